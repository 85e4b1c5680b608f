# SPDX-License-Identifier: Apache-2.0
"""Batches: split into microbatches, weighted, and merged."""
