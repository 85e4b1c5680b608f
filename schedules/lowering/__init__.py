# SPDX-License-Identifier: Apache-2.0
"""From a schedule to a program: transfers inserted."""
