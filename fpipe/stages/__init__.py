# SPDX-License-Identifier: Apache-2.0
"""Stages: pure functions, and what crosses between them."""
