# SPDX-License-Identifier: Apache-2.0
"""The user's model: parts, copies of it, a copy without its tensors, its Python state."""
