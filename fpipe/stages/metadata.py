# SPDX-License-Identifier: Apache-2.0
"""The values, gradients and cotangents that will flow, from one forward and one backward of all stages on fake tensors.

Shapes and dtypes of values could be read from the captured graph. Whether a value requires a gradient, whether a
cotangent comes back for it, and with which strides, can't. So the stages' own functions are run in order, each on its
own leaves as in the real run, then their backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.autodiff.split_backward import Graph, search
from fpipe.capture.assumed_values import VALUE_READS, AssumedValues, assume_values
from fpipe.cutting.routing import Layout, Routes
from fpipe.errors import CaptureError
from fpipe.ir.captured import Captured, Function, Parameter, Tensors, Value
from fpipe.runtime.segments.branching import certain_leaves
from fpipe.tensors.effects import Effects
from fpipe.tensors.fake import note_effects
from fpipe.tensors.random import preserve_generators
from fpipe.tensors.settings import settings
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.torch_private import (
    TENSOR_METHODS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)


@dataclass(frozen=True)
class Metadata:
    """The metadata of all that flows between stages.

    - `specs`: of every source and of every value that a stage makes for another.
    - `differentiable`: the values that require a gradient.
    - `cotangents`: per (stage, value), the cotangent that the stage computes for the value's previous user.
    - `grads`: per stage, the parameters that it owns and that may get a gradient; `totals`: their specs, per (stage,
      value). If it depends on data whether a microbatch has one, the spec is an `OptionalSpec`, in `cotangents` too.
    - `undeferred`: per stage, those whose gradients can't be deferred to the weight half, and why.
    - `varying`: the stages that read values of tensors, so that what they do may depend on them.
    - `casting`: the stages in which something runs under autocast.
    - `unrecordable`: the stages that no graph can represent, and why.
    """

    specs: dict[Value, Spec] = field(default_factory=dict)
    differentiable: set[Value] = field(default_factory=set)
    cotangents: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    grads: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    totals: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    undeferred: dict[int, dict[Value, str]] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    casting: set[int] = field(default_factory=set)
    unrecordable: dict[int, str] = field(default_factory=dict)

    def pulls(self, s: int, layout: Layout) -> Routes:
        """Return, per earlier stage, the values for which stage `s` sends it a cotangent."""
        return _merge((layout.gets, layout.earlier), lambda peer, value: (s, value) in self.cotangents)

    def pulled_by(self, layout: Layout) -> Routes:
        """Return, per later stage, the values for which it sends a cotangent."""
        return _merge((layout.gives, layout.later), lambda peer, value: (peer, value) in self.cotangents)


def _merge(tables: Sequence[Routes], keep: Callable[[int, Value], bool]) -> Routes:
    peers = sorted({peer for table in tables for peer in table})
    rows = {p: tuple(v for table in tables for v in table.get(p, ()) if keep(p, v)) for p in peers}
    return {peer: values for peer, values in rows.items() if values}


@dataclass(frozen=True)
class _Run:
    """One stage's fake forward: its function, its arguments as leaves, the values it made, and what was observed."""

    function: Function
    leaves: Mapping[Value, Tensor]
    made: Mapping[Value, Tensor]
    watch: _Watch


def infer(captured: Captured, layouts: Sequence[Layout], functions: Sequence[Function]) -> Metadata:
    """Run forward and backward of all stages on fake tensors."""
    metadata = Metadata()
    trainable = {v for v, s in captured.sources.items() if isinstance(s, Parameter) and s.name in captured.trainable}
    metadata.differentiable.update(trainable)
    devices = {tensor.device for tensor in captured.fakes.values()} | {torch.device("cpu")}
    with (
        preserve_generators(device for device in devices if device.type in ("cpu", "cuda")),
        captured.mode,
        torch.set_grad_enabled(captured.backward),
    ):
        values = dict(captured.fakes)
        metadata.specs.update({value: Spec.of(tensor) for value, tensor in values.items()})
        runs = [
            _forward(captured, layout, function, values, metadata)
            for layout, function in zip(layouts, functions, strict=True)
        ]
        found: dict[tuple[int, Value], Tensor] = {}
        for s in reversed(range(len(runs))):
            _backward(s, layouts[s], runs[s], captured, found, metadata)
    return metadata


