# SPDX-License-Identifier: Apache-2.0
"""Schedules and programs as files."""
