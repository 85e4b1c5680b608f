# SPDX-License-Identifier: Apache-2.0
"""Schedules of the literature, one file per family."""

from schedules.families.fill_drain import gpipe
from schedules.families.one_forward_one_backward import one_f_one_b

__all__ = ["gpipe", "one_f_one_b"]
