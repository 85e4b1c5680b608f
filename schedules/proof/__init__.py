# SPDX-License-Identifier: Apache-2.0
"""What a program computes, shown on formulas."""
