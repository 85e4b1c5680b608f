# SPDX-License-Identifier: Apache-2.0
"""Trace a loss or gradient that is infinite or nan to the action that made it.

Problem. One bad value spreads to every stage and to every gradient, and a check of each action in every step costs time
in all steps that are fine.

Idea. A step is a function of its arguments: run again, it computes the same bits. So steps check nothing. Once
`fpipe.all_finite` says no, the step is replayed with the same arguments, and every action looks at what it made. Of all
actions on all ranks that made something not finite, the first in the order of the plain loop on one device is named,
whatever the schedule: what came later may have it from there.

Runs when `find_nonfinite` is called; the function that it returns runs one step per call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.pipelines.argument_checks import require_backward
from fpipe.pipelines.handshake import CommonArguments, agree_on_arguments, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import begin_step, hold_for_backward, training_variant
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution, Inputs, Instruction, LinkedProgram
from fpipe.runtime.handlers import HANDLERS
from fpipe.runtime.transport import Payload, Transport
from fpipe.tensors import random
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import local_part
from fpipe.tensors.tree import flatten, stored_values
from schedules import Action

FORWARDS, BACKWARDS = ("F", "C", "OVERLAP_F", "R"), ("B", "I", "W")
Order: TypeAlias = tuple[int, ...]
"""The place of an action in the plain loop on one device: earlier ones are less."""


class NonFinite(NamedTuple):
    """The first thing in a step that is not finite.

    - `rank`, `action`: where it was made. The action is `None` for a parameter or a tensor of the batch, which come
      first.
    - `leaf`: the loss, a value that leaves a stage, by the module that made it, or a gradient.
    - `got`: `"nan"` or `"inf"`.
    """

    rank: int
    action: str | None
    leaf: str
    got: str

    def __str__(self) -> str:
        where = f"rank {self.rank}" + ("" if self.action is None else f", {self.action}")
        return f"{where}: got {self.got} in {self.leaf}"


def find_nonfinite(pipe: Pipeline) -> Callable[..., NonFinite | None]:
    """Return the function that replays a step, and returns the first infinite or nan value in it.

    If `fpipe.all_finite` returned false, or the loss is nan, call it with the arguments of that step: `params` and
    `buffers` as they were before it, the batch, `seed`, `scale` and `total`. It returns the same `NonFinite` on every
    rank, or `None` if loss and gradients of this step, without those of earlier ones, are finite. Under
    torch.distributed every rank must call this, and then the function. It costs one step, and modifies nothing.

    Values without a gradient, such as masks, may be infinite.

    Raise `InputError` for arguments that don't fit the pipeline, before anything is sent.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> x = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=lambda y: y.log().mean(), cuts=["1"],
    ...                       schedule=gpipe(ranks=2, microbatches=2))
    >>> _ = model[1].weight.data.fill_(1.0), model[0].weight.data.fill_(1.0), model[0].bias.data.zero_()
    >>> print(fpipe.find_nonfinite(pipe)(*pipe.init(model), (x,)))
    rank 1, 1F1: got nan in the loss
    """
    with call_together(find_nonfinite, locals()):
        require_backward(pipe.schedule)
        agree_on_arguments(pipe)
    variant = training_variant(False, None)

    @accept_trees("params", "buffers")
    def find(
        params: State,
        buffers: State,
        inputs: Any,
        targets: Any = None,
        *,
        seed: int | None = None,
        scale: float | None = None,
        total: float | None = None,
    ) -> NonFinite | None:
        with suspend_autocast(variant) as cast_, pipe.ranks.enter_call("find_nonfinite"):
            call = CommonArguments(seed, scale, total)
            held = hold_for_backward(pipe, variant, params, buffers)
            plan, given = begin_step(pipe, cast_, held, (inputs, targets), call)
            seen = _replay(pipe, plan, given)
            seen.look_at_arguments(pipe.ranks.ranks[0], params, inputs, targets)
            return _agree_on_first(pipe.ranks.exchange_text(json.dumps(seen), "what is not finite"))

    return find


class _Findings(NamedTuple):
    """All that is not finite on the ranks of this process, by its place in the plain loop; and the end results."""

    found: list[tuple[Order, NonFinite]]
    ends: list[str]

    def look_at_arguments(self, rank: int, params: State, inputs: Any, targets: Any) -> None:
        """Add the parameters, and the tensors of the batch, that are not finite; masks may be negative infinity."""
        named = [(f"params[{name!r}]", local_part(p)) for name, p in params.items()]
        for what, tree in (("inputs", inputs), ("targets", targets)):
            tensors, structure = flatten(tree)
            tensors = [x.clamp(min=0) if x.is_floating_point() else x for x in tensors]
            named += [(what + path, x) for path, x in zip(structure.names, tensors, strict=True)]
        for leaf, tensor in named:
            got = _judge(tensor)
            if got:
                self.found.append(((-1,), NonFinite(rank, None, leaf, got)))


def _agree_on_first(texts: list[str]) -> NonFinite | None:
    """Return the first of what all processes have found, if any end result is not finite."""
    every = [json.loads(text) for text in texts]
    found = [(tuple(order), NonFinite(*one)) for mine, _ in every for order, one in mine]
    return min(found)[1] if any(ends for _, ends in every) and found else None


def _replay(pipe: Pipeline, plan: StepPlan, given: Mapping[int, Inputs]) -> _Findings:
    """Run the plan's program on this process's ranks, and look at what each action makes."""
    seen = _Findings([], [])

    def execution(copy: int, rank: int, transport: Transport) -> Execution:
        part = plan.parts[copy]
        return Execution(rank, _Checks(part, seen, set()).add_to(part.programs[rank]), transport, given[copy])

    with random.preserve_generators(plan.generators), plan.context():
        copies = pipe.ranks.run([partial(execution, copy) for copy in given])
    for outcomes in copies:
        for outcome in outcomes.values():
            for s, total in outcome.grads.items():
                names = plan.assembly.stages[s].grads
                seen.ends.extend(name for name, grad in zip(names, total, strict=False) if _judge(grad))
            seen.ends.extend("loss" for values in outcome.results.values() if _judge(values[0]))
    return seen


class _Checks(NamedTuple):
    """The checks of what the actions of a rank make; `bad` are the sums of gradients that are bad."""

    plan: StepPlan
    seen: _Findings
    bad: set[tuple[int, str]]

    def add_to(self, program: LinkedProgram) -> LinkedProgram:
        """Return the program with handlers that look at what they make."""
        wrapped = cache(self._wrap)
        instructions = [
            one._replace(handler=wrapped(one.handler)) if _is_checked(one) else one for one in program.instructions
        ]
        return program._replace(instructions=tuple(instructions))

    def _wrap(self, handler: ActionHandler) -> ActionHandler:
        def checked(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
            values = handler(run, action, stage, arrived)
            self._look(run, action, values)
            return values

        return checked

    def _look(self, run: Execution, action: Action, values: Payload) -> None:
        """Note the first thing that an action made and that is not finite, unless its microbatch counts for nothing."""
        if run.unit[1] in run.inputs.skips:
            return
        made = [*self._list_made(action, values), *self._list_sums(action.stage, run.grads)]
        bad = [(leaf, got) for leaf, tensor in made if (got := _judge(tensor))]
        if bad:
            self.seen.found.append((self._order(action), NonFinite(run.rank, str(action), *bad[0])))

    def _list_made(self, action: Action, values: Payload) -> Iterator[tuple[str, Any]]:
        """Yield what an action made, with its name: values with a gradient, the loss, cotangents."""
        assembly = self.plan.assemblies[action.microbatch * self.plan.slices + (action.slice or 0)]
        stage = assembly.stages[action.stage]
        paths = {value: unit.path for unit in assembly.captured.units for value in unit.makes}
        if action.kind in FORWARDS:
            differentiable = {(one.source, value) for one in stage.pulled_by for value in one.values}
            sent = [(one.target, value) for one in stage.gives for value in one.values]
            for (target, value), tensor in zip(sent, values[len(stage.results) :], strict=False):
                if (target, value) in differentiable:
                    yield f"the output of {paths.get(value, 'an earlier stage')!r}", tensor
            if stage.results and assembly.captured.loss is not None and values:
                yield "the loss", values[0]
        if action.kind in BACKWARDS:
            sent = [(one.target, value) for one in stage.pulls for value in one.values]
            for (_, value), tensor in zip(sent, values, strict=False):
                yield f"the gradient with respect to the output of {paths.get(value, '')!r}", tensor

    def _list_sums(self, s: int, grads: Mapping[int, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the sums of gradients of a stage that have just become bad; later ones have it from these."""
        names = self.plan.assembly.stages[s].grads
        for name, grad in zip(names, grads.get(s, ()), strict=False):
            if (s, name) not in self.bad and _judge(grad):
                self.bad.add((s, name))
                yield f"grads[{name!r}]", grad

    def _order(self, action: Action) -> Order:
        i = self.plan.copy * self.plan.microbatches + action.microbatch
        if action.kind in FORWARDS:
            return i, 0, action.stage
        return (i, 1, -action.stage) if action.kind in BACKWARDS else (i, 2, action.stage)


def _is_checked(one: Instruction) -> bool:
    """Return whether an instruction computes values of a microbatch, or gradients."""
    kind = one.action.kind
    return kind in (*FORWARDS, *BACKWARDS, "G") and one.handler is HANDLERS[kind]


def _judge(tensor: object) -> str:
    """Return whether a tensor holds `nan`, or else `inf`; nothing if it is finite, or no tensor of such numbers."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    if tensor.is_meta:
        return ""
    plain = stored_values(tensor)
    if bool(torch.isfinite(plain).all()):
        return ""
    return "nan" if bool(torch.isnan(plain).any()) else "inf"
