# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on the makespan of every schedule with given costs, placement and memory."""
