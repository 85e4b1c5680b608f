# SPDX-License-Identifier: Apache-2.0
"""Hostile files and command lines, drawn at random: `python -m tests.fuzzing checkpoints --seed N`."""
