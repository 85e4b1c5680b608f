# SPDX-License-Identifier: Apache-2.0
"""The output of a front end: a model as a list of units, and the values that pass between them.

Problem. One tracer sees modules, another torch calls, a third operators. The code downstream should not care.

Idea. A captured model is a flat list of *units*, in the order in which one device runs them. A unit reads and makes
*values*: tensors, identified by integers. Parameters, buffers, batch leaves and constants are values, too; they come
from a *source* rather than from a unit. So a tied parameter is simply a value with several readers. A stage is a
contiguous run of units.

A front end may also supply a function that fuses a run of units into one callable. The default is `chain_units`.

Invariants. Every value is made before it is read. A unit's `call` takes the values of `reads` and returns a tuple of
those of `makes`; it modifies nothing but the tensors passed to it.

Runs when a plan is made; the functions that `chain_units` and `compose` return run in every step. Whatever runs a list
of operations, be it a stage, the uncut model, a prologue or a question about the batch, is made by `compose`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple, NewType, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.record.objective import Objective
from fpipe.record.variant import Casts
from fpipe.tensors import random
from fpipe.tensors.placed import Arrivals, Placed
from fpipe.tensors.torch_private import FakeTensorMode
from fpipe.tensors.tree import Structure, flatten

NOTHING: Final = flatten(None)[1]
"""The structure of a tree without leaves."""
Value = NewType("Value", int)
Value.__doc__ = """The number of a tensor: one that a unit makes, or a source. At run time it is a plain integer."""
Tensors: TypeAlias = tuple[Tensor, ...]
Hook: TypeAlias = Callable[[Tensor], Tensor | None]
"""A hook on a parameter's gradient: returns a replacement, or `None` to keep it."""
Hooks: TypeAlias = Mapping[str, tuple[Hook, ...]]
Contexts: TypeAlias = Sequence[Callable[[], AbstractContextManager[Any]]]


class Parameter(NamedTuple):
    """A parameter of the model, by its first name."""

    name: str


class Buffer(NamedTuple):
    """A buffer of the model, by its first name."""

    name: str


class BatchLeaf(NamedTuple):
    """Tensor leaf number `leaf` of the batch: inputs first, then targets, then the scale of the loss."""

    leaf: int


class Constant(NamedTuple):
    """A tensor that the model created itself, or holds without registering it."""

    tensor: Tensor


