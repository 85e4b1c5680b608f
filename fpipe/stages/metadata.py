# SPDX-License-Identifier: Apache-2.0
"""Metadata of all that flows between stages, from one forward and one backward of each stage on fake tensors.

The capture has the shapes and dtypes of values. It can't tell whether a value requires a gradient, or whether a
cotangent comes back for it, and with which strides. So the stages' own functions are run in order, each on its own
leaves as in a step, and then their backwards in reverse order.

Most stages of a deep model are alike. A stage for which the record has the same torch calls as for an earlier one, of
tensors with the same metadata, reuses that stage's forward, and its backward, if the same cotangents enter it. Only
the record matters, not the names of classes: calls with other arguments or modes, of code that is not torch's, that
draw, communicate, or were answered, make stages differ.

Invariant: what is found for a stage is what its own run would have shown.

Runs when a plan is made: once per kind of microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.cutting.routing import Section
from fpipe.errors import CaptureError
from fpipe.record.captured import AS_PYTHON, Buffer, Captured, Constant, Function, Parameter, Value
from fpipe.record.exchanges import watch_exchanges
from fpipe.record.fakes.assumed_values import VALUE_READS, AssumedValues, assume_values
from fpipe.record.fakes.recurrent import RECURRENT
from fpipe.record.model.places import traceback_line
from fpipe.record.refusals import data_dependence_error
from fpipe.record.trace.branching import certain_leaves
from fpipe.record.variant import Variant
from fpipe.stages.backends import GraphRequest
from fpipe.stages.graph.joint import Joint, Node, Tape, note_on
from fpipe.tensors.effects import Effects, storage_id
from fpipe.tensors.random import preserve_generators
from fpipe.tensors.settings import settings
from fpipe.tensors.spec import OptionalSpec, Spec, resolve
from fpipe.tensors.torch_private import (
    PAD,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    finish_collective,
)

PACKING = frozenset(function.__name__ for function in (*RECURRENT, PAD))
"""The names of functions that read the sizes of packed sequences."""
UNROLLED = 100
"""The largest number of operators per torch call in a stage that is worth request."""


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
    - `runs`: per stage, the run that showed all this.
    """

    specs: dict[Value, Spec] = field(default_factory=dict)
    differentiable: set[Value] = field(default_factory=set)
    cotangents: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    grads: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    totals: dict[tuple[int, Value], Spec] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    casting: set[int] = field(default_factory=set)
    unrecordable: dict[int, str] = field(default_factory=dict)
    runs: list[FakeRun] = field(default_factory=list)

    def pulls(self, s: int, section: Section) -> Mapping[int, tuple[Value, ...]]:
        """Return, per earlier stage, the values for which stage `s` sends it a cotangent."""
        found: dict[int, tuple[Value, ...]] = {}
        for peer, values in section.earlier.items():
            found[peer] = tuple(value for value in values if (s, value) in self.cotangents)
        return {peer: values for peer, values in found.items() if values}


class ForwardWatch(TorchFunctionMode):
    """A function mode that records what keeps a stage from being recorded as a graph, or matters to its wiring.

    - `varying`: values of tensors are read, so other values may give another graph.
    - `casting`: something runs under autocast.
    - `nesting`: torch makes nested tensors.
    - `setting`: torch's settings change.
    - `calls`: the number of torch calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.varying = self.casting = self.nesting = self.setting = False
        self.calls, self.before = 0, settings().kernels

    def note(self, answers: AssumedValues) -> None:
        """Record whether values of tensors were assumed, and whether nested tensors were made."""
        self.varying |= answers.given
        self.nesting |= answers.nested

    @property
    def unrecordable(self) -> str:
        """The reason why the stage can't be recorded as a graph; empty if it may be possible."""
        if self.varying:
            return "it reads the values of tensors"
        if self.setting:
            return "it changes torch's settings for what it calls"
        return "an encoder with a padding mask nests tensors" if self.nesting else ""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.varying |= func in VALUE_READS or func is PAD
        self.setting |= settings().kernels != self.before
        self.casting |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))


