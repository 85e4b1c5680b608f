# SPDX-License-Identifier: Apache-2.0
"""Record which attributes of modules a capture reads, by module class, and which it writes, by module.

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

from fpipe.tensors.patching import current, replace

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
    """The names of the attributes that were read and written; if `read` is empty, everything counts as read.

    - `read`: by class of module. `written`: by the module's name; in a loss, prefixed by `loss`.
    - `original`: the attributes read from the original model's modules, as text.
    """

    read: Mapping[type, set[str]] = field(default_factory=dict)
    written: Mapping[str, set[str]] = field(default_factory=dict)
    original: Collection[str] = ()

    def of(self, path: str, kind: type, attributes: Iterable[str]) -> set[str]:
        """Return the names that are read and not written, for a module of this class with these `attributes`."""
        names = self.read.get(kind, set()) if self.read else set(attributes)
        return {name for name in names if not name.startswith("__")} - self.written.get(path, set())


@contextmanager
def record_reads(model: nn.Module, loss: object, originals: Mapping[int, str]) -> Iterator[Reads]:
    """Record the attributes of modules that are read and written while copies of `model` run inside; yield the record.

    The record is complete on exit. `originals`: the names, for errors, of the original model's modules, by id.
    """
    read, original = defaultdict[type, set[str]](set), set[str]()
    written: dict[int, tuple[dict[str, Any], set[str]]] = {}  # also keeps the modules' tables alive, and ids unique
    roots: dict[int, nn.Module] = {id(vars(model)): model}
    get: Any = current(nn.Module, "__getattribute__")

    def get_and_record(module: nn.Module, name: str) -> Any:
        read[type(module)].add(name)
        if type(module) is type(model):
            roots.setdefault(id(get(module, "__dict__")), module)
        if id(module) in originals:
            original.add(f"{originals[id(module)]}, attribute {name!r}")
        return get(module, name)

    def record_writes(method: str, function: Any, name: str | None) -> Any:
        def call_and_record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            table = get(module, "__dict__")
            written.setdefault(id(table), (table, set()))[1].add(args[0] if name is None else name)
            return function(module, *args, **kwargs)

        return replace(nn.Module, method, call_and_record)

    found = Reads(read, defaultdict(set), original)
    with ExitStack() as stack:
        stack.enter_context(replace(nn.Module, "__getattribute__", get_and_record))
        for method in ("__setattr__", "__delattr__"):
            stack.enter_context(record_writes(method, current(nn.Module, method), None))
        for method, name in REGISTRATIONS.items():
            stack.enter_context(record_writes(method, current(nn.Module, method), name))
        yield found
    copies = [*roots.values(), *([loss] if isinstance(loss, nn.Module) else [])]
    for path, module in [pair for one in copies for pair in one.named_modules(prefix="loss" if one is loss else "")]:
        if id(vars(module)) in written:
            found.written[path].update(written[id(vars(module))][1])
