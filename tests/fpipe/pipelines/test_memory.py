# SPDX-License-Identifier: Apache-2.0
"""Memory to the byte: what stages really hold after every action is what the simulation says, fed with their sizes.

Every allocation is watched by a weak reference to its memory, so nobody can hold anything unseen: not an action's
leftover in a dictionary, nor a closure, a hook, or a tensor that was not detached. What leaves a stage function is
copied, as if it went to another rank; the copy is nobody's until a stage is given it.
"""

import gc
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, product

import optree
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.ir.variant import TRAINING
from fpipe.pipelines.step import scatter
from fpipe.runtime.executor import Execution
from fpipe.runtime.instructions import link
from fpipe.runtime.transport.local import LocalTransport, drive
from fpipe.tensors import random
from fpipe.tensors.spec import Spec
from schedules import (
    KINDS,
    Costs,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    lower,
    memory_over_time,
    one_f_one_b,
    recompute,
    simulate,
    spans,
    v_min,
    zb_h1,
    zb_v,
)
from schedules.replay.engine import needs
from schedules.testing import orders
from tests.common.cases import Case, mse, rows_of
from tests.common.layers import Assigned, Average, linears
from tests.common.random_models import case_of, descriptions, places
from tests.common.running import build
from tests.common.sizes import by_day, few
from tests.common.zoo import ZOO
from tests.fpipe.verification.test_random_models import built_or_refused, schedules

SEED = 5
NOBODY, STEP, UNKNOWN = "nobody", "step", "unknown"


class Memory(TorchDispatchMode):
    """All that operations make, and the rank whose stage holds it, if one does.

    - `rank`: the rank whose stage function is running.
    - `owners`: per storage a weak reference, its size, and the rank; `STEP` for what was there before.
    """

    def __init__(self):
        super().__init__()
        self.rank, self.owners = NOBODY, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors((args, kwargs)):
            if func is not torch.ops.aten.lift_fresh.default and self.owner(tensor) is UNKNOWN:
                self.own(tensor, STEP)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            if self.owner(tensor) is UNKNOWN:
                self.own(tensor, self.rank)
        return out

    def owner(self, tensor):
        return self.owners.get(tensor.untyped_storage()._cdata, (None, 0, UNKNOWN))[2]

    def own(self, tensor, rank):
        storage = tensor.untyped_storage()
        self.owners[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), rank

    def held(self, rank):
        """The bytes that stages of a rank hold; what is gone is forgotten."""
        self.owners = {number: entry for number, entry in self.owners.items() if not entry[0].expired()}
        return sum(size for _, size, owner in self.owners.values() if owner == rank)


def tensors(tree):
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Watched:
    """A stage on a rank, whose functions hold what they keep, and give copies away."""

    def __init__(self, stage, rank, memory):
        self.stage, self.rank, self.memory = stage, rank, memory

    def __getattr__(self, name):
        return getattr(self.stage, name)

    def computed(self, name, received, *given):
        """What a function of the stage returns."""
        memory = self.memory
        for tensor in received:
            if memory.owner(tensor) is NOBODY:
                memory.own(tensor, self.rank)
        memory.rank = self.rank
        out = getattr(self.stage, name)(*given)
        memory.rank = NOBODY
        return out

    def forward(self, params, buffers, inputs, key):
        received = (*buffers, *inputs[len(self.stage.batch) :])
        outputs, new, residuals = self.computed("forward", received, params, buffers, inputs, key)
        return copies(outputs), changed(buffers, new), residuals

    def evaluate(self, params, buffers, inputs, key):
        received = (*buffers, *inputs[len(self.stage.batch) :])
        outputs, new = self.computed("evaluate", received, params, buffers, inputs, key)
        return copies(outputs), changed(buffers, new)

    def backward(self, residuals, cotangents, onto):
        outgoing, grads = self.computed("backward", cotangents, residuals, cotangents, onto)
        return copies(outgoing), grads if onto else copies(grads)

    def backward_input(self, residuals, cotangents):
        outgoing, deferred = self.computed("backward_input", cotangents, residuals, cotangents)
        return copies(outgoing), deferred

    def backward_weight(self, deferred, onto):
        grads = self.computed("backward_weight", (), deferred, onto)
        return grads if onto else copies(grads)


def copies(tensors):
    """What another rank would receive of these."""
    specs = map(Spec.of, tensors)
    return tuple(spec.unpack(spec.pack(tensor).clone()) for spec, tensor in zip(specs, tensors, strict=True))


def changed(before, after):
    """Buffers after a forward: those that it does not modify stay the same."""
    return tuple(a if a is b else copies((a,))[0] for b, a in zip(before, after, strict=True))


