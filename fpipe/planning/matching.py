# SPDX-License-Identifier: Apache-2.0
"""Check that a profile is of the model that a plan is made for, without capturing the model again.

A plan for another model would run, and its predictions would be wrong. What can be compared at once: the batch, the
class of the model, the modules at which blocks begin, and the bytes of all parameters. `Profile.require` compares every
operation, but needs a pipeline.

Runs when a plan is made from a profile.
"""

from __future__ import annotations

from typing import Any

from fpipe.errors import InputError
from fpipe.pipelines.builder import Model, make_batchings
from fpipe.pipelines.description import format_bytes
from fpipe.pipelines.loss_weights import Weight
from fpipe.planning.profile import Profile
from fpipe.record.front_ends.parts import as_module


def require_profile_of(
    profile: Profile,
    model: Model,
    example: Any,
    targets: Any,
    microbatches: int,
    *,
    batch_dims: Any = 0,
    weight: Weight | None = None,
    **options: Any,
) -> None:
    """Raise `InputError`, naming what differs first, if a profile can't be of this model and batch.

    `options` are other arguments of `fpipe.profile`, which are ignored.
    """
    if not isinstance(profile, Profile):
        raise InputError(
            f"profile: got {profile!r}, expected a Profile. Pass what fpipe.profile returned, or "
            "fpipe.Profile.read(path)."
        )
    batching = make_batchings(example, targets, batch_dims, microbatches, weight, microbatches)[True]
    module, first = as_module(model), str(batching.split(batching.example)[0])
    held = sum({id(one): one.nbytes for one in module.parameters()}.values())
    known, blocks = {path for path, _ in module.named_modules()}, profile.blocks
    unknown = [mark.path for block in blocks for mark in block.marks if mark.path not in known]
    profiled = int(profile.ranges.parameters[0, len(blocks)])
    if not profile.microbatch.startswith(first):
        raise _differs("microbatch", profile.microbatch, f"{first}, the first of {microbatches}")
    if profile.model != type(module).__name__:
        raise _differs("model", profile.model, type(module).__name__)
    if unknown:
        raise _differs("blocks", f"one at the module {unknown[0]!r}", "modules that the model has")
    if profiled != held:
        raise _differs("parameters", format_bytes(profiled), f"{format_bytes(held)}, as the model has")


def _differs(field: str, got: object, expected: object) -> InputError:
    return InputError(
        f"profile.{field}: got {got}, expected {expected}: the profile is of another model, batch, or number of "
        "microbatches. Profile this one, or leave the profile out."
    )
