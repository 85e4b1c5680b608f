# SPDX-License-Identifier: Apache-2.0
"""Memory to the byte: what stages really hold after every action is what the simulation says, fed with their sizes.

Every allocation is watched by a weak reference to its memory, so nobody can hold anything unseen: not an action's
leftover in a dictionary, nor a closure, a hook, or a tensor that was not detached. What leaves a stage function is
copied, as if it went to another rank; the copy is nobody's until a stage is given it.
"""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution
from fpipe.runtime.local import LocalTransport, drive
from fpipe.tensors import random
from schedules import (
    KINDS,
    chain,
    dualpipe_v,
    families,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    recompute,
    v_min,
    zb_h1,
    zb_v,
)
from schedules.language.actions import SENDS, Action, message_of
from schedules.playing.outputs import inputs_of
from tests.common.cases import Case, mse, rows_of
from tests.common.layers import Assigned, Average, linears
from tests.common.memory import SEED, require_as_simulated
from tests.common.random_models import Description, Leaf, case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import build
from tests.common.sizes import by_day, covering, few, sampled
from tests.common.zoo import ZOO


def build_case(name, how, rows=2, **options):
    """A case of the zoo under a schedule."""
    return build(ZOO[name], how, rows * how.microbatches, **{"capture": "trace", **options})


SCHEDULES = {
    "1F1B": one_f_one_b(ranks=4, microbatches=5),
    "ZB-H1": zb_h1(ranks=4, microbatches=5),
    "ZB-V": zb_v(ranks=2, microbatches=5),
    "V-Min": v_min(ranks=2, microbatches=5),
}


@contextmanager
def without_onednn(off):
    enabled, *_ = torch.backends.mkldnn.set_flags(False) if off else (None,)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)


HOWS = [*((how, "autograd") for how in SCHEDULES), ("ZB-V", "graph")]


@sampled(2)
@pytest.mark.parametrize(("name", "way"), by_day(product(ZOO, HOWS), 11), ids=str)
def test_memory_after_every_action_is_as_simulated(name, way):
    """The fake LSTM does not know of the workspace that oneDNN's real one keeps, so that is off."""
    how, backward = way
    with without_onednn(name == "recurrent"):
        require_as_simulated(*build_case(name, SCHEDULES[how], backward=backward))


@sampled(1)
@pytest.mark.parametrize("how", SCHEDULES)
def test_memory_of_reassigned_buffers_is_as_simulated(how):
    case = Case(lambda: linears(Assigned, Average, Assigned), rows_of(), mse, ("1", "3", "5"))
    for one in (SCHEDULES[how], recompute(SCHEDULES[how])):
        require_as_simulated(*build(case, one, 2 * one.microbatches, capture="trace"))


RECOMPUTED = ["skips", "unet", "normalised", "in_place", "frozen_below", "gpt_dropout"]


@sampled(1)
@pytest.mark.parametrize(("name", "how"), by_day(product(RECOMPUTED, SCHEDULES), 5))
def test_memory_of_recomputed_stages_is_as_simulated(name, how):
    how = SCHEDULES[how]
    for stages in (range(how.stages), [1, 3]):
        require_as_simulated(*build_case(name, recompute(how, tuple(stages))))


def test_memory_of_a_value_that_a_rank_keeps_for_a_later_stage_is_as_simulated():
    two = Description((Leaf("plain"), Leaf("plain")))
    how = interleaved_1f1b(ranks=2, microbatches=3, chunks=2)
    for one in (how, recompute(how)):
        cuts = ("body.parts.0.b", "body.parts.1", "body.parts.1.b")
        require_as_simulated(*build_unless_refused(two, case_of(two), one, 6, cuts, capture="trace"))


@settings(max_examples=few(8))
@given(descriptions(), st.data())
def test_memory_of_any_model_is_as_simulated_wherever_it_is_cut(description, data):
    names = places(description)
    cuts = tuple(name for name in names if name in data.draw(st.sets(st.sampled_from(names), max_size=3)))
    how = data.draw(schedules_of(len(cuts) + 1, 3))
    built = build_unless_refused(description, case_of(description), how, 6, cuts, capture="trace")
    assume(built is not None)
    require_as_simulated(*built)


# ------------------------------------------------------------------------------------------------------ receive buffers


