# SPDX-License-Identifier: Apache-2.0
"""What is described alike does the same, as far as one can see. tests/distributed compares processes."""

import functools
import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fpipe.runtime.fingerprint import bits, described

FACTOR = 2.0


def twice(x):
    return x * FACTOR


def made(body, **names):
    """A function `f` of this source, with these globals: a module of its own."""
    names["__name__"] = "users"
    exec(body, names)
    return names["f"]


def closed(held):
    return lambda x: (x, held)


@dataclass
class Scale:
    by: float

    def __call__(self, x):
        return x * self.by


DIFFERENT = {
    "body": (made("def f(x): return x + 1"), made("def f(x): return x + 2")),
    "operator": (made("def f(x): return x + x"), made("def f(x): return x * x")),
    "global": (made("def f(x): return x + n", n=1), made("def f(x): return x + n", n=2)),
    "global called": (
        made("def g(x): return x\ndef f(x): return g(x)"),
        made("def g(x): return -x\ndef f(x): return g(x)"),
    ),
    "inner": (made("def f(x): return [y for y in x]"), made("def f(x): return [y + 1 for y in x]")),
    "default": (made("def f(x, y=1): return y"), made("def f(x, y=2): return y")),
    "default by name": (made("def f(x, *, y=1): return y"), made("def f(x, *, y=2): return y")),
    "set": (made("def f(x): return x in {'a', 'b'}"), made("def f(x): return x in {'a', 'c'}")),
    "kind": (made("def f(x): return 1"), made("def f(x): return 1.0")),
    "attribute": (made("def f(x): return x.min"), made("def f(x): return x.max")),
    "cell": (closed(1), closed(2)),
    "cell of tensors": (closed(torch.ones(2)), closed(torch.zeros(2))),
    "cell of functions": (closed(closed(1)), closed(closed(2))),
    "cell of lists": (closed([1, {"a": 2}]), closed([1, {"a": 3}])),
    "argument": (functools.partial(twice, 1), functools.partial(twice, 2)),
    "object": (Scale(1.0), Scale(2.0)),
    "method": (Scale(1.0).__call__, Scale(2.0).__call__),
    "module": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "weights": (nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.zeros(2))),
    "mode": (nn.Dropout(), nn.Dropout().eval()),
    "names": (nn.functional.mse_loss, nn.functional.l1_loss),
    "dims": ((0, None), (0, 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_told_apart(what):
    one, two = DIFFERENT[what]
    assert described(one) != described(two)
    assert described(one) == described(one)


def test_what_does_the_same_is_alike():
    for pair in (
        (made("def f(x): return x + 1"), made("\n\n# a word\ndef f(x):\n    return x + 1")),
        (made("def f(x): return x + 1"), made("def f(other): return other + 1")),
        (made("def f(x): return g", g=logging.getLogger("a")), made("def f(x): return g", g=logging.getLogger("b"))),
        (closed(torch.device("cuda", 0)), closed(torch.device("cuda", 1))),
        (closed([1, 2]), closed([1, 2])),
    ):
        assert described(pair[0]) == described(pair[1])


def test_much_is_described_in_few_lines():
    assert len(described(closed(list(range(10**6))))) < 2000
    assert len(described([[k] * 900 for k in range(900)])) <= 20_000


def test_parameters_of_modules_may_differ():
    """A model that a loss closes over may have been made with other numbers, and is loaded later."""
    assert described(closed(nn.Linear(2, 2))) == described(closed(nn.Linear(2, 2)))
    assert described(closed(nn.Linear(2, 2))) != described(closed(nn.Linear(2, 3)))


def test_a_function_that_calls_itself_ends():
    assert described(made("def f(x): return f(x)"))


def test_bits():
    tensor = torch.randn(3, 4)
    assert bits(tensor) == bits(tensor.t().contiguous().t())
    assert bits(torch.zeros(1)) != bits(-torch.zeros(1))
    assert bits(torch.empty(0)) == bits(torch.empty(0))
    assert bits(tensor.to("meta")) == "none"
    assert bits(tensor.to_sparse()) == bits(tensor)
