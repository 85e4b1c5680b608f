# SPDX-License-Identifier: Apache-2.0
"""What is measured; `python -m benchmarks` runs it."""