def is_asking(captured: Captured) -> bool:
    """Return whether the model checks if tensors were computed; values that a stage receives must then look so."""
    return captured.observed is not None and captured.observed.asking


def made_by(layout: Layout) -> tuple[Value, ...]:
    """Return the values made in a stage that leave it or are assigned to a buffer, each once."""
    leaving = (*layout.leaving, *layout.reassigned.values())
    return tuple(dict.fromkeys(value for value in leaving if value not in layout.inputs))


def _forward(
    captured: Captured, layout: Layout, function: Function, values: dict[Value, Tensor], metadata: Metadata
) -> _Run:
    leaves = {v: values[v].detach().requires_grad_(v in metadata.differentiable) for v in layout.inputs}
    leaves |= {v: nn.Parameter(leaves[v], leaves[v].requires_grad) for v in layout.parameters}
    received = {v for values in layout.gets.values() for v in values} & metadata.differentiable
    inner = received if is_asking(captured) else set[Value]()
    arguments = [
        leaf.clone() if value in layout.modified else leaf.view_as(leaf) if value in inner else leaf
        for value, leaf in leaves.items()
    ]
    try:
        with assume_values(captured.mode) as answers, _Watch() as watch:
            made = dict(zip(made_by(layout), function(0, *arguments), strict=True))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = next((unit.path for unit in layout.units if unit.path), "(root)")
        raise CaptureError(
            f"the stage that begins in module {where}: got the operator {error}, whose result depends on the values of "
            "its input, expected shapes and control flow that do not. Rewrite that part."
        ) from error
    watch.answered(answers)
    for value, tensor in made.items():
        values[value] = tensor
        metadata.specs[value] = Spec.of(tensor)
        if tensor.requires_grad:
            metadata.differentiable.add(value)
    return _Run(function, leaves, made, watch)


GRAD_FN: Any = TENSOR_METHODS["grad_fn"].__get__
"""The function that torch calls to get a tensor's `grad_fn`."""


class _Watch(TorchFunctionMode):
    """Records what makes a backward harder to split.

    - `hooked`: nodes of the autograd graph may have hooks, which run only in autograd's backward.
    - `varying`: values of tensors are read, so other values may give another graph.
    - `casting`: something runs under autocast.
    - `nesting`: torch makes nested tensors.
    - `setting`: torch's settings change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooked = self.varying = self.casting = self.nesting = self.setting = False
        self.before = settings().kernels

    def answered(self, answers: AssumedValues) -> None:
        """Record what `answers` were given for."""
        self.varying |= answers.given
        self.nesting |= answers.nested

    @property
    def unrecordable(self) -> str:
        """Why no graph can represent what was seen; empty if one may."""
        if self.varying:
            return "it reads the values of tensors"
        if self.setting:
            return "it changes torch's settings for what it calls"
        return "an encoder with a padding mask nests tensors" if self.nesting else ""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.hooked |= func in (Tensor.register_hook, GRAD_FN)
        self.varying |= func in VALUE_READS
        self.setting |= settings().kernels != self.before
        self.casting |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))


def _backward(
    s: int,
    layout: Layout,
    run: _Run,
    captured: Captured,
    found: dict[tuple[int, Value], Tensor],
    metadata: Metadata,
) -> None:
    roots, incoming, sure = _roots(layout, run, captured.loss, found, metadata)
    previous = [v for routes in (layout.gets, layout.earlier) for values in routes.values() for v in values]
    wanted = [v for v in dict.fromkeys((*previous, *layout.parameters)) if v in metadata.differentiable]
    leaves = [run.leaves[value] for value in wanted]
    undeferred = _undeferred(run, roots, [value for value in wanted if value not in previous], captured)
    grads = _grads(s, run, roots, leaves, incoming, captured.mode) if roots and leaves else ()
    flowing = {value: grad for value, grad in zip(wanted, grads, strict=False) if grad is not None}
    if captured.dynamic:
        flowing = {value: _dense(grad, run.leaves[value]) for value, grad in flowing.items()}
    if roots:  # another branch may use it
        flowing |= {v: run.leaves[v].detach() for v in wanted if v not in flowing and _unsure(captured, v)}
    reached = certain_leaves(sure) if captured.dynamic else frozenset(map(id, leaves))
    for value, grad in flowing.items():
        kind = Spec if id(run.leaves[value]) in reached else OptionalSpec
        if value in previous:
            found[s, value] = grad
            metadata.cotangents[s, value] = kind.of(grad)
        else:
            metadata.totals[s, value] = kind.of(run.leaves[value])
    metadata.grads[s] = tuple(value for value in flowing if value not in previous)
    metadata.varying.update({s} if run.watch.varying else ())
    metadata.casting.update({s} if run.watch.casting else ())
    metadata.unrecordable[s] = run.watch.unrecordable
    metadata.undeferred[s] = {value: undeferred[value] for value in metadata.grads[s] if value in undeferred}


def _dense(grad: Tensor, leaf: Tensor) -> Tensor:
    """Return a gradient with memory for each element, since another branch may give each a different value."""
    pairs = zip(grad.shape, grad.stride(), strict=True)
    return leaf.detach() if any(size > 1 and not step for size, step in pairs) else grad


def _undeferred(run: _Run, roots: Sequence[Tensor], wanted: Sequence[Value], captured: Captured) -> dict[Value, str]:
    """Return the parameters whose gradients can't be deferred, and why."""
    if run.watch.hooked:
        return dict.fromkeys(wanted, "tensors have hooks")
    refused = {k: "data decide how it is used" for k, value in enumerate(wanted) if _unsure(captured, value)}
    refused |= {k: "its gradient has a hook" for k, value in enumerate(wanted) if _is_hooked(captured, value)}
    leaves = [run.leaves[value] for value in wanted]
    return {wanted[k]: why for k, why in search(Graph(roots, 0), leaves, refused).reasons.items()}


