# SPDX-License-Identifier: Apache-2.0
"""Errors for models that cannot be captured faithfully, shared by the front ends and later checks.

Each function returns the error; `where` names the module or the value.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.errors import CaptureError


def seeding_error(where: str) -> CaptureError:
    """Return the error for a forward that seeds a generator."""
    return CaptureError(
        f"{where}: got a forward that seeds the generator, expected random numbers that follow from the step's seed. "
        "Remove torch.manual_seed."
    )


def own_generator_error(where: str) -> CaptureError:
    """Return the error for a random operation that draws from a generator other than the default one."""
    return CaptureError(
        f"{where}: got a random operation with a generator argument, expected torch's default generator, which is "
        "seeded from the step's seed. Drop the argument."
    )


def unregistered_write_error(where: str) -> CaptureError:
    """Return the error for an in-place change of an unregistered tensor, which would be lost."""
    if where.partition(".")[0] in ("module loss", "the loss"):
        return CaptureError(
            f"{where}: got an in-place change of a tensor, expected a loss that keeps nothing: the change would be "
            "lost, even in a buffer of the loss. Return the new value with the loss, as (loss, aux), and keep it in "
            "the training loop; or let the model keep it."
        )
    return CaptureError(
        f"{where}: got an in-place change of a tensor that is neither a parameter nor a buffer, expected changes of "
        "registered buffers only: the next step would not see this one. Use register_buffer."
    )


def foreign_parameter_error(where: str, shape: Sequence[int]) -> CaptureError:
    """Return the error for a tensor from outside the model that requires a gradient."""
    return CaptureError(
        f"{where}: got a tensor of shape {list(shape)} that requires a gradient but is not a parameter of the model "
        "(from a closure, a global or an attribute), expected only the model's parameters: it would get no gradient. "
        "Register it as a parameter of the model, or detach it. If a loss calls the model, let the model do it, and "
        "return what the loss needs."
    )


def data_dependence_error(where: str, operator: object) -> CaptureError:
    """Return the error for an operator whose result depends on data, which fake tensors lack."""
    return CaptureError(
        f"{where}: got the operator {operator}, whose result depends on the values of its input, expected shapes and "
        "control flow that do not depend on data. Rewrite that part."
    )


def original_state_error(where: str) -> CaptureError:
    """Return the error for code outside the model that reads original state which stages change in their copy."""
    return CaptureError(
        f"{where}: got a use of it from outside the model, whose forward changes it, expected uses through modules "
        "only: stages run a copy of the model, and this code would see the original. Pass the module (a hook's first "
        "argument), or let the model return what is needed. If the forward changes it only once, call the model before "
        "you build the pipeline."
    )
