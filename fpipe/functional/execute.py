# SPDX-License-Identifier: Apache-2.0
"""Apply a program to stages: those of a model, pure functions, or whatever keeps the contract of a stage.

Idea. Both kinds of stages are bound to the arguments of one step (`Bound`): what the executor runs, its inputs, and how
its outcome becomes results. Everything else is the same for both, and for every transport.

Runs in every step of a loop that is built on `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fpipe.errors import InputError, ScheduleError
from fpipe.functional.graph import Stages, connect
from fpipe.functional.node import Node
from fpipe.network.ranks import Ranks
from fpipe.runtime.executor import Execution, Inputs, LinkedProgram, Outcome
from fpipe.runtime.instructions import link
from fpipe.runtime.transport import Transport
from fpipe.tensors import random
from fpipe.tensors.tree import NAMESPACE
from schedules import Program

UNSUPPORTED = {"U": "updates weights", "UNSHARD": "gathers weights", "REDUCE_GRAD": "reduces gradients"}
"""The kinds of actions that need more than stages, and what they do."""


class Executed(NamedTuple):
    """The results of one execution, on the ranks that have them.

    - `loss`: the mean over microbatches, on the rank of the last stage; `None` on others, and for forwards only.
    - `aux`: per microbatch, what the last stage returned beside the loss.
    - `outputs`: per microbatch, the output of the last stage, for a program of forwards only.
    - `buffers`: as they were passed, after all microbatches.
    """

    loss: Any
    aux: tuple[Any, ...]
    outputs: tuple[Any, ...]
    buffers: Any


class Bound(NamedTuple):
    """Stages, bound to the arguments of one step.

    - `inputs`: those of the executor. `link`: links the program of a rank. `context`: to run in.
    - `finish`: returns the results, given the outcome of each rank.
    """

    inputs: Inputs
    link: Callable[[int], LinkedProgram]
    context: Callable[[], AbstractContextManager[Any]]
    finish: Callable[[Mapping[int, Outcome]], tuple[Executed, Any]]


class UserTransport(Transport, Protocol):
    """A transport of your own, for one rank of many: `rank` is its number. Its handles have a method `wait()`."""

    rank: int


Split = Callable[[Any, int], Sequence[Any]]


def execute(
    program: Program,
    stages: Any,
    params: Any,
    buffers: Any,
    inputs: Any,
    targets: Any = None,
    *,
    seed: int | None = None,
    split: Split | None = None,
    transport: UserTransport | Ranks | None = None,
) -> tuple[Executed, Any]:
    """Apply a program to stages; return the results, and the gradients in the structure of the parameters.

    - `program`: a schedule, lowered for the graph of the stages: `schedules.lower(schedule, stages.graph)`.
    - `stages`: what `fpipe.cut` or `fpipe.connect` returned, or a sequence for `fpipe.connect`.
    - `params`, `buffers`: a sequence with one pytree for each stage; for stages of a model, also one dict by name.
    - `inputs`, `targets`: the whole batch. Its tensors are split along their first dimension, all other leaves are the
      same for every microbatch.
    - `seed`: for stages that draw random numbers, a new one for each step.
    - `split(tree, M)`: returns the M microbatches of inputs and of targets, instead.
    - `transport`: to run one rank of many, what `fpipe.processes` returns, or a transport of your own. By default all
      ranks run in this process.

    The loss is the mean of what the last stage returns for each microbatch, or of the first of a pair, whose second is
    `aux`. Gradients are bit for bit those of a loop that adds `(loss / M).backward()`. No argument is modified.

    Raise `InputError`, `ScheduleError` or `GraphError` before anything is sent.

    >>> import torch, fpipe
    >>> from schedules import lower, zb_h1
    >>> def hidden(weight, inputs):
    ...     return torch.tanh(inputs[0] @ weight)
    >>> def error(weight, inputs):
    ...     h, y = inputs
    ...     return ((h @ weight - y) ** 2).mean()
    >>> stages = fpipe.connect([hidden, error])
    >>> program = lower(zb_h1(ranks=2, microbatches=4), stages.graph)
    >>> params, x, y = [torch.eye(3), torch.ones(3, 1)], torch.ones(8, 3), torch.zeros(8, 1)
    >>> out, grads = fpipe.execute(program, stages, params, [(), ()], (x,), y)
    >>> round(out.loss.item(), 3), [list(grad.shape) for grad in grads]
    (5.22, [[3, 3], [3, 1]])
    """
    stages = stages if hasattr(stages, "graph") else connect(stages, targets is not None)
    _require_runnable(program, stages)
    ranks = _ranks_of(program, transport)
    bind = bind_functions if isinstance(stages, Stages) else stages.bind
    bound: Bound = bind(stages, program, ranks, params, buffers, (inputs, targets), seed, split or split_rows)

    def execution(rank: int, channels: Transport) -> Execution:
        return Execution(rank, bound.link(rank), channels, bound.inputs)

    with bound.context():
        if transport is None or isinstance(transport, Ranks):
            (outcomes,) = (transport or Ranks(program.schedule.ranks)).run([execution])
        else:
            outcomes = {transport.rank: _drive(execution(transport.rank, transport))}
    return bound.finish(outcomes)


def _drive(execution: Execution) -> Outcome:
    """Run one rank to its end, waiting for each handle that it yields."""
    run = execution.run()
    while True:
        try:
            handle: Any = next(run)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        handle.wait()


def _ranks_of(program: Program, transport: UserTransport | Ranks | None) -> tuple[int, ...]:
    count = program.schedule.ranks
    if transport is None:
        return tuple(range(count))
    ranks = transport.ranks if isinstance(transport, Ranks) else (transport.rank,)
    if not all(0 <= rank < count for rank in ranks):
        raise InputError(
            f"transport: got rank {max(ranks)}, expected one of {count}, the ranks of {program.schedule!r}. Pass a "
            "program for as many ranks as there are."
        )
    return ranks


def _require_runnable(program: Program, stages: Any) -> None:
    if program.graph != stages.graph:
        raise InputError(
            f"program: got one lowered for {program.graph}, expected one for {stages.graph}, that of the stages. "
            "Pass schedules.lower(schedule, stages.graph)."
        )
    schedule = program.schedule
    for rank in range(schedule.ranks):
        for position, action in enumerate(schedule.actions(rank)):
            if action.kind in UNSUPPORTED:
                raise ScheduleError(
                    f"rank {rank}, position {position}: got {action}, which {UNSUPPORTED[action.kind]}, expected "
                    "compute actions of stages only. Pass the schedule to fpipe.pipeline."
                )


def split_rows(tree: Any, microbatches: int) -> Sequence[Any]:
    """Return the microbatches of a tree: tensors split along their first dimension, all other leaves the same.

    >>> [one["x"].tolist() for one in split_rows({"x": torch.arange(3), "scale": 2}, 2)]
    [[0, 1], [2]]
    """
    columns, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    for path, leaf in zip(optree.tree_paths(tree, none_is_leaf=True, namespace=NAMESPACE), columns, strict=True):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) < microbatches):
            raise InputError(
                f"batch, leaf {'.'.join(map(str, path))}: got shape {list(leaf.shape)}, expected at least "
                f"{microbatches} rows, one for each microbatch. Pass a larger batch, or split=."
            )
    parts = [torch.tensor_split(c, microbatches) if isinstance(c, Tensor) else [c] * microbatches for c in columns]
    return [optree.tree_unflatten(structure, [part[i] for part in parts]) for i in range(microbatches)]


# ----------------------------------------------------------------------------------------------------- pure functions


def bind_functions(
    stages: Stages,
    program: Program,
    ranks: Sequence[int],
    params: Any,
    buffers: Any,
    batch: tuple[Any, Any],
    seed: int | None,
    split: Split,
) -> Bound:
    """Return connected stages bound to the arguments of one step."""
    schedule, count = program.schedule, program.schedule.microbatches
    for what, given in (("params", params), ("buffers", buffers)):
        if not isinstance(given, Sequence) or len(given) != len(stages):
            got = f"{len(given)} trees" if isinstance(given, Sequence) else type(given).__name__
            raise InputError(
                f"{what}: got {got}, expected a sequence with one tree for each of {len(stages)} stages. Pass () for a "
                "stage that has none."
            )
    halves = [split(tree, count) for tree in batch]
    rows = [{"inputs": a, "targets": b} for a, b in zip(*halves, strict=True)]
    nodes = [Node(stages, s, {}) for s in range(len(stages))]
    last, trains = len(stages) - 1, schedule.backward
    shared = {s: buffers[s] for s in range(len(stages))}

    def linked(rank: int) -> LinkedProgram:
        own = {s: nodes[s] for s in schedule.placement.stages_on(rank)}
        return link(program.actions(rank), own, schedule.placement)

    def finish(outcomes: Mapping[int, Outcome]) -> tuple[Executed, Any]:
        new, grads = list(buffers), [None] * len(stages)
        for outcome in outcomes.values():
            for s, state in outcome.buffers[0].items():
                new[s] = state
            for s, total in outcome.grads.items():
                if total:
                    grads[s] = total[0]
        made = {i: one[0] for outcome in outcomes.values() for i, one in outcome.results.items()}
        results = [made[i] for i in sorted(made)]
        if not trains:
            return Executed(None, (), tuple(results), new), grads
        pairs = [one if isinstance(one, tuple) else (one, None) for one in results]
        loss = mean_of([one for one, _ in pairs], count) if pairs else None
        return Executed(loss, tuple([aux for _, aux in pairs]), (), new), grads

    keys = [random.Unseeded() if seed is None else random.key(seed, i) for i in range(count)]
    inputs = Inputs(
        params=[dict(enumerate(params))] * count,
        buffers=[shared] * count,
        batch=lambda s, i: (rows[i],),
        keys=keys,
        starts={last: (1 / count,)} if trains else {},
    )
    return Bound(inputs, linked, nullcontext, finish)


def mean_of(losses: Sequence[Any], count: int) -> Any:
    """Return the sum of `loss / count`, in order."""
    total = losses[0] / count
    for one in losses[1:]:
        total = total + one / count
    return total
