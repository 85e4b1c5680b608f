# SPDX-License-Identifier: Apache-2.0
"""Count the operators that run."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.called = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called[func] += 1
        return func(*args, **(kwargs or {}))
