# SPDX-License-Identifier: Apache-2.0
"""Calls that can be repeated: torch calls with other tensors, and *frames*, the calls of the user's code around them.

A frame is the call of a module, of the loss or of a checkpointed function. It can run in place of the torch calls in it
only if it can be called from outside: every tensor that it reads is an argument or module state; every tensor that it
makes and others use is returned or assigned to an attribute. Any other frame is opened: what is inside it runs.

Runs when a plan is made; `Invocation`, `tensors_at`, `require_constants` and `pick` also run in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, EllipsisType, FunctionType, MappingProxyType, MethodType, NoneType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.captured import Labels, Modes, Tensors, Value
from fpipe.record.fakes.assumed_values import is_torch_function
from fpipe.record.numbers import Number, to_python
from fpipe.tensors.settings import Settings, settings
from fpipe.tensors.torch_private import count_dispatch_modes
from fpipe.tensors.tree import COMMON_TYPES, NAMESPACE, PLAIN, flatten_all, flatten_closures

PART = "a part, which is never cut"
"""The seal of a call inside which the user wants no cut; unlike other sealed calls, it is opened."""
COMPARABLE = (bool, int, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The classes of arguments that are the same if they are equal and of one class."""
HARMLESS = (Tensor, *PLAIN, slice, range, type, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Size)


class Invocation:
    """A call that can be repeated with other tensors: a function and the tree of its arguments.

    - `reads`: the values of the tensors among the arguments, each once, and of the numbers (`fpipe.record.numbers`).
    - `opaque`: the class name of an argument in which tensors or state may hide; empty if there is none.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, value: Callable[[Tensor], Value]) -> None:
        self.function = function
        self.leaves, self.spec = flatten_closures((args, kwargs))
        reads, numbers = dict[Value, int](), set[int]()
        self.holes, self.opaque = list[tuple[int, int]](), ""
        for k, leaf in enumerate(self.leaves):
            is_tensor = isinstance(leaf, Tensor)
            if not is_tensor and type(leaf) in COMMON_TYPES:  # most of the others
                continue
            if not is_tensor and not self.opaque and _hides(leaf):
                self.opaque = type(leaf).__name__
            if is_tensor or isinstance(leaf, Number):
                read = reads.setdefault(value(leaf if is_tensor else leaf.tensor), len(reads))
                numbers |= set() if is_tensor else {read}
                self.holes.append((k, read))
                self.leaves[k] = None
        self.reads, self.numbers = tuple(reads), frozenset(numbers)
        given = [k for k, argument in enumerate(args) if isinstance(argument, Tensor | Number)]
        self.flat = len(given) == len(self.holes) and all(map(_is_immutable, (*args, *kwargs.values())))
        self.args = [None if k in given else one for k, one in enumerate(args)] if self.flat else []
        self.kwargs = kwargs if self.flat else {}
        self.places = [(k, read) for k, (_, read) in zip(given, self.holes, strict=False)]
        self.direct = self.flat and not kwargs and self.places == [(k, k) for k in range(len(args))]

    @property
    def form(self) -> Hashable:
        """Everything about a call of torch's but the tensors that it reads; `None` if it can't be compared."""
        function = self.function
        is_method = issubclass(Tensor, getattr(function, "__objclass__", NoneType))
        if self.numbers or not (is_method or is_torch_function(function)):
            return None
        try:
            return function, self.spec, tuple([_compare(leaf) for leaf in self.leaves]), tuple(self.holes)
        except TypeError:
            return None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Call the function with `tensors`, the values of `reads`."""
        if self.numbers:
            tensors = [to_python(one) if k in self.numbers else one for k, one in enumerate(tensors)]
        if self.direct:  # just tensors, each once
            return self.function(*tensors)
        if self.flat:  # tensors are arguments by position, and nothing else can change
            filled = self.args.copy()
            for k, read in self.places:
                filled[k] = tensors[read]
            return self.function(*filled, **self.kwargs)
        leaves = list(self.leaves)
        for leaf, read in self.holes:
            leaves[leaf] = tensors[read]
        args, kwargs = optree.tree_unflatten(self.spec, leaves)
        return self.function(*args, **kwargs)


def _compare(leaf: Any) -> Hashable:
    """Return an argument as a value that is equal only for arguments of the same kinds and bits.

    Raise `TypeError` for what cannot be compared.
    """
    kind = type(leaf)
    if kind is float:
        return kind, leaf.hex()
    if kind is slice:
        return kind, _compare(leaf.start), _compare(leaf.stop), _compare(leaf.step)
    if kind not in COMPARABLE:
        raise TypeError
    return kind, leaf


