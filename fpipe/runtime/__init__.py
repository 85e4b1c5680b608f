# SPDX-License-Identifier: Apache-2.0
"""The code that runs in every step: the executor, its handlers and instructions, recording, threads taking turns."""
