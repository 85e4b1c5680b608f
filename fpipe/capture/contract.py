# SPDX-License-Identifier: Apache-2.0
"""What a front end delivers: a model as units and the values between them.

Problem. Tracers differ in what they see; everything behind them should not.

Idea. A captured model is a straight line of *units*, in the order in which one device runs them. A unit reads and makes
*values*, which are tensors named by integers. Parameters, buffers, leaves of the batch and constants are values too,
that come from a *source* instead of a unit; so a tied parameter is simply a value with several readers. A stage will be
a contiguous run of units.

A front end may also say how to fuse a run of units into one callable; `interpret` is the plain way.

Invariants. Units are in execution order: every value is made before it is read. A unit's `call` takes the values of
`reads` and returns a tuple with those of `makes`; calling it changes no state but the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe import random
from fpipe.capture.losses import Objective
from fpipe.tree import Structure

Value: TypeAlias = int
Tensors: TypeAlias = tuple[Tensor, ...]


class Parameter(NamedTuple):
    """A value that is the model's parameter `name` (its first name)."""

    name: str


class Buffer(NamedTuple):
    """A value that is the model's buffer `name` (its first name)."""

    name: str


class Batch(NamedTuple):
    """A value that is tensor leaf number `leaf` of (inputs, targets)."""

    leaf: int


class Constant(NamedTuple):
    """A value that the model made itself, or holds without registering it."""

    tensor: Tensor


Source: TypeAlias = Parameter | Buffer | Batch | Constant


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of the model that is never cut.

    `path` is its call path in the uncut model; `does` says what it does, so that models can be told apart. `scope`,
    given the same values as `call` (`None` for values that were made on the way), is a context in which a backward
    through the unit must run (a checkpointed module looks up its parameters again then).
    """

    path: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    call: Callable[..., Tensors]
    scope: Callable[..., AbstractContextManager[None]] | None = None
    does: str = ""


class Function(Protocol):
    """A run of units as one callable: `function(key, *inputs) -> outputs`."""

    def __call__(self, key: int, *inputs: Tensor) -> Tensors:
        """Run the units; random ones draw by `key`."""


class Labels(NamedTuple):
    """How a random unit is keyed: its label, and the devices whose generators it draws from."""

    label: int
    devices: tuple[torch.device, ...]


Fuse: TypeAlias = Callable[[Sequence[Unit], Mapping[Unit, Labels], tuple[Value, ...], tuple[Value, ...]], "Function"]


def interpret(
    units: Sequence[Unit], random_units: Mapping[Unit, Labels], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Function:
    """A run of units, called one after the other; a value is let go of after its last use."""
    last = {value: index for index, unit in enumerate(units) for value in (*unit.reads, *unit.makes)}
    last.update(dict.fromkeys(outputs, len(units)))
    dead = [tuple(value for value, end in last.items() if end == index) for index in range(len(units))]

    def run(key: int, *tensors: Tensor) -> Tensors:
        values = dict(zip(inputs, tensors, strict=True))
        for unit, finished in zip(units, dead, strict=True):
            if unit in random_units:
                for device in random_units[unit].devices:
                    random.reseed(key, random_units[unit].label, device)
            values.update(zip(unit.makes, unit.call(*[values[value] for value in unit.reads]), strict=True))
            for value in finished:
                del values[value]
        return tuple(values[value] for value in outputs)

    return run


class Call(NamedTuple):
    """One call of a module: what runs inside it are the units `start` to `stop`, the latter excluded.

    - `path`: the module's name; `kind`: its class.
    - `sealed`: why no stage may begin inside it; empty if one may.
    """

    path: str
    kind: type
    start: int
    stop: int
    sealed: str = ""


@dataclass(frozen=True)
class Captured:
    """A model, its loss, and one example microbatch, as units and values.

    - `sources`: the values that no unit makes.
    - `loss`: the value of the loss, already divided by the number of microbatches; `None` if none was asked for.
    - `outputs`, `structure`: the tensors that the model returns, and the tree that they are leaves of.
    - `calls`: the calls of modules, each before those inside it.
    - `fakes`: a fake tensor for every source; `mode`: the fake mode that they live in.
    - `trainable`: names of the parameters that require a gradient; `backward`: whether gradients are computed at all.
      In evaluation they are not, but the parameters still require one, since kernels are chosen by that too.
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
    fuse: Fuse = field(default=interpret)
    backward: bool = True


class FrontEnd(Protocol):
    """How a model is captured."""

    def __call__(self, model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
        """Capture what `objective(model, leaves)` computes for one microbatch.

        `leaves` are the tensors of an example microbatch, for their metadata only; the model may be on meta, or hold
        fake tensors. Raises `CaptureError`, naming the module, for what cannot be captured and for what would be lost.
        """


@contextmanager
def scopes(units: Iterable[Unit], values: Mapping[Value, Tensor]) -> Iterator[None]:
    """The contexts of all units that have one; `values` are those that the run was given, parameters among them."""
    with ExitStack() as stack:
        for unit in units:
            if unit.scope is not None:
                stack.enter_context(unit.scope(*[values.get(value) for value in unit.reads]))
        yield
