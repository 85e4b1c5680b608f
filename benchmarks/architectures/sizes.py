# SPDX-License-Identifier: Apache-2.0
"""The sizes of the tiny models and of their batches.

Small enough for a second's work, and large enough that kernels go the ways they go in large models: at 64 tokens and
heads of 32, attention with and without a mask differ in the last bits, and so do grouped keys and values and their
copies.
"""

WIDTH, HEADS, GROUPS, HEAD, INNER = 128, 4, 2, 32, 192
LAYERS, WORDS, EXPERTS, SIDE, PATCH, BINS = 4, 128, 4, 64, 8, 16
POSITIONS, SOUNDS = 256, 64
ROWS, LENGTH, FRAMES, SAMPLES = 4, 64, 2, 4000
