# SPDX-License-Identifier: Apache-2.0
"""A plan holds its memory, is not beaten by any cuts by hand, is never below its bound, and says what it must."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe.errors import InputError
from fpipe.planning import choosing
from fpipe.planning.candidates import FACTORIES, find_peak, fit_memory, keep_best, start
from fpipe.planning.chain import partition_chain
from fpipe.planning.choosing import PlanProgress
from fpipe.planning.floor import bound_plans
from fpipe.planning.plan import Plan
from fpipe.planning.ranges import Spread, sum_blocks
from schedules import (
    Certificate,
    Costs,
    Link,
    Sizes,
    certificate,
    check,
    chimera,
    dualpipe,
    forward_only,
    interleaved_1f1b,
    lower,
    offload,
    one_f_one_b,
    pipedream,
    recompute,
    seq_1f1b,
    simulate,
    v_half,
    zb_h1,
    zb_v,
)
from tests.common.chain_profiles import by_hand, chain_profile, find_plan, problem_of
from tests.common.options import grouped
from tests.common.sizes import by_night, few, sampled
from tests.common.zoo import ZOO

FORWARDS = st.lists(st.integers(1, 20), min_size=5, max_size=8)


@by_night
@settings(max_examples=15, deadline=None)
@given(FORWARDS, st.integers(2, 3), st.sampled_from([0.0, 2.0]))
def test_no_cuts_by_hand_are_much_faster_and_none_is_below_the_bound(forward, ranks, latency):
    profile = chain_profile(forward, link=Link(latency=latency))
    factories = (one_f_one_b, zb_h1, zb_v, interleaved_1f1b)
    plan = find_plan(profile, factories, ranks=ranks)
    best = min(by_hand(profile, factories, ranks, 4), key=lambda one: one.predicted.seconds)
    assert best.predicted.seconds * 1.03 >= plan.predicted.seconds
    assert plan.bound <= best.predicted.seconds * (1 + 1e-9)
    check(plan.schedule)


def test_a_schedule_that_follows_costs_follows_those_of_its_stages(tmp_path):
    profile = chain_profile([1, 4, 2, 3, 1, 5, 2, 2], link=Link(latency=1))
    plan = find_plan(profile, [v_half], ranks=3, microbatches=6)
    costs = dict(plan.schedule.arguments)["costs"]
    assert costs == profile.costs([k for k, one in enumerate(profile.blocks) if one.name in plan.cuts])
    fixed = find_plan(profile, [v_half(3, 6)], ranks=3, microbatches=6)
    assert fixed.schedule == v_half(3, 6)
    assert plan.predicted.seconds < fixed.predicted.seconds
    plan.save(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_the_bound_knows_that_checkpointed_forwards_may_end_earlier():
    profile = chain_profile([1] * 8)
    profile = replace(profile, times=tuple(one._replace(C=0.1) for one in profile.times))
    plan = find_plan(profile, [one_f_one_b], ranks=8, microbatches=2, caps=20.0)
    assert plan.schedule.factory is recompute
    assert plan.bound <= plan.predicted.seconds


def test_the_bound_names_everything_that_it_consists_of():
    profile = replace(chain_profile([1] * 8, link=Link(latency=10)), step=3.0)
    text = bound_plans(problem_of(profile, 4, 1), split=False, single=True).because
    assert (
        text == "one microbatch takes 24 s from end to end, and its transfers 60 s, and a step 3 s besides its actions"
    )
    with_step, without = (
        problem_of(one, 4, 1).try_out(one_f_one_b(4, 1), (2, 4, 6)) for one in (profile, replace(profile, step=0.0))
    )
    assert with_step.predicted.seconds == without.predicted.seconds + 3
    twice = bound_plans(problem_of(profile, 4, 1), split=False, single=True, copies=2)  # two ranks may be all it visits
    assert "its transfers 0 s" in twice.because


@pytest.mark.parametrize(
    ("forward", "factories"), [([1, 20, 1], [chimera]), ([1] * 8, [one_f_one_b, interleaved_1f1b])]
)
def test_the_bound_knows_that_ranks_may_share_a_block_or_hold_several_stages(forward, factories):
    plan = find_plan(chain_profile(forward), factories)
    assert plan.bound <= plan.predicted.seconds


@settings(max_examples=30, deadline=None)
@given(FORWARDS, st.integers(2, 4), st.integers(1, 6), st.sampled_from([0.0, 0.5]))
def test_plans_with_a_stage_per_rank_are_not_below_their_bound(forward, ranks, microbatches, fixed):
    profile = chain_profile(forward, fixed=fixed)
    for split, factory in ((False, one_f_one_b), (True, zb_h1)):
        least = bound_plans(problem_of(profile, ranks, microbatches), split=split, single=True).makespan
        fastest = min(one.predicted.seconds for one in by_hand(profile, [factory], ranks, microbatches))
        assert least <= fastest * (1 + 1e-9)


@by_night
@settings(max_examples=15, deadline=None)
@given(FORWARDS, st.sampled_from([dualpipe, chimera]), st.sampled_from([2, 4]), st.integers(2, 6))
def test_plans_that_hold_stages_twice_are_not_below_their_bound(forward, factory, ranks, microbatches):
    profile = chain_profile(forward, fixed=0.5, link=Link(latency=0.25))
    plan = find_plan(profile, [factory], ranks=ranks, microbatches=microbatches)
    fastest = min(one.predicted.seconds for one in by_hand(profile, [factory], ranks, microbatches))
    assert plan.bound <= fastest * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(FORWARDS, st.integers(60, 200))
def test_the_memory_is_held(forward, cap):
    profile = chain_profile(forward)
    try:
        plan = find_plan(profile, (one_f_one_b, zb_v), caps=cap)
    except InputError as error:
        if "expected at least" not in str(error):
            raise
        return
    assert max(plan.predicted.memory) <= cap


def test_little_memory_makes_stages_recompute():
    plan = find_plan(chain_profile([1] * 8), [one_f_one_b], ranks=2, microbatches=8, caps=75)
    assert plan.schedule.factory is recompute
    assert max(plan.predicted.memory) <= 75


def test_a_rank_with_little_memory_gets_few_blocks_though_a_step_takes_longer():
    found = start(problem_of(chain_profile([1] * 8), caps=(inf, 18.0)), one_f_one_b(2, 4))
    assert (found.fits, found.cuts) == (True, (7,))


def test_activations_are_moved_to_a_fast_host_where_memory_is_short(tmp_path):
    """Stages of 20 bytes and 2 s per forward: at 10 bytes per second, a move takes as long as a pass."""
    profile, given_ = chain_profile([1] * 8), {"ranks": 4, "microbatches": 8, "caps": 80.0}
    without, fast, slow = (find_plan(profile, [one_f_one_b], host=host, **given_) for host in (0, 10, 0.01))
    assert without.schedule.factory is slow.schedule.factory is recompute
    assert fast.schedule == offload(one_f_one_b(4, 8))
    assert fast.costs.OFFLOAD == (2.0,) * 4
    assert fast.predicted.seconds < without.predicted.seconds
    assert max(fast.predicted.memory) <= 80
    timeline = simulate(fast.schedule, fast.costs, sizes=fast.sizes)
    assert (timeline.makespan, timeline.peak_memory) == (fast.predicted.seconds, fast.predicted.memory)
    assert fast.bound <= fast.predicted.seconds
    fast.save(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == fast


def test_of_equal_schedules_the_best_cuts_are_kept():
    problem = problem_of(chain_profile([1] * 8))
    worse, best = (problem.try_out(one_f_one_b(2, 4), (cut,)) for cut in (7, 4))
    assert keep_best([worse, best], 9) == keep_best([best, worse], 9) == [best]


@given(
    st.sampled_from([one_f_one_b, zb_h1, zb_v, dualpipe, pipedream, seq_1f1b]),
    st.sets(st.integers(0, 1)),
    st.booleans(),
)
def test_the_peak_of_a_rank_is_that_of_a_simulation(factory, stages, residual):
    how = recompute(factory(2, 4), tuple(sorted(stages)))
    sizes = Sizes(activation=(9, 4, 7, 5)[: how.stages], inputs=1, residual=3 if residual else None)
    peaks = tuple(find_peak(how, rank, sizes) for rank in range(2))
    assert peaks == simulate(how, Costs(), sizes=sizes).peak_memory


def test_the_stages_whose_recomputation_lowers_the_peak_most_are_recomputed_and_no_more():
    profile = chain_profile([1] * 4, weights=[0] * 4)
    profile = replace(profile, activation=tuple(Spread(size, (k,)) for k, size in enumerate((10, 1, 1, 30))))
    whole = problem_of(profile, caps=(50.0, inf)).try_out(zb_v(2, 4), (1, 2, 3))
    assert whole.predicted.memory == (60, 20)
    fitting = fit_memory(whole)
    assert dict(fitting.schedule.arguments)["stages"] == (0,), (
        "of stage 3, which keeps more, no two microbatches are held"
    )
    assert fitting.predicted.memory[0] <= 50
    twice = replace(chain_profile([1] * 2, weights=[0] * 2), activation=(Spread(30, (0,)), Spread(10, (1,))))
    held = fit_memory(problem_of(twice, caps=30.0).try_out(chimera(2, 4), (1,)))
    assert dict(held.schedule.arguments)["stages"] == (0,), "recomputed for one rank, which is enough for the other"


@sampled(1)
@pytest.mark.parametrize(
    ("profile", "given", "words"),
    [
        (chain_profile([1] * 8), {"caps": 10.0}, r"memory: got 10.0 B, expected at least \d+ B"),
        (chain_profile([1, 1]), {"ranks": 4}, "too few places"),
    ],
)
def test_what_cannot_be_planned_is_refused(profile, given, words):
    with pytest.raises(InputError, match=words):
        find_plan(profile, **given)


def test_a_pinned_stage_leaves_no_places_inside():
    profile = chain_profile([1] * 8)
    problem = problem_of(profile, ranks=3)
    one = problem.pin(("1",), (("2", "7"),))
    assert (one.pinned, one.places) == ((1, 2, 7), {1, 2, 7})
    assert problem.pin((), ((None, "3"), ("3", None))).places == {3}


@pytest.mark.parametrize(
    ("cuts", "stages", "words"),
    [
        (("6",), (("2", "7"),), r"stages: got \('2', '7'\) and a stage that begins at '6', in the middle"),
        ((), (("2", "7"), ("3", None)), r"stages: got \('2', '7'\) and a stage that begins at '3'"),
        ((), ("27",), r"stages\[0\]: got '27', expected two names of modules"),
        ((), (("7", "2"),), r"stages\[0\]: got \(.7., .2.\), expected a second module that comes after"),
    ],
)
def test_pins_that_contradict_one_another_are_refused(cuts, stages, words):
    with pytest.raises(InputError, match=words):
        problem_of(chain_profile([1] * 8), ranks=3).pin(cuts, stages)


def test_pinned_cuts_are_kept():
    assert "2" in find_plan(chain_profile([1] * 8), [one_f_one_b], pinned=(2,)).cuts
    assert find_plan(chain_profile([1] * 8), [one_f_one_b], ranks=3, pinned=(2, 7)).cuts == ("2", "7")


def test_without_times_parameters_are_balanced():
    profile = chain_profile([0.0] * 6, weights=[50, 10, 10, 10, 10, 10])
    plan = find_plan(profile, [one_f_one_b], ranks=2)
    assert plan.cuts == ("1",)
    assert "not predicted: the profile has no times" in str(plan)
    assert "  bound  " not in str(plan)


@sampled(2)
@pytest.mark.parametrize(
    ("profile", "caps", "advice"),
    [
        (chain_profile([1] * 8), inf, "use data parallelism"),
        (chain_profile([1] * 8, link=Link(latency=1000)), inf, "train on one device"),
        (chain_profile([1] * 8, weights=[100] * 8), 600.0, ""),  # the model fits on no device
    ],
)
def test_it_says_what_is_faster_than_a_pipeline(profile, caps, advice):
    plan = find_plan(profile, caps=caps)
    assert advice in plan.advice
    assert bool(plan.advice) == (plan.alone.fits or plan.copies.fits) == bool(advice)
    assert bool(advice) == (min(plan.alone.seconds, plan.copies.seconds) < plan.predicted.seconds and plan.alone.fits)


def test_copies_fit_only_if_all_ranks_have_room_for_the_model():
    plan = find_plan(chain_profile([1] * 8, weights=[100] * 8), [one_f_one_b], caps=(inf, 600.0))
    assert (plan.alone.fits, plan.copies.fits) == (True, False)
    assert "data parallelism" not in plan.advice


def test_the_same_profile_gives_the_same_plan():
    profile = chain_profile([3, 1, 4, 1, 5, 9, 2, 6])
    assert find_plan(profile) == find_plan(profile)


def test_progress_is_reported_and_an_interrupt_returns_the_best_so_far():
    seen: list[PlanProgress] = []

    def report(progress):
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    plan = find_plan(chain_profile([3, 1, 4, 1, 5, 9, 2, 6]), report=report)
    assert [one.tried for one in seen] == [1, 2, 3]
    assert {one.total for one in seen} == {len(FACTORIES)}
    assert seen[-1].best == plan.predicted.seconds
    assert 0 <= plan.gap <= seen[-1].gap, "the bound in between holds for more plans"
    assert 0 <= seen[0].took <= seen[-1].took < seen[-1].most == 60
    assert not plan.complete
    assert "stopped early" in str(plan)


def test_an_interrupt_before_anything_was_found_is_raised():
    def factory(ranks, microbatches):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_plan(chain_profile([1] * 8), [factory])


def test_a_plan_prints_what_it_is():
    text = str(find_plan(chain_profile([3, 1, 4, 1, 5, 9, 2, 6])))
    for words in (
        "Plan for Chain on 2 ranks",
        "schedule",
        "cuts",
        "predicted, bubble",
        "memory",
        "limited by",
        "bound",
        "one device",
        "copies",
        "next best",
    ):
        assert words in text


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan = find_plan(chain_profile([3, 1, 4, 1, 5, 9, 2, 6]), caps=500.0)
    plan.save(path)
    return plan, path


def test_a_plan_is_read_as_it_was_saved(saved):
    plan, path = saved
    assert Plan.read(path) == plan


def test_a_plan_is_a_page(saved, tmp_path):
    plan = saved[0]
    plan.page(tmp_path / "plan.html", beside=Plan.read(saved[1]))
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "plan.html").read_text(), re.DOTALL)[1]
    one, other = json.loads(data)["panels"]
    timeline = simulate(plan.schedule, plan.costs, sizes=plan.sizes)
    assert max(map(max, one["ends"])) == pytest.approx(timeline.makespan)
    assert (one["time"], one["size"], one["caps"]) == ("s", "B", [500] * plan.schedule.ranks)
    assert (one["ends"], "beside: " + one["name"]) == (other["ends"], other["name"])
    assert plan.predicted.memory == tuple(-(-held // 1) for held in timeline.peak_memory)
    assert plan._repr_html_().startswith("<pre>Plan for ")
    assert "<svg " in plan._repr_html_()


def test_a_plan_without_times_has_no_page(saved, tmp_path):
    plan = replace(saved[0], predicted=replace(saved[0].predicted, seconds=0.0))
    with pytest.raises(InputError, match="page: got a plan without times"):
        plan.page(tmp_path / "plan.html")
    assert plan._repr_html_().startswith("<pre>Plan for ")
    assert "<svg " not in plan._repr_html_()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"sizes": {', '"sizes": {"x": 1, ', "sizes: "),
        ('"value": "Sizes"', '"value": "Costs"', "sizes: "),
        ('"fpipe plan"', '"other"', "expected a plan that fpipe saved"),
        ('"version": 1', '"version": 2', "version: got 2, expected 1"),
        ('"bound": ', '"bound": -', "bound: got -"),
        ('"bound": ', '"bound": NaN, "x": ', "NaN"),
        ('"complete": true', '"complete": 3', "complete: got 3, expected true or false"),
        ('"schedule": "', '"schedule": "no_', "expected a built-in schedule"),
        ("{", "", "plan.json: "),
    ],
)
def test_a_file_that_was_changed_is_refused(saved, tmp_path, old, new, words):
    text = saved[1].read_text()
    assert old in text
    path = tmp_path / "plan.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        Plan.read(path)


def test_an_altered_plan_is_refused_unless_its_checksum_is_removed(saved, tmp_path):
    plan, path = saved[0], tmp_path / "plan.json"
    document = {**json.loads(saved[1].read_text()), "bound": plan.bound / 2}
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"plan\.json: crc32: got \d+, expected \d+: .* altered .* remove crc32"):
        Plan.read(path)
    del document["crc32"]
    path.write_text(json.dumps(document))
    assert Plan.read(path).bound == plan.bound / 2


def test_a_plan_of_a_wrong_schedule_is_refused(saved, tmp_path):
    path = tmp_path / "plan.json"
    wrong = {"schedule": "table", "arguments": {"rows": ["0F0,0B0", "1B0,1F0"]}}
    document = json.loads(saved[1].read_text())
    path.write_text(json.dumps({**document, "crc32": None, "schedule": wrong, "cuts": ["4"]}))
    with pytest.raises(InputError, match="rule"):
        Plan.read(path)


def layers(count=6):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(count)])


@pytest.fixture(scope="module")
def planned():
    model, x = layers(), torch.ones(8, 8)
    return model, x, fpipe.plan(model, (x,), ranks=2, loss=torch.mean, microbatches=4, memory="1MB", seconds=5)


def test_a_pipeline_of_a_plan_is_exact(planned):
    model, x, plan = planned
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, plan=plan)
    assert pipe.schedule == plan.schedule
    assert fpipe.verify(pipe, model, (x,))


def test_a_drop_in_module_takes_a_plan(planned):
    model, x, plan = planned
    made = fpipe.Pipelined(model, example=(x,), loss=torch.mean, plan=plan)
    made(x).backward()
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": one_f_one_b(2, 4)}, "schedule: got .* besides a plan"),
        ({"cuts": ["2"]}, "cuts: got .* besides a plan"),
        ({"stages": 2}, "stages: got 2 besides a plan"),
        ({"plan": "plan.json"}, "plan: got 'plan.json', expected a Plan"),
        ({"plan": None}, "schedule: got None, expected a Schedule"),
    ],
)
def test_a_plan_replaces_other_arguments(planned, given, words):
    model, x, plan = planned
    with pytest.raises(InputError, match=words):
        fpipe.pipeline(model, example=(x,), loss=torch.mean, **grouped({"plan": plan, **given}))


@sampled(3)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "ranks: got 0"),
        ({"memory": "lots"}, "memory: got 'lots'"),
        ({"memory": -1}, "memory: got -1"),
        ({"memory": (1e6,)}, "memory: got 1 amounts, expected 2"),
        ({"memory": {1: 2}}, "memory: got {1: 2}"),
        ({"microbatches": 0}, "microbatches: got 0"),
        ({"microbatches": ()}, "microbatches: got none"),
        ({"schedules": ()}, "schedules: got none"),
        ({"schedules": [3]}, r"schedules\[0\]: got 3"),
        ({"schedules": one_f_one_b(3, 4)}, "expected a schedule of 2 ranks"),
        ({"cuts": ["9"]}, "got '9'"),
        ({"cuts": ["1", "2"], "schedules": one_f_one_b}, "2 stages, and the pins make at least 3"),
        ({"schedules": one_f_one_b(2, 8)}, "expected 2 ranks and 4 microbatches"),
        (
            {"schedules": lambda ranks, microbatches: one_f_one_b(ranks, microbatches + 1)},
            "expected 2 ranks and 4 micr",
        ),
        (
            {"schedules": lambda ranks, microbatches: 3},
            "got 3 from .*, expected a Schedule of 2 ranks and 4 microbatches",
        ),
        ({"schedules": pipedream}, "with updates 0U0 0U1.* what one update applies"),
        ({"schedules": seq_1f1b}, "model: got Sequential, whose forward takes no carry, expected one for 2 slices"),
        ({"slices": 0}, "slices: got 0"),
        ({"slices": ()}, r"slices: got \[\], expected at least one"),
        ({"schedules": seq_1f1b, "slices": 1}, "expected 2 ranks and 4 microbatches of 1 slices"),
        ({"schedules": forward_only(2, 4)}, "which has no backward, expected one that computes"),
        ({"stages": [("2", "1")]}, r"stages\[0\]: got .*, expected a second module that comes after the first"),
        ({"stages": [(None, None)]}, "needs 1 cuts, and the model has too few places for them: 0"),
        ({"microbatch": 4}, "microbatch: got an argument that neither"),
        ({"weights": 0}, "weights: got 0"),
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"profile": "profile.json"}, "profile: got 'profile.json', expected a Profile"),
    ],
)
def test_wrong_arguments_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        fpipe.plan(
            layers(),
            (torch.ones(8, 8),),
            **grouped({"ranks": 2, "loss": torch.mean, "microbatches": 4, "seconds": 1, **given}, fpipe.profile),
        )


def other(**changes):
    """Return the profile of `layers`, with something else."""
    made = fpipe.profile(
        layers(), (torch.ones(8, 8),), loss=torch.mean, microbatches=4, device=fpipe.Roofline(1e9, 1e9)
    )
    return replace(made, **changes)


@sampled(2)
@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (
            lambda: other(microbatch="float32[3, 8] and [[], []]"),
            r"profile.microbatch: got .*, expected float32\[2, 8\]",
        ),
        (lambda: other(model="GPT"), "profile.model: got GPT, expected Sequential"),
        (lambda: chain_profile([1] * 7), "profile.microbatch: got"),
        (lambda: other(blocks=other().blocks[:-1] + chain_profile([1] * 9).blocks[-1:]), "one at the module '8'"),
        (lambda: other(parameters=(Spread(8, (0,)),)), "profile.parameters: got 8 B, expected 1.7 KiB"),
    ],
)
def test_a_profile_of_another_model_is_refused(profile, words):
    with pytest.raises(InputError, match=words):
        fpipe.plan(layers(), (torch.ones(8, 8),), ranks=2, loss=torch.mean, microbatches=4, profile=profile())


@sampled(2)
@pytest.mark.parametrize("name", ["later", "recurrent", "several", "gpt_dropout"])
def test_a_profile_of_the_model_is_taken(name):
    case = ZOO[name]
    model, inputs, targets = case.make(8)
    given = {"loss": case.loss, "microbatches": 2}
    profile = fpipe.profile(model, inputs, targets, **grouped(given, fpipe.profile), device=fpipe.Roofline(1e9, 1e9))
    plan = fpipe.plan(
        model, inputs, targets, ranks=2, schedules=one_f_one_b, profile=profile, **grouped(given, fpipe.profile)
    )
    assert plan.schedule.factory is one_f_one_b


def largest(amounts, cuts):
    return max(sum(amounts[a:b]) for a, b in pairwise([0, *cuts, len(amounts)]))


@given(st.data())
def test_no_partition_has_a_smaller_largest_stage(data):
    amounts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, 4))
    places = data.draw(st.sets(st.integers(1, max(1, len(amounts) - 1))))
    places = {k for k in places if k < len(amounts)}
    pinned = [k for k in sorted(places) if data.draw(st.booleans())]
    allowed = [cuts for cuts in combinations(sorted(places), stages - 1) if set(pinned) <= set(cuts)]
    found = partition_chain(sum_blocks(amounts), stages, places, pinned)
    if not allowed:
        assert found is None
    else:
        assert found in allowed
        assert largest(amounts, found) == min(largest(amounts, cuts) for cuts in allowed)


# ------------------------------------------------------------------------------------------------------- certificates


@settings(max_examples=few(12), deadline=None)
@given(FORWARDS, st.sampled_from([one_f_one_b, zb_h1, zb_v, chimera, interleaved_1f1b]), st.sampled_from([0.0, 0.5]))
def test_a_plan_has_a_certificate_of_what_was_predicted(forward, factory, latency):
    plan = find_plan(chain_profile(forward, link=Link(latency=latency)), [factory], ranks=2)
    certificate = plan.certificate
    assert Certificate.parse(certificate.text) == certificate
    program = lower(plan.schedule)
    assert certificate.programs() == [" ".join(map(str, program.actions(rank))) for rank in range(2)]
    assert float(certificate.makespan) == pytest.approx(plan.predicted.seconds - chain_profile(forward).step)
    assert certificate.bound <= certificate.makespan
    assert "certified   correct" in str(plan)


def test_a_plan_keeps_its_certificate_in_its_file(tmp_path):
    plan = find_plan(chain_profile([2, 3, 1, 2]), [zb_h1], ranks=2)
    plan.save(tmp_path / "plan.json")
    assert fpipe.Plan.read(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    certificate.verify(json.dumps(document["certificate"]))  # by the file on its own
    del document["crc32"]
    for claim, value in (("makespan", "1"), ("bound", [0, "0", "1", "0"]), ("programs", ["0F0"] * 2), ("order", [])):
        altered = {**document, "certificate": {**document["certificate"], claim: value}}
        (tmp_path / "altered.json").write_text(json.dumps(altered))
        with pytest.raises(InputError, match=r"altered.json: certificate: .*Make the plan again"):
            fpipe.Plan.read(tmp_path / "altered.json")
    (tmp_path / "altered.json").write_text(json.dumps({**document, "certificate": None}))
    assert fpipe.Plan.read(tmp_path / "altered.json") == replace(plan, certificate=None)


def test_a_pipeline_is_built_only_from_the_program_that_is_certified():
    model, x = layers(), torch.ones(8, 8)
    plan = fpipe.plan(model, (x,), ranks=2, loss=torch.mean, microbatches=4, schedules=one_f_one_b, seconds=1)
    fpipe.pipeline(model, example=(x,), loss=torch.mean, plan=plan)
    text = plan.certificate.text.replace('"makespan": "', '"makespan": "1')
    for wrong, words in (
        (replace(plan, schedule=zb_h1(2, 4)), "got another program for rank 0, expected that of zb_h1"),
        (replace(plan, certificate=replace(plan.certificate, text=text)), "plan.certificate: makespan: got"),
    ):
        with pytest.raises(InputError, match=words):
            fpipe.pipeline(model, example=(x,), loss=torch.mean, plan=wrong)


def test_a_very_long_program_is_planned_without_a_certificate(monkeypatch):
    monkeypatch.setattr(choosing, "MOST_CERTIFIED", 7)
    plan = find_plan(chain_profile([2, 3, 1, 2]), [zb_h1], ranks=2)
    assert plan.certificate is None
    assert "certified" not in str(plan)
