# SPDX-License-Identifier: Apache-2.0
"""Tensors returned by modules inside a call, for code that collects them by hooks.

A router's logits, attention weights and hidden states are kept by forward hooks and used by whoever called the model.
The call that made them still runs as is; results of modules inside it are noted on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.ir.captured import Tensors, Value
from fpipe.ir.tape import Frame, tensors_at


class Inner(NamedTuple):
    """A tensor that a module returns: the module, its call number inside the outer call, from 0, and the leaf."""

    path: str
    module: nn.Module
    call: int
    leaf: int


def inner(frame: Frame, wanted: Collection[Value]) -> Mapping[Value, Inner]:
    """Return where to find those of the `wanted` values that modules inside a call return."""
    found: dict[Value, Inner] = {}
    count: Counter[nn.Module] = Counter()
    for one in _calls(frame) if wanted else ():
        module = one.invocation.function
        assert isinstance(module, nn.Module), "the call of a module"
        for leaf, value in one.returned.items():
            if value in wanted and not (module._backward_hooks or module._backward_pre_hooks):
                found.setdefault(value, Inner(one.path, module, count[module], leaf))
        count[module] += 1
    return found


def _calls(frame: Frame) -> Iterator[Frame]:
    """Yield the calls of modules inside another, in the order in which they begin."""
    for one in frame.inner:
        if isinstance(one.invocation.function, nn.Module):
            yield one
        yield from _calls(one)


class Noted:
    """A context that notes what modules inside it return."""

    def __init__(self, wanted: Sequence[Inner]) -> None:
        self.wanted = wanted
        self.returned: dict[tuple[nn.Module, int], Any] = {}
        self.count: Counter[nn.Module] = Counter()

    def __enter__(self) -> Noted:
        modules = dict.fromkeys(one.module for one in self.wanted)
        self.handles = [module.register_forward_hook(self._returned) for module in modules]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _returned(self, module: nn.Module, args: object, out: Any) -> None:
        self.returned[module, self.count[module]] = out
        self.count[module] += 1

    @property
    def tensors(self) -> Tensors:
        """The wanted tensors."""
        return tuple([self._tensor(one) for one in self.wanted])

    def _tensor(self, one: Inner) -> Tensor:
        leaves = tensors_at(self.returned.get((one.module, one.call)))
        if one.leaf not in leaves:
            raise InputError(
                f"module {one.path}: got no tensor at leaf {one.leaf} of what its call {one.call} returned, expected "
                "one as at capture, since it is collected and used outside. Call the module every time, and return the "
                "same structure."
            )
        return leaves[one.leaf]
