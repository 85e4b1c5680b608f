# SPDX-License-Identifier: Apache-2.0
"""Pairs of functions, modules and values that look alike and do different things."""

import functools
from dataclasses import dataclass

import torch
from torch import nn

FACTOR = 2.0


def twice(x):
    return x * FACTOR


def function(body, **names):
    """A function `f` of this source, with these globals: a module of its own."""
    names["__name__"] = "users"
    exec(body, names)
    return names["f"]


def closure(cell):
    """A function that closes over a value."""
    return lambda x: (x, cell)


@dataclass
class Scale:
    by: float

    def __call__(self, x):
        return x * self.by


LOOKALIKES = {
    "body": (function("def f(x): return x + 1"), function("def f(x): return x + 2")),
    "operator": (function("def f(x): return x + x"), function("def f(x): return x * x")),
    "global": (function("def f(x): return x + n", n=1), function("def f(x): return x + n", n=2)),
    "global called": (
        function("def g(x): return x\ndef f(x): return g(x)"),
        function("def g(x): return -x\ndef f(x): return g(x)"),
    ),
    "inner": (function("def f(x): return [y for y in x]"), function("def f(x): return [y + 1 for y in x]")),
    "default": (function("def f(x, y=1): return y"), function("def f(x, y=2): return y")),
    "default by name": (function("def f(x, *, y=1): return y"), function("def f(x, *, y=2): return y")),
    "set": (function("def f(x): return x in {'a', 'b'}"), function("def f(x): return x in {'a', 'c'}")),
    "kind": (function("def f(x): return 1"), function("def f(x): return 1.0")),
    "attribute": (function("def f(x): return x.min"), function("def f(x): return x.max")),
    "cell": (closure(1), closure(2)),
    "cell of tensors": (closure(torch.ones(2)), closure(torch.zeros(2))),
    "cell of functions": (closure(closure(1)), closure(closure(2))),
    "cell of lists": (closure([1, {"a": 2}]), closure([1, {"a": 3}])),
    "argument": (functools.partial(twice, 1), functools.partial(twice, 2)),
    "object": (Scale(1.0), Scale(2.0)),
    "method": (Scale(1.0).__call__, Scale(2.0).__call__),
    "module": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "weights": (nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.zeros(2))),
    "mode": (nn.Dropout(), nn.Dropout().eval()),
    "names": (nn.functional.mse_loss, nn.functional.l1_loss),
    "dims": ((0, None), (0, 1)),
}
