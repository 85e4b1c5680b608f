# SPDX-License-Identifier: Apache-2.0
"""Metadata of all that flows between stages, from one forward and one backward of each stage on fake tensors.

The capture has the shapes and dtypes of values. It can't tell whether a value requires a gradient, or whether a
cotangent comes back for it, and with which strides. So the stages' own functions are run in order, each on its own
leaves as in a step, and then their backwards in reverse order.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fpipe.cutting.routing import Section
from fpipe.errors import CaptureError
from fpipe.record.captured import AS_PYTHON, Buffer, Captured, Function, Parameter, Value
from fpipe.record.fakes.assumed_values import assume_values
from fpipe.record.model.places import traceback_line
from fpipe.record.refusals import data_dependence_error
from fpipe.record.trace.branching import certain_leaves
from fpipe.stages.forward_watch import ForwardWatch
from fpipe.tensors.effects import Effects, storage_id
from fpipe.tensors.fake import note_effects
from fpipe.tensors.random import preserve_generators
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    finish_collective,
)


@dataclass(frozen=True)
class Metadata:
    """The metadata of all that flows between stages.

    - `specs`: of every source, and of every value that a stage makes for another, or repeats.
    - `differentiable`: the values that require a gradient.
    - `cotangents`: per (stage, value), the cotangent that the stage computes for the value's previous user.
    - `grads`: per stage, the parameters that it owns and that may get a gradient; `totals`: their specs, per (stage,
      value). If it depends on data whether a microbatch has one, the spec is an `OptionalSpec`, in `cotangents` too.
    - `varying`: the stages that read values of tensors, so that their operations may depend on data.
    - `casting`: the stages in which something runs under autocast.
    - `unrecordable`: per stage, why it can't be recorded as a graph; empty if it may be possible.
    """

    specs: dict[Value, Spec] = field(default_factory=dict)
    differentiable: set[Value] = field(default_factory=set)
    cotangents: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    grads: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    totals: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    casting: set[int] = field(default_factory=set)
    unrecordable: dict[int, str] = field(default_factory=dict)

    def pulls(self, s: int, section: Section) -> Mapping[int, tuple[Value, ...]]:
        """Return, per earlier stage, the values for which stage `s` sends it a cotangent."""
        found: dict[int, tuple[Value, ...]] = {}
        for peer in sorted({*section.gets, *section.earlier}):
            shared = (*section.gets.get(peer, ()), *section.earlier.get(peer, ()))
            found[peer] = tuple(value for value in shared if (s, value) in self.cotangents)
        return {peer: values for peer, values in found.items() if values}


@dataclass(frozen=True)
class _FakeForward:
    """One stage's forward on fake tensors: its function, its arguments as leaves, the values it made, and the watch."""

    function: Function
    leaves: Mapping[Value, Tensor]
    made: Mapping[Value, Tensor]
    watch: ForwardWatch


def infer(captured: Captured, sections: Sequence[Section], functions: Sequence[Function]) -> Metadata:
    """Return the metadata found by running the forward and backward of all stages on fake tensors."""
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
        forwards = [
            _infer_forward(captured, section, function, values, metadata)
            for section, function in zip(sections, functions, strict=True)
        ]
        arriving: dict[tuple[int, Value], Tensor] = {}
        for s in reversed(range(len(sections))):
            _infer_backward(s, sections[s], forwards[s], captured, arriving, metadata)
    return metadata


def is_asking(captured: Captured) -> bool:
    """Return whether the model asks if tensors were computed; if so, received values must not look like leaves."""
    return captured.observed is not None and captured.observed.asking


