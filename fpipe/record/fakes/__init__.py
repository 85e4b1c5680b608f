# SPDX-License-Identifier: Apache-2.0
"""Runs on fake tensors: they look like eager runs to the model's code, and leave nothing behind."""
