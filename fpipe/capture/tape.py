# SPDX-License-Identifier: Apache-2.0
"""What a recording of a model's run consists of: torch calls in order, and the module calls around them.

A *tape* is a straight line of units, one per torch call, with *spans* over it: the calls of modules, of the loss, and
of checkpointed functions, nested as they were. Either can be played: a unit repeats one torch call, a span calls what
was called, as it is, so that everything inside it happens as its author wrote it.

A span stands for its units only if it can be called from outside: every tensor that it reads is an argument, or state
that is put in place before; every tensor that it makes and others use is returned, or assigned to an attribute. One
that cannot is opened, and what it consists of is played instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fpipe.capture.closures import apart
from fpipe.capture.contract import Labels, Tensors, Unit, Value
from fpipe.capture.modes import Casts, Modes
from fpipe.capture.questions import Answer, Told
from fpipe.errors import InputError
from fpipe.tree import PLAIN, taken_apart

HARMLESS = (Tensor, *PLAIN, slice, range, type, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Size)


class Invocation:
    """A call that can be repeated with other tensors: a function, and the tree of its arguments.

    - `reads`: the values of the tensors among the arguments, each once.
    - `opaque`: the class of an argument in which tensors or state may hide; empty if there is none.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, value: Callable[[Tensor], Value]) -> None:
        self.function = function
        self.leaves, self.spec = apart((args, kwargs))
        tensors = {k: value(leaf) for k, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        self.reads = tuple(dict.fromkeys(tensors.values()))
        self.holes = [(k, self.reads.index(v)) for k, v in tensors.items()]
        hiding = [type(leaf).__name__ for leaf in self.leaves if _hides(leaf)]
        self.opaque = hiding[0] if hiding else ""
        for k in tensors:
            self.leaves[k] = None
        flat = not kwargs and all(isinstance(argument, Tensor) for argument in args)
        self.direct = flat and self.holes == [(k, k) for k in range(len(args))]  # just tensors, each once

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Call the function with `tensors`, the values of `reads`."""
        if self.direct:
            return self.function(*tensors)
        leaves = list(self.leaves)
        for leaf, read in self.holes:
            leaves[leaf] = tensors[read]
        args, kwargs = optree.tree_unflatten(self.spec, leaves)
        return self.function(*args, **kwargs)


def _hides(leaf: Any) -> bool:
    """Whether tensors or state may hide in an argument that was not taken apart."""
    if isinstance(leaf, partial):
        return any(map(_hides, taken_apart((leaf.func, leaf.args, leaf.keywords))[0]))
    return not isinstance(leaf, HARMLESS)


def tensors_at(tree: Any) -> dict[int, Tensor]:
    """The tensors of a tree, by the number of the leaf."""
    if isinstance(tree, Tensor):
        return {0: tree}
    return {k: x for k, x in enumerate(taken_apart(tree)[0]) if isinstance(x, Tensor)}


def constants_at(tree: Any) -> dict[int, Any]:
    """The numbers, strings and flags of a tree, by the number of the leaf."""
    if isinstance(tree, Tensor):
        return {}
    return {k: x for k, x in enumerate(taken_apart(tree)[0]) if isinstance(x, PLAIN)}


def require_constants(tree: Any, expected: Mapping[int, Any], where: str) -> None:
    """Raise `InputError` unless what a call returned besides tensors is what it was at capture."""
    if expected and (got := constants_at(tree)) != expected:
        raise InputError(
            f"{where}: got {list(got.values())} among what it returned, expected {list(expected.values())} as at "
            "capture: values that are no tensors are part of the program. Return the same ones every time."
        )


def pick(tree: Any, picks: Sequence[int], where: str) -> Tensors:
    """The tensors at these leaves of what a call returned."""
    if isinstance(tree, Tensor) and len(picks) == 1:
        return (tree,)
    leaves = tensors_at(tree)
    if not all(k in leaves for k in picks):
        raise InputError(
            f"{where}: got tensors at the leaves {list(leaves)} of what it returned, expected some at {list(picks)} as "
            "at capture. Return the same structure every time."
        )
    return tuple([leaves[k] for k in picks])


class Attribute(NamedTuple):
    """A tensor that a forward assigned to an attribute of a module."""

    module: nn.Module
    name: str
    value: Value


@dataclass(eq=False)
class Span:
    """A call whose torch calls are the units `start` to `stop`, the latter excluded.

    - `path`, `kind`: the module's first name and its class; of a checkpointed function, those of the module around it.
    - `returned`: the values of the returned tensors, by leaf; `constants`: what else was returned.
    - `assigned`: tensors that were assigned to attributes meanwhile; `touched`: all attributes that were.
    - `ticks`: from which torch call to which, those that left no unit included.
    - `sealed`: why it cannot be opened; empty if it can. `checkpoint`: whether it is a checkpointed function;
      `reentrant`: whether torch would differentiate it by a backward inside the backward.
    - `branching`: whether what happens in it depends on data.
    - `stream`: how all that is drawn in it is keyed, if that depends on data; `None` inside such a call, or outside.
    """

    path: str
    kind: type
    invocation: Invocation
    modes: Modes
    start: int
    first_tick: int
    checkpoint: bool = False
    reentrant: bool = False
    branching: bool = False
    stream: Labels | None = None
    stop: int = 0
    last_tick: int = 0
    sealed: str = ""
    returned: Mapping[int, Value] = field(default_factory=dict)
    constants: Mapping[int, Any] = field(default_factory=dict)
    assigned: list[Attribute] = field(default_factory=list)
    touched: list[tuple[nn.Module, str]] = field(default_factory=list)
    inner: list[Span] = field(default_factory=list)


class Returned(NamedTuple):
    """What a torch call returned, in which modes it was made, and when the next one was."""

    invocation: Invocation
    modes: tuple[bool, Casts]
    out: Any
    last: int


class Draw(NamedTuple):
    """A torch call that draws random numbers: when, which function, and how it is keyed."""

    tick: int
    function: Any
    label: int
    devices: tuple[torch.device, ...]


@dataclass(frozen=True)
class Tape:
    """A recorded run.

    - `units`: the torch calls; `invocations`, `modes`, `ticks`: of each, the function and its arguments, what else it
      depends on, and from when to when it ran.
    - `returned`: by tick, what each torch call returned that ran inside no other, also those that left no unit.
    - `casts`: which of the values that it reads each unit casts to another dtype, as autocast does.
    - `spans`: the outermost spans. `streams`: those of all spans that draw from a stream.
    - `draws`: what drew random numbers, in order, outside of streams.
    - `told`: what read values and was answered, in order.
    - `calls`: per function that was answered, the ticks of all its calls; `outside`: per function that draws, the ticks
      of its calls outside of streams.
    - `hooked`: positions of units from which on tensors were saved through hooks, as checkpoints do. Not ticks: between
      the hooks and the first unit there may be calls that left none.
    - `fused`: ticks at which torch's modules took their fast path, which they do only where no mode is on.
    - `rewriters`: positions of the units that change buffers, and the memories of these.
    - `fakes`: the tensors of the run, by value.
    """

    units: tuple[Unit, ...]
    invocations: Mapping[Unit, Invocation]
    modes: Mapping[Unit, Modes]
    ticks: Mapping[Unit, tuple[int, int]]
    returned: Mapping[int, Returned]
    casts: Mapping[Unit, frozenset[Value]]
    spans: tuple[Span, ...]
    streams: tuple[Span, ...]
    draws: tuple[Draw, ...]
    told: tuple[Told, ...]
    calls: Mapping[Any, Sequence[int]]
    outside: Mapping[Any, Sequence[int]]
    hooked: Sequence[int]
    fused: Sequence[int]
    rewriters: Mapping[int, frozenset[int]]
    fakes: Mapping[Value, Tensor]

    def drawn(self, first: int, last: int) -> dict[tuple[Any, int], Draw]:
        """Return what draws from tick `first` to `last`, by function and which of its calls in that time it is.

        What draws from a stream is left out, and so are the calls made there.
        """
        found = [draw for draw in self.draws if first <= draw.tick < last]
        return {(draw.function, _number(self.outside[draw.function], draw.tick, first)): draw for draw in found}

    def stream(self, tick: int) -> Labels | None:
        """Return the stream that a call at `tick` draws from, if any."""
        return next((one.stream for one in self.streams if one.first_tick <= tick < one.last_tick), None)

    def counted(self, first: int, last: int) -> dict[Any, int]:
        """Return how often each function that draws is called from tick `first` to `last`, outside of streams."""
        functions = dict.fromkeys(draw.function for draw in self.draws if first <= draw.tick < last)
        return {function: _number(self.outside[function], last, first) for function in functions}

    def answered(self, first: int, last: int) -> dict[tuple[Any, int], Answer]:
        """Return the answers given from tick `first` to `last`, by function and which of its calls in that time."""
        found = [told for told in self.told if first <= told.tick < last]
        return {(told.function, _number(self.calls[told.function], told.tick, first)): told.answer for told in found}


def _number(ticks: Sequence[int], tick: int, first: int) -> int:
    """Return how many of these ticks are from `first` to `tick`, the latter excluded."""
    return bisect_left(ticks, tick) - bisect_left(ticks, first)


def checkpointed(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the outermost checkpointed functions."""
    for span in spans:
        yield from [span] if span.checkpoint else checkpointed(span.inner)
