# SPDX-License-Identifier: Apache-2.0
"""A stage differentiated as a graph, recorded once: the functions of `autograd`, without autograd.

What is kept between functions is a list of tensors, which the one function that it is for empties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fpipe.capture.contract import Tensors
from fpipe.differentiation.code import Run


@dataclass(frozen=True)
class Recorded:
    """The functions of a stage, as phases of a graph.

    - `views` takes parameters, and gives what `forward` takes for them.
    - `evaluation` makes the forward that keeps nothing.
    - `below_autograd`: whether they call the operators that were recorded, and nothing else.
    - `undeferred`: the gradients that the input half computes, and why.
    - `remark`: how the phases are run.
    """

    views: Run
    forward: Run
    backward: Run
    backward_input: Run
    backward_weight: Run
    evaluation: Callable[[], Run]
    undeferred: Mapping[int, str]
    below_autograd: bool
    remark: str

    @cached_property
    def evaluate(self) -> Run:
        """The forward that keeps nothing, made at its first use."""
        return self.evaluation()

    def leaves(self, params: Tensors) -> Tensors:
        """The parameters, without a graph, and views of them that every microbatch needs."""
        leaves: Tensors = self.views(tuple([tensor.detach() for tensor in params]))
        return leaves
