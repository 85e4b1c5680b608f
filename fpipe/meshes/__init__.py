# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on a device mesh: each trains on rows of its own, and weights are replicated or sharded."""