def _is_immutable(argument: Any) -> bool:
    """Return whether nobody can change a container in an argument: it is a leaf, `None`, or a tuple of these."""
    if type(argument) in COMMON_TYPES or argument is None:
        return True
    if type(argument) is tuple:
        return all(map(_is_immutable, argument))
    return optree.tree_structure(argument, namespace=NAMESPACE).is_leaf()


def _hides(leaf: Any) -> bool:
    """Return whether tensors or state may hide inside a leaf."""
    if isinstance(leaf, partial):
        return any(map(_hides, flatten_all((leaf.func, leaf.args, leaf.keywords))[0]))
    return not isinstance(leaf, HARMLESS)


def tensors_at(tree: Any) -> dict[int, Tensor]:
    """Return the tensor leaves of a tree, by leaf number."""
    if isinstance(tree, Tensor):
        return {0: tree}
    return {k: x for k, x in enumerate(flatten_all(tree)[0]) if isinstance(x, Tensor)}


def constants_at(tree: Any) -> dict[int, Any]:
    """Return the leaves that are numbers, strings or flags, by leaf number."""
    if isinstance(tree, Tensor):
        return {}
    return {k: x for k, x in enumerate(flatten_all(tree)[0]) if isinstance(x, PLAIN) and not isinstance(x, Number)}


def require_constants(tree: Any, expected: Mapping[int, Any], where: str) -> None:
    """Raise `InputError` unless a call returned the numbers, strings and flags of the capture; skip if it had none."""
    if expected and (got := constants_at(tree)) != expected:
        raise InputError(
            f"{where}: got {list(got.values())} among what it returned, expected {list(expected.values())} as at "
            "capture. What is not a tensor is part of the program. Return the same every time."
        )


def pick(tree: Any, picks: Sequence[int], where: str) -> Tensors:
    """Return the leaves `picks` of a call's result; raise `InputError` if one of them is not a tensor."""
    if isinstance(tree, Tensor) and len(picks) == 1:
        return (tree,)
    leaves = tensors_at(tree)
    if not all(k in leaves for k in picks):
        raise InputError(
            f"{where}: got tensors at the leaves {list(leaves)} of what it returned, expected tensors at {list(picks)} "
            "as at capture. Return the same structure every time."
        )
    return tuple([leaves[k] for k in picks])


class Attribute(NamedTuple):
    """A module attribute to which a forward assigned a tensor."""

    module: nn.Module
    name: str
    value: Value


@dataclass(eq=False)
class Frame:
    """A call of a module, the loss or a checkpointed function, over units `start` (inclusive) to `stop` (exclusive).

    - `path`, `kind`: the module's first name and its class; for a checkpointed function, those of the enclosing module.
    - `returned`: the values of the returned tensors, by leaf; `constants`: the numbers, strings and flags returned.
    - `assigned`: tensors assigned to attributes during the call; `touched`: all attributes assigned.
    - `first_tick`, `last_tick`: the range of torch calls, including those that left no unit.
    - `sealed`: the reason why no cut may go through it; empty if one may.
    - `checkpoint`: True for a checkpointed function; `how` are the settings of its checkpoint,
      `checkpointed` the function and the variables that it closed over when it was called. `reentrant`: True if
      torch would differentiate it by a backward inside the backward.
    - `branching`: True if it branches on data; `shapes` are then those of the values made in it.
    - `settings`: torch's settings when it began; `depth`: the number of dispatch modes then.
    - `stream`: the labels shared by all draws in it, if data decides what is drawn; set on the outermost such call.
    """

    path: str
    kind: type
    invocation: Invocation
    modes: Modes
    start: int
    first_tick: int
    checkpoint: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)
    checkpointed: tuple[Callable[..., Any] | None, Mapping[str, Any]] = (None, MappingProxyType({}))
    reentrant: bool = False
    branching: bool = False
    stream: Labels | None = None
    stop: int = 0
    last_tick: int = 0
    sealed: str = ""
    settings: Settings = field(default_factory=settings)
    depth: int = field(default_factory=count_dispatch_modes)
    returned: Mapping[int, Value] = field(default_factory=dict)
    constants: Mapping[int, Any] = field(default_factory=dict)
    shapes: Mapping[Value, torch.Size] = field(default_factory=dict)
    assigned: list[Attribute] = field(default_factory=list)
    touched: list[tuple[nn.Module, str]] = field(default_factory=list)
    inner: list[Frame] = field(default_factory=list)


def outermost_checkpoints(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield the frames of checkpointed functions that are not inside another one."""
    for frame in frames:
        yield from [frame] if frame.checkpoint else outermost_checkpoints(frame.inner)


def all_frames(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield all frames, each before the frames inside it."""
    for frame in frames:
        yield frame
        yield from all_frames(frame.inner)
