# SPDX-License-Identifier: Apache-2.0
"""How batches are cut: pieces rejoin, signatures tell batches apart, and everything else is refused by name."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.pipelines.batch import Batching
from fpipe.pipelines.leaf import Leaf, split_evenly
from fpipe.pipelines.loss_weights import compute_scales
from fpipe.pipelines.merge import Merge, merge
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import broadcast, flatten, same_bits
from tests.common.loops import piece

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


def count_up(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@st.composite
def leaves(draw):
    """A tensor in some layout, a dimension, and a number of microbatches that this may have."""
    shape = draw(SHAPES)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    count = draw(st.integers(1, shape[dim]))
    order = draw(st.permutations(range(len(shape))))
    inverse = [order.index(k) for k in range(len(shape))]
    return count_up([shape[k] for k in order]).permute(inverse), dim, count


@given(leaves())
def test_microbatches_are_merged_into_the_batch(given):
    tensor, dim, count = given
    leaf = Leaf.of("x", tensor, dim, CPU)
    known = leaf.conform(tensor, count)
    parts = leaf.parts(known, count)
    assert [part.shape for part in parts] == [part.shape for part in tensor.tensor_split(count, dim)]
    assert same_bits(merge(parts, dim), tensor)
    assert leaf.part_specs(leaf.specs(known), count) == tuple(map(Spec.of, parts))


@given(leaves())
def test_a_batch_on_meta_has_the_same_microbatches(given):
    tensor, dim, count = given
    leaf = Leaf.of("x", tensor, dim, CPU)
    assert leaf.specs(leaf.conform(tensor.to("meta"), count)) == leaf.specs(leaf.conform(tensor, count))


@pytest.mark.parametrize("count", range(1, 10))
def test_any_size_of_at_least_a_row_per_microbatch_is_split_as_by_tensor_split(count):
    """Views of the batch, in the memory of the batch; fewer rows are refused."""
    batching = Batching.of((torch.zeros(count, 2),), torch.zeros(count), 0, count)
    for size in range(65):
        x, y = torch.randn(size, 2), torch.randn(size)
        if size < count:
            with pytest.raises(fpipe.InputError, match=rf"inputs\[0\]: got .* {size} in .*, expected at least {count}"):
                batching.split_batch((x,), y)
            continue
        batch = batching.split_batch((x,), y)
        for parts, whole in zip(batch.take().values(), (x, y), strict=True):
            want = whole.tensor_split(count)
            assert all(map(same_bits, parts, want))
            assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in want]
            assert [len(part) for part in parts] == split_evenly(size, count)
        kinds = set(batching.split(batch.signature))
        assert len(kinds) == (1 if size % count == 0 else 2)


@given(leaves(), SHAPES)
def test_layouts_follow_the_example(given, shape):
    tensor, *_ = given
    if len(shape) != tensor.dim():
        return
    spec = Spec.of(tensor).resize(shape)
    made = torch.empty_strided(spec.shape, spec.stride)
    assert made.shape == shape
    assert Spec.of(torch.empty_like(made)) == spec, "no gaps"
    if all(size > 1 for size in (*shape, *tensor.shape)):
        order = [sorted(range(len(shape)), key=lambda k, t=t: -t.stride(k)) for t in (tensor, made)]
        assert order[0] == order[1]


def halves(x, m):
    """A function of the user's: overlapping windows."""
    step = x.shape[0] // m
    return [x[i * step : i * step + 2] for i in range(m)]


TREES = {
    "one number": (0, {"a": (8, 2), "b": [(8,), (8, 3)]}, (8,)),
    "by argument": (({"a": 1, "b": 0}, 0), {"a": (3, 8), "b": [(8,), (8, 3)]}, (8,)),
    "replicated": (({"a": None, "b": [0, None]}, 0), {"a": (), "b": [(7, 2), (5,)]}, (7,)),
    "functions": (({"a": halves, "b": 0}, None), {"a": (9, 2), "b": [(4,), (4, 3)]}, (2, 2)),
    "negative": (({"a": -1, "b": -2}, -1), {"a": (3, 7), "b": [(7, 1), (7, 3)]}, (2, 7)),
}


