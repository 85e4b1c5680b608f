# SPDX-License-Identifier: Apache-2.0
"""The sizes of the tiny models and their batches.

Small enough to run in a second, and large enough that kernels take the same paths as in large models: at 64 tokens and
heads of 32, attention with and without a mask differ in the last bits, as do grouped keys and values and expanded ones.
"""

WIDTH, HEADS, GROUPS, HEAD, INNER = 128, 4, 2, 32, 192
LAYERS, WORDS, EXPERTS, SIDE, PATCH, BINS = 4, 128, 4, 64, 8, 16
POSITIONS, SOUNDS = 256, 64
ROWS, LENGTH, FRAMES, SAMPLES = 4, 64, 2, 4000
