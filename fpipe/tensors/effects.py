# SPDX-License-Identifier: Apache-2.0
"""The side effects of operators: what they write, cast and draw.

A dispatch mode sees every operator with its schema. Version counters would miss the statistics of batch normalization,
whose operators do not declare what they write; the table `UNDECLARED` names the positions of these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fpipe.torch_private import FakeTensor, OpOverload, TorchDispatchMode

UNDECLARED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "aten::native_batch_norm": (3, 4),
        "aten::cudnn_batch_norm": (3, 4),
        "aten::miopen_batch_norm": (3, 4),
    }
)
TRAINING_FLAG = 5  # the position of the flag; without it, these write nothing


def memory(tensor: Tensor) -> int:
    """Return an identifier of a live tensor's storage; a sparse tensor has none, and gets a unique one."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


class Effects:
    """The memory that operators write, their casts and their draws, noted as they are called.

    `observer` is called with each operator, too.
    """

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.cast: set[int] = set()
        self.drawn: dict[torch.device, None] = {}
        self.foreign = False
        self.unregistered = False
        self.observer: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] = lambda func, args, kwargs: None

    def note_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the call of an operator."""
        self.observer(func, args, kwargs)
        for argument in written_arguments(func, args, kwargs):
            self._write(argument)
        if func is torch.ops.aten._to_copy.default:
            self.cast.add(memory(args[0]))
        self.foreign |= torch.Generator in map(type, (*args, *kwargs.values()))

    def note_return(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note that it has returned."""
        self.drawn.update(dict.fromkeys(random_devices(func, args, kwargs, out)))

    def _write(self, argument: Any) -> None:
        for tensor in argument if isinstance(argument, tuple | list) else (argument,):
            if isinstance(tensor, FakeTensor):
                self.written.add(memory(tensor))
            elif isinstance(tensor, Tensor):
                self.unregistered = True


class EffectsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the effects of the operators dispatched under it, in any fake mode."""

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
    """Yield the arguments that a call of an operator writes to."""
    if not isinstance(func, OpOverload):
        return
    if is_collective(func) and func._schema.name.endswith("_"):  # its first argument receives, undeclared
        yield from args[0] if isinstance(args[0], list | tuple) else args[:1]
        return
    if not func._schema.is_mutable and func._schema.name not in UNDECLARED:
        return
    for position, declared in enumerate(func._schema.arguments):
        undeclared = position in UNDECLARED.get(func._schema.name, ()) and args[TRAINING_FLAG]
        if undeclared or (declared.alias_info is not None and declared.alias_info.is_write):
            yield args[position] if position < len(args) else kwargs.get(declared.name)


def is_collective(func: Any) -> bool:
    """Return whether an operator is one of torch.distributed's that write to their arguments and return a handle."""
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def random_devices(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> list[torch.device]:
    """Return the devices whose generators a call of an operator that returned `out` draws from."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    if _argument(func, "dropout_p", args, kwargs) == 0:
        return []
    tensors = out if isinstance(out, tuple | list) else (out,)
    return list(dict.fromkeys(tensor.device for tensor in tensors if isinstance(tensor, Tensor)))


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call passes for an operator's argument `name`; `None` if the operator has no such argument."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return args[position] if position < len(args) else kwargs.get(name, declared.default_value)
    return None
