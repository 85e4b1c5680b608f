# SPDX-License-Identifier: Apache-2.0
"""Compute expressions beside values: what every tensor is, as operators applied to inputs.

Problem. Equal bits on one batch show nothing about another batch.

Idea. While torch runs, each operator's results get an expression: the operator, its other arguments, and the
expressions of its operands. Equal expressions have one number (hash-consing). So two computations whose results have
equal numbers apply the same operators to the same inputs in the same order, whatever the inputs' values are.

A tensor is a window into memory. So memory has the expressions, as stretches of bytes, each a part of one operator's
result, or of an input. A view is another window; a copy moves stretches; what is written in place is the result of the
operator that wrote it. Inputs, which no operator made, are known by their bytes: no two of them may be equal.

What depends on no input is a constant, and known by its bytes, too.

Lemmas, of operators that compute the same bits: sums of two operands in either order; a number, and a tensor without
dimensions that holds it, rounded where the operator rounds it; reductions that keep a dimension of size 1, and those
that don't; an operator and its in-place and `out=` variants; an operator on a list and one for each of its elements; a
power with exponent 1 and its base; results of a backward, whichever others it is asked for; the gradients of both
biases of a recurrent layer. Nothing else is assumed to be equal.

Runs when `prove` is called.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import string_at
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fpipe.tensors.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, active_fake_mode
from schedules.status import say

Expression: TypeAlias = int
"""The number of an expression; equal ones have the same."""
READ_METADATA: Final = frozenset(
    ("ones_like", "zeros_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operators that read the metadata of their operand only."""
FILL: Final = frozenset(("fill", "zero", "copy", "uniform", "normal", "bernoulli", "random", "exponential"))
"""Operators that overwrite their operand without reading it."""
FORMATS: Final = MappingProxyType({torch.float64: "d", torch.float32: "f", torch.int64: "q"})
"""How numbers are stored."""
IN_PLACE_VIEWS: Final = frozenset(
    ("detach", "transpose", "t", "squeeze", "unsqueeze", "as_strided", "swapaxes", "swapdims")
)
"""Operators whose in-place variants write no element."""
COPIES: Final = frozenset(("clone", "_to_copy", "to", "lift_fresh_copy"))
NUMBERS: Final = frozenset((*COPIES, "scalar_tensor", "full"))
"""Operators whose result, without dimensions, is the number that they are given."""
TWINS: Final = MappingProxyType({("mkldnn_rnn_layer_backward", 4): 3})
"""The results of operators that equal an earlier one: the gradients of both biases of a recurrent layer."""
TOLD: Final = 100
"""After how many operators a proof says how far it is."""
EXACT: Final = 2**53
"""The largest integer below which floats hold all."""
MOST_RUNS: Final = 4096
"""The most separate parts of memory that are followed through a copy."""
LARGEST_FOLDED: Final = 4096
"""The most elements of a constant that is known by its bytes."""


class ByteRange(NamedTuple):
    """Bytes from `start` to `end` of some memory: those from `at` on of an operator's result, or of an input.

    `source` is the result's expression, or for an input -1 and below.
    """

    start: int
    end: int
    source: int
    at: int


class ByteWindow(NamedTuple):
    """Bytes of an operator's result, or of an input, from `at` on: `dims` has strides and sizes, the smallest first."""

    source: int
    at: int
    dims: tuple[tuple[int, int], ...]