def _grads(
    s: int,
    run: _Run,
    roots: Sequence[Tensor],
    leaves: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    mode: FakeTensorMode,
) -> Tensors:
    effects = Effects()
    try:
        with (
            assume_values(mode) as answers,
            note_effects(mode, effects),
            run.function.backward_scope(tuple(run.leaves.values())),
        ):
            found = torch.autograd.grad(roots, leaves, incoming, allow_unused=True)
    except RuntimeError as error:
        raise CaptureError(
            f"stage {s}: got {type(error).__name__} in its backward: {error}, expected one that runs. Call backward() "
            "on the loss of the model itself, which should raise too; compute new tensors where it changes some in "
            "place that its backward needs."
        ) from error
    run.watch.answered(answers)
    if effects.drawn and run.function.scope is None:  # else a checkpoint may redraw what it drew
        raise CaptureError(
            f"stage {s}: got a backward that draws random numbers, expected only forwards that do: their numbers "
            "follow from the step's seed. Draw them in the forward of the custom autograd function, and save them."
        )
    return found


def _unsure(captured: Captured, value: Value) -> bool:
    source = captured.sources.get(value)
    return isinstance(source, Parameter) and source.name in captured.dynamic


def _is_hooked(captured: Captured, value: Value) -> bool:
    source = captured.sources.get(value)
    return isinstance(source, Parameter) and source.name in captured.hooks


def _roots(
    layout: Layout, run: _Run, loss: Value | None, found: Mapping[tuple[int, Value], Tensor], metadata: Metadata
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Return where cotangents enter, at the loss and values used later, and what enters; and where one always does."""
    roots: list[Tensor] = []
    incoming: list[Tensor | None] = []
    sure: list[Tensor] = []
    tensors = {**run.leaves, **run.made}
    if loss in layout.results and loss is not None and tensors[loss].requires_grad:
        roots.append(tensors[loss])
        incoming.append(None)
        sure.append(tensors[loss])
    for routes in (layout.gives, layout.later):
        for t, values in routes.items():
            for value in values:
                if (t, value) in found:
                    roots.append(tensors[value])
                    incoming.append(found[t, value])
                    sure += [tensors[value]] * (not isinstance(metadata.cotangents[t, value], OptionalSpec))
    return roots, incoming, sure
