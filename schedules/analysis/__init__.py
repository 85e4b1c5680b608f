# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a schedule, the critical path, and costs estimated from timelines."""
