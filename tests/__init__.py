# SPDX-License-Identifier: Apache-2.0
"""Tests, in the folders of what they test."""
