# SPDX-License-Identifier: Apache-2.0
"""Describe Python values as lines of text that are equal in all processes if the values are.

Problem. Ranks must run the same program, and the user's own functions are part of it: losses, weights, ways to split a
batch. A function's name says nothing about its body, its address differs between processes, and unpickling data from a
peer would be unsafe.

Idea. Each process describes its values in lines, one for each thing that can differ, and the lines are compared. A
function is described by its bytecode, its constants, its defaults, the contents of its closure cells, and the globals
that it names.

Limits. Functions are followed into cells, defaults, partials, bound methods, and into functions of the same file that
they name. Functions of torch and of the standard library are identified by name. Numbers, strings, containers and
tensors are compared by value, devices by type, callable objects, dataclasses and modules by their contents, except for
the values of parameters; any other object by its class. Only the first `ENTRIES` entries of a container count. Files
and environment variables that a function reads when it runs are not compared.

Runs when ranks agree: descriptions are made once per kind of batch, digests in every step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fpipe.record.model.walk import codes, is_library, named_globals
from fpipe.tensors.spec import Spec, as_bytes
from fpipe.tensors.tree import closure_variables

ATOMS: Final = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.layout, torch.memory_format, type(None))
ENTRIES: Final = 1000
LINES: Final = 20_000


def digest(lines: Iterable[str]) -> int:
    """Return a 63-bit digest of lines of text."""
    text = "\n".join([*lines, ""])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def digest_tensor(tensor: Tensor) -> str:
    """Return a digest of a tensor's values; `none` if it has no values.

    >>> ones = digest_tensor(torch.ones(2))
    >>> ones == digest_tensor(torch.ones(4)[:2]), ones == digest_tensor(torch.zeros(2))
    (True, False)
    """
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return "none"
    if tensor.layout is not torch.strided:
        return digest_tensor(tensor.detach().to_dense())
    data = as_bytes(tensor.detach().cpu())
    memory = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return blake2b(memory, digest_size=8).hexdigest()


def describe_value(value: object) -> list[str]:
    """Return the lines that describe a value.

    >>> def scaled(factor): return lambda x, y: x * factor
    >>> describe_value(scaled(2)) == describe_value(scaled(2)), describe_value(scaled(2)) == describe_value(scaled(3))
    (True, False)
    >>> [line for line in describe_value(scaled(2)) if "factor" in line]
    ['cell factor: 2']
    """
    return list(islice(_Description().lines("", value), LINES))


class _Description:
    """One description, in which no object is described twice."""

    def __init__(self) -> None:
        self.seen: dict[int, object] = {}

    def lines(self, path: str, value: Any) -> Iterator[str]:
        """Yield the lines that describe the value at `path`."""
        if isinstance(value, ATOMS):
            yield _format(path, repr(value))
        elif isinstance(value, torch.device):
            yield _format(path, f"a device of type {value.type}")
        elif isinstance(value, Tensor):
            yield _format(path, f"{Spec.of(value)} of values {digest_tensor(value)}")
        elif id(value) in self.seen:
            yield _format(path, "as before")
        else:
            self.seen[id(value)] = value  # kept alive, so that its id stays unique
            yield from self._nested_lines(path, value)

    def _nested_lines(self, path: str, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield _format(path, f"{type(value).__qualname__} of {len(value)}")
            for key, held in islice(value.items(), ENTRIES):
                yield from self.lines(f"{path}[{_key(key)}]", held)
        elif isinstance(value, set | frozenset):
            yield _format(path, f"{{{', '.join(sorted(_key(one) for one in value))}}}")
        elif isinstance(value, list | tuple):
            yield _format(path, f"{type(value).__qualname__} of {len(value)}")
            for k, held in enumerate(value[:ENTRIES]):
                yield from self.lines(f"{path}[{k}]", held)
        elif isinstance(value, FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, MethodType):
            yield from self.lines(_extend(path, "function"), value.__func__)
            yield from self.lines(_extend(path, "self"), value.__self__)
        elif isinstance(value, partial):
            yield from self.lines(_extend(path, "partial"), (value.func, value.args, value.keywords))
        elif isinstance(value, type | ModuleType | BuiltinFunctionType):
            yield _format(path, _qualified_name(value))
        else:
            yield from self._object(path, value)

    def _function(self, path: str, function: FunctionType) -> Iterator[str]:
        yield _format(path, f"function {_qualified_name(function)}")
        package = (function.__module__ or "").partition(".")[0]
        if is_library(package) and package != "fpipe":  # fpipe's functions close over what users passed
            return
        for code in codes(function.__code__):
            yield _format(_extend(path, f"code of {code.co_name}"), digest_code(code))
        yield from self.lines(_extend(path, "defaults"), (function.__defaults__, function.__kwdefaults__))
        for name, variable in closure_variables(function).items():
            yield from self.lines(_extend(path, f"cell {name}"), variable)
        for name, one in named_globals(function).items():
            yield from self._describe_global(_extend(path, f"global {name}"), one, function)

    def _describe_global(self, path: str, value: Any, function: FunctionType) -> Iterator[str]:
        """Yield the lines of a global; a function of another file is identified by name."""
        foreign = isinstance(value, FunctionType) and value.__globals__ is not function.__globals__
        yield from [_format(path, _qualified_name(value))] if foreign else self.lines(path, value)

    def _object(self, path: str, value: Any) -> Iterator[str]:
        yield _format(path, f"a {_qualified_name(type(value))}")
        if isinstance(value, nn.Module):
            yield from self._module(path, value)
        elif callable(value) or is_dataclass(value):
            held = dict(getattr(value, "__dict__", {}))
            yield from self.lines(_extend(path, "call"), vars(type(value)).get("__call__"))
            for name, one in held.items():
                yield from self.lines(f"{path}.{name}", one)

    def _module(self, path: str, module: nn.Module) -> Iterator[str]:
        for name, one in module.named_modules():
            where = _extend(path, name or "itself")
            yield _format(
                where, f"{_qualified_name(type(one))}, {one.extra_repr()}, {'training' if one.training else 'eval'}"
            )
            yield from self.lines(_extend(where, "forward"), type(one).forward)
            own = {k: v for k, v in vars(one).items() if isinstance(v, (*ATOMS, Tensor)) and k != "training"}
            for attribute, held in (*own.items(), *one._buffers.items()):
                yield from self.lines(f"{where}.{attribute}", held)
            for attribute, parameter in one._parameters.items():
                yield _format(f"{where}.{attribute}", "none" if parameter is None else str(Spec.of(parameter)))


def digest_code(code: CodeType) -> str:
    """Return a digest of what a code object does, independent of its location and its variables' names."""
    constants = [_format_constant(one) for one in code.co_consts if not isinstance(one, CodeType)]
    what = (code.co_code.hex(), constants, code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    return blake2b(repr(what).encode(), digest_size=8).hexdigest()


def _format_constant(value: Any) -> str:
    """Return a constant as text; sets of strings are sorted, since each process orders them differently."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(_format_constant(one) for one in value)})"
    if isinstance(value, tuple):
        return f"({', '.join(_format_constant(one) for one in value)})"
    return repr(value)


def _key(value: object) -> str:
    return repr(value) if isinstance(value, ATOMS) else _qualified_name(type(value))


def _qualified_name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if module and name else str(name or getattr(value, "__name__", type(value).__name__))


def _extend(path: str, part: str) -> str:
    return f"{path}, {part}" if path else part


def _format(path: str, text: str) -> str:
    return f"{path}: {text}" if path else text
