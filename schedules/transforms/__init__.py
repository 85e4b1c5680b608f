# SPDX-License-Identifier: Apache-2.0
"""Schedules made from schedules."""
