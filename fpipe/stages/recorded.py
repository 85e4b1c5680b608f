# SPDX-License-Identifier: Apache-2.0
"""A stage recorded once as a graph: the same functions as in `autograd`, without autograd.

State that one function keeps for another is a list of tensors, which the other function empties.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fpipe.record.captured import Tensors
from fpipe.stages.accumulation import Grads
from fpipe.stages.autograd import Autograd
from fpipe.stages.graph.codegen import PhaseFunction
from fpipe.stages.interface import WeightIndex, Wiring


@dataclass(frozen=True)
class Recorded:
    """The functions of a stage, as phases of a graph.

    - `views` takes the parameters and returns them in the form that `forward` takes.
    - `makers` make the others, by name, at their first use: a schedule has whole backwards or halves, rarely both.
    - `below_autograd`: whether the functions call the recorded operators and nothing else.
    - `undeferred`: the weights whose gradients the input half computes, each with the reason.
    - `remark`: a note for users on how the phases are run.
    - `eager`: the same functions, computed by autograd.
    - `movable`: the positions in the residuals of tensors in memory that is the microbatch's own.
    """

    views: PhaseFunction
    forward: PhaseFunction
    makers: Mapping[str, Callable[[], PhaseFunction]]
    undeferred: Mapping[WeightIndex, str]
    below_autograd: bool
    remark: str
    eager: Autograd
    movable: tuple[int, ...] = ()

    @cached_property
    def evaluate(self) -> PhaseFunction:
        """The forward without residuals."""
        return self.makers["evaluate"]()

    @cached_property
    def backward(self) -> PhaseFunction:
        """The whole backward."""
        return self.makers["backward"]()

    @cached_property
    def backward_input(self) -> PhaseFunction:
        """The input half of the backward."""
        return self.makers["backward_input"]()

    @cached_property
    def backward_weight(self) -> PhaseFunction:
        """The weight half of the backward."""
        return self.makers["backward_weight"]()

    def leaves(self, params: Tensors) -> Tensors:
        """Return the parameters, detached, and views of them that every microbatch needs."""
        leaves: Tensors = self.views(tuple([tensor.detach() for tensor in params]))
        return leaves


def skip_absent(stage: Recorded, wiring: Wiring) -> Recorded:
    """Return the same stage with a backward that computes nothing if its only cotangent is absent.

    A graph is recorded with all cotangents of a stage. A stage with several, of which only some may arrive, can't be
    recorded, so it is left to autograd.
    """
    outgoing = (None,) * len(wiring.cotangents)
    grads = (None,) * (len(wiring.leaves) - len(outgoing))

    def backward(residuals: Any, cotangents: Grads, onto: Grads = ()) -> tuple[Grads, Grads]:
        if cotangents[0] is None:
            return outgoing, onto or grads
        made: tuple[Grads, Grads] = stage.backward(residuals, cotangents, *_sums(onto))
        return made

    def backward_input(residuals: Any, cotangents: Grads) -> tuple[Grads, Any]:
        if cotangents[0] is None:
            return outgoing, None
        made, deferred = stage.backward_input(residuals, cotangents)
        return made, (deferred,)

    def backward_weight(deferred: Any, onto: Grads = ()) -> Grads:
        if deferred is None:
            return onto or grads
        totals: Grads = stage.backward_weight(*deferred, *_sums(onto))
        return totals

    own: dict[str, Callable[[], PhaseFunction]] = {
        "backward": lambda: backward,
        "backward_input": lambda: backward_input,
        "backward_weight": lambda: backward_weight,
    }
    return replace(stage, makers={**stage.makers, **own})


def _sums(onto: Grads) -> tuple[Grads, ...]:
    """Return `onto`, if it holds sums; a stage has gradients for all of its parameters or for none."""
    return (onto,) if onto and onto[0] is not None else ()
