# SPDX-License-Identifier: Apache-2.0
"""Schedules and programs as files."""

from schedules.files.cells import own, pipelining, pipelining_2_15
from schedules.files.csv import Listing, read_csv, write_csv

__all__ = ["Listing", "own", "pipelining", "pipelining_2_15", "read_csv", "write_csv"]
