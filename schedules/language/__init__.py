# SPDX-License-Identifier: Apache-2.0
"""The parts of a schedule: actions, placements, stage graphs, costs, and the decorator that makes schedules."""
