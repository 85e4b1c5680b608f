# SPDX-License-Identifier: Apache-2.0
"""The intermediate representation that front ends deliver, as plain values."""