@dataclass
class FakeRun:
    """One stage's forward and backward on fake tensors.

    - `leaves`: its arguments; `current`: these after the forward, and what it made.
    - `outputs`: what leaves the stage; `buffers`: those that it replaces.
    - `tape`: notes the run, if the stage is to be recorded; `arguments`: its nodes; `forward`: those of the forward.
    - `entering`: the cotangents from later stages, by stage and value. `start`: that of the loss, if it is passed one.
    - `scoped`: the arguments that a rerun in the backward reads. `grads`: the gradients, where there is one.
    - `done`: what the backward was run for, and the run that has its results; empty until one of the stages that share
      this forward has run it.
    """

    function: Function
    section: Section
    leaves: Mapping[Value, Tensor]
    current: Mapping[Value, Tensor]
    outputs: Mapping[Value, Tensor]
    buffers: Mapping[Value, Tensor]
    watch: ForwardWatch
    tape: Tape | None
    arguments: Mapping[Value, Node]
    forward: frozenset[Node] = frozenset()
    entering: dict[tuple[int, Value], Tensor] = field(default_factory=dict)
    start: Tensor | None = None
    scoped: Mapping[Value, Tensor] = field(default_factory=dict)
    grads: Mapping[Value, Tensor] = field(default_factory=dict)
    done: list[tuple[Hashable, FakeRun]] = field(default_factory=list)

    @property
    def values(self) -> tuple[Value, ...]:
        """The values that the stage's function takes and makes, in order."""
        return (*self.section.inputs, *self.section.outputs)

    @property
    def is_apart(self) -> bool:
        """True if each tensor that the forward made is in new memory of its own."""
        made = [self.current[value] for value in self.section.outputs]
        given, memories = (frozenset(map(storage_id, some)) for some in (self.leaves.values(), made))
        return len(memories) == len(made) and memories.isdisjoint(given) and not any(x.storage_offset() for x in made)

    def of(self, section: Section, function: Function) -> FakeRun:
        """Return the forward of another stage of the same form, on the same fake tensors."""
        to = dict(zip(self.values, (*section.inputs, *section.outputs), strict=True))
        parts = ("leaves", "current", "outputs", "arguments")
        renamed: dict[str, Any] = {name: {to[v]: one for v, one in getattr(self, name).items()} for name in parts}
        return replace(self, function=function, section=section, entering={}, **renamed)

    def take_backward(self, run: FakeRun, entering: Iterable[tuple[int, Value]]) -> None:
        """Take the results of the same backward, run for another stage, given the keys of the cotangents."""
        to = dict(zip(run.values, self.values, strict=True))
        self.entering = dict(zip(entering, run.entering.values(), strict=True))
        self.start, self.grads = run.start, {to[value]: grad for value, grad in run.grads.items()}

    def enter_scope(self) -> AbstractContextManager[None]:
        """Return the context for the backward, in which parts of the forward may run again.

        As on one device, reruns read the buffers as the forward left them; what they modify is cloned first.
        """
        if self.function.scope is None:
            return nullcontext()
        after = {**self.leaves, **{v: self.current[v] for v in self.section.buffers}, **self.buffers}
        self.scoped = {v: one.clone() if v in self.section.modified else one for v, one in after.items()}
        return self.function.scope(tuple(self.scoped.values()))

    @property
    def starts(self) -> tuple[Tensor, ...]:
        """The cotangent of the loss, if the stage is passed one."""
        return () if self.start is None else (self.start,)

    def joint(
        self, pulls: Sequence[Value], grads: Sequence[Value], pulled_by: Iterable[tuple[int, Value]]
    ) -> Joint | str:
        """Return what the tape has noted as a joint graph, or the reason why there is none.

        `pulls` and `grads` are the values whose gradients the stage returns, `pulled_by` the cotangents that it gets.
        """
        tape, section = self.tape, self.section
        assert tape is not None, "the stage is to be recorded"
        cotangents = [*self.starts, *[self.entering[one] for one in pulled_by]]
        try:
            if not self.grads.keys() >= {*pulls, *grads}:
                raise CaptureError("got gradients that only other data give a value")
            returned = [
                tuple(map(tape.node_of, group))
                for group in (
                    [self.outputs[value] for value in section.leaving],
                    [self.buffers.get(value, self.current[value]) for value in section.buffers],
                    [self.grads[value] for value in pulls],
                    [self.grads[value] for value in grads],
                )
            ]
            entering = tuple(map(tape.node_of, cotangents))
        except CaptureError as error:
            tape.fail(error)
        if tape.failure:
            return tape.failure
        for node in (*tape.nodes, *tape.known.values()):
            if node.value is not None and node.value.requires_grad:
                node.value = node.value.detach()  # else it would keep autograd's graph
        of = self.arguments
        params, buffers = tuple(of[v] for v in section.parameters), tuple(of[v] for v in section.buffers)
        inputs = tuple(node for value, node in of.items() if value not in {*section.parameters, *section.buffers})
        return Joint(tuple(tape.nodes), params, buffers, inputs, tape.key, entering, self.forward, *returned)