def make_tree(shapes):
    return optree.tree_map(count_up, shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("what", TREES)
def test_trees_are_split_leaf_by_leaf(what):
    dims, inputs, targets = TREES[what]
    inputs, targets = {**make_tree(inputs), "flag": True, "none": None}, count_up(targets)
    if isinstance(dims, tuple):
        dims = ({**dims[0], "flag": 0, "none": 0}, dims[1])
    batch = Batching.of(inputs, targets, dims, 4).split_batch(inputs, targets)
    found = batch.take()
    for i in range(4):
        how = dims if isinstance(dims, tuple) else (dims, dims)
        want, _ = flatten((piece(inputs, i, 4, how[0]), piece(targets, i, 4, how[1])))
        assert len(found) == len(want)
        assert all(map(same_bits, [found[leaf][i] for leaf in sorted(found)], want))


def test_batches_that_differ_have_different_signatures():
    """Equal for equal shapes and equal values of what is no tensor; values of tensors do not matter."""
    x, y = torch.randn(6, 3), torch.randn(6)
    batching = Batching.of((x, 2), y, 0, 3)

    def signature(inputs, targets):
        return batching.split_batch(inputs, targets).signature

    known = signature((x, 2), y)
    assert known == batching.example
    assert hash(known) == hash(batching.example)
    same = [(x + 1, 2), (x.t().contiguous().t(), 2), (x.to("meta"), 2), None]
    assert all(signature(inputs, targets) == known for inputs in same for targets in (y, None, y.to("meta")))
    others = [
        signature((x[:, :2], 2), y),
        signature((x[:5], 2), y[:5]),
        signature((x, True), y),
        signature((x, 2.0), y),
    ]
    assert len({known, *others}) == 5
    assert len(set(batching.split(others[1]))) == 2, "the last is smaller"
    assert len(set(batching.split(known))) == 1


def test_rows_that_belong_together_stay_together():
    x, y = torch.randn(7, 2), torch.randn(14)
    with pytest.raises(
        fpipe.InputError, match=r"inputs\[0\]: got 7 in dimension 0, and 14 .* of targets.*divisible by 3"
    ):
        Batching.of((x,), y, (0, 0), 3)
    assert len(Batching.of((x[:6],), y[:12], (0, 0), 3).leaves) == 2


def test_leaves_of_one_entry_of_batch_dims_have_as_many_rows():
    """Also in later batches: offsets that have as many rows as the example by chance are no part of the batch."""
    x, offsets, y = torch.randn(8, 2), torch.arange(16), torch.randn(8)
    for dims in (0, (0, 0)):
        with pytest.raises(fpipe.InputError, match=r"inputs\[1\]: got 16 in dimension 0 of .* expected 8.*batch_dims"):
            Batching.of((x, offsets), y, dims, 4)
        batching = Batching.of((x, offsets[:8]), y, dims, 4)
        with pytest.raises(fpipe.InputError, match=r"inputs\[1\]: got 16 in dimension 0 .* expected 8"):
            batching.split_batch((x, offsets), y)
    for dims, parts in (((0, None), 0), 16), (((0, 0), 0), 4):
        found = Batching.of((x, offsets), y, dims, 4).split_batch((x, offsets), y).take()
        assert [len(found[leaf][0]) for leaf in range(3)] == [2, parts, 2]


@pytest.mark.parametrize(("rows", "others", "fits"), [(7, 7, True), (7, 14, False), (9, 6, True), (8, 9, False)])
def test_later_batches_are_split_like_the_first(rows, others, fits):
    """Where the number of microbatches divides neither size, only equal sizes are cut at the same rows."""
    batching = Batching.of((torch.zeros(6, 2), torch.zeros(4, 6)), torch.zeros(5), ((0, 1), None), 3)
    batch = (torch.zeros(rows, 2), torch.zeros(4, others)), torch.zeros(8)
    if fits:
        parts = batching.split_batch(*batch).take()
        assert [len(part) for part in parts[0]] == split_evenly(rows, 3)
        assert [part.shape[1] for part in parts[1]] == split_evenly(others, 3)
        return
    with pytest.raises(
        fpipe.InputError, match=rf"got \d+ in dimension [01], and ({rows}|{others}) in dimension [01] of"
    ):
        batching.split_batch(*batch)
    with pytest.raises(fpipe.InputError, match="expected at least 3, one row for each"):
        batching.split_batch((torch.zeros(2, 2), torch.zeros(4, 2)), torch.zeros(8))


def at(*stops):
    """A function that cuts rows at these places."""
    return lambda x, m: x.tensor_split(stops)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (((at(2, 5), at(2, 5)), at(2, 5)), []),
        (((at(1, 5), at(2, 5)), 0), ["inputs[0]", "[1, 4, 2] rows", "[2, 3, 2] of inputs[1]"]),
        (((at(3, 6), 0), 0), ["inputs[0]: got pieces of [3, 3, 1] rows", "[3, 2, 2] of inputs[1]", "the same way"]),
        (((at(3, 5), 0), at(1, 3)), ["inputs[0]: got pieces of [3, 2, 2] rows", "[1, 2, 4] of targets"]),
        (((at(3, 5), 0), 0), []),
        (((lambda x, m: [x[:3]] * m, 0), 0), []),
        (((at(3), 0), 0), ["inputs[0]", "expected 3 tensors", "one for each microbatch"]),
        (((lambda x, m: [x, x, None], 0), 0), ["inputs[0]", "None", "expected 3 tensors"]),
        (((lambda x, m: list(x[:3]), 0), 0), []),
    ],
)
def test_leaves_split_by_functions_must_have_as_many_rows_as_others(dims, words):
    """Else rows of one sample would be trained on the target of another, where shapes can be broadcast."""
    batch = (torch.zeros(7, 2), torch.zeros(7)), torch.zeros(7, 1)
    if not words:
        assert len(Batching.of(*batch, dims, 3).split_batch(*batch).take()) == 3
        return
    with pytest.raises(fpipe.InputError) as caught:
        Batching.of(*batch, dims, 3)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_leaves_that_are_needed_and_missing_are_refused():
    x, y = torch.randn(4, 2), torch.randn(4)
    batch = Batching.of((x,), y, 0, 2).split_batch(None, y.to("meta"))
    assert not batch.take([])
    with pytest.raises(fpipe.InputError, match=r"inputs\[0\]: got nothing, expected float32\[4, 2\] with values"):
        batch.take([0])
    with pytest.raises(fpipe.InputError, match="targets: got a tensor on the meta device"):
        batch.take([1])


