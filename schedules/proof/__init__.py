# SPDX-License-Identifier: Apache-2.0
"""Show on formulas what a program computes."""
