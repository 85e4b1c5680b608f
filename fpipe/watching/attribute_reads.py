# SPDX-License-Identifier: Apache-2.0
"""Record which attributes of modules a capture reads and writes, by module class.

A pipeline runs a copy of the model, but a loss or a hook may close over the original. So for reads from the original's
modules, the module is recorded, too.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fpipe.patching import current, replace

REGISTRATIONS = {
    "register_buffer": "_buffers",
    "register_forward_hook": "_forward_hooks",
    "register_forward_pre_hook": "_forward_pre_hooks",
    "register_full_backward_hook": "_backward_hooks",
    "register_full_backward_pre_hook": "_backward_pre_hooks",
}
"""Methods of modules, and the attribute that each writes without assigning to it."""


@dataclass(frozen=True)
class Reads:
    """The names of the attributes that were read and written, by class; if `read` is empty, everything counts as read.

    - `original`: the attributes read from the original model's modules, as text.
    """

    read: Mapping[type, set[str]] = field(default_factory=dict)
    written: Mapping[type, set[str]] = field(default_factory=dict)
    original: Collection[str] = ()

    def of(self, kind: type, attributes: Iterable[str]) -> set[str]:
        """Return the names that are read and not written, for a module of this class with these `attributes`."""
        names = self.read.get(kind, set()) if self.read else set(attributes)
        return {name for name in names if not name.startswith("__")} - self.written.get(kind, set())

    def is_written(self, kind: type, name: str) -> bool:
        """Return whether the model itself writes this attribute."""
        return name in self.written.get(kind, ())


@contextmanager
def record_reads(originals: Mapping[int, str]) -> Iterator[Reads]:
    """Record the attributes of modules that are read and written inside; yield the record.

    `originals`: the names, for errors, of the original model's modules, by id.
    """
    read, written, original = defaultdict[type, set[str]](set), defaultdict[type, set[str]](set), set[str]()
    get: Any = current(nn.Module, "__getattribute__")

    def get_and_record(module: nn.Module, name: str) -> Any:
        read[type(module)].add(name)
        if id(module) in originals:
            original.add(f"{originals[id(module)]}, attribute {name!r}")
        return get(module, name)

    def record_writes(method: str, function: Any, name: str | None) -> Any:
        def call_and_record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            written[type(module)].add(args[0] if name is None else name)
            return function(module, *args, **kwargs)

        return replace(nn.Module, method, call_and_record)

    with ExitStack() as stack:
        stack.enter_context(replace(nn.Module, "__getattribute__", get_and_record))
        for method in ("__setattr__", "__delattr__"):
            stack.enter_context(record_writes(method, current(nn.Module, method), None))
        for method, name in REGISTRATIONS.items():
            stack.enter_context(record_writes(method, current(nn.Module, method), name))
        yield Reads(read, written, original)
