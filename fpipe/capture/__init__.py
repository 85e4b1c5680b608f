# SPDX-License-Identifier: Apache-2.0
"""Front ends, which turn a model into units and values; `fpipe.ir.captured` defines what they deliver."""
