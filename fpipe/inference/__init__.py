# SPDX-License-Identifier: Apache-2.0
"""Run a trained model: outputs for a batch, or for each microbatch, and generated tokens."""
