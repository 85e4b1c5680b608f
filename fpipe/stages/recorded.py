# SPDX-License-Identifier: Apache-2.0
"""A stage recorded once as a graph: the same functions as in `autograd`, without autograd.

State that one function keeps for another is a list of tensors, which the other function empties.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fpipe.record.captured import Tensors
from fpipe.stages.autograd import Autograd
from fpipe.stages.graph.codegen import PhaseFunction
from fpipe.stages.interface import WeightIndex


@dataclass(frozen=True)
class Recorded:
    """The functions of a stage, as phases of a graph.

    - `views` takes the parameters and returns them in the form that `forward` takes.
    - `evaluation` returns the forward without residuals.
    - `below_autograd`: whether the functions call the recorded operators and nothing else.
    - `undeferred`: the weights whose gradients the input half computes, each with the reason.
    - `remark`: a note for users on how the phases are run.
    - `eager`: the same functions, computed by autograd.
    """

    views: PhaseFunction
    forward: PhaseFunction
    backward: PhaseFunction
    backward_input: PhaseFunction
    backward_weight: PhaseFunction
    evaluation: Callable[[], PhaseFunction]
    undeferred: Mapping[WeightIndex, str]
    below_autograd: bool
    remark: str
    eager: Autograd

    @cached_property
    def evaluate(self) -> PhaseFunction:
        """The forward without residuals, generated at its first use."""
        return self.evaluation()

    def leaves(self, params: Tensors) -> Tensors:
        """Return the parameters, detached, and views of them that every microbatch needs."""
        leaves: Tensors = self.views(tuple([tensor.detach() for tensor in params]))
        return leaves
