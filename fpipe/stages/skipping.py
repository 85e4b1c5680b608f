# SPDX-License-Identifier: Apache-2.0
"""Skip the backward of a recorded stage if its only cotangent is absent, which may depend on data.

A graph is recorded with all cotangents of a stage. A stage with several, of which only some may arrive, can't be
recorded, so `fpipe.stages.assembly` leaves it to autograd.

Runs when a plan is made; the functions that it returns run in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fpipe.stages.accumulation import Gradients
from fpipe.stages.interface import Wiring
from fpipe.stages.recorded import Recorded


def skip_absent(stage: Recorded, wiring: Wiring) -> Recorded:
    """Return the same stage with a backward that computes nothing for an absent cotangent."""
    outgoing = (None,) * len(wiring.cotangents)
    grads = (None,) * (len(wiring.leaves) - len(outgoing))

    def backward(residuals: Any, cotangents: Gradients, onto: Gradients = ()) -> tuple[Gradients, Gradients]:
        if cotangents[0] is None:
            return outgoing, onto or grads
        if _is_sum(onto):
            found: tuple[Gradients, Gradients] = stage.backward(residuals, cotangents, onto)
            return found
        first: tuple[Gradients, Gradients] = stage.backward(residuals, cotangents)
        return first

    def backward_input(residuals: Any, cotangents: Gradients) -> tuple[Gradients, Any]:
        if cotangents[0] is None:
            return outgoing, None
        made, deferred = stage.backward_input(residuals, cotangents)
        return made, (deferred,)

    def backward_weight(deferred: Any, onto: Gradients = ()) -> Gradients:
        if deferred is None:
            return onto or grads
        if _is_sum(onto):
            totals: Gradients = stage.backward_weight(*deferred, onto)
            return totals
        first: Gradients = stage.backward_weight(*deferred)
        return first

    return replace(stage, backward=backward, backward_input=backward_input, backward_weight=backward_weight)


def _is_sum(onto: Gradients) -> bool:
    """Return whether `onto` holds sums; a stage has gradients for all of its parameters or for none."""
    return bool(onto) and onto[0] is not None