class Expressions(TorchDispatchMode):
    """The expressions of everything that is computed inside of it.

    - `numbers`: the number of each expression, by what it is; `operators`: how many operators ran.
    - `memory`: the stretches of each storage, by its address, while it lives. `inputs`: the bytes of each input.
    - `scalars`: the expressions that are numbers. `constants`, `variables`: the inputs, by number, that depend on
      nothing, and those that are declared.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.numbers: dict[Any, Expression] = {}
        self.operators = 0
        self.memory: dict[int, tuple[StorageWeakRef, list[ByteRange]]] = {}
        self.inputs: list[bytes | None] = []
        self.scalars: dict[Expression, Any] = {}
        self.constants, self.variables = set[int](), set[int]()

    def declare(self, tensors: Iterable[Tensor]) -> None:
        """Declare that these tensors are inputs; other memory that no operator wrote is a constant."""
        for tensor in tensors:
            self.variables.update(-one.source - 1 for one in self._stretches(tensor) if one.source < 0)
        self.constants -= self.variables

    def value(self, tensor: Tensor) -> Expression:
        """Return the expression of a tensor: of its bytes, and how they are laid out."""
        geometry = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
        return self._number("value", self._content(tensor), *geometry)

    def difference(self, mine: Expression, theirs: Expression) -> str:
        """Return where two expressions begin to differ: operators from the result on, and the two that differ."""
        meanings = dict(enumerate(self.numbers))
        path, seen = list[str](), set[tuple[int, int]]()

        def differ(a: Expression, b: Expression) -> str:
            if a == b or (a, b) in seen:
                return ""
            seen.add((a, b))
            first, second = meanings[a], meanings[b]
            ours, others = (operands(one) for one in (first, second))
            if first[:1] == ("add",) == second[:1]:
                ours, others = [x for x in ours if x not in others], [x for x in others if x not in ours]
                ours.sort(key=lambda one: name(meanings, one))
                others.sort(key=lambda one: name(meanings, one))
            if first[0] != second[0] or len(ours) != len(others) or ours == others:
                return f"{show(first)}, and there {show(second)}"
            path.append(first[0])
            found = next(filter(None, (differ(x, y) for x, y in zip(ours, others, strict=True))), "")
            if not found:
                path.pop()
            return found

        found = differ(mine, theirs)
        return " of ".join([found, *[one for one in path[::-1] if one != "value"][:6]])

    def _number(self, *key: Any) -> Expression:
        return self.numbers.setdefault(key, len(self.numbers))

    def _stretches(self, tensor: Tensor) -> list[ByteRange]:
        """Return the stretches of a tensor's memory; memory that no operator wrote is an input."""
        storage = tensor.untyped_storage()
        known = self.memory.get(storage._cdata)
        if known is None or known[0].expired():  # type: ignore[no-untyped-call]
            size = storage.nbytes()
            self.inputs.append(None if isinstance(tensor, FakeTensor) else _read_bytes(storage))
            known = self._hold(tensor, [ByteRange(0, size, -len(self.inputs), 0)])
            self.constants.add(len(self.inputs) - 1)
        return known[1]

    def _hold(self, tensor: Tensor, stretches: list[ByteRange]) -> tuple[StorageWeakRef, list[ByteRange]]:
        storage = tensor.untyped_storage()
        self.memory[storage._cdata] = StorageWeakRef(storage), stretches  # type: ignore[no-untyped-call]
        return self.memory[storage._cdata]

    def _content(self, tensor: Tensor) -> tuple[ByteWindow, ...]:
        """Return what is in a tensor's window: inputs by their bytes."""
        dims, around = _dims(tensor), self._around(tensor)
        if around is not None and dims is not None and not self._is_known(around):
            first = _first(tensor)
            return (self._window(around._replace(start=first, at=around.at + first - around.start), dims),)
        return _join([self._window(one, ((1, one.end - one.start),)) for one in self._read(tensor)])

    def _window(self, part: ByteRange, dims: tuple[tuple[int, int], ...]) -> ByteWindow:
        if part.source >= 0:
            return ByteWindow(part.source, part.at, dims)
        k = -part.source - 1
        known = self.inputs[k]
        if known is None:
            return ByteWindow(self._number("input", k), part.at, dims)
        found = known[part.at : part.at + part.end - part.start]
        return ByteWindow(self._number("input", hashlib.sha256(found).digest()), 0, dims)

    def _around(self, tensor: Tensor) -> ByteRange | None:
        """Return the stretch that holds all of a tensor; `None` if several do."""
        first, end = _first(tensor), _end(tensor)
        return next((one for one in self._stretches(tensor) if one.start <= first < end <= one.end), None)

    def _is_known(self, part: ByteRange) -> bool:
        """Return whether a stretch is an input that is known by its bytes."""
        return part.source < 0 and self.inputs[-part.source - 1] is not None

    def _sources(self, tensor: Tensor) -> set[int]:
        """Return what a tensor's elements are parts of."""
        around = self._around(tensor)
        return {one.source for one in self._read(tensor)} if around is None else {around.source}

    def _read(self, tensor: Tensor) -> list[ByteRange]:
        """Return the stretches of a tensor's elements, by address, without what is between them."""
        known, found, place = self._stretches(tensor), list[ByteRange](), 0
        for start, end in _runs(tensor):
            found += [one._replace(start=one.start + place, end=one.end + place) for one in _cut(known, start, end)]
            place += end - start
        return _cut(found, 0, place)

    def _write(self, tensor: Tensor, new: Sequence[ByteRange]) -> None:
        """Put stretches in the place of a tensor's elements."""
        known, place = self._stretches(tensor), 0
        for start, end in _runs(tensor):
            before = [one._replace(end=min(one.end, start)) for one in known if one.start < start]
            after = [
                ByteRange(max(one.start, end), one.end, one.source, one.at + max(0, end - one.start))
                for one in known
                if one.end > end
            ]
            part = _cut(new, place, place + end - start)
            middle = [one._replace(start=start + one.start, end=start + one.end) for one in part]
            known[:] = [*before, *middle, *after]
            place += end - start

    def _assign(self, tensor: Tensor, expression: Expression) -> None:
        """Record that an operator has written a tensor."""
        self._write(tensor, [ByteRange(0, sum(end - start for start, end in _runs(tensor)), expression, 0)])

    def _move(self, source: Any, target: Tensor) -> None:
        """Record that a tensor was copied: its elements as they are, or what a conversion or rearrangement makes."""
        kinds = [(x.dtype, x.shape, _order(x), x.is_conj(), x.is_neg()) for x in (source, target)]
        if kinds[0] == kinds[1] and _count_runs(source) <= MOST_RUNS:
            self._write(target, self._read(source))
        else:
            geometry = target.dtype, tuple(target.shape), target.stride(), target.is_conj(), target.is_neg()
            self._assign(target, self._number("copy", *geometry, (self._describe(source),), 0))

    def _describe(self, value: Any) -> Any:
        """Return what an argument is, as a part of an expression."""
        if isinstance(value, Tensor):
            return self._scalar(value) or ("tensor", self.value(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._describe, value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return "number", _spell(value)
        return value if isinstance(value, str | bool) or value is None else (type(value).__name__, str(value))

    def _scalar(self, tensor: Tensor) -> Any:
        """Return the number that a tensor without dimensions is known to hold; `None` for other tensors."""
        if tensor.dim() or tensor.device.type != "cpu" or tensor.dtype not in FORMATS:
            return None
        (one,) = self._read(tensor)
        if one.source >= 0:
            return self.scalars.get(one.source)
        known = self.inputs[-one.source - 1]
        if -one.source - 1 in self.variables or known is None:
            return None
        data = known[one.at : one.at + tensor.element_size()]
        return "number", _spell(struct.unpack(FORMATS[tensor.dtype], data)[0])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; record the expressions of its results, and of what it wrote."""
        kwargs = kwargs or {}
        if active_fake_mode() is not None or self._is_recorded(types, args, kwargs):  # a model is recorded
            return func(*args, **kwargs)
        self.operators += 1
        if self.operators % TOLD == 0:
            say(f"{self.operators} operators, {len(self.numbers)} expressions")
        call = OperatorCall.of(func, args, kwargs)
        keys = [self._key(one) for one in call.parts()]
        is_constant = self._depends_on_nothing(call)
        result = func(*args, **kwargs)
        values = self._compute(func, call, args, kwargs, result) if is_constant else ()
        if call.written:
            for k, (tensor, own) in enumerate(zip(call.written, keys, strict=True)):
                if call.name == "copy":
                    self._move(call.given["src"], tensor)
                elif not (is_constant and self._fold(tensor, tensor)):
                    self._assign(tensor, self._number(*own, 0 if len(keys) > 1 else k))
            return result
        known = {one.untyped_storage()._cdata for one in _tensors((*args, *kwargs.values()))}
        for k, tensor in enumerate(result if isinstance(result, tuple | list) else [result]):
            if (
                isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known
            ):  # else it is a view, or a result that is returned twice
                if not (values and self._fold(tensor, values[k])):
                    self._make(call, keys[0], k, tensor)
                known.add(tensor.untyped_storage()._cdata)
        return result

    def _is_recorded(self, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator has fakes of another mode."""
        if not any(issubclass(kind, FakeTensor) for kind in types):
            return False
        fakes = [one for one in _tensors((*args, *kwargs.values())) if isinstance(one, FakeTensor)]
        return any(one.fake_mode is not self.mode for one in fakes)

    def _depends_on_nothing(self, call: OperatorCall) -> bool:
        """Return whether the results of an operator are the same for all inputs."""
        if call.draws or call.name.startswith(("empty", "new_empty")):
            return False
        read = [value for name, value in call.given.items() if not (name == "self" and call.name in FILL)]
        return call.name in READ_METADATA or all(map(self._is_constant, _tensors(read)))

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._scalar(tensor) is not None or all(
            -source - 1 in self.constants for source in self._sources(tensor)
        )

    def _compute(
        self, func: Any, call: OperatorCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Sequence[Any]:
        """Return the results of an operator on constants; of fakes, those on the values of these. Empty if unknown."""
        made = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(one, FakeTensor) for one in made):
            return made
        if call.written:
            return ()
        known = {id(one): self._value_of(one, call) for one in _tensors((*args, *kwargs.values()))}
        if any(one is None for one in known.values()):
            return ()
        given: Any = (tuple(args), dict(kwargs))
        given = optree.tree_map(lambda one: known.get(id(one), one), given, none_is_leaf=True)
        found = func(*given[0], **given[1])
        return found if isinstance(found, tuple | list) else (found,)

    def _value_of(self, tensor: Tensor, call: OperatorCall) -> Tensor | None:
        """Return a constant with its value; `None` for a large one, and for one with gaps in its memory."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if tensor.numel() > LARGEST_FOLDED:
            return None
        if call.name in READ_METADATA:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        number = self._scalar(tensor)
        if number is not None:
            return torch.tensor(float(number[1]), dtype=tensor.dtype)
        dims = _dims(tensor)
        if dims is None or len(dims) > 1:
            return None
        parts = [(self.inputs[-one.source - 1], one) for one in self._read(tensor)]
        data = b"".join([known[one.at : one.at + one.end - one.start] for known, one in parts if known is not None])
        return torch.frombuffer(bytearray(data), dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _fold(self, tensor: Tensor, value: Tensor) -> bool:
        """Record that a tensor is a constant, known by the bytes of its value; return false if it is large."""
        if tensor.numel() > LARGEST_FOLDED or not tensor.numel() or isinstance(value, FakeTensor):
            return False
        runs, start = _runs(value), value.data_ptr() - int(value.storage_offset()) * value.element_size()
        self.constants.add(len(self.inputs))
        data = b"".join(string_at(start + first, end - first) for first, end in runs)
        self.inputs.append(data)
        if tensor.untyped_storage()._cdata not in self.memory or len(data) == tensor.untyped_storage().nbytes():
            self._hold(tensor, [ByteRange(0, tensor.untyped_storage().nbytes(), -len(self.inputs), 0)])
        self._write(tensor, [ByteRange(0, len(data), -len(self.inputs), 0)])
        return True

    def _key(self, call: OperatorCall) -> tuple[Any, ...]:
        described = [
            (name, (value.dtype, tuple(value.shape), value.stride()))
            if isinstance(value, Tensor) and (call.name in READ_METADATA or (name == "self" and call.name in FILL))
            else (name, self._describe(value))
            for name, value in call.arguments()
        ]
        if call.rounds:
            described = [(name, _round(value)) for name, value in described]
        if call.commutes:
            described = [("operands", tuple(sorted((value for _, value in described), key=repr)))]
        return call.name, call.overload, tuple(described), _generator_state(call.given) if call.draws else None

    def _make(self, call: OperatorCall, key: tuple[Any, ...], k: int, tensor: Tensor) -> None:
        """Record a new tensor."""
        size = tensor.untyped_storage().nbytes()
        number = next((value for _, value in key[2] if type(value) is tuple and value[:1] == ("number",)), None)
        if call.name in NUMBERS and not tensor.dim() and number is not None:
            expression = self._number("scalar", number, tensor.dtype)
            self.scalars[expression] = number
        else:
            expression = self._number(*key, TWINS.get((call.name, k), k))
        self._hold(tensor, [ByteRange(0, size, expression, 0)])
        is_base = call.name == "pow" and call.overload == "Tensor_Scalar" and call.given["exponent"] == 1
        if (call.name in COPIES or is_base) and expression not in self.scalars:
            self._move(call.given["self"], tensor)


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
        written = tuple(_tensors([given.get(name) for name in known.writes])) if known.writes else ()
        a, b = given.get("self"), given.get("other")
        alike = (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and (a.shape, a.dtype, a.stride())
            == (
                b.shape,
                b.dtype,
                b.stride(),
            )
        )
        rounds = known.name in ("mul", "div", "add", "sub") and isinstance(a, Tensor) and a.is_floating_point()
        return cls(
            known.name,
            {"Scalar": "Tensor", "": "Tensor" if "other" in given else "default"}.get(known.overload, known.overload),
            given,
            written,
            known.outs,
            known.defaults,
            known.draws,
            known.name == "add" and alike and given.get("alpha", 1) == 1,
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


def _read_bytes(storage: Any) -> bytes:
    size: int = storage.nbytes()
    return string_at(storage.data_ptr(), size) if size else b""


def operands(meaning: Any) -> list[Expression]:
    """Return the expressions of which one is made."""
    if meaning[0] == "value":
        return [one.source for one in meaning[1]]
    found: list[Expression] = []
    waiting = [meaning]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, tuple):
            if len(one) == 2 and one[0] == "tensor":
                found.append(one[1])
            else:
                waiting = [*one, *waiting]
    return found


def name(meanings: Mapping[Expression, Any], expression: Expression) -> str:
    """Return the operator that made a value."""
    meaning = meanings[expression]
    while meaning[0] == "value" and meaning[1]:
        meaning = meanings[meaning[1][0].source]
    return str(meaning[0])


def show(meaning: Any) -> str:
    """Return an expression in words, without its operands."""
    if meaning[0] == "value":
        return f"{str(meaning[2]).removeprefix('torch.')}{list(meaning[3])} of strides {list(meaning[4])}"
    if meaning[0] == "input":
        return f"an input of digest {meaning[1].hex()[:8]}" if isinstance(meaning[1], bytes) else f"input {meaning[1]}"
    if meaning[0] in ("scalar", "copy"):
        return f"a copy as {str(meaning[1]).removeprefix('torch.')}" if meaning[0] == "copy" else str(meaning[1])
    others = [f"{key}={value}" for key, value in meaning[2] if key != "operands" and "tensor" not in str(value)]
    return f"{meaning[0]}({', '.join(others)})" + (f" number {meaning[-1]}" if meaning[-1] else "")


def _spell(number: float) -> str:
    """Return a number as text, the same for equal numbers; an integer that no float equals, as it is."""
    return repr(float(number)) if abs(number) <= EXACT or isinstance(number, float) else repr(number)


def _round(described: Any) -> Any:
    """Return a number as float32 has it; other arguments as they are."""
    if type(described) is tuple and described[:1] == ("number",):
        return "number", repr(ctypes.c_float(float(described[1])).value)
    return described


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of their strides, the largest first, without those of size 1."""
    strides: tuple[int, ...] = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))