def infer(
    captured: Captured,
    sections: Sequence[Section],
    functions: Sequence[Function],
    variant: Variant,
    request: GraphRequest | None,
) -> Metadata:
    """Return the metadata found by running the forward and backward of all stages on fake tensors."""
    metadata, recorded = Metadata(), () if request is None else request.stages
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
        forwards: dict[Hashable, FakeRun] = {}
        for s, (section, function) in enumerate(zip(sections, functions, strict=True)):
            kept = _kept_call(section, captured)
            form = _form(captured, section, function, values, metadata, (s in recorded, kept))
            if form in forwards:
                run = forwards[form].of(section, function)
                own = {value: Spec.of(run.outputs[value]).allocate() for value in section.outputs}
                _add_made(run, own, values, metadata)
            else:
                run = _run_forward(captured, section, function, values, metadata, s in recorded and not kept)
                forwards.update({form: run} if form is not None and run.is_apart else {})
            if request is not None and not request.needed and _is_unrolled(run):
                kept, run.tape = "some of its torch calls consist of hundreds of operators, fast as they are", None
            metadata.runs.append(run)
            metadata.unrecordable[s] = kept
        for s in reversed(range(len(sections))):
            run = metadata.runs[s]
            if run.done and run.done[0][0] != _request(run, captured, metadata):  # autograd has freed the shared graph
                run = _run_forward(captured, run.section, run.function, values, metadata, run.tape is not None)
                metadata.runs[s] = run
            _infer_backward(s, run, captured, metadata, variant)
    for run in metadata.runs:
        run.done.clear()  # it may have the run itself
    return metadata


def _form(
    captured: Captured,
    section: Section,
    function: Function,
    values: Mapping[Value, Tensor],
    metadata: Metadata,
    how: Hashable,
) -> Hashable:
    """Return what determines a stage's run, with values numbered in its order; `None` if that can't be compared.

    That is: its torch calls; the metadata and memories of what it is given; its constants; and `how` it is run.
    """
    acts = function.scope is not None or function.redraws or section.modified or section.reassigned
    if function.form is None or acts or captured.dynamic or is_asking(captured) or _sizes(captured, section):
        return None
    known, memories = {**values, **section.repeats}, dict[int, int]()
    given = [known[value] for value in section.inputs]
    if any(type(one) is not FakeTensor or one.is_conj() or one.is_neg() for one in given):
        return None
    groups = section.parameters, section.buffers, section.constants, section.batch, section.repeats, section.inputs
    number = {value: k for k, value in enumerate((*section.inputs, *section.outputs))}
    return (
        (function.form, how, section.constants, *map(len, groups)),
        tuple([(Spec.of(one), one.storage_offset()) for one in given]),
        tuple([memories.setdefault(storage_id(one), len(memories)) for one in given]),
        tuple([value in metadata.differentiable for value in section.inputs]),
        tuple([number[value] for value in section.leaving]),
    )


def is_asking(captured: Captured) -> bool:
    """Return whether the model asks if tensors were computed; if so, received values must not look like leaves."""
    return captured.observed is not None and captured.observed.asking


def _is_unrolled(run: FakeRun) -> bool:
    """Return whether a forward calls hundreds of operators per torch call, as a recurrent network under autocast does.

    Such a call loops over the sequence in C++. A graph unrolls the loop: it takes longer, and far longer to build.
    """
    return len(run.forward) > UNROLLED * (run.watch.calls + 10)


