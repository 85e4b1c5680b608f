# SPDX-License-Identifier: Apache-2.0
"""The stage graph: what travels, along which edges, and which in-place changes a cut would hide."""

from collections import Counter

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from schedules import (
    chimera,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    recompute,
    zb_v,
)
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import few, sampled
from tests.common.zoo import ZOO


def graph(name):
    return build(ZOO[name], one_f_one_b(ranks=4, microbatches=2), 4)[0].program.graph


CHAIN = {(0, 1), (1, 2), (2, 3)}


@sampled(2)
@pytest.mark.parametrize(
    ("name", "values", "cotangents", "gradients"),
    [
        ("mlp", CHAIN, CHAIN, set()),
        ("skips", CHAIN, CHAIN, set()),
        ("chained", CHAIN, CHAIN | {(0, 2)}, {(0, 2), (0, 3)}),
        ("gpt", CHAIN, CHAIN | {(0, 3)}, {(0, 3)}),
        ("frozen_below", CHAIN, {(1, 2), (2, 3)}, set()),
        ("all_frozen", CHAIN, set(), set()),
        ("twice", CHAIN, CHAIN | {(0, 3)}, {(0, 3)}),
        ("contexts", {(0, 1), (0, 2), (1, 2), (2, 3), (1, 3)}, None, set()),
    ],
)
def test_values_cross_exactly_these_edges(name, values, cotangents, gradients):
    found = graph(name)
    if name != "contexts":
        assert found.values == values
        assert found.cotangents == cotangents
    assert found.gradients == gradients
    assert found.cotangents <= found.values | {(0, 2), (0, 3)}, "cotangents go the way of values, or of tied parameters"


def test_a_value_is_sent_from_user_to_user():
    """`first` is used by stages 1, 2 and 3; it goes 0 to 1 to 2 to 3, never 0 to 3."""
    stages = build(ZOO["skips"], one_f_one_b(ranks=4, microbatches=2), 4)[0].stages
    assert [[one.target for one in stage.gives] for stage in stages] == [[1], [2], [3], []]
    assert [sum(len(one.specs) for one in stage.gives) for stage in stages] == [1, 2, 2, 0]


