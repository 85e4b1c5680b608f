# SPDX-License-Identifier: Apache-2.0
"""Stages recorded once as a graph of operators, forward and backward."""
