# SPDX-License-Identifier: Apache-2.0
"""Collect tensors that modules return deep inside a call.

For example, forward hooks save a router's logits, attention weights or hidden states for the caller of the model. The
call that computes them still runs as is; hooks of our own record the results of the modules inside it.

Runs in every step; `fpipe.record.trace.usage` selects the outputs to collect when a pipeline is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.captured import Tensors
from fpipe.record.trace.tape import tensors_at


class InnerOutput(NamedTuple):
    """A tensor that a module returns: the module, its call number inside the outer call, from 0, and the leaf."""

    path: str
    module: nn.Module
    call: int
    leaf: int


class InnerOutputs:
    """A context that records the results of the modules that return the `wanted` outputs."""

    def __init__(self, wanted: Sequence[InnerOutput]) -> None:
        self.wanted = wanted
        self.returned: dict[tuple[nn.Module, int], Any] = {}
        self.count: Counter[nn.Module] = Counter()

    def __enter__(self) -> InnerOutputs:
        modules = dict.fromkeys(one.module for one in self.wanted)
        self.handles = [module.register_forward_hook(self._note) for module in modules]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, module: nn.Module, args: object, out: Any) -> None:
        self.returned[module, self.count[module]] = out
        self.count[module] += 1

    @property
    def tensors(self) -> Tensors:
        """The wanted tensors."""
        return tuple([self._tensor(one) for one in self.wanted])

    def _tensor(self, one: InnerOutput) -> Tensor:
        leaves = tensors_at(self.returned.get((one.module, one.call)))
        if one.leaf not in leaves:
            raise InputError(
                f"module {one.path}: got no tensor at leaf {one.leaf} of the result of its call {one.call}, expected "
                "one as at capture, because code outside of the module uses it. Call the module every time, and return "
                "the same structure."
            )
        return leaves[one.leaf]
