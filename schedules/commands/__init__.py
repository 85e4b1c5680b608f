# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m schedules`: how schedules are named, the options, and the commands."""