def _infer_forward(
    captured: Captured, section: Section, function: Function, values: dict[Value, Tensor], metadata: Metadata
) -> _FakeForward:
    metadata.specs.update({value: Spec.of(tensor) for value, tensor in section.repeats.items()})
    known = {**values, **section.repeats}
    leaves = {v: known[v].detach().requires_grad_(v in metadata.differentiable) for v in section.inputs}
    leaves |= {v: nn.Parameter(leaves[v], leaves[v].requires_grad) for v in section.parameters}
    received = {v for values in section.gets.values() for v in values} & metadata.differentiable
    inner = received if is_asking(captured) else set[Value]()
    arguments = [
        leaf.clone() if value in section.modified else leaf.view_as(leaf) if value in inner else leaf
        for value, leaf in leaves.items()
    ]
    try:
        with assume_values(captured.mode) as answers, ForwardWatch() as watch:
            made = dict(zip(section.outputs, function(0, *arguments), strict=True))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = next((unit.path for unit in section.units if unit.path), "(root)")
        raise data_dependence_error(f"the stage that begins in module {where}", error) from error
    watch.note(answers)
    for value, tensor in made.items():
        values[value] = tensor
        metadata.specs[value] = Spec.of(tensor)
        if tensor.requires_grad:
            metadata.differentiable.add(value)
    return _FakeForward(function, leaves, made, watch)


class _Entry(NamedTuple):
    """A tensor at which a cotangent enters a stage's backward: the loss, or a value that later stages use.

    `cotangent` is `None` for the loss; `sure` is false if it depends on data whether one enters.
    """

    root: Tensor
    cotangent: Tensor | None
    sure: bool


def _infer_backward(
    s: int,
    section: Section,
    forward: _FakeForward,
    captured: Captured,
    arriving: dict[tuple[int, Value], Tensor],
    metadata: Metadata,
) -> None:
    """Run a stage's backward; add what it shows to `metadata`, and the cotangents that it returns to `arriving`."""
    entries = _cotangent_entries(section, forward, captured.loss, arriving, metadata)
    previous = {v: None for routes in (section.gets, section.earlier) for values in routes.values() for v in values}
    wanted = [v for v in dict.fromkeys((*previous, *section.parameters)) if v in metadata.differentiable]
    flowing = _possible_gradients(s, forward, entries, wanted, captured)
    sure = _certain_values(forward, entries, flowing, captured)
    for value, grad in flowing.items():
        kind = Spec if value in sure else OptionalSpec
        if value in previous:
            arriving[s, value] = grad
            metadata.cotangents[s, value] = kind.of(grad)
        else:
            metadata.totals[s, value] = kind.of(forward.leaves[value])
    grads = tuple(value for value in flowing if value not in previous)
    metadata.grads[s] = grads
    metadata.varying.update({s} if forward.watch.varying else ())
    metadata.casting.update({s} if forward.watch.casting else ())
    metadata.unrecordable[s] = forward.watch.unrecordable or _kept_call(section, captured)


def _cotangent_entries(
    section: Section,
    forward: _FakeForward,
    loss: Value | None,
    arriving: Mapping[tuple[int, Value], Tensor],
    metadata: Metadata,
) -> list[_Entry]:
    """Return the tensors at which cotangents enter a stage's backward."""
    tensors = {**forward.leaves, **forward.made}
    entries: list[_Entry] = []
    if loss is not None and loss in section.results and tensors[loss].requires_grad:
        entries.append(_Entry(tensors[loss], None, True))
    for routes in (section.gives, section.later):
        for t, values in routes.items():
            for value in values:
                if (t, value) in arriving:
                    sure = not isinstance(metadata.cotangents[t, value], OptionalSpec)
                    entries.append(_Entry(tensors[value], arriving[t, value], sure))
    return entries


def _possible_gradients(
    s: int, forward: _FakeForward, entries: Sequence[_Entry], wanted: Sequence[Value], captured: Captured
) -> dict[Value, Tensor]:
    """Return the gradients of the wanted values, where there may be one."""
    if not entries or not wanted:
        return {}
    grads = _grads(s, forward, entries, [forward.leaves[value] for value in wanted], captured)
    found = {value: grad for value, grad in zip(wanted, grads, strict=True) if grad is not None}
    if not captured.dynamic:
        return found
    found = {value: _without_broadcasts(grad, forward.leaves[value]) for value, grad in found.items()}
    others = [value for value in wanted if value not in found and _is_dynamic(captured, value)]
    return found | {value: forward.leaves[value].detach() for value in others}  # another branch may use it


