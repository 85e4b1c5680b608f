# SPDX-License-Identifier: Apache-2.0
"""Front ends: functions from a module to a module, which is then recorded; and models made of parts."""