def _runs(tensor: Tensor) -> list[tuple[int, int]]:
    """Return where the bytes of a tensor are in its memory: the first and the end of each run without a gap."""
    size = tensor.element_size()
    if not tensor.numel():
        return []
    dims = sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and stride)
    block, starts = 1, [int(tensor.storage_offset())]
    while dims and dims[0][0] == block:
        block *= dims.pop(0)[1]
    for stride, n in dims:
        starts = [start + k * stride for start in starts for k in range(n)]
    return [(start * size, (start + block) * size) for start in sorted(set(starts))]


def _first(tensor: Tensor) -> int:
    """Return where the bytes of a tensor begin in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _end(tensor: Tensor) -> int:
    """Return where the bytes of a tensor end in its memory."""
    if not tensor.numel():
        return _first(tensor)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _first(tensor) + (last + 1) * tensor.element_size()


def _count_runs(tensor: Tensor) -> int:
    """Return in how many separate parts of memory a tensor is, at most."""
    dims = _dims(tensor)
    return len(_runs(tensor)) if dims is None else math.prod(n for _, n in dims[1:])


def _dims(tensor: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Return strides and sizes of a tensor's bytes, smallest first; `None` if elements overlap, or there are none."""
    size = tensor.element_size()
    if not tensor.numel():
        return None
    pairs = sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and stride)
    found = [(1, size)]
    for stride, n in pairs:
        before, count = found[-1]
        if stride * size < before * count:
            return None
        found[-1:] = [(before, count * n)] if stride * size == before * count else [found[-1], (stride * size, n)]
    return tuple(found)