def receive_buffers(actions):
    """Per compute action of a lowered program, the messages that are received before it and used neither by it nor
    before."""
    waiting, found = {}, []
    for action in actions:
        kind, s, i, peer, part = action
        if KINDS[kind].does == "RECV":
            waiting[message_of(action)] = None
        elif peer is None:
            crosses = KINDS[kind].crosses or kind
            for message in [m for m in waiting if (KINDS[m.kind].carries, *m[2:]) == (crosses, i, s, part)]:
                del waiting[message]
            found.append((action, set(waiting)))
    return found


def uses(how, graph, rank):
    """Per message that a rank is sent, the number of the compute action that uses it; a fused pair is one."""
    found, at = {}, -1
    fused = False
    for action in how.actions(rank):
        at, fused = at + (not fused), action.kind == "OVERLAP_F"
        for what, peer, i in inputs_of(action, graph):
            if peer != action.stage and how.placement.home(peer, i) != rank:
                found[Action(SENDS[what], peer, i, action.stage, action.slice)] = at
    return found


def sent_messages(how, graph, rank):
    """The messages for a rank, per rank that sends them, in its order."""
    for source in set(range(how.ranks)) - {rank}:
        made = [(KINDS[a.kind].crosses, a) for a in how.actions(source) if KINDS[a.kind].crosses]
        yield [
            Action(SENDS[what], a.stage, a.microbatch, t, a.slice)
            for what, a in made
            for t in (graph.feeds if what == "F" else graph.pulls)[a.stage]
            if how.placement.home(t, a.microbatch) == rank
        ]


def expected_buffers(how, graph, rank):
    """Per compute action what should wait behind it: what the next one uses, and what is sent before that."""
    used = uses(how, graph, rank)
    channels = list(sent_messages(how, graph, rank))
    at, fused = -1, False
    for action in how.actions(rank):
        at, fused = at + (not fused), action.kind == "OVERLAP_F"
        waiting = set()
        for channel in channels:
            last = max((k for k, message in enumerate(channel) if used[message] <= at + 1), default=-1)
            waiting |= {message for message in channel[: last + 1] if used[message] > at}
        yield action, waiting


@pytest.mark.parametrize("name", families.__all__)
def test_receives_are_posted_for_two_actions_and_for_messages_sent_before(name):
    """Few come earlier, where a rank has sent them and cannot go on; none of those that depend on an action before."""
    how = getattr(families, name)(ranks=4, microbatches=8)
    for rank in range(4):
        streams = receive_buffers(lower(how).actions(rank)), expected_buffers(how, chain(how.stages), rank)
        for (action, got), (same, want) in zip(*streams, strict=True):
            assert action == same
            assert len(got - want) <= (3 if name in ("gis", "interleaved_zero_bubble") else 2)


@pytest.mark.parametrize("microbatches", [8, 24])
@pytest.mark.parametrize(
    ("made", "most"),
    [(one_f_one_b, 1), (zb_h1, 1), (gpipe, 1), (interleaved_1f1b, 1), (zb_v, 2), (v_min, 2), (dualpipe_v, 3)],
)
def test_the_number_of_receive_buffers_does_not_depend_on_microbatches(made, most, microbatches):
    how = made(ranks=4, microbatches=microbatches)
    assert most == max(len(waiting) for rank in range(4) for _, waiting in receive_buffers(lower(how).actions(rank)))


@sampled(2)
@covering(name=by_day(["mlp", "gpt", "skips", "unet", "dicts", "later", "several"], 2), how=[*SCHEDULES])
def test_the_executor_posts_no_other_receives(name, how):
    """Handles of receives, whose buffers are made when they are posted, while each action runs."""
    pipe, model, inputs, targets = build_case(name, SCHEDULES[how])
    plan, transport = pipe.training, LocalTransport()
    given = scatter(plan, *pipe.init(model), pipe.batch(TRAINING, inputs, targets), SEED)
    found, runs = [[] for _ in range(pipe.schedule.ranks)], []
    for rank, linked in plan.programs.items():
        names = {t.number: t.message for one in linked.instructions for t in one.receives}

        def watched(handler, rank=rank, names=names):
            def handle(run, action, stage, arrived):
                waiting = {names[number] for number in run.posted if number in names}
                found[rank].append((action, waiting))
                return handler(run, action, stage, arrived)

            return handle

        instructions = [
            one._replace(handler=watched(one.handler)) if one.action.peer is None else one
            for one in linked.instructions
        ]
        runs.append(Execution(rank, linked._replace(instructions=tuple(instructions)), transport, given))
    with random.preserve_generators(plan.devices):
        drive(runs)
    assert found == [receive_buffers(pipe.program.actions(rank)) for rank in range(pipe.schedule.ranks)]