def test_prefixes_of_a_tree_apply_to_all_leaves_below():
    _, structure = flatten(((torch.ones(1), {"a": torch.ones(1), "b": 3}), None))
    assert broadcast("dims", 1, structure) == [1, 1]
    assert broadcast("dims", ((None, 0), 5), structure) == [None, 0]
    assert broadcast("dims", ((None, {"a": len, "b": 7}), 5), structure) == [None, len]
    for wrong in ((0,), ((0, {"b": 1}), 0), [0, 0]):
        with pytest.raises(fpipe.InputError, match="dims: got"):
            broadcast("dims", wrong, structure)


# ------------------------------------------------------------------------------------------------------------- weights


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_weights_of_microbatches_add_up_to_one(counts):
    found = compute_scales(lambda inputs, targets: inputs, [(torch.tensor(n), None) for n in counts])
    assert found == [n / sum(counts) for n in counts]
    assert abs(sum(found) - 1) < 1e-12


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([0, 0], ["got 0 for each of the 2 microbatches", "Skip this batch"]),
        ([1, -1], ["microbatch 1", "got -1.0", "0 or more"]),
        ([float("nan"), 1], ["microbatch 0", "got nan"]),
        ([torch.ones(2), 1], ["microbatch 0", "RuntimeError", "one element"]),
        ([None, 1], ["microbatch 0", "TypeError", "no targets"]),
    ],
)
def test_invalid_weights_are_refused(counts, words):
    with pytest.raises(fpipe.InputError) as caught:
        compute_scales(lambda inputs, targets: inputs, [(count, None) for count in counts])
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_the_scale_of_a_weighted_loss_is_one_more_leaf():
    x, y = torch.randn(5, 2), torch.randn(5)
    batching = Batching.of((x,), y, 0, 3, lambda inputs, targets: len(targets))
    batch = batching.split_batch((x,), y)
    assert [scale.item() for scale in batch.take([2])[2]] == [0.4, 0.4, 0.2]
    assert [len(one.leaves) for one in batching.split(batch.signature)] == [3, 3, 3]
    assert batching.split(batch.signature)[0].structure.names == ("[0][0]", "[1]", "[2]")
    assert [scale.item() for scale in batching.split_batch(None, y).take([2])[2]] == [0.4, 0.4, 0.2], (
        "inputs are not read"
    )
    with pytest.raises(fpipe.InputError, match=r"weight, microbatch 0: got TypeError.*given no targets"):
        batching.split_batch((x,), None).take([2])


# ------------------------------------------------------------------------------------------------------------- joining

PARTS = [torch.ones(2, 3), torch.zeros(1, 3)]


@pytest.mark.parametrize(
    ("dims", "want"),
    [(0, torch.cat(PARTS)), (-2, torch.cat(PARTS)), (None, PARTS[0]), (tuple, tuple(PARTS)), (len, 2)],
)
def test_outputs_are_merged(dims, want):
    _, structure = flatten({"x": PARTS[0], "n": 4})
    joining = Merge.of(structure, dims, [list(map(Spec.of, PARTS))])
    found = joining.apply([PARTS])
    assert found["n"] == 4
    assert torch.equal(found["x"], want) if isinstance(want, torch.Tensor) else found["x"] == want


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        (1, ["outputs", "[[2, 3], [1, 3]]", "differ in dimension 1 only", "output_dims"]),
        (2, ["outputs", "dimension 2", "2 dimensions"]),
        ("0", ["outputs", "'0'"]),
        ({"x": 0}, ["output_dims", "{'x': 0}"]),
    ],
)
def test_outputs_that_cannot_be_merged_are_refused(dims, words):
    _, structure = flatten(PARTS[0])
    with pytest.raises(fpipe.InputError) as caught:
        Merge.of(structure, dims, [list(map(Spec.of, PARTS))])
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
