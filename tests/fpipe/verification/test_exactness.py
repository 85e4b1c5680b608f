# SPDX-License-Identifier: Apache-2.0
"""A pipeline computes what one device computes, bit for bit: loss, outputs, every gradient, every buffer.

Held against two things: `fpipe.reference`, and a plain PyTorch loop that knows nothing of fpipe (`tests.common.loops`).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import B, F, gpipe, one_f_one_b, schedule
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same, differences
from tests.common.loops import eval_loop, loop
from tests.common.random_models import case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import build, require_exact, run, run_reference
from tests.common.schedules import SCHEDULES, descending, linear_fill_drain, looped_fill_drain, vee_fill_drain
from tests.common.sizes import by_day, few, in_turn, sampled
from tests.common.zoo import ZOO, captured_by

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")

CASES = captured_by("trace", "export", "fx", "modules")
SEED = 5


@sampled(2)
@pytest.mark.parametrize(
    ("case", "way"),
    in_turn(
        [*captured_by("trace"), *by_day(captured_by("modules"), 3)],
        [("one_f_one_b", 4), ("split_backward", 4), ("gpipe", 2)],
    ),
    ids=str,
)
def test_every_model_of_the_zoo_is_exact(case, way):
    (name, capture), (kind, ranks) = case, way
    require_exact(ZOO[name], SCHEDULES[kind](ranks=ranks, microbatches=3), capture=capture)


@sampled(1)
@pytest.mark.parametrize(("name", "capture"), by_day(captured_by("export", "fx", "dynamo"), 7))
def test_every_model_of_the_zoo_is_exact_through_a_graph(name, capture):
    require_exact(ZOO[name], SCHEDULES["split_backward"](ranks=4, microbatches=3), capture=capture)


TRIED = [*product(["skips", "chained"], ["export"]), *product(["mlp", "tied_sequence", "dicts"], ["modules"])]


@sampled(2)
@pytest.mark.parametrize(("way", "case"), in_turn(product(SCHEDULES, [1, 2, 4]), TRIED), ids=str)
def test_every_schedule_on_every_number_of_ranks(way, case):
    (kind, ranks), (name, capture) = way, case
    require_exact(ZOO[name], SCHEDULES[kind](ranks=ranks, microbatches=4), capture=capture)


MORE = [("mlp", "export"), ("normalised", "modules"), ("tied_sequence", "modules"), ("dropping", "modules")]


@sampled(1)
@pytest.mark.parametrize(("microbatches", "case"), in_turn(by_day(range(1, 10), 2), MORE), ids=str)
def test_any_number_of_microbatches(microbatches, case):
    name, capture = case
    for how in (SCHEDULES["one_f_one_b"](2, microbatches), SCHEDULES["split_backward"](4, microbatches)):
        require_exact(ZOO[name], how, capture=capture)


@sampled(2)
@pytest.mark.parametrize(
    ("name", "factory"),
    in_turn(
        ["skips", "chained", "normalised", "in_place", "dropping"],
        [linear_fill_drain, looped_fill_drain, vee_fill_drain],
    ),
)
def test_several_stages_on_a_rank(name, factory):
    require_exact(ZOO[name], factory(ranks=2, microbatches=3, chunks=2))


def test_all_stages_on_one_rank():
    require_exact(ZOO["skips"], vee_fill_drain(ranks=1, microbatches=3, chunks=4))


def test_six_stages_on_three_ranks():
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    layers[5].weight = layers[1].weight
    case = Case(lambda: layers, rows_of(), mse, ("1", "2", "3"))
    for factory in (looped_fill_drain, vee_fill_drain):
        require_exact(case, factory(ranks=3, microbatches=4), cuts=tuple("12345"))


@sampled(1)
@pytest.mark.parametrize("name", ["chained", "tied_sequence", "normalised"])
def test_gradients_are_added_in_the_order_of_the_schedule(name):
    case, how = ZOO[name], descending(ranks=4, microbatches=5)
    got = require_exact(case, how, order=[4, 3, 2, 1, 0])
    ascending = run(*build(case, gpipe(ranks=4, microbatches=5), 10))
    assert any(not same_bits(got.grads[name], ascending.grads[name]) for name in got.grads), "the order must matter"


@settings(max_examples=few(8))
@given(
    which=st.sampled_from(CASES),
    kind=st.sampled_from([*SCHEDULES.values(), descending, looped_fill_drain, vee_fill_drain, linear_fill_drain]),
    ranks=st.sampled_from([1, 2, 4]),
    microbatches=st.integers(1, 9),
)
@pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights")
def test_any_model_of_the_zoo_is_exact_under_any_schedule(which, kind, ranks, microbatches):
    assume(which[0] != "in_place" or kind is not descending)  # its own backward cannot wait for another forward
    chunks = {"chunks": 4 // ranks} if "fill_drain" in kind.__name__ else {}
    how = kind(ranks=ranks, microbatches=microbatches, **chunks)
    order = range(microbatches)[::-1] if kind is descending else None
    require_exact(ZOO[which[0]], how, capture=which[1], order=order)


# ---------------------------------------------------------------------------------------------------------- evaluation


@sampled(2)
@pytest.mark.parametrize(("which", "targets_given"), in_turn(by_day(CASES, 8), [True, False]), ids=str)
def test_an_evaluation_is_exact(which, targets_given):
    name, capture = which
    case = ZOO[name]
    pipe, model, inputs, targets = build(case, one_f_one_b(ranks=2, microbatches=3), 6, capture=capture)
    wanted = targets if targets_given else None
    seed = SEED if name == "dropping" else None  # its noise is not dropout: it draws in eval mode too
    got = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted, seed=seed)
    judged = wanted is not None or targets is None  # what needs no targets always has a loss
    want = eval_loop(model, case.loss if judged else None, inputs, wanted, 3)
    if name != "dropping":
        mine, theirs = ((one.loss, one.outputs, {}, one.buffers) for one in (got, want))
        assert_same(*(type(want)(*one) for one in (mine, theirs)))
    assert (got.loss is not None) == judged
    assert all(not leaf.requires_grad for leaf in got.buffers.values())


def test_the_loss_carries_no_graph():
    built = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    got = run(*built)
    assert not got.loss.requires_grad
    assert not got.outputs.requires_grad
    assert not any(grad.requires_grad for grad in got.grads.values())


def test_modules_stay_in_their_mode():
    def half_frozen():
        model = ZOO["normalised"].build()
        model[1].eval()
        return model

    case = Case(half_frozen, rows_of(), mse, ("1", "3", "5"), random=False)
    got = require_exact(case, one_f_one_b(ranks=4, microbatches=3))
    assert got.buffers["1.num_batches_tracked"] == 0
    assert got.buffers["5.num_batches_tracked"] == 3


def test_several_steps_in_a_row():
    """Parameters and buffers go round, as in training; a plain loop does the same."""
    case, how = ZOO["normalised"], one_f_one_b(ranks=4, microbatches=3)
    pipe, model, inputs, targets = build(case, how, 6)
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for _ in range(3):
        out, grads = step(params, buffers, inputs, targets)
        want = loop(model, case.loss, inputs, targets, 3)
        assert_same(want._replace(loss=out.loss, grads=grads, buffers=out.buffers), want)
        params, buffers = {n: p - 0.1 * grads[n] if n in grads else p for n, p in params.items()}, out.buffers
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.1 * want.grads[name]) if name in want.grads else None
        model.load_state_dict(want.buffers, strict=False)


# ------------------------------------------------------------------------------------------------- the tests themselves


@sampled(2)
@pytest.mark.parametrize("leaf", ["loss", "outputs", "grads", "buffers"])
def test_the_comparison_sees_one_bit(leaf):
    built = build(ZOO["normalised"], one_f_one_b(ranks=2, microbatches=2), 4)
    got = run(*built)
    other = run_reference(*built)
    tensor = getattr(other, leaf)
    tensor = next(iter(tensor.values())) if isinstance(tensor, dict) else tensor
    tensor.view(-1)[:1].view(torch.int32)[0] ^= 1
    assert len(list(differences(got, other))) == 1
    assert list(differences(got, got._replace(grads=dict(list(got.grads.items())[1:]))))


@schedule()
def last_first(rank, ranks, microbatches):
    """Microbatches go through in descending order, so the last of the batch is done first."""
    yield from (F(rank, i) for i in reversed(range(microbatches)))
    yield from (B(rank, i) for i in range(microbatches))


@pytest.mark.parametrize("name", ["mlp", "skips"])
def test_outputs_and_losses_are_merged_in_the_order_of_microbatches(name):
    """Not in the order in which they are done."""
    one = ZOO[name]
    pipe, model, inputs, targets = build(one, last_first(ranks=2, microbatches=4), 8)
    assert_same(run(pipe, model, inputs, targets), loop(model, one.loss, inputs, targets, 4))
    step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
    want = eval_loop(model, one.loss, inputs, targets, 4)
    assert same_bits(step.loss, want.loss)
    assert_same(want._replace(outputs=step.outputs), want)


def run_loop(description, rows, microbatches):
    """What a plain loop computes; of a model whose own backward fails, nothing is expected."""
    case = case_of(description)
    model, inputs, targets = case.make(rows)
    try:
        return loop(model, case.loss, inputs, targets, microbatches)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise


def require_exact_at_random_cuts(description, data, capture, names):
    """Cut it at some of `names`, and compare it with everything that it must be equal to."""
    microbatches = data.draw(st.integers(1, 3))
    rows = 3 * microbatches - data.draw(st.sampled_from([0, 0, 1]))
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules_of(len(cuts) + 1, microbatches))
    evenly = data.draw(st.sampled_from([False, False, False, True]))
    case, want = case_of(description), run_loop(description, rows, microbatches)
    built = build_unless_refused(description, case, how, rows, None if evenly else cuts, capture=capture)
    if built is None:
        return
    got = run(*built, seed=SEED if case.random else None)
    assert_same(got, run_reference(*built, seed=SEED if case.random else None))
    if not case.random:
        assert_same(got, want)


@settings(max_examples=few(16))
@given(descriptions(), st.data())
def test_any_model_is_exact_wherever_it_is_cut(description, data):
    require_exact_at_random_cuts(description, data, "trace", places(description))


@settings(max_examples=few(6))
@given(descriptions(sequence=True), st.data())
def test_any_sequence_of_parts_is_exact(description, data):
    names = [f"{k}" for k in range(2, len(description.parts) + 2)]
    require_exact_at_random_cuts(description, data, data.draw(st.sampled_from(["modules", "trace"])), names)


@settings(max_examples=few(4))
@given(descriptions(graph=True), st.data())
def test_any_graph_of_operators_is_exact(description, data):
    capture = data.draw(st.sampled_from(["fx", "export", "dynamo"]))
    require_exact_at_random_cuts(description, data, capture, [name for name in places(description) if "@" not in name])
