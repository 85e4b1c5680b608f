# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on a device mesh: each trains on its own rows, with replicated or sharded weights."""
