# SPDX-License-Identifier: Apache-2.0
"""Tensors and trees of them: metadata, keyed randomness, fake tensors, effects of operators."""
