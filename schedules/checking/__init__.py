# SPDX-License-Identifier: Apache-2.0
"""The rules that correct schedules and programs obey."""
