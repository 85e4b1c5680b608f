# SPDX-License-Identifier: Apache-2.0
"""What is describe_value alike does the same, as far as one can see. tests/distributed compares processes."""

import logging

import pytest
import torch
from torch import nn

from fpipe.network.fingerprint import describe_value, digest_tensor
from tests.common.lookalikes import LOOKALIKES, closure, function


@pytest.mark.parametrize("what", LOOKALIKES)
def test_functions_that_differ_have_different_descriptions(what):
    one, two = LOOKALIKES[what]
    assert describe_value(one) != describe_value(two)
    assert describe_value(one) == describe_value(one)


def test_functions_that_do_the_same_have_equal_descriptions():
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
        assert describe_value(pair[0]) == describe_value(pair[1])


def test_descriptions_of_large_values_are_short():
    assert len(describe_value(closure(list(range(10**6))))) < 2000
    assert len(describe_value([[k] * 900 for k in range(900)])) <= 20_000


def test_values_of_parameters_are_not_described():
    """A model that a loss closes over may have been made with other numbers, and is loaded later."""
    assert describe_value(closure(nn.Linear(2, 2))) == describe_value(closure(nn.Linear(2, 2)))
    assert describe_value(closure(nn.Linear(2, 2))) != describe_value(closure(nn.Linear(2, 3)))


def test_a_recursive_function_is_described():
    assert describe_value(function("def f(x): return f(x)"))


def test_bits_are_compared_whatever_the_layout():
    tensor = torch.randn(3, 4)
    assert digest_tensor(tensor) == digest_tensor(tensor.t().contiguous().t())
    assert digest_tensor(torch.zeros(1)) != digest_tensor(-torch.zeros(1))
    assert digest_tensor(torch.empty(0)) == digest_tensor(torch.empty(0))
    assert digest_tensor(tensor.to("meta")) == "none"
    assert digest_tensor(tensor.to_sparse()) == digest_tensor(tensor)