def levels(pipe, model, inputs, targets, seed=SEED):
    """Per rank, every action and the bytes that its stages hold after it."""
    plan, memory, transport = pipe.training, Memory(), LocalTransport()
    given = scatter(plan, *pipe.init(model), pipe.batch(TRAINING, inputs, targets), seed)
    found, runs = [], []
    for rank in range(pipe.schedule.ranks):
        stages = {s: Watched(pipe.stages[s], rank, memory) for s in plan.placement.stages_on(rank)}
        linked = link(plan.program.actions(rank), stages, plan.placement)
        instructions, after = probed(linked.instructions, lambda rank=rank: memory.held(rank))
        found.append(after)
        runs.append(Execution(linked._replace(instructions=instructions), transport, given))
        hand_over_buffers(runs[-1], pipe.stages, memory)
    with random.preserve_generators(plan.devices), memory, reference_counts_alone():
        drive(transport, runs)
    return found


def hand_over_buffers(run, stages, memory):
    """Give a run copies of the buffers that it changes, as every later version is: nobody else keeps them."""
    run.inputs = run.inputs._replace(buffers={})
    with memory:
        for s, buffers in run.buffers.items():
            stage = stages[s]
            run.buffers[s] = tuple(copies((b,))[0] if k in stage.wiring.changed else b for k, b in enumerate(buffers))


def probed(instructions, measure):
    """These instructions, and after each that computes another, which measures; and the list of what is found."""
    found, longer = [], []

    def probe(run, action, stage, arrived):
        found.append((action, measure()))
        return ()

    for one in instructions:
        longer.append(one)
        if KINDS[one.action.kind].after:
            longer.append(one._replace(handler=probe, receives=(), waits=(), awaited=(), made=(), sends=()))
    return tuple(longer), found


@contextmanager
def reference_counts_alone():
    """Inside, what is held in a cycle is never let go of."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def simulated(how, sizes):
    """Per rank, every action and the bytes that are held after it."""
    for rank in range(how.ranks):
        actions = [action for action in how.actions(rank) if KINDS[action.kind].after]
        yield list(zip(actions, accumulate(sizes.growth(a.kind, a.stage) for a in actions), strict=True))


def over_time(how, graph, found):
    """What was measured, as `memory_over_time` would have it."""
    measured, before = [dict(after) for after in found], [0] * how.ranks
    levels = [{} for _ in found]
    for rank, action, start, end in spans(how, Costs(), graph):
        held = measured[rank].get(action, before[rank])
        if held != before[rank]:
            levels[rank][start if held > before[rank] else end] = held
        before[rank] = held
    return tuple(tuple(one.items()) for one in levels)


def require_as_simulated(pipe, *given):
    """What was measured is what was simulated: after every action, over time, and at its most."""
    how, graph, sizes = pipe.schedule, pipe.program.graph, pipe.sizes
    found = levels(pipe, *given)
    assert found == list(simulated(how, sizes))
    assert over_time(how, graph, found) == memory_over_time(spans(how, Costs(), graph), how, sizes)
    peaks = tuple(max(held for _, held in after) for after in found)
    assert peaks == simulate(how, Costs(), graph, replace(sizes, weight=0)).peak_memory


def built(name, how, rows=2, **options):
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


@pytest.mark.parametrize(("name", "way"), by_day(product(ZOO, HOWS), 5), ids=str)
def test_what_is_held_after_every_action(name, way):
    """The fake LSTM does not know of the workspace that oneDNN's real one keeps, so that is off."""
    how, backward = way
    with without_onednn(name == "recurrent"):
        require_as_simulated(*built(name, SCHEDULES[how], backward=backward))


@pytest.mark.parametrize("how", SCHEDULES)
def test_what_buffers_that_are_assigned_hold(how):
    case = Case(lambda: linears(Assigned, Average, Assigned), rows_of(), mse, ("1", "3", "5"))
    for one in (SCHEDULES[how], recompute(SCHEDULES[how])):
        require_as_simulated(*build(case, one, 2 * one.microbatches, capture="trace"))


RECOMPUTED = ["skips", "unet", "normalised", "in_place", "frozen_below", "gpt_dropout"]


@pytest.mark.parametrize(("name", "how"), by_day(product(RECOMPUTED, SCHEDULES), 3))
def test_what_is_recomputed(name, how):
    how = SCHEDULES[how]
    for stages in (range(how.stages), [1, 3]):
        require_as_simulated(*built(name, recompute(how, tuple(stages))))


@settings(max_examples=few(12))
@given(descriptions(), st.data())
def test_any_model_cut_anywhere(description, data):
    names = places(description)
    cuts = tuple(name for name in names if name in data.draw(st.sets(st.sampled_from(names), max_size=3)))
    how = data.draw(schedules(len(cuts) + 1, 3))
    built = built_or_refused(description, case_of(description), how, 6, cuts, "trace")
    assume(built is not None)
    require_as_simulated(*built)


