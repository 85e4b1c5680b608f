# SPDX-License-Identifier: Apache-2.0
"""The intermediate representation: what a front end delivers, as plain values."""