class Dense(nn.Module):
    """Each block reads what all blocks before it returned."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x):
        found = [self.embed(x)]
        for block in self.blocks:
            found.append(torch.tanh(block(torch.stack(found).mean(0))))
        return self.head(torch.stack(found).sum(0))


WITH_CHUNKS = [
    interleaved_1f1b(ranks=2, microbatches=4, chunks=3),
    interleaved_zero_bubble(ranks=2, microbatches=4, chunks=3),
    recompute(interleaved_1f1b(ranks=3, microbatches=3, chunks=2)),
    zb_v(ranks=3, microbatches=4),
    chimera(ranks=6, microbatches=4),
    one_f_one_b(ranks=6, microbatches=4),
    hanayo(ranks=3, microbatches=3, waves=1),
]


@sampled(3)
@pytest.mark.parametrize("how", WITH_CHUNKS, ids=repr)
def test_a_value_crosses_once_to_each_rank(how):
    one = Case(lambda: Dense(6), rows_of(), mse, tuple(f"blocks.{k}" for k in range(1, 6)))
    built = build(one, how, 12, one.cuts)
    assert_same(run(*built), run_reference(*built))
    pipe, *_ = built
    arrivals = Counter(
        (ranks[one.target], value)
        for ranks in how.placement.routes
        for stage in pipe.stages
        for one in stage.gives
        for value in one.values
        if ranks[one.source] != ranks[one.target]
    )
    assert arrivals
    assert max(arrivals.values()) == len(how.placement.routes)
    back = [[one.target for one in stage.pulls] for stage in pipe.stages]
    assert back == [[s - 1] if s else [] for s in range(6)], "cotangents are added in the order of one device"


def test_values_in_the_batch_are_not_sent():
    """The token ids are read by stages 0 and 3, from the batch both times."""
    pipe, *_ = build(ZOO["later"], one_f_one_b(ranks=4, microbatches=2), 4)
    assert pipe.stages[0].batch == (0,)
    assert 0 in pipe.stages[3].batch
    integers = [spec for stage in pipe.stages for one in stage.gives for spec in one.specs if spec.dtype == torch.int64]
    assert len(integers) == 1, "the argmax alone"


def test_parameters_and_buffers_live_where_they_are_used():
    pipe, model, *_ = build(ZOO["normalised"], one_f_one_b(ranks=4, microbatches=2), 4)
    assert [stage.parameters for stage in pipe.stages] == [
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias", "2.weight", "2.bias"),
        ("4.weight", "4.bias"),
        ("5.weight", "5.bias", "6.weight", "6.bias"),
    ]
    assert {name for stage in pipe.stages for name in stage.buffers} == {name for name, _ in model.named_buffers()}


def test_unread_parameters_and_buffers_are_held_by_the_first_stage():
    pipe, *_ = build(ZOO["unused"], one_f_one_b(ranks=4, microbatches=2), 4)
    assert {"spare", "idle"} <= set(pipe.stages[0].unused)


def test_a_tied_parameter_belongs_to_its_first_user():
    pipe, *_ = build(ZOO["chained"], one_f_one_b(ranks=4, microbatches=2), 4)
    owners = [stage.index for stage in pipe.stages if "a.weight" in stage.grads]
    holders = [stage.index for stage in pipe.stages if "a.weight" in stage.parameters]
    assert (owners, holders) == ([0], [0, 2, 3])


# ----------------------------------------------------------------------------------------------- in place, across a cut


class Pair(nn.Module):
    """`a`, then `b`, then `c`; `change` does something in place in `b`, and `use` something in `c`."""

    def __init__(self, change, use):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.change, self.use = change, use
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.a(x * 1)
        z = self.b(y * 1)
        self.change(self, x, y, z)
        return self.c(z) + self.use(self, x, y, z)


CHANGES = {
    "a value": (lambda m, x, y, z: y.detach().add_(1), lambda m, x, y, z: y, "a value"),
    "a view of a value": (lambda m, x, y, z: y.detach()[:, :1].add_(1), lambda m, x, y, z: y, "a value"),
}


def case(change, use):
    return Case(lambda: Pair(change, use), rows_of(), mse, ("", "", ""))


def nothing(*_):
    return 0


@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_a_later_stage_would_not_see_are_refused(what):
    change, use, named = CHANGES[what]
    with pytest.raises(fpipe.CutError) as caught:
        build(case(change, use), gpipe(ranks=3, microbatches=2), 4, ("b", "c"))
    message = str(caught.value)
    assert message.startswith("stage 1: ")
    assert named in message
    assert "in place" in message
    assert "Move the cut" in message


@pytest.mark.parametrize("what", CHANGES)
def test_the_same_changes_within_one_stage_are_exact(what):
    change, use, _ = CHANGES[what]
    one = case(change, use)
    built = _, model, inputs, targets = build(one, gpipe(ranks=2, microbatches=2), 4, ("b",))
    assert_same(run(*built), run_reference(*built))
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


@pytest.mark.parametrize("what", CHANGES)
def test_values_that_no_later_stage_reads_may_change(what):
    change, _, _ = CHANGES[what]
    one = case(change, nothing)
    built = _, model, inputs, targets = build(one, gpipe(ranks=3, microbatches=2), 4, ("b", "c"))
    assert_same(run(*built), run_reference(*built))
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


@sampled(1)
@pytest.mark.parametrize(
    ("change", "use"),
    [
        (lambda m, x, y, z: m.state.add_(1), lambda m, x, y, z: m.state),
        (lambda m, x, y, z: x.add_(1), lambda m, x, y, z: x),
    ],
    ids=["a buffer", "an input"],
)
def test_a_later_stage_reads_what_an_earlier_one_changed_by_name(change, use):
    """What the later stage reads is the changed value, which crosses the cut like any other."""
    one = case(change, use)
    built = _, model, inputs, targets = build(one, gpipe(ranks=3, microbatches=2), 4, ("b", "c"), capture="export")
    assert_same(run(*built), run_reference(*built))
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 2))


def test_a_buffer_that_is_read_in_one_stage_and_changed_in_a_later_one_is_refused():
    class Late(Pair):
        def forward(self, x):
            y = self.b(self.a(x) + self.state)
            self.state.add_(1)
            return self.c(y)

    one = Case(lambda: Late(nothing, nothing), rows_of(), mse, ("", "", ""))
    with pytest.raises(fpipe.CutError, match="the buffer 'state'"):
        build(one, gpipe(ranks=2, microbatches=2), 4, ("b",))


@pytest.mark.parametrize("capture", ["export", "modules"])
def test_a_parameter_that_is_changed_in_place_is_refused(capture):
    class Shrinking(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    one = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shrinking(WIDTH, WIDTH)), rows_of(), mse, ("", "1", ""))
    with pytest.raises(fpipe.CutError, match=r"the parameter '1\.weight' in place"):
        build(one, gpipe(ranks=2, microbatches=2), 4, capture=capture)


class Step(nn.Module):
    """One operation on a pool of tensors, some of which share memory."""

    def __init__(self, kind, i, j):
        super().__init__()
        self.kind, self.i, self.j = kind, i, j
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pool):
        x, y = pool[self.i % len(pool)], pool[self.j % len(pool)]
        if self.kind == "view":
            return [*pool, x[:, :2]]
        if self.kind == "same":
            return [*pool, x.view_as(x)]
        if self.kind == "in_place":
            x.mul_(1.5)
            return pool
        if self.kind == "add_in_place":
            x.add_(y.mean(1, keepdim=True))
            return pool
        if self.kind == "add":
            return [*pool, x + y.mean(1, keepdim=True)]
        return [*pool, self.linear(x.mean(1, keepdim=True).expand(-1, WIDTH))]


class Pool(nn.Module):
    """Steps, then a sum of everything that there is."""

    def __init__(self, steps):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(Step(*step) for step in steps)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        pool = [self.first(x)]
        for step in self.steps:
            pool = step(pool)
        total = pool[0]
        for tensor in pool[1:]:
            total = total + tensor.mean(1, keepdim=True)
        return self.last(total)


kinds = st.sampled_from(["view", "same", "in_place", "in_place", "add_in_place", "add", "linear"])
steps = st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=few(12))
@given(steps=steps, data=st.data())
def test_shared_memory_is_exact_or_refused(steps, data):
    """Views, and changes in place through any of them, cut anywhere: never a wrong number."""
    one = Case(lambda: Pool(steps), rows_of(), mse, ("", "", ""))
    model, inputs, targets = one.make(4)
    try:
        want = loop(model, mse, inputs, targets, 2)
    except RuntimeError:
        assume(False)  # autograd refuses it on one device
    places = [f"steps.{k}" for k, step in enumerate(model.steps) if step.kind not in ("in_place",) or k] + ["last"]
    cuts = data.draw(
        st.sets(st.sampled_from(places), min_size=1, max_size=2).map(lambda found: sorted(found, key=places.index))
    )
    try:
        built = build(one, gpipe(ranks=len(cuts) + 1, microbatches=2), 4, tuple(cuts))
    except fpipe.CutError as error:
        event(str(error).split(": ")[1][:30])
        return
    event("exact")
    assert_same(run(*built), want)
    assert_same(run(*built), run_reference(*built))


@pytest.mark.parametrize(
    ("steps", "cut"),
    [
        ([("view", 0, 0), ("in_place", 0, 0), ("add", 1, 0)], "steps.1"),
        ([("same", 0, 0), ("in_place", 1, 0), ("add", 0, 0)], "steps.1"),
        ([("view", 0, 0), ("in_place", 0, 0), ("view", 0, 0), ("view", 1, 0)], "steps.2"),
        ([("view", 0, 0), ("in_place", 1, 0), ("in_place", 1, 0)], "steps.2"),
    ],
    ids=["base and view", "view and base", "a view from before", "again in the next stage"],
)
def test_in_place_changes_of_shared_memory_across_a_cut_are_refused(steps, cut):
    one = Case(lambda: Pool(steps), rows_of(), mse, ("", "", ""))
    with pytest.raises(fpipe.CutError, match="in place"):
        build(one, gpipe(ranks=2, microbatches=2), 4, (cut,))
