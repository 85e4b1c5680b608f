# SPDX-License-Identifier: Apache-2.0
"""The benchmarks; `python -m benchmarks` runs them."""
