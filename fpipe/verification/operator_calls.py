# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's operators: what tells two of them apart.

Names stand for an operator with its in-place and `out=` variants; arguments count if they differ from their defaults.

Runs when `prove` is called.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from ctypes import string_at
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fpipe.tensors.tree import list_tensors

IN_PLACE_VIEWS: Final = frozenset(
    ("detach", "transpose", "t", "squeeze", "unsqueeze", "as_strided", "swapaxes", "swapdims", "set")
)
"""Operators whose in-place variants write no element."""
EXACT: Final = 2**53
"""The largest integer below which floats hold all."""


class OperatorSignature(NamedTuple):
    """Everything about an operator that no call changes: names and defaults of arguments, and which it writes."""

    name: str
    overload: str
    names: tuple[str, ...]
    writes: tuple[str, ...]
    outs: frozenset[str]
    defaults: Mapping[str, Any]
    draws: bool


@cache  # reading a schema takes longer than the rest of a call
def _signature(func: Any) -> OperatorSignature:
    declared, overload = func._schema.arguments, func._schema.overload_name
    space, _, name = func._schema.name.partition("::")
    writes = [one for one in declared if one.alias_info is not None and one.alias_info.is_write]
    if name.removesuffix("_") in IN_PLACE_VIEWS:
        writes = []
    if any(one.is_out for one in writes):
        overload = overload.replace("_out", "").replace("out", "")
    if writes and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return OperatorSignature(
        name if space == "aten" else func._schema.name,
        overload,
        tuple([one.name for one in declared]),
        tuple([one.name for one in writes]),
        frozenset(one.name for one in writes if one.is_out),
        {one.name: one.default_value for one in declared if one.has_default_value()},
        torch.Tag.nondeterministic_seeded in func.tags,
    )


class OperatorCall(NamedTuple):
    """A call of an operator: its name without namespace and in-place mark, overload, and arguments by name.

    - `written`: the tensors that it writes; `outs`: the names of arguments that it only writes.
    - `draws`: whether it draws random numbers. `commutes`: whether its two operands may be exchanged. `rounds`: whether
      it rounds numbers to float32.
    """

    name: str
    overload: str
    given: Mapping[str, Any]
    written: tuple[Tensor, ...]
    outs: frozenset[str]
    defaults: Mapping[str, Any]
    draws: bool
    commutes: bool
    rounds: bool

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperatorCall:
        """Return the call of an operator with these arguments."""
        known = _signature(func)
        given = {**dict(zip(known.names, args, strict=False)), **kwargs}
        written = tuple(list_tensors([given.get(name) for name in known.writes]))
        a, b = given.get("self"), given.get("other")
        commutes = False
        if known.name == "add" and given.get("alpha", 1) == 1 and isinstance(a, Tensor) and isinstance(b, Tensor):
            commutes = (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        rounds = known.name in ("mul", "div", "add", "sub") and isinstance(a, Tensor) and a.is_floating_point()
        return cls(
            known.name,
            {"Scalar": "Tensor", "": "Tensor" if "other" in given else "default"}.get(known.overload, known.overload),
            given,
            written,
            known.outs,
            known.defaults,
            known.draws and given.get("dropout_p", known.defaults.get("dropout_p")) != 0,
            commutes,
            rounds and a is not None and a.itemsize <= 4,
        )

    def parts(self) -> list[OperatorCall]:
        """Return the calls that an operator on lists stands for, one for each tensor that it writes; else this one."""
        if self.name != "_foreach_add" or self.overload != "List" or self.given.get("alpha", 1) != 1:
            return [self] * max(1, len(self.written))
        pairs = zip(self.given["self"], self.given["other"], strict=True)
        return [OperatorCall.of(torch.ops.aten.add_.Tensor, pair, {}) for pair in pairs]

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments that tell calls apart: not those with their default, and no layout of the result."""
        for name, value in self.given.items():
            default = self.defaults.get(name, self)
            same = type(default) is type(value) and not isinstance(value, Tensor) and default == value
            kept = name == "memory_format" and value is torch.preserve_format
            if name not in self.outs and name not in ("keepdim", "output_mask") and not (same or kept):
                yield name, value


def spell_number(number: float) -> str:
    """Return a number as text, the same for equal numbers; an integer that no float equals, as it is."""
    return repr(float(number)) if abs(number) <= EXACT or isinstance(number, float) else repr(number)


def round_number(described: Any) -> Any:
    """Return a number as float32 has it; other arguments as they are."""
    if type(described) is tuple and described[:1] == ("number",):
        return "number", repr(ctypes.c_float(float(described[1])).value)
    return described


def read_generator(given: Mapping[str, Any]) -> bytes:
    """Return the state of the generator that an operator draws from."""
    generator = given.get("generator")
    state = (torch.default_generator if generator is None else generator).get_state()
    return hashlib.sha256(string_at(state.data_ptr(), state.numel())).digest()
