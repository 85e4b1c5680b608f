# SPDX-License-Identifier: Apache-2.0
"""What runs in every step: the executor, its handlers and instructions, timelines, threads that take turns."""
