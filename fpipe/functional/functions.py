# SPDX-License-Identifier: Apache-2.0
"""Connected stages that are pure functions, bound to the arguments of one step.

If values travel between processes, all ranks must know what crosses each edge before anything is sent. So every rank
runs all stages once on fake tensors, for each shape of a microbatch.

Runs in every step of `execute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.functional.bound import BoundStages, Executed, Split, mean_of
from fpipe.functional.derived import TreeShape
from fpipe.functional.graph import Stages
from fpipe.functional.node import Layouts, StageNode
from fpipe.runtime.executor import Inputs, LinkedProgram, Outcome
from fpipe.runtime.instructions import link
from fpipe.tensors import random
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.tree import NAMESPACE
from schedules import Program, Schedule


def bind_functions(
    stages: Stages,
    program: Program,
    ranks: Sequence[int],
    params: Any,
    buffers: Any,
    batch: tuple[Any, Any],
    seed: int | None,
    split: Split,
    packed: bool,
    slicing: Split,
) -> BoundStages:
    """Return connected stages bound to the arguments of one step; `packed`: whether tensors travel, rather than trees.

    Raise `InputError` for arguments that do not match the stages.
    """
    schedule = program.schedule
    slices, count = schedule.slices, schedule.microbatches * schedule.slices
    _require_arguments(stages, schedule, params, buffers, packed)
    halves = [[part for one in split(tree, schedule.microbatches) for part in slicing(one, slices)] for tree in batch]
    rows = [{"inputs": a, "targets": b} for a, b in zip(*halves, strict=True)]
    shapes = tuple(
        [TreeShape.of((rows[i : i + slices], params, buffers))[1] if packed else None for i in range(0, count, slices)]
    )
    if (program, shapes) not in stages.plans:
        stages.plans[program, shapes] = _Plan.of(stages, program, params, buffers, rows, shapes)
    plan = stages.plans[program, shapes]

    def finish(outcomes: Mapping[int, Outcome]) -> tuple[Executed, Any]:
        new, made = list(buffers), dict[int, Any]()
        grads = [optree.tree_map(lambda _: None, one, none_is_leaf=True, namespace=NAMESPACE) for one in params]
        for outcome in outcomes.values():
            for s, state in outcome.buffers[0].items():
                new[s] = state
            for s, total in outcome.grads.items():
                grads[s] = total[0] if total else grads[s]
            made.update({i: one[0] for i, one in outcome.results.items()})
        results = [made[i] for i in sorted(made)]
        if not schedule.backward:
            return Executed(None, (), tuple(results), new), grads
        pairs = [one if isinstance(one, tuple) else (one, None) for one in results]
        loss = mean_of([one for one, _ in pairs], count) if pairs else None
        return Executed(loss, tuple([aux for _, aux in pairs]), (), new), grads

    inputs = Inputs(
        params=[dict(enumerate(params))] * count,
        buffers=[dict(enumerate(buffers))] * count,
        batch=lambda s, i: (rows[i],),
        keys=[random.Unseeded() if seed is None else random.key(seed, i) for i in range(count)],
        starts={(len(stages) - 1, i): (1 / count,) for i in range(count if schedule.backward else 0)},
    )

    return BoundStages(inputs, plan.link, nullcontext, finish, lambda: plan.lines)


def _require_arguments(stages: Stages, schedule: Schedule, params: Any, buffers: Any, packed: bool) -> None:
    """Raise `InputError` unless these stages can be run with these arguments under a schedule."""
    for what, given in (("params", params), ("buffers", buffers)):
        if not isinstance(given, Sequence) or len(given) != len(stages):
            got = f"{len(given)} trees" if isinstance(given, Sequence) else type(given).__name__
            raise InputError(
                f"{what}: got {got}, expected a sequence with one tree for each of {len(stages)} stages. Pass () for a "
                "stage without any."
            )
    for s in range(len(stages)):
        if schedule.backward and not stages[s].is_differentiable:
            raise InputError(
                f"stage {stages.names[s]!r}: got no backward, expected one for {schedule!r}. Pass backward=, or a "
                "schedule of forwards only."
            )
        if packed and len(schedule.placement.replicas(s)) > 1:
            raise InputError(
                f"schedule: got {schedule!r}, with stage {s} on two ranks, expected one rank for each stage that is a "
                "function. Run all ranks in one process, or build a pipeline of a module."
            )


class _Plan(NamedTuple):
    """All that depends on the program and on shapes only: the nodes of each unit, and linked programs.

    A unit is a microbatch, or a slice of one. `lines`: what crosses, as text.
    """

    program: Program
    nodes: Sequence[Mapping[int, StageNode]]
    lines: Sequence[str]
    linked: dict[int, LinkedProgram]

    @classmethod
    def of(
        cls,
        stages: Stages,
        program: Program,
        params: Any,
        buffers: Any,
        rows: Sequence[Mapping[str, Any]],
        shapes: Sequence[TreeShape | None],
    ) -> _Plan:
        """Return the plan for units like `rows`, in microbatches of these shapes, which run on fake tensors."""
        nodes, lines = dict[TreeShape | None, list[Mapping[int, StageNode]]](), str(stages).splitlines()
        slices = program.schedule.slices
        for i, shape in enumerate(shapes):
            if shape not in nodes:
                units = rows[i * slices : (i + 1) * slices]
                layouts = [{}] * slices if shape is None else find_layouts(stages, params, buffers, units)
                nodes[shape] = [
                    {s: StageNode(stages, s, layouts[k], k, slices) for s in range(len(stages))} for k in range(slices)
                ]
                lines += [f"{edge}: {', '.join(map(str, one.specs))}" for part in layouts for edge, one in part.items()]
        return cls(program, [one for shape in shapes for one in nodes[shape]], lines, {})

    def link(self, rank: int) -> LinkedProgram:
        """Return the program of a rank, linked to its nodes."""
        if rank not in self.linked:
            schedule, (usual, *_) = self.program.schedule, self.nodes
            placement = schedule.placement
            own = [{s: nodes[s] for s in placement.stages_on(rank)} for nodes in self.nodes]
            uneven = {i: own[i] for i, nodes in enumerate(self.nodes) if nodes is not usual}
            self.linked[rank] = link(self.program.actions(rank), own[0], placement, uneven, slices=schedule.slices)
        return self.linked[rank]


def find_layouts(stages: Stages, params: Any, buffers: Any, units: Sequence[Mapping[str, Any]]) -> list[Layouts]:
    """Return the shape of what each edge carries for each slice of a microbatch; all stages run on fake tensors."""
    everything: Any = list(units), params, buffers
    tensors: list[Tensor] = [
        one for one in optree.tree_leaves(everything, namespace=NAMESPACE) if isinstance(one, Tensor)
    ]
    home = next((one.device for one in tensors if one.device.type != "meta"), torch.device("cpu"))
    found, carried, mode = list[Layouts](), dict[tuple[int, int], Any](), fake_mode()
    rows, weights, state = optree.tree_map(
        lambda leaf: fake(mode, leaf, home) if isinstance(leaf, Tensor) else leaf, everything, namespace=NAMESPACE
    )
    with mode:
        for k, batch in enumerate(rows):
            layouts = dict[tuple[int, int], TreeShape]()
            for s in range(len(stages)):
                node = StageNode(stages, s, {}, k, len(units))
                given = batch, *[carried[source, s] for source in node.sources]
                outputs, _ = node.evaluate(weights[s], state[s], given, 0)
                for t, trees in zip(node.targets, outputs[len(node.results) :], strict=True):
                    carried[s, t] = trees
                    layouts |= {} if s == t else {(s, t): TreeShape.of(trees)[1]}
            found.append(layouts)
    return found