def _join(pieces: list[ByteWindow]) -> tuple[ByteWindow, ...]:
    """Return pieces as one, if they are all of one source, and regular."""
    lengths = {(one.source, one.dims) for one in pieces}
    if len(pieces) < 2 or len(lengths) > 1:
        return tuple(pieces)
    ats, dims = [one.at for one in pieces], list(pieces[0].dims)
    while len(ats) > 1:
        stride, count = ats[1] - ats[0], 1
        while count < len(ats) and ats[count] - ats[0] == count * stride:
            count += 1
        firsts = ats[::count]
        expected = [first + k * stride for first in firsts for k in range(count)]
        if expected != ats or stride < dims[-1][0] * dims[-1][1]:
            return tuple(pieces)
        dims.append((stride, count))
        ats = firsts
    return (ByteWindow(pieces[0].source, pieces[0].at, tuple(dims)),)


def _cut(stretches: Sequence[ByteRange], start: int, end: int) -> list[ByteRange]:
    """Return what is between two places, counted from the first; neighbors that continue each other are joined."""
    found: list[ByteRange] = []
    for one in stretches:
        first, last = max(one.start, start), min(one.end, end)
        if first >= last:
            continue
        part = ByteRange(first - start, last - start, one.source, one.at + first - one.start)
        before = found[-1] if found else None
        if before is not None and before.source == part.source and before.at + before.end - before.start == part.at:
            found[-1] = before._replace(end=part.end)
        else:
            found.append(part)
    return found


def _generator_state(given: Mapping[str, Any]) -> bytes:
    """Return the state of the generator that an operator draws from."""
    generator = given.get("generator")
    state = (torch.default_generator if generator is None else generator).get_state()
    return hashlib.sha256(string_at(state.data_ptr(), state.numel())).digest()
