# SPDX-License-Identifier: Apache-2.0
"""Stages: pure functions, with the ports through which values reach them."""
