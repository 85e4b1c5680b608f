# SPDX-License-Identifier: Apache-2.0
"""Numbers that change from step to step: those in the batch, and those that `.item()` reads from it.

Problem. A model divides by `num_items_in_batch`, or by `mask.sum().item()`. If the record contained the number, it
would have to be made again in every step.

Idea. While a model is recorded, such a number is a `Number`: a stand-in for a Python number, backed by a tensor without
dimensions (int64 or float64, on the CPU) that is a value of the record like any other. Python's arithmetic on numbers
is recorded as calls of `compute`. A torch call that only computes with a number (`takes_numbers`) is recorded with the
number's tensor in its place; in a step, the call gets the Python number in that tensor, so it does exactly what an
eager run does.

Whatever else code does with a number needs to know it: `range(n)`, a shape, an f-string, `if n > 3`. Then the number
or, in the last example, the truth of the comparison, is a question about the batch (`fpipe.record.questions`), and the
answer is part of the batch's signature.

Runs when a model is recorded; `compute` and `to_python` also run in every step.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import optree
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fpipe.tensors.patching import current, replace
from fpipe.tensors.torch_private import DataDependentOutputException, FakeTensor, list_dispatch_modes
from fpipe.tensors.tree import COMMON_TYPES, NAMESPACE

PythonNumber: TypeAlias = int | float


NUMBER_TYPES: Mapping[torch.dtype, type] = MappingProxyType({torch.int64: int, torch.float64: float, torch.bool: bool})
"""The Python types of numbers, by the dtype of their tensors."""
DTYPES: Mapping[type, torch.dtype] = MappingProxyType({kind: dtype for dtype, kind in NUMBER_TYPES.items()})
PROBES: Mapping[torch.dtype, PythonNumber] = MappingProxyType({torch.int64: 3, torch.float64: 0.75})
"""Numbers to call torch functions with on fake tensors; no metadata depends on them."""


def as_tensor(number: PythonNumber) -> Tensor:
    """Return a number as the tensor that stands for it in a record."""
    return torch.tensor(number, dtype=DTYPES[type(number)])


def _words(text: str) -> list[str]:
    return text.split()


# ------------------------------------------------------------------------------- functions that records contain, or see


def _overridable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch function modes see, as they see torch's own."""

    def call(*args: Any) -> Any:
        tensors = tuple(one for one in args if isinstance(one, Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args)
        return function(*args)

    call.__name__ = call.__qualname__ = function.__name__
    return call


@runtime_checkable
class NamesNumbers(Protocol):
    """A dispatch mode that records operators, and tells a number of the batch by its name: a number used nowhere else.

    It is no torch function mode: none is in force where a backward runs a checkpointed function again.
    """

    def name_number(self, tensor: Tensor) -> PythonNumber:
        """Return the name of the number in a tensor."""


@_overridable
def to_python(tensor: Tensor) -> Any:
    """Return the Python number in a tensor; for a fake tensor, a `Number` in a recording, its name, or a probe."""
    if not isinstance(tensor, FakeTensor):
        return tensor.item()
    naming = next((mode for mode in reversed(list_dispatch_modes()) if isinstance(mode, NamesNumbers)), None)
    return PROBES[tensor.dtype] if naming is None else naming.name_number(tensor)


def _read(tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    return tensor.item()


def _reader(name: str) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        return _read(tensor)

    read.__name__ = name
    return _overridable(read)


READERS: Mapping[torch.dtype, Callable[[Tensor], Any]] = MappingProxyType(
    {
        torch.int64: _reader("use of an int"),
        torch.float64: _reader("use of a float"),
        torch.bool: _reader("comparison of numbers"),
    }
)
"""The functions by which code learns a number: each use is a question about the batch."""


@_overridable
def extract(tensor: Tensor) -> Tensor:
    """Return the number that `tensor.item()` returns, as a tensor."""
    dtype = torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.detach().reshape(()).to("cpu", dtype, copy=True)


@_overridable
def to_tensor(number: Tensor, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Return what `torch.tensor(number, dtype=dtype, device=device)` returns, given the number as a tensor."""
    default = torch.get_default_dtype() if number.is_floating_point() else number.dtype
    return number.to(device or torch.get_default_device(), dtype or default, copy=True)


@_overridable
def compute(name: str, *operands: Any) -> Tensor:
    """Return the result of Python's arithmetic, as a tensor, on numbers, each a Python number or a tensor.

    >>> compute("truediv", torch.tensor(1), 3), compute("sqrt", torch.tensor(2.0, dtype=torch.float64))
    (tensor(0.3333, dtype=torch.float64), tensor(1.4142, dtype=torch.float64))
    """
    written = " ".join("_" if isinstance(one, Tensor) else repr(one) for one in operands)
    tensors = [one for one in operands if isinstance(one, Tensor)]
    kind = _result_kind(name, *[NUMBER_TYPES[one.dtype] if isinstance(one, Tensor) else one for one in operands])
    assert kind is not None, "the kind of the result is known"
    result: Tensor = _compute_op(name, written, kind.__name__, tensors)
    return result


def _run_compute(name: str, written: str, kind: str, tensors: list[Tensor]) -> Tensor:
    given = iter(tensors)
    operands = [next(given).item() if one == "_" else _literal(one) for one in written.split()]
    return torch.tensor(FUNCTIONS[name](*operands), dtype=DTYPES[getattr(builtins, kind)])


def _literal(written: str) -> PythonNumber:
    try:
        return int(written)
    except ValueError:
        return float(written)


# An operator of torch's, so that graphs of operators can contain it.
_LIBRARY: Any = torch.library.Library("fpipe", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("compute(str name, str written, str kind, Tensor[] tensors) -> Tensor")
_LIBRARY.impl("compute", _run_compute, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fpipe::compute",
    lambda name, written, kind, tensors: torch.empty((), dtype=DTYPES[getattr(builtins, kind)]),
    lib=_LIBRARY,
)
_compute_op: Any = torch.ops.fpipe.compute


# -------------------------------------------------------------------------------------------------------- arithmetic

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
INTEGRAL = frozenset({"and_", "or_", "xor", "lshift", "rshift", "invert"})
TO_INTEGER = frozenset({"floor", "ceil", "trunc"})
MATH = frozenset(
    _words("sqrt exp expm1 exp2 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh pow hypot fabs")
)
"""Functions of `math` that are recorded. They return floats."""
BINARY: Mapping[str, str] = MappingProxyType(
    {name.strip("_"): name for name in _words("add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift")}
)
"""Python's names of methods, without underscores, and those of the functions."""
UNARY = ("neg", "pos", "abs", "invert")
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: getattr(operator, name) for name in (*BINARY.values(), *UNARY, *COMPARISONS)}
    | {name: getattr(math, name) for name in (*MATH - {"pow"}, *TO_INTEGER)}
    | {"math.pow": math.pow, "round": round}
)


def _result_kind(name: str, *operands: Any) -> type | None:
    """Return the type of a result; `None` if the values decide. An operand is a type or, if it is known, a number."""
    kinds = [one if isinstance(one, type) else type(one) for one in operands]
    if name in COMPARISONS:
        return bool
    if name in MATH - {"pow"} or name in ("truediv", "math.pow"):
        return float
    if name in TO_INTEGER:
        return int
    if name == "round":
        return kinds[0] if len(kinds) > 1 else int
    if name == "pow":
        return _power_kind(*operands)
    if name in INTEGRAL:
        return None if float in kinds else int
    return float if float in kinds else int


def _power_kind(base: Any, exponent: Any) -> type | None:
    """Return the type of a power: a negative exponent makes ints a float, and a negative base may make it complex."""
    kinds = [one if isinstance(one, type) else type(one) for one in (base, exponent)]
    if float not in kinds:
        return int if not isinstance(exponent, type) and exponent >= 0 else None
    if kinds[1] is not float or (not isinstance(base, type) and base >= 0):
        return float
    return None


def _calculate(name: str, *operands: Any) -> Any:
    """Return the result of arithmetic on numbers, some of which are `Number`."""
    known = [one.known if isinstance(one, Number) else one for one in operands]
    if None not in known:
        return FUNCTIONS[name](*known)
    flat = [int(one) if one is True or one is False else one for one in known]
    mixed = [one if found is None else found for one, found in zip(operands, flat, strict=True)]
    kinds = [NUMBER_TYPES[one.tensor.dtype] if isinstance(one, Number) else one for one in mixed]
    kind = None if bool in kinds else _result_kind(name, *kinds)
    if kind is None:
        return FUNCTIONS[name](*[learn(one) for one in operands])
    return number_of(compute(name, *[one.tensor if isinstance(one, Number) else one for one in mixed]))


# -------------------------------------------------------------------------------------------------------------- numbers


class Number:
    """A stand-in for a Python number while a model is recorded.

    For `isinstance`, it is an int, a float or a bool. torch's parsers accept it, because its class is derived from that
    of torch's symbolic numbers.

    - `tensor`: its value in the record. `known`: the Python number, once code has learned it; else `None`.
    """

    tensor: Tensor
    known: Any

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.known = tensor, None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return NUMBER_TYPES[self.tensor.dtype]

    @property
    def node(self) -> Any:
        """Refuse to be used as a symbolic number of torch's."""
        raise TypeError("got a number of the batch where no torch function mode sees it, expected one that is recorded")

    def learn(self) -> Any:
        """Return the Python number, which then is part of the batch's signature."""
        if self.known is None:
            self.known = READERS[self.tensor.dtype](self.tensor)
        return self.known

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.__class__, name):
            raise AttributeError(f"{self.__class__.__name__!r} object has no attribute {name!r}")
        return getattr(self.learn(), name)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: object) -> Number:
        return self

    def __round__(self, digits: int | None = None) -> Any:
        return _calculate("round", self) if digits is None else _calculate("round", self, digits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return NUMBER_TYPES[self.tensor.dtype], (self.learn(),)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        return numpy.asarray(self.learn(), dtype)


def _operand(other: Any) -> bool:
    return isinstance(other, Number) or type(other) in (int, float, bool)


def _binary(name: str, swapped: bool = False) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        pair = (other, self) if swapped else (self, other)
        return _calculate(name, *pair) if _operand(other) else FUNCTIONS[name](*map(learn, pair))

    return method


def _unary(name: str) -> Callable[[Number], Any]:
    return lambda self: _calculate(name, self)


def _delegate(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.learn(), name)(*args, **kwargs)


OBJECT_METHODS = frozenset(
    _words(
        "__init__ __new__ __class__ __getattribute__ __getattr__ __setattr__ __delattr__ __dir__ __init_subclass__"
        " __subclasshook__ __sizeof__ __reduce__ __getnewargs__ __getstate__ __doc__ __slots__"
    )
)


def _methods(*bases: type) -> dict[str, Any]:
    """Return the methods of numbers: arithmetic is recorded; any other method of int, float or `bases` learns it."""
    names = {name for base in (int, float, *bases) for name in dir(base) if callable(getattr(base, name))}
    found: dict[str, Any] = {name: _delegate(name) for name in names - OBJECT_METHODS}
    found |= {name: value for name, value in vars(Number).items() if name not in OBJECT_METHODS or name == "__init__"}
    for method, name in BINARY.items():
        found |= {f"__{method}__": _binary(name), f"__r{method}__": _binary(name, swapped=True)}
    found |= {f"__{name}__": _binary(name) for name in COMPARISONS}
    found |= {f"__{name}__": _unary(name) for name in (*UNARY, *TO_INTEGER)}
    found |= {"__bool__": lambda self: bool(self.learn()), "__class__": vars(Number)["__class__"]}
    return found


_Integer: Any = type("Integer", (Number, torch.SymInt), _methods(torch.SymInt))
_Float: Any = type("Float", (Number, torch.SymFloat), _methods(torch.SymFloat))
_Condition: Any = type("Condition", (Number, torch.SymBool), _methods(torch.SymBool))
CLASSES: Mapping[torch.dtype, Any] = MappingProxyType(
    {torch.int64: _Integer, torch.float64: _Float, torch.bool: _Condition}
)


def number_of(tensor: Tensor) -> Any:
    """Return the number that a tensor of a record stands for."""
    return CLASSES[tensor.dtype](tensor)


def learn(leaf: Any) -> Any:
    """Return the Python number for a `Number`, in a slice too; anything else unchanged."""
    if isinstance(leaf, slice):
        return slice(learn(leaf.start), learn(leaf.stop), learn(leaf.step))
    return leaf.learn() if isinstance(leaf, Number) else leaf


def learn_all(tree: Any) -> Any:
    """Return a tree with Python numbers in place of each `Number`."""
    return optree.tree_map(learn, tree, namespace=NAMESPACE)


def probe_all(tree: Any) -> Any:
    """Return a tree with probes in place of each `Number`."""
    return optree.tree_map(
        lambda leaf: PROBES[leaf.tensor.dtype] if isinstance(leaf, Number) else leaf, tree, namespace=NAMESPACE
    )


def has_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call gets a `Number`, maybe within lists, tuples, dicts or slices."""
    return any(map(_holds_number, args)) or any(map(_holds_number, kwargs.values()))


def _holds_number(one: Any) -> bool:
    if type(one) in COMMON_TYPES:
        return False
    if isinstance(one, slice):
        return any(isinstance(part, Number) for part in (one.start, one.stop, one.step))
    if isinstance(one, list | tuple):
        return any(map(_holds_number, one))
    return any(map(_holds_number, one.values())) if isinstance(one, dict) else isinstance(one, Number)


@contextmanager
def record_math() -> Iterator[None]:
    """Let the functions of `math` that are in `MATH` take a `Number` inside this context."""
    with ExitStack() as stack:
        for name in sorted(MATH):
            stack.enter_context(replace(math, name, _math_function(name, current(math, name))))
        yield


def _math_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not any(isinstance(one, Number) for one in args):
            return function(*args)
        known = all(map(_operand, args))
        return _calculate("math.pow" if name == "pow" else name, *args) if known else function(*map(learn, args))

    return call


# ---------------------------------------------------------------------------------------------------------- torch calls

BOTH = frozenset(
    _words(
        "add sub subtract mul multiply div divide true_divide rsub remainder fmod floor_divide eq ne lt le gt ge"
        " not_equal less less_equal greater greater_equal radd rmul rdiv rtruediv rmod rfloordiv iadd isub imul"
        " itruediv ifloordiv imod truediv floordiv mod"
    )
)
"""Torch functions, without underscores, that compute with a number as either operand or as `alpha`."""
PLACES: Mapping[str, tuple[int | str, ...]] = MappingProxyType(
    dict.fromkeys(BOTH, (0, 1, "input", "other", "alpha"))
    | dict.fromkeys(("clamp", "clip"), (1, 2, "min", "max"))
    | {"clamp_min": (1, "min"), "clamp_max": (1, "max")}
    | {"masked_fill": (2, "value"), "fill": (1, "value"), "where": (1, 2, "self", "input", "other")}
    | {"full": (1, "fill_value"), "full_like": (1, "fill_value"), "new_full": (2, "fill_value")}
    | dict.fromkeys(("addcmul", "addcdiv"), ("value",))
)
"""For each torch function, without underscores, the arguments that are numbers to compute with.

Neither the metadata of results nor, in a graph of operators, other numbers follow from them. So `pow` is missing: its
backward computes the exponent minus one.
"""
CREATING = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})
"""Functions that turn a number into a tensor."""


def takes_numbers(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a torch call only computes with the numbers among its arguments.

    >>> n = number_of(torch.tensor(3))
    >>> takes_numbers(torch.mul, (torch.ones(2), n), {}), takes_numbers(torch.zeros, (n,), {})
    (True, False)
    """
    places = PLACES.get(getattr(function, "__name__", "").strip("_"), ())
    given = [*enumerate(args), *kwargs.items()]
    return all(k in places and type(one) is not _Condition for k, one in given if _holds_number(one)) and not any(
        _holds_number(one) and not isinstance(one, Number) for _, one in given
    )


def creates_tensor(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call turns a number into a tensor, and nothing else."""
    alone = len(args) == 1 and type(args[0]) in (_Integer, _Float)
    return function in CREATING and alone and kwargs.keys() <= {"dtype", "device"}


def sets_number(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call assigns a number to elements of a tensor that can hold it."""
    if function is not Tensor.__setitem__ or type(args[2]) not in (_Integer, _Float):
        return False
    return args[0].is_floating_point() or (type(args[2]) is _Integer and args[0].dtype is not torch.bool)


def forget_constants(tree: Any) -> None:
    """Let fake tensors forget the values that torch computed for them from probes."""
    for leaf in optree.tree_leaves(tree, namespace=NAMESPACE):
        if isinstance(leaf, FakeTensor):
            leaf.constant = None
