# SPDX-License-Identifier: Apache-2.0
"""Stages with a carry, under schedules that cut sequences into slices, give the bits of a plain loop over slices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import Action, Placement, chain, check, from_rows, lower, recompute, seq_1f1b, split_backward, zb_h1
from tests.common.carries import LAYERS, attend, error, loop, make, project, recur, stages_of


def assert_bits(got, want):
    assert same_bits(got[0].loss, want[0])
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[name], theirs[name]) for name in mine)


HOWS = [lambda s: s, split_backward, recompute]


@given(
    st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(HOWS),
)
def test_slices_equal_a_loop_over_slices(layers, microbatches, slices, change):
    params, x, y = make(layers)
    schedule = change(seq_1f1b(len(params), microbatches, slices=slices))
    stages = stages_of(layers)
    got = fpipe.execute(lower(schedule, stages.graph), stages, params, [()] * len(params), (x,), y)
    assert_bits(got, loop(layers, params, x, y, microbatches, slices))


@st.composite
def sliced_orders(draw, stages, microbatches, slices):
    """Any order of forwards and backwards, some in halves, on any ranks, that a chain with carries allows."""
    drawn = draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages))
    homes = [sorted({*drawn}).index(rank) for rank in drawn]
    placement = Placement(1 + max(homes), tuple(homes))
    units = [(s, i, k) for i in range(microbatches) for k in range(slices) for s in range(stages)]
    halved = draw(st.sets(st.sampled_from(units)))
    waiting = [(kind, *unit) for unit in units for kind in ("FIW" if unit in halved else "FB")]
    done, rows = set(), [[] for _ in range(placement.ranks)]

    def is_ready(kind, s, i, k):
        if kind == "W":
            return ("I", s, i, k) in done
        step = -1 if kind == "F" else 1
        before = [(s + step, i, k)] * (0 <= s + step < stages) + [(s, i, k + step)] * (0 <= k + step < slices)
        forward = kind == "F" or ("F", s, i, k) in done
        return forward and all(any((other, *one) in done for other in ("F" if kind == "F" else "BI")) for one in before)

    while waiting:
        one = draw(st.sampled_from([action for action in waiting if is_ready(*action)]))
        waiting.remove(one)
        done.add(one)
        kind, s, i, k = one
        rows[homes[s]].append(Action(kind, s, i, None, k))
    return from_rows(tuple(map(tuple, rows)), placement, microbatches=microbatches, slices=slices)


@given(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=2), st.integers(1, 2), st.data())
def test_any_order_of_slices_computes_the_same(layers, microbatches, data):
    """Bit for bit, if gradients are added in the order of the loop; else but for the order of the terms."""
    schedule = data.draw(sliced_orders(len(layers) + 1, microbatches, 2))
    check(schedule)
    params, x, y = make(layers)
    stages = stages_of(layers)
    got, grads = fpipe.execute(lower(schedule, stages.graph), stages, params, [()] * len(params), (x,), y)
    loss, want = loop(layers, params, x, y, microbatches, 2)
    assert same_bits(got.loss, loss)
    for s, (mine, theirs) in enumerate(zip(grads, want, strict=True)):
        rank = schedule.placement.homes[s]
        terms = [(a.microbatch, -a.slice) for a in schedule.actions(rank) if a.stage == s and a.kind in "BW"]
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-5)
            assert terms != sorted(terms) or same_bits(mine[name], theirs[name])


def test_slices_equal_the_whole_sequence():
    layers = [attend, recur, attend]
    params, x, y = make(layers)
    stages = stages_of(layers)
    found = [
        fpipe.execute(lower(seq_1f1b(4, 2, slices=n), stages.graph), stages, params, [()] * 4, (x,), y) for n in (1, 4)
    ]
    torch.testing.assert_close(found[0][0].loss, found[1][0].loss, rtol=1e-6, atol=1e-6)
    for whole, sliced in zip(found[0][1], found[1][1], strict=True):
        assert all(torch.allclose(whole[name], sliced[name], rtol=1e-5, atol=1e-6) for name in whole)


def test_a_carry_that_is_left_out_of_the_backward_gives_other_gradients():
    """What the tests above would see."""
    layers = [recur]
    params, x, y = make(layers)
    cut = fpipe.stage(lambda p, i: recur(p, (i[0], None if i[1] is None else i[1].detach())), carries=True)
    stages = fpipe.connect_stages([cut, error])
    program = lower(seq_1f1b(2, 2, slices=2), stages.graph)
    _, grads = fpipe.execute(program, stages, params, [()] * 2, (x,), y)
    assert not same_bits(grads[0]["u"], loop(layers, params, x, y, 2, 2)[1][0]["u"])


def test_a_stage_of_ones_own_has_a_carry():
    """A running sum, on numbers: y_t = w x_t + y_(t - 1)."""

    def forward(w, buffers, inputs, key):
        x, before = inputs
        y = w * x + (before or 0)
        return (y, y), buffers, (w, x, before)

    def backward(residuals, cotangents):
        (w, x, before), (of_output, of_carry) = residuals, cotangents
        total = (of_output or 0) + (of_carry or 0)
        return (w * total, None if before is None else total), x * total

    def last(w, buffers, inputs, key):
        return inputs[0], buffers, None

    total = fpipe.Stage(forward, backward, carries=True)
    end = fpipe.Stage(last, lambda residuals, cotangent: ((cotangent,), 0.0))
    stages = fpipe.connect_stages([total, end], targets=False)
    out, grads = fpipe.execute(
        lower(seq_1f1b(2, 1, slices=2), stages.graph),
        stages,
        [3.0, 0.0],
        [(), ()],
        ([1.0, 2.0],),
        split=lambda tree, M: [tree],
        slicing=lambda tree, n: [None] * n if tree is None else [(tree[0][k],) for k in range(n)],
    )
    assert (out.loss, grads[0]) == ((3 + 9) / 2, (1 + 1 + 2) / 2)


def test_a_carry_may_also_be_read_by_other_stages():
    """Skips beside a carry, in the graph of names."""
    params, x, y = make([attend, project, recur])

    def both(params, inputs):
        first, second, *carry = inputs
        return recur(params, (first + second, *carry))

    rows = {
        "a": (fpipe.stage(attend, carries=True), ["inputs"]),
        "b": (project, ["a"]),
        "c": (fpipe.stage(both, carries=True), ["a", "b"]),
        "d": (error, ["c", "targets"]),
    }
    stages = fpipe.connect_stages(rows)
    found = [
        fpipe.execute(lower(seq_1f1b(4, 2, slices=n), stages.graph), stages, params, [()] * 4, (x,), y) for n in (1, 2)
    ]
    for whole, sliced in zip(found[0][1], found[1][1], strict=True):
        assert all(torch.allclose(whole[name], sliced[name], rtol=1e-5, atol=1e-6) for name in whole)


def test_what_slices_need_is_refused_by_name():
    params, x, y = make([project])
    stages = stages_of([project])
    program = lower(seq_1f1b(2, 2, slices=9), stages.graph)
    with pytest.raises(fpipe.InputError, match="expected at least 9 columns, one for each slice"):
        fpipe.execute(program, stages, params, [()] * 2, (x,), y)
    record = fpipe.capture(torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 2), example=(x,), loss=torch.mean)
    model = fpipe.cut(record, ["1"])
    with pytest.raises(fpipe.InputError, match="of 2 slices, expected whole microbatches for stages that are cut"):
        fpipe.execute(lower(seq_1f1b(2, 2, slices=2), model.graph), model, params, [(), ()], (x,))


def test_zero_bubble_and_whole_microbatches_need_no_slices():
    """A stage with a carry runs under any schedule: it gets none, and what it leaves is dropped."""
    layers = [attend]
    params, x, y = make(layers)
    stages = stages_of(layers)
    got = fpipe.execute(lower(zb_h1(2, 2), stages.graph), stages, params, [()] * 2, (x,), y)
    assert_bits(got, loop(layers, params, x, y, 2, 1))
    assert stages.graph == chain(2)
