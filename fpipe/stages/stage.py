# SPDX-License-Identifier: Apache-2.0
"""A stage: a piece of the model as pure functions, and what it exchanges with other stages.

It keeps the contract of `fpipe.runtime.contract`, on tuples of tensors. `params` is what `ModelStage.leaves` returns
for the parameters, once per step. The stage's part of the batch is its leaves of the batch and what its prologue
computes, as a `Feed` returns them. `fpipe.stages` implements the functions.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from fpipe.record.captured import Tensors
from fpipe.runtime.contract import StageCrossing
from fpipe.runtime.transport import Handle
from fpipe.stages.accumulation import Grads, sum_of
from fpipe.stages.interface import StageFunctions, Wiring
from fpipe.stages.moving import Mover
from fpipe.stages.prologue import Prologue
from fpipe.tensors.spec import Spec
from schedules.language.actions import Action


@dataclass(frozen=True)
class ModelStage:
    """A piece of the model, and what it exchanges with other stages.

    - `parameters`, `buffers`: names, in argument order; `unused`: held here, but read by no operation.
    - `batch`: the tensor leaves of (inputs, targets) that it reads. `prologue`: what it computes from these and its
      buffers instead of getting it.
    - `results`: specs of the values that leave the pipeline here.
    - `gets`, `gives`: the values that travel forward; `pulls`, `pulled_by`: cotangents, to earlier and from later
      stages.
    - `shares`, `shared_by`: gradients of shared parameters, to and from other holders.
    - `keeps`: the outputs, by position, that the rank keeps for a later stage while other ranks use them, too.
    - `grads`, `totals`: names and specs of the parameters whose gradients this stage computes. A spec is an
      `OptionalSpec`, here and in what crosses, if it depends on data whether there is a gradient.
    - `wiring`: the roles of the tensors of its functions; `functions`: the computation.
    - `start`: the spec of the loss's cotangent, if the loss is computed here and the step is passed its cotangent.
    """

    index: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    unused: tuple[str, ...]
    batch: tuple[int, ...]
    results: tuple[Spec, ...]
    gets: tuple[StageCrossing, ...]
    gives: tuple[StageCrossing, ...]
    pulls: tuple[StageCrossing, ...]
    pulled_by: tuple[StageCrossing, ...]
    shares: tuple[StageCrossing, ...]
    shared_by: tuple[StageCrossing, ...]
    grads: tuple[str, ...]
    totals: tuple[Spec, ...]
    wiring: Wiring
    functions: StageFunctions
    start: tuple[Spec, ...] = ()
    keeps: tuple[int, ...] = ()
    prologue: Prologue = field(default_factory=Prologue)

    @property
    def undeferred(self) -> Mapping[str, str]:
        """The parameters whose gradients the input half computes, each with the reason."""
        return {self.grads[k]: why for k, why in self.functions.undeferred.items()}

    def __str__(self) -> str:
        given = [f"{' '.join(map(str, one.specs))} to stage {one.target}" for one in self.gives]
        shared = [f"{' '.join(one.values)} with stage {one.target}" for one in self.shares]
        parts = [f"parameters {' '.join(self.parameters) or 'none'}"]
        parts += [f"repeats {self.prologue}"] * bool(self.prologue.specs)
        parts += [f"gives {', '.join(given)}"] * bool(given) + [f"shares {', '.join(shared)}"] * bool(shared)
        return f"stage {self.index}: {'; '.join(parts)}"

    @property
    def eager(self) -> ModelStage:
        """The same stage, differentiated by autograd."""
        return replace(self, functions=self.functions.eager)

    def leaves(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return this stage's parameters, selected from `params`, in the form that its functions take."""
        return self.functions.leaves(tuple([params[name] for name in self.parameters]))

    @cached_property
    def forward(self) -> Callable[[Tensors, Tensors, Tensors, int], tuple[Tensors, Tensors, Any | None]]:
        """The forward of one microbatch."""
        return self.functions.forward

    @cached_property
    def evaluate(self) -> Callable[[Tensors, Tensors, Tensors, int], tuple[Tensors, Tensors]]:
        """The forward without residuals; its outputs and buffers are the same, bit for bit."""
        return self.functions.evaluate

    @cached_property
    def backward(self) -> Callable[..., tuple[Grads, Grads]]:
        """The backward of one microbatch; it returns cotangents for earlier stages, and the parameters' gradients."""
        return self.functions.backward

    @cached_property
    def backward_input(self) -> Callable[[Any, Grads], tuple[Grads, Any]]:
        """The input half of the backward; it returns cotangents for earlier stages, and state for the weight half."""
        return self.functions.backward_input

    @cached_property
    def backward_weight(self) -> Callable[..., Grads]:
        """The weight half of the backward; it returns the parameters' gradients, `None` where nothing was computed."""
        return self.functions.backward_weight

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self.functions.movable)

    def offload(self, residuals: Any) -> Any:
        """Return residuals, with the memory that the microbatch has of its own moved off the device."""
        return self._mover.move_out(residuals)

    def reload(self, action: Action, residuals: Any) -> Handle:
        """Post the move back; return its handle."""
        return self._mover.move_back(action, residuals)

    def zero_cotangents(self) -> Tensors:
        """Return zeros in place of the cotangents for earlier stages."""
        return tuple([spec.allocate().zero_() for crossing in self.pulls for spec in crossing.specs])

    def gradients_for(self, peer: int, total: Grads) -> Grads:
        """Return the gradients of parameters that stage `peer` also holds; for this stage's other replica, all."""
        complete = self.complete(total)
        if peer == self.index:
            return complete
        return tuple([complete[self.grads.index(name)] for name in self.names_for(peer)])

    def names_for(self, peer: int) -> tuple[str, ...]:
        """Return the names of the shared parameters whose gradients are sent to stage `peer`."""
        (names,) = [crossing.values for crossing in self.shares if crossing.target == peer]
        return names

    def add(self, first: Grads, second: Grads) -> Grads:
        """Return the sum of two replicas' gradients, in new memory."""
        return sum_of(first, second)

    def complete(self, total: Grads) -> Grads:
        """Return the sum over all microbatches; `None` for a parameter that got no gradient from any of them."""
        return total or (None,) * len(self.grads)