Source: TypeAlias = Parameter | Buffer | BatchLeaf | Constant


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of the model that is never cut.

    `path` is its call path in the uncut model. `does` describes the operation; ranks compare it.
    """

    path: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: Callable[..., Tensors]
    does: str = ""


@dataclass(frozen=True)
class Function:
    """One callable for a run of units: `function(key, *inputs) -> outputs`. Random units are seeded from `key`.

    `scope(inputs)` is the context that a backward through it must run in: a checkpointed module looks up its parameters
    again during the backward. `redraws`: whether a backward may draw again what the forward drew. `form`: equal for
    functions that make the same torch calls, in the same order, of what they are given; `None` if that is not known.
    """

    run: Callable[..., Tensors]
    scope: Callable[[Tensors], AbstractContextManager[None]] | None = None
    redraws: bool = False
    form: Hashable = None

    def __call__(self, key: int, *inputs: Tensor) -> Tensors:
        """Run the units."""
        return self.run(key, *inputs)

    def backward_scope(self, inputs: Tensors) -> AbstractContextManager[None]:
        """Return the context that a backward for these inputs must run in."""
        return nullcontext() if self.scope is None else self.scope(inputs)


class Labels(NamedTuple):
    """The label that a random call is seeded from, and the devices whose generators it draws from."""

    label: int
    devices: tuple[torch.device, ...]

    def seed(self, key: int) -> None:
        """Make subsequent draws depend on `key` and the label."""
        for device in self.devices:
            random.reseed(key, self.label, device)


Fuse: TypeAlias = Callable[[Sequence[Unit], Mapping[Unit, Labels], tuple[Value, ...], tuple[Value, ...]], "Function"]


def chain_units(
    units: Sequence[Unit], random_units: Mapping[Unit, Labels], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Function:
    """Return a function that calls the units one after another."""
    return Function(compose([operation_of(unit, random_units.get(unit)) for unit in units], inputs, outputs))


# -------------------------------------------------------------------------------------------------- operations in modes


class Modes(NamedTuple):
    """The modes in force around a torch call: grad mode, and autocast by device type.

    - `grad`, `ambient`: whether gradients are enabled, here and around the whole model.
    - `region`: the number of the outermost autocast context, which has its own cache of casts; 0 outside of all.
    """

    grad: bool = True
    ambient: bool = True
    autocast: Casts = ()
    region: int = 0

    @property
    def in_ambient(self) -> Modes:
        """The same autocast, in the ambient grad mode."""
        return self._replace(grad=self.ambient)

    def inside(self, around: Modes) -> Modes:
        """Return the modes for a call that runs where the modes `around` are in force already."""
        same = (self.grad, self.autocast, self.region) == (around.grad, around.autocast, around.region)
        return Modes(around.grad, around.grad) if same else self._replace(ambient=around.grad)

    @property
    def contexts(self) -> Contexts:
        """The contexts that establish these modes; none for the ambient grad mode without autocast."""
        casts = [partial(torch.autocast, kind, dtype) for kind, dtype in self.autocast]
        off = [partial(torch.autocast, "cpu", enabled=False)] if self.region and not casts else []
        grads = [] if self.grad == self.ambient else [partial(torch.set_grad_enabled, self.grad)]
        return [*grads, *casts, *off]


def current_casts() -> Casts:
    """Return the autocast dtype of each device type for which autocast is on."""
    kinds = ("cpu", "cuda")
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)])


class Operation(NamedTuple):
    """One call of a function: `call(key, *tensors)` takes the values of `reads` and returns those of `makes`.

    It runs under `modes`, if it is composed with others.
    """

    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: Callable[..., Tensors]
    modes: Modes = Modes()


def operation_of(unit: Unit, labels: Labels | None = None) -> Operation:
    """Return a unit as an operation; if the unit is random, the operation seeds the generators first."""
    return seed_once(Operation(unit.reads, unit.makes, lambda key, *tensors: unit.call(*tensors)), labels)


def seed_once(operation: Operation, labels: Labels | None) -> Operation:
    """Return the operation, seeded before it runs if `labels` are given."""
    if labels is None:
        return operation

    def run(key: int, *tensors: Tensor) -> Tensors:
        labels.seed(key)
        return operation.call(key, *tensors)

    return operation._replace(call=run)


def join(operations: Sequence[Operation], makes: tuple[Value, ...]) -> Operation:
    """Return one operation that runs these in order, and makes some of what they make; it enters their modes itself."""
    made = {value for operation in operations for value in operation.makes}
    reads = tuple(dict.fromkeys(v for operation in operations for v in operation.reads if v not in made))
    return Operation(reads, makes, compose(operations, reads, makes))


def compose(
    operations: Sequence[Operation], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Callable[..., Tensors]:
    """Return a function `(key, *inputs) -> outputs` that runs the operations in order, each under its modes.

    It frees each value after its last use.
    """
    operations = _enter_modes(operations, outputs)
    last = {
        value: index for index, operation in enumerate(operations) for value in (*operation.reads, *operation.makes)
    }
    last.update(dict.fromkeys(outputs, len(operations)))
    slot = {value: k for k, value in enumerate(dict.fromkeys([*inputs, *last]))}
    dead: list[list[int]] = [[] for _ in range(len(operations) + 1)]
    for value, index in last.items():
        dead[index].append(slot[value])
    plan = [
        (operation.call, [slot[v] for v in operation.reads], [slot[v] for v in operation.makes], dead[index])
        for index, operation in enumerate(operations)
    ]
    empty, returned = [None] * (len(slot) - len(inputs)), [slot[value] for value in outputs]

    def run(key: int, *tensors: Tensor) -> Tensors:
        slots: list[Any] = [*tensors, *empty]
        for call, reads, makes, finished in plan:
            for k, tensor in zip(makes, call(key, *[slots[k] for k in reads]), strict=True):
                slots[k] = tensor
            for k in finished:
                slots[k] = None
        return tuple([slots[k] for k in returned])

    return run


def _enter_modes(operations: Sequence[Operation], outputs: tuple[Value, ...]) -> list[Operation]:
    """Return the operations; join each run that needs special modes into one operation that enters them.

    An autocast region is entered once, because autocast caches casts until the outermost context exits: it casts a
    weight once for all of its uses.
    """
    found: list[Operation] = []
    for region, later in _group(operations, lambda modes: modes.region, outputs):
        inner: list[Operation] = []
        for group, needed in _group(region, lambda modes: modes, later):
            inner += _run_inside(group[0].modes.contexts, group, needed)
        modes = region[0].modes
        found += _run_inside(modes.in_ambient.contexts if modes.region else (), inner, later)
    return found


def _group(
    operations: Sequence[Operation], key: Callable[[Modes], Any], outputs: Collection[Value]
) -> list[tuple[list[Operation], set[Value]]]:
    """Return the runs of operations with equal keys, each with the values that are read after it."""
    groups = [list(group) for _, group in groupby(operations, key=lambda operation: key(operation.modes))]
    later = {*outputs}
    found: list[tuple[list[Operation], set[Value]]] = []
    for group in reversed(groups):
        found.append((group, set(later)))
        later |= {value for operation in group for value in operation.reads}
    return found[::-1]


def _run_inside(around: Contexts, operations: Sequence[Operation], needed: Collection[Value]) -> list[Operation]:
    """Return the operations; join them into one that runs inside the contexts `around`, if there are any."""
    operations = [operation._replace(modes=Modes()) for operation in operations]
    if not around:
        return operations
    run = join(operations, tuple(value for one in operations for value in one.makes if value in needed))

    def call(key: int, *tensors: Tensor) -> Tensors:
        with ExitStack() as stack:
            for context in around:
                stack.enter_context(context())
            return run.call(key, *tensors)

    return [run._replace(call=call)]


# ------------------------------------------------------------------------------------------------ a model and its calls


NAMED, COMPILED_CODE = "named in whole", "code compiled by torch.compile"
AS_PYTHON = frozenset({NAMED, COMPILED_CODE})
"""The reasons for which a step must make a call as Python, even if its operators could be recorded."""


class Call(NamedTuple):
    """A module call; units `start` (inclusive) to `stop` (exclusive) run inside it.

    - `path`: the module's name; `kind`: its class.
    - `sealed`: the reason why no stage may begin inside the call; empty if one may.
    - `python`: the reason why a step makes the call as Python; empty if it runs the recorded torch calls.
    - `checkpointed`: True for the call of a checkpointed function.
    - `has_hooks`: True if a step makes the call as Python, and a module in it has hooks.
    """

    path: str
    kind: type
    start: int
    stop: int
    sealed: str = ""
    python: str = ""
    checkpointed: bool = False
    has_hooks: bool = False

    @property
    def whole(self) -> bool:
        """True if a step runs all of its units together, or none."""
        return bool(self.python) or self.checkpointed


@dataclass(frozen=True)
class Observed:
    """The aliases and side effects observed in a model.

    - `storage`: for every value, the memory that holds it; values in the same memory alias each other.
    - `written`: for each unit, the memory that it modifies in place.
    - `random`: the units that draw random numbers, and their labels.
    - `views`: the values that are views of others.
    - `asking`: True if the model checks a tensor's autograd node, or whether it is a leaf.
    - `undecided`: the devices on which random numbers may be drawn, depending on data.
    - `collective`: the units that communicate with other processes.
    - `attached`: the values whose place in autograd the model changes, by `requires_grad_` or a hook.
    """

    storage: Mapping[Value, int]
    written: Mapping[Unit, frozenset[int]]
    random: Mapping[Unit, Labels]
    views: frozenset[Value]
    asking: bool = False
    undecided: tuple[torch.device, ...] = ()
    collective: frozenset[Unit] = frozenset()
    attached: frozenset[Value] = frozenset()


@dataclass(frozen=True)
class Captured:
    """A model and its loss, captured for one microbatch.

    - `sources`: the values that no unit makes.
    - `loss`: the microbatch's share of the step's loss (see `Objective`); `None` if none was requested.
    - `outputs`, `structure`: the tensors that the model returns, and the tree that they are leaves of.
    - `aux`, `aux_structure`: the same for what the loss returns beside itself; an empty tree of `None` if nothing.
    - `calls`: the module calls, each before those inside it.
    - `fuse`: fuses the units of a stage, or others, into one function; they need not follow each other.
    - `observed`: aliases and side effects, if the front end knows them.
    - `dynamic`: names of the parameters that may be used or not, depending on data; empty if nothing branches on data.
    - `fakes`: a fake tensor for every source; `mode`: the fake mode that they belong to.
    - `hooks`: hooks on the gradients of parameters, by name.
    - `reassigned`: buffers that the model replaces by assignment, and the values that it assigns.
    - `moved`: places in the modules' Python state that only the first run changes, as text.
    - `observers`: side effects of the model's code, which steps do not repeat, as text.
    - `placed`: how the values that are DTensors are placed; outside of stages, they are plain local tensors.
      `arrivals`: how their gradients are.
    - `slices`: the positions of the units at which slices after the first begin; empty for a whole microbatch.
    - `ranks_of`: the rank of a pipeline that each process of the job is; empty if this process is all of them.
    - `trainable`: names of the parameters that require a gradient; `backward`: whether gradients are computed at all.
      In evaluation they are not, but the parameters still require one, because kernel selection depends on it.
    """

    units: tuple[Unit, ...]
    sources: Mapping[Value, Source]
    loss: Value | None
    outputs: tuple[Value, ...]
    structure: Structure
    fakes: Mapping[Value, Tensor]
    mode: FakeTensorMode
    trainable: frozenset[str]
    aux: tuple[Value, ...] = ()
    aux_structure: Structure = NOTHING
    calls: tuple[Call, ...] = ()
    observed: Observed | None = None
    dynamic: frozenset[str] = frozenset()
    fuse: Fuse = field(default=chain_units)
    backward: bool = True
    hooks: Hooks = field(default_factory=dict)
    reassigned: Mapping[Value, Value] = field(default_factory=dict)
    moved: frozenset[str] = frozenset()
    observers: tuple[str, ...] = ()
    placed: Mapping[Value, Placed] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)
    ranks_of: Mapping[int, int] = field(default_factory=dict)
    slices: tuple[int, ...] = ()

    def slice(self, k: int) -> Captured:
        """Return the units and calls of slice `k` alone; the record itself if it is of a whole microbatch."""
        if not self.slices:
            return self
        start, stop = [0, *self.slices, len(self.units)][k : k + 2]
        calls = [call for call in self.calls if start <= call.start and call.stop <= stop]
        shifted = tuple([call._replace(start=call.start - start, stop=call.stop - start) for call in calls])
        units = self.units[start:stop]
        known = {*self.sources, *(value for unit in units for value in unit.makes)}
        outputs, aux = (tuple([value for value in some if value in known]) for some in (self.outputs, self.aux))
        loss = self.loss if self.loss in known else None
        return replace(self, units=units, calls=shifted, loss=loss, outputs=outputs, aux=aux, slices=())


class CaptureFunction(Protocol):
    """A function that captures a model."""

    def __call__(self, model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
        """Capture what `objective(model, leaves)` computes for one microbatch.

        `leaves` are the tensors of an example microbatch, used only for their metadata; the model may be on meta, or
        hold fake tensors. Raise `CaptureError`, naming the module, if something cannot be captured or would be lost.
        """


class FrontEnd(Protocol):
    """A function that reads a model, and returns a module to record instead."""

    def __call__(self, model: nn.Module, inputs: Any, /) -> nn.Module:
        """Return a module that is called like the model, and has its names of parameters and buffers.

        `inputs` are those of an example microbatch, a tuple of positional or a dict of keyword arguments. They and the
        model hold fake tensors. What the model does only on its first call has happened.
        """
