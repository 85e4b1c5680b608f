# SPDX-License-Identifier: Apache-2.0
"""Measure to the byte what the stages of each rank hold after every action, and compare it with the simulation."""

import gc
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.pipelines.inputs import scatter
from fpipe.record.variant import TRAINING
from fpipe.runtime.executor import Execution
from fpipe.runtime.instructions import link
from fpipe.runtime.local import LocalTransport, drive
from fpipe.tensors import random
from fpipe.tensors.spec import Spec
from schedules import KINDS, Costs, memory_over_time, simulate, spans

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


class Alive(TorchDispatchMode):
    """The most bytes at once of all tensors that operations make within."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors(out)):
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def tensors(tree):
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Watched:
    """A stage on a rank, whose functions hold what they keep, and give copies away.

    - `shared`: per microbatch, the outputs that its rank keeps for a later stage, from the forward to the backward.
    - `recomputed`: how many of these microbatches have another forward before their backward.
    """

    def __init__(self, stage, rank, memory):
        self.stage, self.rank, self.memory = stage, rank, memory
        self.shared, self.recomputed = [], 0

    def __getattr__(self, name):
        return getattr(self.stage, name)

    @property
    def leaves_taken(self):
        """How many leaves of the batch the stage's function takes, before what its prologue computes."""
        prologue = self.stage.prologue
        return prologue.own if prologue.specs else len(self.stage.batch)

    def computed(self, name, received, *given):
        """What a function of the stage returns."""
        memory = self.memory
        for tensor in received:
            if memory.owner(tensor) is NOBODY:
                memory.own(tensor, self.rank)
        function = getattr(self.stage, name)  # with the constants that it keeps for all microbatches
        memory.rank = self.rank
        out = function(*given)
        memory.rank = NOBODY
        return out

    def share(self, outputs):
        kept = copies([outputs[k] for k in self.stage.keeps])
        for tensor in kept:
            self.memory.own(tensor, self.rank)
        self.shared.append(kept)

    def forward(self, params, buffers, inputs, key):
        received = (*buffers, *inputs[self.leaves_taken :])
        outputs, new, residuals = self.computed("forward", received, params, buffers, inputs, key)
        if self.recomputed:
            self.recomputed -= 1
        else:
            self.share(outputs)
        return copies(outputs), changed(buffers, new), residuals

    def evaluate(self, params, buffers, inputs, key):
        received = (*buffers, *inputs[self.leaves_taken :])
        outputs, new = self.computed("evaluate", received, params, buffers, inputs, key)
        self.share(outputs)
        self.recomputed += 1
        return copies(outputs), changed(buffers, new)

    def backward(self, residuals, cotangents, onto):
        outgoing, grads = self.computed("backward", cotangents, residuals, cotangents, onto)
        self.shared.pop()
        return copies(outgoing), grads if onto else copies(grads)

    def backward_input(self, residuals, cotangents):
        outgoing, deferred = self.computed("backward_input", cotangents, residuals, cotangents)
        self.shared.pop()
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
    for stage in pipe.stages:
        for name in ("evaluate", "backward", "backward_input", "backward_weight"):
            assert getattr(stage.functions, name)  # made at its first use, with constants that are not a microbatch's
    for rank in range(pipe.schedule.ranks):
        stages = {s: Watched(pipe.stages[s], rank, memory) for s in plan.placement.stages_on(rank)}
        linked = link(plan.program.actions(rank), stages, plan.placement)
        instructions, after = probed(linked.instructions, lambda rank=rank: memory.held(rank))
        found.append(after)
        runs.append(Execution(rank, linked._replace(instructions=instructions), transport, given))
        hand_over_buffers(runs[-1], pipe.stages, memory)
    with random.preserve_generators(plan.devices), memory, reference_counts_alone():
        drive(runs)
    return found


def hand_over_buffers(run, stages, memory):
    """Give a run copies of the buffers that it changes, as every later version is: nobody else keeps them."""
    run.inputs = run.inputs._replace(buffers=[])
    with memory:
        shared = run.buffers[0]
        for s, buffers in shared.items():
            stage = stages[s]
            shared[s] = tuple(
                copies((b,))[0] if k in stage.wiring.modified_buffers else b for k, b in enumerate(buffers)
            )


def probed(instructions, measure):
    """These instructions, and after each that computes another, which measures; and the list of what is found."""
    found, longer = [], []

    def probe(run, action, stage, arrived):
        found.append((action, measure()))
        return ()

    for one in instructions:
        longer.append(one)
        if KINDS[one.action.kind].after:
            longer.append(one._replace(handler=probe, receives=(), waits=(), awaited=(), outputs=(), sends=()))
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
