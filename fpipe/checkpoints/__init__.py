# SPDX-License-Identifier: Apache-2.0
"""Save the state of a training run, resume it on other ranks, cuts and schedules, and export weights."""
