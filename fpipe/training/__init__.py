# SPDX-License-Identifier: Apache-2.0
"""The part of a training loop between a backward and the next step: norms, clipping, optimizers, mixed precision.

Runs in every step, after the backward.
"""
