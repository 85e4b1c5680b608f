# SPDX-License-Identifier: Apache-2.0
"""The side effects of operators: writes to memory, casts, and random draws.

A dispatch mode sees every operator with its schema, which declares the arguments that it writes to. The operators of
batch normalization do not declare that they update the running statistics, and version counters miss it too; the table
`UNDECLARED` gives the positions of these arguments.

Collectives of torch.distributed in a forward, such as `dist.all_reduce`: a synchronous one is an ordinary torch call
that writes to its arguments. An asynchronous one returns a handle, which is not a tensor; and some collectives bypass
torch function modes. A module that calls either kind runs as a whole or not at all. A stage with collectives is never
recorded as a graph. Functional collectives are ordinary operators.

Runs when a pipeline is built, and when a new kind of batch first comes; `storage_id` also runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import CaptureError
from fpipe.tensors.placed import Placed, is_holder, storage_holder
from fpipe.tensors.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    as_group,
    is_dtensor,
)

Observer: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
"""Called with an operator and its positional and keyword arguments, before it runs."""

UNDECLARED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "aten::native_batch_norm": (3, 4),
        "aten::cudnn_batch_norm": (3, 4),
        "aten::miopen_batch_norm": (3, 4),
    }
)
TRAINING_FLAG = 5  # the position of the training flag; if false, the arguments in `UNDECLARED` are not written


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a live tensor's storage; for a sparse tensor, which has none, a unique number.

    For a DTensor, it is that of the local tensor.
    """
    if type(tensor) is not FakeTensor and is_holder(tensor):
        with DisableTorchFunction():  # a recorder does not know the local tensor
            return storage_id(storage_holder(tensor))
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


class Effects:
    """The side effects of the operators called so far.

    - `written`, `cast`: the memory that they wrote, and that of the tensors that they cast.
    - `drawn`: the devices whose generators they drew from, in order.
    - `foreign`: whether one took a `torch.Generator`. `unregistered`: whether one wrote to a tensor that is not fake.
    - `communicates`: whether one communicated with other processes.
    - `observer`: called with each operator and its arguments, inside `observe`.
    """

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.cast: set[int] = set()
        self.drawn: dict[torch.device, None] = {}
        self.foreign = False
        self.unregistered = self.communicates = False
        self.observer: Observer | None = None

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Call `observer` with each operator, inside this context."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None

    def note_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record an operator call that is about to run."""
        if self.observer is not None:
            self.observer(func, args, kwargs)
        if not has_effects(func):
            return
        for argument in written_arguments(func, args, kwargs):
            self._write(argument)
        if func is torch.ops.aten._to_copy.default:
            self.cast.add(storage_id(args[0]))
        self.foreign |= torch.Generator in map(type, (*args, *kwargs.values()))
        self.communicates |= is_communication(func)

    def note_return(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record the random draws of an operator call that returned `out`."""
        if has_effects(func):
            self.drawn.update(dict.fromkeys(random_devices(func, args, kwargs, out)))

    def _write(self, argument: Any) -> None:
        for tensor in argument if isinstance(argument, tuple | list) else (argument,):
            if isinstance(tensor, FakeTensor):
                self.written.add(storage_id(tensor))
            elif isinstance(tensor, Tensor):
                self.unregistered = True


class EffectsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the effects of operators, whatever the fake mode."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.effects = Effects()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.effects.note_call(func, args, kwargs)
        out = func(*args, **kwargs)
        self.effects.note_return(func, args, kwargs, out)
        return out


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator call writes to."""
    if not isinstance(func, OpOverload) or not _may_write(func):
        return
    if is_collective(func) and func._schema.name.endswith("_"):  # writes its first argument, undeclared
        yield from args[0] if isinstance(args[0], list | tuple) else args[:1]
        return
    for position, declared in enumerate(func._schema.arguments):
        undeclared = position in UNDECLARED.get(func._schema.name, ()) and args[TRAINING_FLAG]
        if undeclared or (declared.alias_info is not None and declared.alias_info.is_write):
            yield args[position] if position < len(args) else kwargs.get(declared.name)


@cache
def has_effects(func: Any) -> bool:
    """Return whether an operator may do more than return something: write, cast, draw random numbers, or communicate.

    >>> aten = torch.ops.aten
    >>> [has_effects(one) for one in (aten.mul.Tensor, aten.mul_.Tensor, aten._to_copy.default, aten.bernoulli.default)]
    [False, True, True, True]
    """
    if not isinstance(func, OpOverload):
        return True
    casts = func is torch.ops.aten._to_copy.default
    takes_generator = any("Generator" in str(one.type) for one in func._schema.arguments)
    return casts or takes_generator or _may_write(func) or is_random(func) or is_communication(func)


@cache
def _may_write(func: Any) -> bool:
    """Return whether an operator may write to some of its arguments."""
    schema = func._schema
    return schema.is_mutable or schema.name in UNDECLARED or (is_collective(func) and schema.name.endswith("_"))


def written_memory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the memory that an operator call writes to, as identified by `storage_id`."""
    leaves: list[Any] = optree.tree_leaves([*written_arguments(func, args, kwargs)])  # type: ignore[arg-type]
    return {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def has_handle(out: Any) -> bool:
    """Return whether a call returned the handle of an asynchronous collective."""
    return dist.is_available() and isinstance(out, dist.Work)


def is_collective(func: Any) -> bool:
    """Return whether an operator is a collective of torch.distributed that writes to its arguments: not functional."""
    return isinstance(func, OpOverload) and func.namespace == "c10d"


@cache
def is_communication(func: Any) -> bool:
    """Return whether an operator belongs to torch.distributed."""
    return isinstance(func, OpOverload) and ("c10d" in func.namespace or func.namespace == "_dtensor")


def operator_name(func: Any) -> str:
    """Return the name of an operator of torch.distributed without its namespace."""
    return str(func._schema.name.partition("::")[2].rstrip("_"))


def find_partners(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the processes between which an operator communicates, by their numbers in the job; none if it doesn't.

    That is the whole group of a collective, and both ends of a message.
    """
    if not is_communication(func):
        return ()
    given = {one.name: _argument(func, one.name, args, kwargs) for one in func._schema.arguments}
    group = as_group(given.get("process_group", given.get("group_name")))
    members = given.get("ranks", ()) if group is None else dist.get_process_group_ranks(group)
    tag = given.get("tag", given.get("tag_list"))
    if not members or tag is None or isinstance(tag, str):
        return tuple(members)
    ends = [given[name] for name in ("src", "dst") if name in given] or given.get("peer_list", range(len(members)))
    return tuple(sorted({dist.get_rank(), *[members[end] for end in ends]}))


@cache
def is_random(func: Any) -> bool:
    """Return whether an operator draws from a generator.

    torch tags some backwards of attention so, which draw nothing: they take the state that their forward drew from.
    """
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return all(one.name != "philox_seed" for one in func._schema.arguments)


def random_devices(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> list[torch.device]:
    """Return the devices whose generators an operator call drew from; `out` is what it returned."""
    if not is_random(func):
        return []
    if _argument(func, "dropout_p", args, kwargs) == 0:
        return []
    tensors = out if isinstance(out, tuple | list) else (out,)
    return list(dict.fromkeys(tensor.device for tensor in tensors if isinstance(tensor, Tensor)))


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of an operator call's argument `name`, or its default; `None` if there is no such argument."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return args[position] if position < len(args) else kwargs.get(name, declared.default_value)
    return None


def require_same_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `CaptureError` if an operator draws random numbers for a DTensor that is not whole on every process.

    Each process would draw the same numbers, for different parts.
    """
    placed = [Placed.of(one) for one in (*args, *kwargs.values()) if is_dtensor(one)]
    parts = [one for one in placed if not (one.is_complete and one.mesh.device_type == "cpu")]
    if parts and is_random(func):
        if _argument(func, "dropout_p", args, kwargs) == 0:
            return
        raise CaptureError(
            f"{func}: got random numbers drawn for {parts[0]}, expected draws for plain tensors, which follow from the "
            "step's seed. Set dropout to 0, or draw where the tensor is plain (use_local_output=True)."
        )
