# SPDX-License-Identifier: Apache-2.0
"""Front ends, which turn a model into units and values; `fpipe.record.captured` defines what they deliver."""
