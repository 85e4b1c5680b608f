# SPDX-License-Identifier: Apache-2.0
"""What `python -m schedules` is made of: how schedules are named, what is asked about them, and the answers."""
