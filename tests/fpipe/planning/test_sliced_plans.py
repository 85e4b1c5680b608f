# SPDX-License-Identifier: Apache-2.0
"""Profiles and plans of sequences in slices: as measured of pipelines, as simulated, never below the bound."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe.planning.candidates import FACTORIES
from fpipe.planning.choosing import choose
from fpipe.planning.floor import bound_plans
from fpipe.tensors.tree import same_bits
from schedules import Link, recompute, seq_1f1b, simulate, split_backward
from tests.common.chain_profiles import by_hand, chain_profile, problem_of
from tests.common.sizes import by_night, few, sampled
from tests.common.sliced_models import make_model, word_loss

ROOFLINE = fpipe.Roofline(1e9, 1e9)
BY_LAYER = fpipe.Recording(unsplittable="blocks.*")


def profiled(slices, model=None, **options):
    known, x, y = make_model(blocks=2)
    options = {"device": ROOFLINE, "recording": BY_LAYER, **options}
    return fpipe.profile(model or known, (x,), y, loss=word_loss, microbatches=3, slices=slices, **options)


@pytest.fixture(scope="module")
def profile():
    return profiled(3)


@sampled(2)
@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("backward", ["graph", "autograd"])
def test_stages_of_a_profile_are_those_of_a_pipeline(slices, backward):
    model, x, y = make_model(blocks=2)
    options = {"gradients": fpipe.Gradients(backward=backward), "recording": BY_LAYER}
    known, how = profiled(slices, **options), seq_1f1b(2, 3, slices=slices)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, schedule=how, cuts=["blocks.1"], **options)
    known.require(pipe)
    mine, theirs = known.sizes(["blocks.1"]), pipe.sizes
    assert mine.weight == theirs.weight
    for name in ("activation", "inputs"):
        assert all(0.9 * b <= a <= 1.1 * b for a, b in zip(getattr(mine, name), getattr(theirs, name), strict=True))
    of_pipe = fpipe.profile(pipe, (x,), y, device=ROOFLINE)
    assert of_pipe.slices == known.slices
    assert len(of_pipe.blocks) == len(known.blocks)


def test_all_slices_take_as_long_as_they_are(profile):
    assert len(profile.parts) == 3
    assert sum(profile.parts) == pytest.approx(1)
    lengths = fpipe.Microbatching(slice_lengths=lambda length, slices: [length - slices + 1, *[1] * (slices - 1)])
    parts = profiled(3, microbatching=lengths).parts
    assert parts[0] > 1.5 * parts[2]
    costs = profile.costs(["blocks.1"])
    assert costs.slices == profile.slices
    whole = replace(costs, slices=())
    assert simulate(seq_1f1b(1, 3, slices=3), profile.costs([])).makespan == pytest.approx(
        simulate(seq_1f1b(1, 3, slices=3), replace(profile.costs([]), slices=())).makespan
    )
    assert sum(whole.time(kind, s) for kind in "FB" for s in (0, 1)) == pytest.approx(sum(profile.slices))


@by_night
def test_the_times_of_slices_are_measured(tmp_path):
    known = profiled(2, device=None, seconds=0)
    assert len(known.slices) == 2
    assert min(known.slices) > 0
    known.save(tmp_path / "profile.json")
    assert fpipe.Profile.read(tmp_path / "profile.json") == known
    assert "slices      take" in str(known)
    assert known.merge(known) == known


@by_night
def test_a_carry_stays_within_a_block(profile):
    starts = [block.name for block in profiled(3, recording=fpipe.Recording()).blocks]
    assert "blocks.1.mixer.cell" in starts
    assert "blocks.1.mixer.cell@1" not in starts  # the first steps of a recurrence hand their state on
    assert [block.name for block in profile.blocks][1:] == ["embedding", "blocks.0", "blocks.1", "head"]


def test_a_profile_of_other_slices_is_refused(profile):
    model, x, y = make_model(blocks=2)
    for n in (1, 2):
        pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, schedule=seq_1f1b(2, 3, slices=n))
        with pytest.raises(fpipe.InputError, match=f"slices: got a profile for 3 slices .*, expected {n}"):
            profile.require(pipe)
    with pytest.raises(fpipe.InputError, match=r"others\[0\].slices: got a profile for 1 slices .*, expected 3"):
        profile.merge(replace(profile, slices=()))
    with pytest.raises(fpipe.InputError, match=r"slices: got \[2\], expected 3, for which the profile is"):
        fpipe.plan(model, (x,), y, ranks=2, loss=word_loss, microbatches=3, profile=profile, slices=2)
    with pytest.raises(fpipe.InputError, match="model: got Sequential, whose forward takes no carry"):
        profiled(2, model=torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)))


FORWARDS = st.lists(st.integers(1, 20), min_size=5, max_size=7)
SHARES = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@settings(max_examples=few(12), deadline=None)
@given(FORWARDS, SHARES, st.integers(2, 3), st.integers(1, 4), st.sampled_from([0.0, 0.5]), st.booleans())
def test_no_plan_of_slices_is_below_its_bound(forward, shares, ranks, microbatches, latency, split):
    profile = replace(
        chain_profile(forward, fixed=latency, link=Link(latency=latency)), slices=tuple(map(float, shares))
    )
    made = seq_1f1b(ranks, microbatches, slices=len(shares))
    made = split_backward(made) if split else made
    least = bound_plans(problem_of(profile, ranks, microbatches), split=split, single=True, recomputed=False).makespan
    fastest = min(one.predicted.seconds for one in by_hand(profile, [lambda *_: made], ranks, microbatches))
    assert least <= fastest * (1 + 1e-9)


def test_few_microbatches_are_cut_into_slices_where_that_pays():
    whole = chain_profile([4] * 8)
    problems = [problem_of(replace(whole, slices=(1.0,) * n if n > 1 else ()), 4, 2) for n in (1, 4)]
    factories = (*FACTORIES, partial(seq_1f1b, slices=4))
    plan = choose(problems, factories, seconds=30.0, report=lambda _: None)
    assert plan.schedule == seq_1f1b(4, 2, slices=4)
    costly = [
        problems[0],
        replace(problems[1], profile=replace(problems[1].profile, fixed=problems[1].profile.times[0])),
    ]
    other = choose(costly, factories, seconds=30.0, report=lambda _: None)
    assert other.schedule.slices == 1
    assert plan.bound <= plan.predicted.seconds


def test_a_plan_of_slices_predicts_what_is_simulated_and_runs(profile, tmp_path):
    model, x, y = make_model(blocks=2)
    given_ = {"ranks": 2, "loss": word_loss, "microbatches": 3, "seconds": 5, "recording": BY_LAYER}
    sliced = fpipe.plan(model, (x,), y, **given_, profile=profile, schedules=[partial(seq_1f1b, slices=3)])
    assert sliced.schedule == seq_1f1b(2, 3, slices=3)
    timeline = simulate(sliced.schedule, sliced.costs, sizes=sliced.sizes)
    assert sliced.predicted.seconds == pytest.approx(timeline.makespan)
    assert sliced.certificate is not None
    assert float(sliced.certificate.makespan) == pytest.approx(timeline.makespan)
    sliced.save(tmp_path / "plan.json")
    assert fpipe.Plan.read(tmp_path / "plan.json") == sliced
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, plan=sliced, recording=BY_LAYER)
    state = pipe.init(model)
    out, grads = fpipe.value_and_grad(pipe)(*state, (x,), y)
    reference, wanted = fpipe.reference(pipe)(*state, (x,), y)
    assert same_bits(out.loss, reference.loss)
    assert not [name for name in wanted if not same_bits(grads[name], wanted[name])]
    least = fpipe.plan(
        model,
        (x,),
        y,
        **given_,
        profile=profile,
        schedules=seq_1f1b(2, 3, slices=3),
        memory=2 * max(sliced.predicted.memory),
    )
    assert least.schedule == sliced.schedule


@by_night
def test_a_plan_chooses_the_number_of_slices():
    model, x, y = make_model(blocks=2)
    given_ = {"ranks": 2, "loss": word_loss, "microbatches": 3, "seconds": 5, "recording": BY_LAYER, "device": ROOFLINE}
    plans = [fpipe.plan(model, (x,), y, **given_, slices=n) for n in (1, 3, (1, 3))]
    assert plans[2].predicted.seconds == min(plan.predicted.seconds for plan in plans)


def test_slices_are_recomputed_where_memory_is_short(profile):
    model, x, y = make_model(blocks=2)
    given_ = {"ranks": 2, "loss": word_loss, "microbatches": 3, "seconds": 5, "recording": BY_LAYER}
    plenty = fpipe.plan(model, (x,), y, **given_, profile=profile, schedules=seq_1f1b(2, 3, slices=3))
    cap = max(plenty.predicted.memory) - 1000
    plan = fpipe.plan(model, (x,), y, **given_, profile=profile, schedules=seq_1f1b(2, 3, slices=3), memory=cap)
    assert plan.schedule.factory is recompute
    assert max(plan.predicted.memory) <= cap