def _run_forward(
    captured: Captured,
    section: Section,
    function: Function,
    values: dict[Value, Tensor],
    metadata: Metadata,
    recorded: bool,
    casting: bool = False,
) -> FakeRun:
    """Run a stage's forward; add what it shows to `metadata`, and what it makes to `values`.

    `casting`: whether something in it is known to run under autocast.
    """
    known = {**values, **section.repeats}
    leaves = {v: known[v].detach().requires_grad_(v in metadata.differentiable) for v in section.inputs}
    leaves |= {v: nn.Parameter(leaves[v], leaves[v].requires_grad) for v in section.parameters}
    leaves |= _sizes(captured, section)
    received = {v for values in section.gets.values() for v in values} & metadata.differentiable
    inner = received if casting or is_asking(captured) else set[Value]()
    tape = Tape() if recorded else None
    arguments = {} if tape is None else _take_arguments(tape, captured, section, leaves)
    try:
        with assume_values(captured.mode) as answers, ForwardWatch() as watch, note_on(tape):
            given = [
                leaf.clone() if v in section.modified else leaf.view_as(leaf) if v in inner else leaf
                for v, leaf in leaves.items()
            ]
            made = dict(zip(section.outputs, function(0, *given), strict=True))
            current = {**dict(zip(leaves, given, strict=True)), **made}
            outputs = {v: resolve(current[v].detach()) for v in section.leaving}
            buffers = {old: current[new].detach().clone() for old, new in section.reassigned.items()}
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = next((unit.path for unit in section.units if unit.path), "(root)")
        raise data_dependence_error(f"the stage that begins in module {where}", error) from error
    watch.note(answers)
    if recorded and watch.casting and received and not inner:  # received values must not be leaves there: see `Wiring`
        return _run_forward(captured, section, function, values, metadata, recorded, casting=True)
    forward = frozenset(() if tape is None else tape.nodes)
    run = FakeRun(function, section, leaves, current, outputs, buffers, watch, tape, arguments, forward)
    _add_made(run, {**made, **{v: outputs[v] for v in made.keys() & outputs.keys()}}, values, metadata)
    return run


def _add_made(run: FakeRun, made: Mapping[Value, Tensor], values: dict[Value, Tensor], metadata: Metadata) -> None:
    """Add what a stage makes, as later stages get it, to `values`, and what its forward shows to `metadata`."""
    values.update(made)
    metadata.specs.update({value: Spec.of(tensor) for value, tensor in (*made.items(), *run.section.repeats.items())})
    metadata.differentiable.update([value for value in made if run.current[value].requires_grad])


def _sizes(captured: Captured, section: Section) -> Mapping[Value, Tensor]:
    """Return the constants that may be sizes of packed sequences, as real tensors: torch reads them unseen by modes."""
    packing = [unit for unit in section.units if unit.does.partition("[")[0] in PACKING]
    read = {value for unit in packing for value in unit.reads}
    sources = {value: captured.sources[value] for value in section.constants if value in read}
    constants = {value: source.tensor for value, source in sources.items() if isinstance(source, Constant)}
    return {v: one for v, one in constants.items() if one.dtype is torch.int64 and one.dim() == 1 and one.is_cpu}


def _take_arguments(
    tape: Tape, captured: Captured, section: Section, leaves: Mapping[Value, Tensor]
) -> Mapping[Value, Node]:
    """Return the nodes of a stage's arguments; its constants are held in the graph."""
    for value in section.constants:
        source = captured.sources[value]
        assert isinstance(source, Constant), "that is what a section lists there"
        tape.hold(leaves[value], source.tensor)
    others = [value for value in leaves if value not in section.constants]
    return dict(zip(others, tape.take(leaves[value] for value in others), strict=True))


class _Entry(NamedTuple):
    """A tensor at which a cotangent enters a stage's backward: the loss, or a value that later stages use.

    `cotangent` is `None` for the loss if it is 1; `sure` is false if it depends on data whether one enters.
    """

    root: Tensor
    cotangent: Tensor | None
    sure: bool


