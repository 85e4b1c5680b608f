# SPDX-License-Identifier: Apache-2.0
"""Batches: cut into microbatches, weighted, and put together again."""
