# SPDX-License-Identifier: Apache-2.0
"""Compare a pipeline, bit for bit, with one device."""
