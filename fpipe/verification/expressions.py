# SPDX-License-Identifier: Apache-2.0
"""Compute expressions beside values: what every tensor is, as operators applied to inputs.

Problem. Equal bits on one batch show nothing about another batch.

Idea. While torch runs, each operator's results get an expression: the operator, its other arguments, and the
expressions of its operands. Equal expressions have one number (hash-consing). So two computations whose results have
equal numbers apply the same operators to the same inputs in the same order, whatever the inputs' values are.

A tensor is a window into memory. So memory has the expressions, as ranges of bytes, each a part of one operator's
result, or of an input. A view is another window; a copy moves ranges; what is written in place is the result of the
operator that wrote it. Inputs, which no operator made, are known by their bytes: no two of them may be equal.

What depends on no input is a constant, and known by its bytes, too.

Lemmas, of operators that compute the same bits: sums of two operands in either order, and the sums of their parts; what
is concatenated, and its parts; a number, and a tensor without dimensions that holds it, rounded where the operator
rounds it; reductions that keep a dimension of size 1, and those that don't; an operator and its in-place and `out=`
variants; an operator on a list and one for each of its elements; a power with exponent 1 and its base; results of a
backward, whichever others it is asked for; the gradients of both biases of a recurrent layer. Nothing else is assumed
to be equal.

Runs when `prove` is called.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import string_at
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fpipe.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    count_dispatch_modes,
)
from fpipe.tensors.tree import list_tensors
from fpipe.verification.byte_ranges import (
    ByteRange,
    ByteWindow,
    align_ranges,
    count_runs,
    cut_ranges,
    find_around,
    first_byte,
    is_scattered,
    join_windows,
    list_dims,
    list_runs,
    order_dims,
    read_ranges,
    shift_ranges,
    write_ranges,
)
from fpipe.verification.operator_calls import OperatorCall, read_generator, round_number, spell_number
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
COPIES: Final = frozenset(("clone", "_to_copy", "to", "lift_fresh_copy"))
NUMBERS: Final = frozenset((*COPIES, "scalar_tensor", "full"))
"""Operators whose result, without dimensions, is the number that they are given."""
TWINS: Final = MappingProxyType({("mkldnn_rnn_layer_backward", 4): 3})
"""The results of operators that equal an earlier one: the gradients of both biases of a recurrent layer."""
TOLD: Final = 100
"""After how many operators a proof says how far it is."""
MOST_RUNS: Final = 4096
"""The most separate parts of memory that are followed through a copy."""
LARGEST_FOLDED: Final = 4096
"""The most elements of a constant that is known by its bytes."""


class Expressions(TorchDispatchMode):
    """The expressions of everything that is computed inside of it.

    - `numbers`: the number of each expression, by what it is; `operators`: how many operators ran.
    - `memory`: the ranges of each storage, by its address, which a weak reference keeps from being used again.
      `inputs`: the bytes of each input.
    - `scalars`: the expressions that are numbers. `constants`, `variables`: the inputs, by number, that depend on
      nothing, and those that are declared.
    - `computed`: the expressions that each side has computed; see `on`. `running`: what computes now, such as an
      action of a rank; its text, when an expression is first made, is the expression's place.
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
        self.computed: dict[str, set[Expression]] = {"": set()}
        self.running: object = None
        self._side, self._places = self.computed[""], dict[Expression, str]()

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        """Note what is computed inside as that of a side."""
        before, self._side = self._side, self.computed.setdefault(side, set())
        try:
            yield
        finally:
            self._side = before

    def place(self, expression: Expression) -> str:
        """Return what was running when an expression was first made; empty if nothing was."""
        return self._places.get(expression, "")

    def declare(self, tensors: Iterable[Tensor]) -> None:
        """Declare that these tensors are inputs; other memory that no operator wrote is a constant."""
        for tensor in tensors:
            self.variables.update(-one.source - 1 for one in self._ranges(tensor) if one.source < 0)
        self.constants -= self.variables

    def value(self, tensor: Tensor) -> Expression:
        """Return the expression of a tensor: of its bytes, and how they are laid out."""
        geometry = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
        return self._number("value", self._content(tensor), *geometry)

    def _number(self, *key: Any) -> Expression:
        known = len(self.numbers)
        number = self.numbers.setdefault(key, known)
        self._side.add(number)
        if number == known and self.running is not None:
            self._places[number] = sys.intern(str(self.running))
        return number

    def _ranges(self, tensor: Tensor) -> list[ByteRange]:
        """Return the ranges of a tensor's memory; memory that no operator wrote is an input."""
        storage = tensor.untyped_storage()
        known = self.memory.get(storage._cdata)
        if known is None:
            size = storage.nbytes()
            self.inputs.append(None if isinstance(tensor, FakeTensor) else _read_bytes(storage))
            known = self._hold(tensor, [ByteRange(0, size, -len(self.inputs), 0)])
            self.constants.add(len(self.inputs) - 1)
        return known[1]

    def _hold(self, tensor: Tensor, ranges: list[ByteRange]) -> tuple[StorageWeakRef, list[ByteRange]]:
        storage = tensor.untyped_storage()
        self.memory[storage._cdata] = StorageWeakRef(storage), ranges  # type: ignore[no-untyped-call]
        return self.memory[storage._cdata]

    def _content(self, tensor: Tensor) -> tuple[ByteWindow, ...]:
        """Return what is in a tensor's window: inputs by their bytes."""
        ranges = self._ranges(tensor)
        dims, around = list_dims(tensor), find_around(ranges, tensor)
        if around is not None and dims is not None and not self._is_known(around):
            first = first_byte(tensor)
            return (self._window(around._replace(start=first, at=around.at + first - around.start), dims),)
        parts = read_ranges(ranges, tensor)
        if parts and all(map(self._is_known, parts)):
            data = b"".join([self._bytes(one) for one in parts])
            return (ByteWindow(self._number("input", hashlib.sha256(data).digest()), 0, ((1, len(data)),)),)
        return join_windows([self._window(one, ((1, one.end - one.start),)) for one in parts])

    def _window(self, part: ByteRange, dims: tuple[tuple[int, int], ...]) -> ByteWindow:
        if part.source >= 0:
            return ByteWindow(part.source, part.at, dims)
        if not self._is_known(part):
            return ByteWindow(self._number("input", -part.source - 1), part.at, dims)
        return ByteWindow(self._number("input", hashlib.sha256(self._bytes(part)).digest()), 0, dims)

    def _bytes(self, part: ByteRange) -> bytes:
        """Return the bytes of a known input."""
        known = self.inputs[-part.source - 1]
        assert known is not None, "the input is known by its bytes"
        return known[part.at : part.at + part.end - part.start]

    def _is_known(self, part: ByteRange) -> bool:
        """Return whether a range is an input that is known by its bytes."""
        return part.source < 0 and self.inputs[-part.source - 1] is not None

    def _sources(self, tensor: Tensor) -> set[int]:
        """Return what a tensor's elements are parts of."""
        ranges = self._ranges(tensor)
        around = find_around(ranges, tensor)
        return {one.source for one in read_ranges(ranges, tensor)} if around is None else {around.source}

    def _assign(self, tensor: Tensor, expression: Expression) -> None:
        """Record that an operator has written a tensor."""
        size = sum(end - start for start, end in list_runs(tensor))
        write_ranges(self._ranges(tensor), tensor, [ByteRange(0, size, expression, 0)])

    def _move(self, source: Any, target: Tensor) -> None:
        """Record that a tensor was copied: its elements as they are, or what a conversion or rearrangement makes."""
        kinds = [(x.dtype, x.shape, order_dims(x), x.is_conj(), x.is_neg()) for x in (source, target)]
        if kinds[0] == kinds[1] and count_runs(source) <= MOST_RUNS:
            write_ranges(self._ranges(target), target, read_ranges(self._ranges(source), source))
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
            return "number", spell_number(value)
        if isinstance(value, str | bool) or value is None:
            return value
        return type(value).__name__, "" if isinstance(value, torch.UntypedStorage) else str(value)

    def _scalar(self, tensor: Tensor) -> Any:
        """Return the number that a tensor without dimensions is known to hold; `None` for other tensors."""
        if tensor.dim() or tensor.device.type != "cpu" or tensor.dtype not in FORMATS:
            return None
        (one,) = read_ranges(self._ranges(tensor), tensor)
        if one.source >= 0:
            return self.scalars.get(one.source)
        known = self.inputs[-one.source - 1]
        if -one.source - 1 in self.variables or known is None:
            return None
        data = known[one.at : one.at + tensor.element_size()]
        return "number", spell_number(struct.unpack(FORMATS[tensor.dtype], data)[0])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; record the expressions of its results, and of what it wrote."""
        kwargs = kwargs or {}
        operands = [*list_tensors((*args, *kwargs.values()))]
        if self._is_recorded(types, operands):
            return func(*args, **kwargs)
        self.operators += 1
        if self.operators % TOLD == 0:
            say(f"{self.operators} operators, {len(self.numbers)} expressions")
        call = OperatorCall.of(func, args, kwargs)
        made = [self._add_elements(one) or self._key(one) for one in call.parts()]
        is_constant = self._depends_on_nothing(call)
        result = func(*args, **kwargs)
        values = self._compute(func, call, (args, kwargs), operands, result) if is_constant else ()
        if call.written:
            for k, (tensor, own) in enumerate(zip(call.written, made, strict=True)):
                if call.name == "copy":
                    self._move(call.given["src"], tensor)
                elif is_constant and self._fold(tensor, tensor):
                    pass
                elif isinstance(own, list):
                    write_ranges(self._ranges(tensor), tensor, own)
                else:
                    self._assign(tensor, self._number(*own, 0 if len(made) > 1 else k))
            return result
        known = {one.untyped_storage()._cdata for one in operands}
        for k, tensor in enumerate(result if isinstance(result, tuple | list) else [result]):
            if not isinstance(tensor, Tensor) or (home := tensor.untyped_storage()._cdata) in known:
                continue  # a view, or a result that is returned twice
            if not (values and self._fold(tensor, values[k])):
                self._make(call, made[0], k, tensor)
            known.add(home)
        return result

    def _is_recorded(self, types: Sequence[type], operands: Sequence[Tensor]) -> bool:
        """Return whether an operator runs while a model is recorded: in another mode of fakes, or on fakes of one."""
        if count_dispatch_modes() and active_fake_mode() is not None:
            return True
        if not any(issubclass(kind, FakeTensor) for kind in types):
            return False
        return any(isinstance(one, FakeTensor) and one.fake_mode is not self.mode for one in operands)

    def _depends_on_nothing(self, call: OperatorCall) -> bool:
        """Return whether the results of an operator are the same for all inputs."""
        if call.draws or call.name.startswith(("empty", "new_empty")):
            return False
        read = [value for name, value in call.given.items() if not (name == "self" and call.name in FILL)]
        return call.name in READ_METADATA or all(map(self._is_constant, list_tensors(read)))

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._scalar(tensor) is not None or all(
            -source - 1 in self.constants for source in self._sources(tensor)
        )

    def _compute(
        self, func: Any, call: OperatorCall, given: Any, operands: Sequence[Tensor], result: Any
    ) -> Sequence[Any]:
        """Return the results of an operator on constants; of fakes, those on the values of these. Empty if unknown."""
        made = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(one, FakeTensor) for one in made):
            return made
        if call.written:
            return ()
        known = {id(one): self._value_of(one, call) for one in operands}
        if any(one is None for one in known.values()):
            return ()
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
        if is_scattered(tensor):
            return None
        data = b"".join([self._bytes(one) for one in read_ranges(self._ranges(tensor), tensor)])
        return torch.frombuffer(bytearray(data), dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _fold(self, tensor: Tensor, value: Tensor) -> bool:
        """Record that a tensor is a constant, known by the bytes of its value; return false if it is large."""
        if tensor.numel() > LARGEST_FOLDED or not tensor.numel() or isinstance(value, FakeTensor):
            return False
        runs, start = list_runs(value), value.data_ptr() - int(value.storage_offset()) * value.element_size()
        self.constants.add(len(self.inputs))
        data = b"".join(string_at(start + first, end - first) for first, end in runs)
        self.inputs.append(data)
        if tensor.untyped_storage()._cdata not in self.memory or len(data) == tensor.untyped_storage().nbytes():
            self._hold(tensor, [ByteRange(0, tensor.untyped_storage().nbytes(), -len(self.inputs), 0)])
        write_ranges(self._ranges(tensor), tensor, [ByteRange(0, len(data), -len(self.inputs), 0)])
        return True

    def _key(self, call: OperatorCall) -> tuple[Any, ...]:
        described = [
            (name, (value.dtype, tuple(value.shape), value.stride()))
            if isinstance(value, Tensor) and (call.name in READ_METADATA or (name == "self" and call.name in FILL))
            else (name, self._describe(value))
            for name, value in call.arguments()
        ]
        if call.rounds:
            described = [(name, round_number(value)) for name, value in described]
        if call.commutes:
            described = [("operands", tuple(sorted((value for _, value in described), key=repr)))]
        return call.name, call.overload, tuple(described), read_generator(call.given) if call.draws else None

    def _add_elements(self, call: OperatorCall) -> list[ByteRange] | None:
        """Return the ranges of a sum of two blocks of memory, element by element; `None` if it is no such sum.

        A range of the sum is at the place of its first operand's, so that it is the same however the block is cut.
        """
        if not call.commutes or is_scattered(call.given["self"]):
            return None
        pair = [call.given["self"], call.given["other"]]
        if any(self._scalar(one) is not None for one in pair):
            return None
        first, second = (read_ranges(self._ranges(one), one) for one in pair)
        if any(map(self._is_known, (*first, *second))):
            return None
        found = list[ByteRange]()
        for one, other in align_ranges(first, second):
            (a, at), (b, place) = sorted((self._window(part, ()).source, part.at) for part in (one, other))
            operands = ("self", ("tensor", a)), ("other", ("tensor", b))
            expression = self._number("add", pair[0].dtype, operands, (at % pair[0].itemsize, place - at), 0)
            found.append(ByteRange(one.start, one.end, expression, at))
        return cut_ranges(found, 0, found[-1].end)

    def _concatenate(self, call: OperatorCall, tensor: Tensor) -> bool:
        """Record that a tensor is others one after another in memory; return false if it is not."""
        parts, dim = call.given["tensors"], call.given.get("dim", 0)
        if math.prod(tensor.shape[: dim % max(1, tensor.dim())]) > 1 or not all(
            part.dtype == tensor.dtype and part.is_contiguous() for part in (*parts, tensor)
        ):
            return False
        found, place = list[ByteRange](), 0
        for part in parts:
            found += shift_ranges(read_ranges(self._ranges(part), part), place)
            place += part.nbytes
        self._hold(tensor, cut_ranges(found, 0, place))
        return True

    def _make(self, call: OperatorCall, key: list[ByteRange] | tuple[Any, ...], k: int, tensor: Tensor) -> None:
        """Record a new tensor."""
        if isinstance(key, list):
            self._hold(tensor, key)
            return
        if call.name == "cat" and self._concatenate(call, tensor):
            return
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


def _read_bytes(storage: Any) -> bytes:
    size: int = storage.nbytes()
    return string_at(storage.data_ptr(), size) if size else b""