# ------------------------------------------------------------------------------------------------------ receive buffers


def buffered(actions):
    """Per compute action of a lowered program, the messages that are received before it and used neither by it nor
    before."""
    waiting, found = {}, []
    for action in actions:
        kind, s, i, peer, part = action
        if kind.startswith("RECV"):
            waiting[kind[5:], peer, i, s, part] = None
        elif peer is None:
            crosses = KINDS[kind].crosses or kind
            for message in [m for m in waiting if (m[0], m[2], m[3], m[4]) == (crosses, i, s, part)]:
                del waiting[message]
            found.append((action, set(waiting)))
    return found


def uses(how, graph, rank):
    """Per message that a rank is sent, the number of the compute action that uses it; a fused pair is one."""
    found, at = {}, -1
    fused = False
    for action in how.actions(rank):
        at, fused = at + (not fused), action.kind == "OVERLAP_F"
        for what, peer, i in needs(action, graph):
            if peer != action.stage and how.placement.home(peer, i) != rank:
                found[what, peer, i, action.stage, action.slice] = at
    return found


def sent(how, graph, rank):
    """The messages for a rank, per rank that sends them, in its order."""
    for source in set(range(how.ranks)) - {rank}:
        made = [(KINDS[a.kind].crosses, a) for a in how.actions(source) if KINDS[a.kind].crosses]
        yield [
            (what, a.stage, a.microbatch, t, a.slice)
            for what, a in made
            for t in (graph.feeds if what == "F" else graph.pulls)[a.stage]
            if how.placement.home(t, a.microbatch) == rank
        ]


def wanted(how, graph, rank):
    """Per compute action what should wait behind it: what the next one uses, and what is sent before that."""
    used = uses(how, graph, rank)
    channels = list(sent(how, graph, rank))
    at, fused = -1, False
    for action in how.actions(rank):
        at, fused = at + (not fused), action.kind == "OVERLAP_F"
        waiting = set()
        for channel in channels:
            last = max((k for k, message in enumerate(channel) if used[message] <= at + 1), default=-1)
            waiting |= {message for message in channel[: last + 1] if used[message] > at}
        yield action, waiting


def without_gradients(case):
    how, graph = case
    return not graph.gradients and not how.placement.mirrors


@given(orders().filter(without_gradients))
def test_receives_are_posted_for_two_actions_and_what_is_sent_before(case):
    """In a fused pair the first action leaves what the second takes."""
    how, graph = case
    for rank in range(how.ranks):
        pairs = zip(buffered(lower(how, graph).actions(rank)), wanted(how, graph, rank), strict=True)
        for (action, got), (same, want) in pairs:
            assert action == same
            assert got == want if action.kind != "OVERLAP_F" else got >= want


@pytest.mark.parametrize("microbatches", [8, 24])
@pytest.mark.parametrize(
    ("made", "most"),
    [(one_f_one_b, 1), (zb_h1, 1), (gpipe, 1), (interleaved_1f1b, 1), (zb_v, 2), (v_min, 2), (dualpipe_v, 3)],
)
def test_how_many_buffers_wait_does_not_depend_on_microbatches(made, most, microbatches):
    how = made(ranks=4, microbatches=microbatches)
    assert most == max(len(waiting) for rank in range(4) for _, waiting in buffered(lower(how).actions(rank)))


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "skips", "unet", "dicts", "later", "several"])
def test_the_executor_posts_no_others(name, how):
    """Handles of receives, whose buffers are made when they are posted, while each action runs."""
    pipe, model, inputs, targets = built(name, SCHEDULES[how])
    plan, transport = pipe.training, LocalTransport()
    given = scatter(plan, *pipe.init(model), pipe.batch(TRAINING, inputs, targets), SEED)
    found, runs = [[] for _ in range(pipe.schedule.ranks)], []
    for rank, linked in plan.linked.items():
        names = {t.number: t.message for one in linked.instructions for t in one.receives}

        def watched(handler, rank=rank, names=names):
            def handle(run, action, stage, arrived):
                waiting = {names[number] for number in run.posted if number in names}
                found[rank].append((action, {(what, s, i, t, None) for what, s, i, t in waiting}))
                return handler(run, action, stage, arrived)

            return handle

        instructions = [
            one._replace(handler=watched(one.handler)) if one.action.peer is None else one
            for one in linked.instructions
        ]
        runs.append(Execution(linked._replace(instructions=tuple(instructions)), transport, given))
    with random.preserve_generators(plan.devices):
        drive(transport, runs)
    assert found == [buffered(pipe.program.actions(rank)) for rank in range(pipe.schedule.ranks)]
