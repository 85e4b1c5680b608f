# SPDX-License-Identifier: Apache-2.0
"""How a stage is differentiated: by autograd, or as a graph that is recorded once."""