def _entering(section: Section, metadata: Metadata) -> Mapping[tuple[int, Value], Spec]:
    """Return the cotangents that enter a stage's backward, by the stage that sends them and the value."""
    keys = [(t, value) for t, values in section.later.items() for value in values]
    return {key: metadata.cotangents[key] for key in keys if key in metadata.cotangents}


def _wanted(section: Section, metadata: Metadata) -> list[Value]:
    """Return the values that may get a gradient in a stage's backward."""
    previous = [value for values in section.earlier.values() for value in values]
    return [v for v in dict.fromkeys((*previous, *section.parameters)) if v in metadata.differentiable]


def _request(run: FakeRun, captured: Captured, metadata: Metadata) -> Hashable:
    """Return what determines a stage's backward after its forward, with values numbered in the stage's order."""
    number = {value: k for k, value in enumerate(run.values)}
    entering = tuple([(number[value], spec) for (_, value), spec in _entering(run.section, metadata).items()])
    wanted = tuple([number[value] for value in _wanted(run.section, metadata)])
    return captured.loss in run.section.results, entering, wanted


def _infer_backward(s: int, run: FakeRun, captured: Captured, metadata: Metadata, variant: Variant) -> None:
    """Run a stage's backward, and add what it shows to `metadata`."""
    previous = {value: None for values in run.section.earlier.values() for value in values}
    entries: Sequence[_Entry] = ()
    if run.done:
        run.take_backward(run.done[0][1], _entering(run.section, metadata))
        flowing: Mapping[Value, Tensor] = run.grads
    else:
        run.done.append((_request(run, captured, metadata), run))
        entries = _cotangent_entries(run, captured.loss, metadata, variant.scaled)
        flowing = _possible_gradients(s, run, entries, _wanted(run.section, metadata), captured)
    sure = _certain_values(run, entries, flowing, captured)
    for value, grad in flowing.items():
        kind = Spec if value in sure else OptionalSpec
        if value in previous:
            metadata.cotangents[s, value] = kind.of(grad)
        else:
            total = kind.of(run.leaves[value])
            metadata.totals[s, value] = replace(total, dtype=variant.sum_dtype(total.dtype))
    metadata.grads[s] = tuple(value for value in flowing if value not in previous)
    metadata.varying.update({s} if run.watch.varying else ())
    metadata.casting.update({s} if run.watch.casting else ())
    metadata.unrecordable[s] = run.watch.unrecordable or metadata.unrecordable[s]


def _cotangent_entries(run: FakeRun, loss: Value | None, metadata: Metadata, scaled: bool) -> list[_Entry]:
    """Return the tensors at which cotangents enter a stage's backward."""
    section, entries = run.section, list[_Entry]()
    if loss is not None and loss in section.results and run.current[loss].requires_grad:
        run.start = Spec.of(run.current[loss]).allocate() if scaled else None
        entries.append(_Entry(run.current[loss], run.start, True))
    for (t, value), spec in _entering(section, metadata).items():
        run.entering[t, value] = entering = spec.allocate()
        entries.append(_Entry(run.current[value], entering, not isinstance(spec, OptionalSpec)))
    if run.tape is not None:
        run.tape.take([*run.starts, *run.entering.values()])
    return entries


def _possible_gradients(
    s: int, run: FakeRun, entries: Sequence[_Entry], wanted: Sequence[Value], captured: Captured
) -> Mapping[Value, Tensor]:
    """Return the gradients of the wanted values, where there may be one."""
    if not entries or not wanted:
        return {}
    grads = _grads(s, run, entries, [run.leaves[value] for value in wanted], captured)
    run.grads = {value: grad for value, grad in zip(wanted, grads, strict=True) if grad is not None}
    if not captured.dynamic:
        return run.grads
    found = {value: _without_broadcasts(grad, run.leaves[value]) for value, grad in run.grads.items()}
    others = [value for value in wanted if value not in found and _is_dynamic(captured, value)]
    return found | {value: run.leaves[value].detach() for value in others}  # another branch may use it


