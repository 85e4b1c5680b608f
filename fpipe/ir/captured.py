# SPDX-License-Identifier: Apache-2.0
"""The output of a front end: a model as units and the values between them.

Problem. Tracers differ in what they see; the code downstream of them should not care.

Idea. A captured model is a straight line of *units*, in the order in which one device runs them. A unit reads and makes
*values*: tensors, named by integers. Parameters, buffers, batch leaves and constants are values too, which come from a
*source* rather than a unit; so a tied parameter is simply a value with several readers. A stage will be a contiguous
run of units.

A front end may also supply a way to fuse a run of units into one callable; `chain_units` is the plain way.

Invariants. Units are in execution order: every value is made before it is read. A unit's `call` takes the values of
`reads` and returns a tuple of those of `makes`; it changes no state other than the tensors passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.ir.objective import Objective
from fpipe.tensors import random
from fpipe.tensors.tree import Structure
from fpipe.torch_private import FakeTensorMode

Value: TypeAlias = int
Tensors: TypeAlias = tuple[Tensor, ...]
Hook: TypeAlias = Callable[[Tensor], Tensor | None]
"""A hook on the gradient of a parameter."""
Hooks: TypeAlias = Mapping[str, tuple[Hook, ...]]


class Parameter(NamedTuple):
    """A value that is the model's parameter `name` (its first name)."""

    name: str


class Buffer(NamedTuple):
    """A value that is the model's buffer `name` (its first name)."""

    name: str


class BatchLeaf(NamedTuple):
    """A value that is tensor leaf number `leaf` of (inputs, targets)."""

    leaf: int


class Constant(NamedTuple):
    """A value that the model created itself, or holds without registering it."""

    tensor: Tensor


Source: TypeAlias = Parameter | Buffer | BatchLeaf | Constant


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of the model that is never cut.

    `path` is its call path in the uncut model; `does` describes what it does, so that models can be distinguished.
    """

    path: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: Callable[..., Tensors]
    does: str = ""


@dataclass(frozen=True)
class Function:
    """A run of units as one callable: `function(key, *inputs) -> outputs`; random units draw by `key`.

    `scope(inputs)` is a context in which any backward through it must run (a checkpointed module looks up its
    parameters again then).
    """

    run: Callable[..., Tensors]
    scope: Callable[[Tensors], AbstractContextManager[None]] | None = None

    def __call__(self, key: int, *inputs: Tensor) -> Tensors:
        """Run the units."""
        return self.run(key, *inputs)

    def backward_scope(self, inputs: Tensors) -> AbstractContextManager[None]:
        """Return the context for a backward."""
        return nullcontext() if self.scope is None else self.scope(inputs)


class Labels(NamedTuple):
    """The key of a random unit: its label, and the devices whose generators it draws from."""

    label: int
    devices: tuple[torch.device, ...]


Fuse: TypeAlias = Callable[[Sequence[Unit], Mapping[Unit, Labels], tuple[Value, ...], tuple[Value, ...]], "Function"]


class Operation(NamedTuple):
    """One call of a function: `call(key, *tensors)` takes the values of `reads` and returns those of `makes`."""

    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: Callable[..., Tensors]


def chain_units(
    units: Sequence[Unit], random_units: Mapping[Unit, Labels], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Function:
    """Return a run of units as a function that calls them one after another."""
    return Function(compose([single(unit, random_units.get(unit)) for unit in units], inputs, outputs))


def single(unit: Unit, labels: Labels | None) -> Operation:
    """Return a unit as an operation, keyed if it is random."""

    def seeded(key: int, *tensors: Tensor) -> Tensors:
        assert labels is not None, "the unit is random"
        for device in labels.devices:
            random.reseed(key, labels.label, device)
        return unit.call(*tensors)

    return Operation(unit.reads, unit.makes, (lambda key, *tensors: unit.call(*tensors)) if labels is None else seeded)


def compose(
    operations: Sequence[Operation], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Callable[..., Tensors]:
    """Return a function of a key and `inputs` that runs the operations in order.

    It frees values after their last use.
    """
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


def no_calls(positions: Sequence[int]) -> Collection[int]:
    """Return no calls: every call does the same wherever the model is cut."""
    return ()


class Call(NamedTuple):
    """One call of a module; units `start` to `stop`, excluding the latter, run inside it.

    - `path`: the module's name; `kind`: its class.
    - `sealed`: why no stage may begin inside it; empty if one may.
    - `apart`: whether it is never called as is, because it uses more than its arguments and state, or makes more.
    """

    path: str
    kind: type
    start: int
    stop: int
    sealed: str = ""
    apart: bool = False


@dataclass(frozen=True)
class Observed:
    """The facts that a capture observed about a model.

    - `storage`: for every value, the memory that holds it; values in the same memory alias each other.
    - `written`: for each unit, the memory that it modifies in place.
    - `random`: the units that draw random numbers, and how they are keyed.
    - `views`: the values that are views of others.
    - `asking`: whether the model asks tensors for their autograd node, or whether they are leaves.
    - `undecided`: the devices on which random numbers may be drawn, depending on data.
    """

    storage: Mapping[Value, int]
    written: Mapping[Unit, frozenset[int]]
    random: Mapping[Unit, Labels]
    views: frozenset[Value]
    asking: bool = False
    undecided: tuple[torch.device, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A model, its loss, and one example microbatch, as units and values.

    - `sources`: the values that no unit makes.
    - `loss`: the value of the loss, as a part of the step's (see `Objective`); `None` if none was requested.
    - `outputs`, `structure`: the tensors that the model returns, and the tree that they are leaves of.
    - `calls`: the calls of modules, each before those inside it.
    - `observed`: what the units were seen to do, if the front end knows.
    - `dynamic`: names of the parameters that may be used or not, depending on data; empty if nothing branches on data.
    - `fakes`: a fake tensor for every source; `mode`: the fake mode that they belong to.
    - `differing`: given the units before which the model is cut, the numbers of the calls that are not made as is,
      because they would do something else without the Python state that other stages' calls leave.
    - `hooks`: hooks on the gradients of parameters, by name.
    - `reassigned`: buffers that the model assigns anew, and the values that they have afterwards.
    - `moved`: what a first run changes in the Python state of modules, and further runs don't, as text.
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
    calls: tuple[Call, ...] = ()
    observed: Observed | None = None
    dynamic: frozenset[str] = frozenset()
    fuse: Fuse = field(default=chain_units)
    differing: Callable[[Sequence[int]], Collection[int]] = field(default=no_calls)
    backward: bool = True
    hooks: Hooks = field(default_factory=dict)
    reassigned: Mapping[Value, Value] = field(default_factory=dict)
    moved: frozenset[str] = frozenset()

    def calls_at(self, positions: Sequence[int]) -> tuple[Call, ...]:
        """Return the calls of modules as they are made if the model is cut before these units."""
        differing = self.differing(positions)
        return tuple([one._replace(apart=one.apart or k in differing) for k, one in enumerate(self.calls)])


class FrontEnd(Protocol):
    """A way to capture a model."""

    def __call__(self, model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
        """Capture what `objective(model, leaves)` computes for one microbatch.

        `leaves` are the tensors of an example microbatch, used only for their metadata; the model may be on meta, or
        hold fake tensors. Raise `CaptureError`, naming the module, for what cannot be captured and for what would be
        lost.
        """
