# SPDX-License-Identifier: Apache-2.0
"""Differentiation of stages: by autograd, or as a graph that is recorded once."""