def _certain_values(
    run: FakeRun, entries: Sequence[_Entry], flowing: Collection[Value], captured: Captured
) -> Collection[Value]:
    """Return the values that get a gradient whatever the data."""
    if not captured.dynamic:
        return flowing
    reached = certain_leaves([entry.root for entry in entries if entry.sure])
    return [value for value in flowing if id(run.leaves[value]) in reached]


def _without_broadcasts(grad: Tensor, leaf: Tensor) -> Tensor:
    """Return a gradient with memory for each element, since another branch may make all elements different."""
    pairs = zip(grad.shape, grad.stride(), strict=True)
    return leaf.detach() if any(size > 1 and not step for size, step in pairs) else grad


def _grads(
    s: int, run: FakeRun, entries: Sequence[_Entry], leaves: Sequence[Tensor], captured: Captured
) -> Sequence[Tensor | None]:
    """Return the gradients of the leaves; raise `CaptureError` if the backward cannot run."""
    effects = Effects()
    roots, cotangents = [entry.root for entry in entries], [entry.cotangent for entry in entries]
    function, paths = run.function, [unit.path for unit in run.section.units if unit.path]
    where = f"stage {s} (modules {' to '.join(dict.fromkeys((*paths[:1], *paths[-1:])))}), its backward"
    try:
        with (
            assume_values(captured.mode) as answers,
            watch_exchanges(captured, effects, where),
            note_on(run.tape),
        ):
            with run.enter_scope():
                grads: Sequence[Tensor | None] = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
            found = [None if one is None else resolve(finish_collective(one)) for one in grads]
    except TypeError as error:  # of fake tensors: a module's own tensor is not there
        raise CaptureError(
            f"stage {s}, its backward{traceback_line(error.__traceback__)}: got code that uses a parameter or buffer "
            "which no forward of its module reads, expected one that uses only tensors that a forward reads: a stage "
            "holds no others. Pass the tensor to the function in the forward, or keep it in a closure of the hook."
        ) from error
    except RuntimeError as error:
        raise CaptureError(
            f"stage {s}, its backward{traceback_line(error.__traceback__)}: got {type(error).__name__}: {error}. Call "
            "backward() on the model's own loss; it should raise the same error. If it complains about an in-place "
            "change, compute a new tensor instead."
        ) from error
    _require_unwritten(s, run, effects, captured)
    run.watch.note(answers)
    if effects.drawn and not function.redraws:
        raise CaptureError(
            f"stage {s}: got a backward that draws random numbers, expected only forwards to draw them, because they "
            "depend on the step's seed. Draw them in the forward of the custom autograd function, and save them."
        )
    return found


def _kept_call(section: Section, captured: Captured) -> str:
    """Return the call in a stage that must run as Python in every step, and why; empty if there is none."""
    present = frozenset(section.units)
    for call in captured.calls:
        if call.python in AS_PYTHON and present.issuperset(captured.units[call.start : call.stop]):
            return f"{call.path or 'the whole model'} runs as Python: {call.python}"
    return ""


def _require_unwritten(s: int, run: FakeRun, effects: Effects, captured: Captured) -> None:
    """Raise `CaptureError` if a backward writes to a parameter, a buffer, or the batch; reruns of a forward may."""
    rewritten = captured.observed.written.values() if captured.observed and run.function.redraws else ()
    again = frozenset[int]().union(*rewritten)
    storage = captured.observed.storage if captured.observed else {}
    for value, leaf in run.leaves.items():
        source, places = captured.sources.get(value), {storage_id(leaf), storage_id(run.scoped.get(value, leaf))}
        if source is not None and not places.isdisjoint(effects.written) and storage.get(value) not in again:
            name = source.name if isinstance(source, Parameter | Buffer) else "a tensor of the batch"
            raise CaptureError(
                f"stage {s}: got a backward (a hook, or a custom autograd function) that writes to {name}, expected "
                "one that only reads it: buffers pass from forward to forward, and forwards of later microbatches have "
                "already run. Write it in the forward, or return the value and write it between steps."
            )


def _is_dynamic(captured: Captured, value: Value) -> bool:
    source = captured.sources.get(value)
    return isinstance(source, Parameter) and source.name in captured.dynamic
