# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a schedule, the critical path, lower bounds, and costs estimated from timelines."""
