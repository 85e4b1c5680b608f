# SPDX-License-Identifier: Apache-2.0
"""A stage: a piece of the model as pure functions, and its ports to the others.

In terms of tuples of tensors:

    forward(params, buffers, inputs, key)  -> outputs, buffers', residuals
    evaluate(params, buffers, inputs, key) -> outputs, buffers'
    backward(residuals, cotangents, onto)  -> input_cotangents, grads
    backward_input(residuals, cotangents)  -> input_cotangents, deferred
    backward_weight(deferred, onto)        -> grads

`params` is what `Stage.leaves` makes of the parameters, once a step. `inputs` are the stage's leaves of the batch, then
what it gets from earlier stages. `outputs` are its results, then what it gives to later stages; a value that is only
passed on stands there too. Nothing that is passed in is modified, but `onto`, and what was kept is used up by its one
use. `onto` may be left out; it is a sum of gradients that is the stage's own, to which those of this microbatch are
added, instead of being returned by themselves. A stage in which nothing wants a gradient keeps nothing, and has `None`
for residuals.

What the functions do is the business of `fpipe.differentiation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fpipe.capture.contract import Tensors
from fpipe.differentiation.contract import Functions, Wiring
from fpipe.differentiation.sums import Gradients, summed
from fpipe.executor import Port
from fpipe.spec import Spec


@dataclass(frozen=True)
class Stage:
    """A piece of the model. Positions count the arguments or the outputs of its functions.

    - `parameters`, `buffers`: names, in the order of the arguments; `unused`: held here, read by no operation.
    - `batch`: which tensor leaves of (inputs, targets) it reads.
    - `results`: specs of what leaves the pipeline here.
    - `gets`, `gives`: what travels forward; `pulls`, `pulled_by`: cotangents, to earlier and from later stages.
    - `shares`, `shared_by`: gradients of shared parameters, to other holders and from them; `shared_names`: which of
      its own it sends, by the stage at the other end.
    - `grads`, `totals`: names and specs of the parameters whose gradients this stage computes. A spec is an
      `OptionalSpec`, here and in ports, if data decide whether there is a gradient.
    - `functions`: what is computed.
    """

    index: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    unused: tuple[str, ...]
    batch: tuple[int, ...]
    results: tuple[Spec, ...]
    gets: tuple[Port, ...]
    gives: tuple[Port, ...]
    pulls: tuple[Port, ...]
    pulled_by: tuple[Port, ...]
    shares: tuple[Port, ...]
    shared_by: tuple[Port, ...]
    shared_names: Mapping[int, tuple[str, ...]]
    grads: tuple[str, ...]
    totals: tuple[Spec, ...]
    wiring: Wiring
    functions: Functions

    @property
    def undeferred(self) -> Mapping[str, str]:
        """The parameters whose gradients the input half computes, and why."""
        return {self.grads[k]: why for k, why in self.functions.undeferred.items()}

    def __str__(self) -> str:
        given = [f"{' '.join(map(str, port.specs))} to stage {port.peer}" for port in self.gives]
        shared = [f"{' '.join(self.shared_names[port.peer])} with stage {port.peer}" for port in self.shares]
        parts = [f"parameters {' '.join(self.parameters) or 'none'}"]
        parts += [f"gives {', '.join(given)}"] * bool(given) + [f"shares {', '.join(shared)}"] * bool(shared)
        return f"stage {self.index}: {'; '.join(parts)}"

    def leaves(self, params: Mapping[str, Tensor]) -> Tensors:
        """This stage's parameters in the form that its functions take, theirs alone."""
        return self.functions.leaves(tuple([params[name] for name in self.parameters]))

    @cached_property
    def forward(self) -> Callable[[Tensors, Tensors, Tensors, int], tuple[Tensors, Tensors, Any | None]]:
        """Run the stage on one microbatch."""
        return self.functions.forward

    @cached_property
    def evaluate(self) -> Callable[[Tensors, Tensors, Tensors, int], tuple[Tensors, Tensors]]:
        """The outputs and buffers of `forward`, bit for bit, and nothing kept."""
        return self.functions.evaluate

    @cached_property
    def backward(self) -> Callable[..., tuple[Gradients, Gradients]]:
        """All gradients of one microbatch: cotangents for earlier stages, and gradients of this stage's parameters."""
        return self.functions.backward

    @cached_property
    def backward_input(self) -> Callable[[Any, Gradients], tuple[Gradients, Any]]:
        """The cotangents for earlier stages, and what is needed for the rest."""
        return self.functions.backward_input

    @cached_property
    def backward_weight(self) -> Callable[..., Gradients]:
        """The gradients of this stage's parameters; `None` where nothing was computed."""
        return self.functions.backward_weight

    def shared(self, total: Gradients, peer: int) -> Gradients:
        """The gradients of the parameters of which stage `peer` holds copies; of its other replica, all."""
        finished = self.finished(total)
        if peer == self.index:
            return finished
        return tuple([finished[self.grads.index(name)] for name in self.shared_names[peer]])

    def accumulate(self, total: Gradients, grads: Gradients, count: int) -> Gradients:
        """The sum of gradients: `total`, of `count` microbatches, plus one more."""
        return summed(total, grads, count) if grads else total

    def finished(self, total: Gradients) -> Gradients:
        """The sum over all microbatches; `None` for what none of them has made a gradient of."""
        own = tuple(grad for grad in total)  # another tuple, so that `owned` sees that the gradients have two holders
        return own or (None,) * len(self.grads)
