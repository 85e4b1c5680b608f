# SPDX-License-Identifier: Apache-2.0
"""Large schedules as arrays of integers: the same rules, times and transfers, for all ranks at once."""
