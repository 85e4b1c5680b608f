# SPDX-License-Identifier: Apache-2.0
"""Trees come apart and together; what differs is named by its path; bits are compared as bits."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fpipe import InputError
from fpipe.tensors.tree import first_names, flatten, require_same_tree, same_bits

Point = namedtuple("Point", "x y")

leaves = (
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 9)) | st.none() | st.booleans() | st.text(max_size=2)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
def test_a_flattened_tree_is_restored(tree):
    tensors, structure = flatten(tree)
    assert len(tensors) == len(structure.names)
    again = structure.unflatten(tensors)
    assert same(again, tree)
    require_same_tree("again", flatten(again)[1], structure)


@given(trees, trees)
def test_trees_that_differ_are_refused(one, other):
    mine, theirs = flatten(one)[1], flatten(other)[1]
    if mine.spec == theirs.spec and mine.names == theirs.names:
        require_same_tree("x", mine, theirs)
    else:
        with pytest.raises(InputError, match=r"^x"):
            require_same_tree("x", mine, theirs)


@dataclass
class Reserved:
    """A dataclass whose field cannot be asked for, as configurations that differ from layer to layer have some."""

    x: torch.Tensor
    heads: int = 2

    def __getattribute__(self, name):
        if name == "heads":
            raise ValueError("ask for the heads of a layer")
        return super().__getattribute__(name)


def test_fields_of_a_dataclass_are_read_as_they_are_stored():
    tensors, structure = flatten(Reserved(torch.ones(2)))
    again = structure.unflatten(tensors)
    assert again.x is tensors[0]
    assert object.__getattribute__(again, "heads") == 2


def test_the_message_names_the_leaf():
    wanted = flatten({"x": torch.ones(1), "pair": (torch.ones(1), 3)})[1]
    with pytest.raises(InputError) as caught:
        require_same_tree("inputs", flatten({"y": torch.ones(1), "pair": (torch.ones(1), 3)})[1], wanted)
    assert "got nothing at ['x'], a tensor at ['y'], expected a tensor at ['x'], nothing at ['y']" in str(caught.value)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({"x": torch.ones(1), "pos": None}, "got None at ['pos'], expected a tensor at ['pos']"),
        ({"x": torch.ones(1), "pos": 3}, "got a value that is no tensor at ['pos'], expected a tensor at ['pos']"),
        ([torch.ones(1)] * 2, "got nothing at ['pos'], nothing at ['x'], a tensor at [0]"),
    ],
)
def test_the_message_shows_no_treespec(got, words):
    with pytest.raises(InputError) as caught:
        require_same_tree("inputs", flatten(got)[1], flatten({"x": torch.ones(1), "pos": torch.ones(1)})[1])
    assert words.split(",")[0] in str(caught.value)
    assert "PyTreeSpec" not in str(caught.value)
    with pytest.raises(InputError, match=r"got \[a tensor\], expected \(a tensor,\), as in") as caught:
        require_same_tree("inputs", flatten([torch.ones(1)])[1], flatten((torch.ones(1),))[1])


def test_the_message_about_a_nested_list_is_short():
    wanted = flatten((torch.ones(8, 64),))[1]
    with pytest.raises(InputError) as caught:
        require_same_tree("inputs", flatten((torch.ones(8, 64).tolist(),))[1], wanted)
    assert "expected a tensor at [0], nothing at [0][0][0]" in str(caught.value)
    assert "and so on, at 513 places in all" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_array_in_a_batch_is_to_be_converted():
    with pytest.raises(InputError, match=r"got ndarray, .* Convert it, as by torch\.as_tensor"):
        flatten((numpy.ones(2),))


def test_tied_parameters_and_shared_modules_go_by_their_first_name():
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": nn.Linear(2, 2), "c": layer})
    model["b"].weight = layer.weight
    assert first_names(model, "parameters") == {
        "a.weight": "a.weight",
        "a.bias": "a.bias",
        "b.weight": "a.weight",
        "b.bias": "b.bias",
        "c.weight": "a.weight",
        "c.bias": "a.bias",
    }
    assert first_names(nn.BatchNorm1d(1), "buffers") == {
        n: n for n in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor(1), torch.tensor(1), True),
        (torch.empty(0, 3), torch.empty(0, 3), True),
        (torch.empty(0, 3), torch.empty(3, 0), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), False),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0]), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
    ],
)
def test_bits_are_compared_as_bits(a, b, equal):
    assert same_bits(a, b) is equal
    assert same_bits(b, a) is equal
