# SPDX-License-Identifier: Apache-2.0
"""What a schedule is: actions, placements, stage graphs, costs, and the decorator that makes schedules."""
