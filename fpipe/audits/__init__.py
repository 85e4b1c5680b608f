# SPDX-License-Identifier: Apache-2.0
"""Find silent corruption: run drawn actions of a step again, while a rank would wait, and compare the bits."""