def _certain_values(
    forward: _FakeForward, entries: Sequence[_Entry], flowing: Collection[Value], captured: Captured
) -> Collection[Value]:
    """Return the values that get a gradient whatever the data."""
    if not captured.dynamic:
        return flowing
    reached = certain_leaves([entry.root for entry in entries if entry.sure])
    return [value for value in flowing if id(forward.leaves[value]) in reached]


def _without_broadcasts(grad: Tensor, leaf: Tensor) -> Tensor:
    """Return a gradient with memory for each element, since another branch may make all elements different."""
    pairs = zip(grad.shape, grad.stride(), strict=True)
    return leaf.detach() if any(size > 1 and not step for size, step in pairs) else grad


def _grads(
    s: int, forward: _FakeForward, entries: Sequence[_Entry], leaves: Sequence[Tensor], captured: Captured
) -> Sequence[Tensor | None]:
    """Return the gradients of the leaves; raise `CaptureError` if the backward cannot run."""
    effects = Effects()
    roots, cotangents = [entry.root for entry in entries], [entry.cotangent for entry in entries]
    function = forward.function
    try:
        with (
            assume_values(captured.mode) as answers,
            note_effects(captured.mode, effects),
            function.backward_scope(tuple(forward.leaves.values())),
        ):
            found: Sequence[Tensor | None] = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    except TypeError as error:  # of fake tensors: a module's own tensor is not there
        raise CaptureError(
            f"stage {s}, its backward{traceback_line(error.__traceback__)}: got code that uses a parameter or buffer "
            "which no forward of its module reads, expected one that uses what a forward reads: a stage holds "
            "nothing else. Pass the tensor to the function in the forward, or keep it in a closure of the hook."
        ) from error
    except RuntimeError as error:
        raise CaptureError(
            f"stage {s}, its backward{traceback_line(error.__traceback__)}: got {type(error).__name__}: {error}. Call "
            "backward() on the model's own loss; it should raise the same error. If it complains about an in-place "
            "change, compute a new tensor instead."
        ) from error
    _require_unwritten(s, forward, effects, captured)
    found = [None if one is None else finish_collective(one) for one in found]
    forward.watch.note(answers)
    if effects.drawn and not function.redraws:
        raise CaptureError(
            f"stage {s}: got a backward that draws random numbers, expected only forwards to draw them, since they "
            "follow from the step's seed. Draw them in the forward of the custom autograd function, and save them."
        )
    return found


def _kept_call(section: Section, captured: Captured) -> str:
    """Return the call in a stage that must run as Python in every step, and why; empty if there is none."""
    present = frozenset(section.units)
    for call in captured.calls:
        if call.python in AS_PYTHON and present.issuperset(captured.units[call.start : call.stop]):
            return f"{call.path or 'the whole model'} runs as Python: {call.python}"
    return ""


def _require_unwritten(s: int, forward: _FakeForward, effects: Effects, captured: Captured) -> None:
    """Raise `CaptureError` if a backward writes to a parameter, a buffer, or the batch; reruns of a forward may."""
    rewritten = captured.observed.written.values() if captured.observed and forward.function.redraws else ()
    again = frozenset[int]().union(*rewritten)
    storage = captured.observed.storage if captured.observed else {}
    for value, leaf in forward.leaves.items():
        source = captured.sources.get(value)
        if source is not None and storage_id(leaf) in effects.written and storage.get(value) not in again:
            name = source.name if isinstance(source, Parameter | Buffer) else "a tensor of the batch"
            raise CaptureError(
                f"stage {s}: got a backward (a hook, or a custom autograd function) that writes to {name}, expected "
                "one that only reads it: buffers go from forward to forward, and later microbatches have been forward "
                "by then. Write it in the forward, or return the value and write it between steps."
            )


def _is_dynamic(captured: Captured, value: Value) -> bool:
    source = captured.sources.get(value)
    return isinstance(source, Parameter) and source.name in captured.dynamic
