# SPDX-License-Identifier: Apache-2.0
"""Which attributes of modules are read and written while a model is captured, by module class.

A pipeline runs a copy of the model, but a loss or a hook may close over the original. What code reads of the original's
modules is noted one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import nn

REGISTERING = {  # what these methods write without assigning to an attribute
    "register_buffer": "_buffers",
    "register_forward_hook": "_forward_hooks",
    "register_forward_pre_hook": "_forward_pre_hooks",
    "register_full_backward_hook": "_backward_hooks",
    "register_full_backward_pre_hook": "_backward_pre_hooks",
}


@dataclass(frozen=True)
class Reads:
    """The names of attributes, by class; if empty, everything counts as read. `original`: those of the original."""

    read: Mapping[type, set[str]] = field(default_factory=dict)
    written: Mapping[type, set[str]] = field(default_factory=dict)
    original: Collection[str] = ()

    def of(self, kind: type, attributes: Iterable[str]) -> set[str]:
        """Return the names that are read, and not written, of a module of this class with these attributes."""
        names = self.read.get(kind, set()) if self.read else set(attributes)
        return {name for name in names if not name.startswith("__")} - self.written.get(kind, set())

    def is_written(self, kind: type, name: str) -> bool:
        """Return whether the model itself writes this attribute."""
        return name in self.written.get(kind, ())


@contextmanager
def reading(originals: Mapping[int, str]) -> Iterator[Reads]:
    """Yield the reads and writes of module attributes that happen inside.

    `originals` are the original model's modules: their ids, and what to call them.
    """
    read, written, original = defaultdict[type, set[str]](set), defaultdict[type, set[str]](set), set[str]()
    get: Any = object.__getattribute__

    def getting(module: nn.Module, name: str) -> Any:
        read[type(module)].add(name)
        if id(module) in originals:
            original.add(f"{originals[id(module)]}, attribute {name!r}")
        return get(module, name)

    def noting(owner: Any, function: Any, name: str | None) -> Any:
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            written[type(module)].add(args[0] if name is None else name)
            return function(module, *args, **kwargs)

        return patch.object(nn.Module, owner, noted)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "__getattribute__", getting))
        for method in ("__setattr__", "__delattr__"):
            stack.enter_context(noting(method, getattr(nn.Module, method), None))
        for method, name in REGISTERING.items():
            stack.enter_context(noting(method, getattr(nn.Module, method), name))
        yield Reads(read, written, original)
