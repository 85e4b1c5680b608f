# SPDX-License-Identifier: Apache-2.0
"""What is described alike does the same, as far as one can see. tests/distributed compares processes."""

import logging

import pytest
import torch
from torch import nn

from fpipe.runtime.fingerprint import bits, described
from tests.common.lookalikes import LOOKALIKES, closure, function


@pytest.mark.parametrize("what", LOOKALIKES)
def test_what_differs_is_told_apart(what):
    one, two = LOOKALIKES[what]
    assert described(one) != described(two)
    assert described(one) == described(one)


def test_what_does_the_same_is_alike():
    for pair in (
        (function("def f(x): return x + 1"), function("\n\n# a word\ndef f(x):\n    return x + 1")),
        (function("def f(x): return x + 1"), function("def f(other): return other + 1")),
        (
            function("def f(x): return g", g=logging.getLogger("a")),
            function("def f(x): return g", g=logging.getLogger("b")),
        ),
        (closure(torch.device("cuda", 0)), closure(torch.device("cuda", 1))),
        (closure([1, 2]), closure([1, 2])),
    ):
        assert described(pair[0]) == described(pair[1])


def test_much_is_described_in_few_lines():
    assert len(described(closure(list(range(10**6))))) < 2000
    assert len(described([[k] * 900 for k in range(900)])) <= 20_000


def test_parameters_of_modules_may_differ():
    """A model that a loss closes over may have been made with other numbers, and is loaded later."""
    assert described(closure(nn.Linear(2, 2))) == described(closure(nn.Linear(2, 2)))
    assert described(closure(nn.Linear(2, 2))) != described(closure(nn.Linear(2, 3)))


def test_a_function_that_calls_itself_ends():
    assert described(function("def f(x): return f(x)"))


def test_bits():
    tensor = torch.randn(3, 4)
    assert bits(tensor) == bits(tensor.t().contiguous().t())
    assert bits(torch.zeros(1)) != bits(-torch.zeros(1))
    assert bits(torch.empty(0)) == bits(torch.empty(0))
    assert bits(tensor.to("meta")) == "none"
    assert bits(tensor.to_sparse()) == bits(tensor)
