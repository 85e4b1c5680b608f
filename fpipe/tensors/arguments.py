# SPDX-License-Identifier: Apache-2.0
"""The types of arguments of fpipe's functions, checked where users call.

`schedules.arguments` reads them from annotations; here are the types that only fpipe has.

Tensors may carry more than values: tangents of forward-mode differentiation, and levels of torch.func. A step detaches
its arguments, which would silently drop both, so it refuses them.

Runs when a public function is called, and in every step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fpipe.errors import InputError
from fpipe.tensors.torch_private import has_dual_level, is_transformed, transform_level
from schedules.arguments import TYPES, ArgumentCheck, ArgumentType, is_number
from schedules.errors import quote


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return is_number(value) and (not isinstance(value, int) or abs(value) <= sys.float_info.max)


def _has_ranks(value: object) -> bool:
    return hasattr(getattr(value, "ranks", None), "enter_call")


def describe_argument(value: object) -> str:
    """Return a value as errors show it: a tensor by its dtype and shape, others by a short `repr`.

    >>> import torch
    >>> describe_argument(torch.ones(2, 3)), describe_argument("x" * 3)
    ('a tensor float32[2, 3]', "'xxx'")
    """
    if isinstance(value, Tensor) and not value.is_nested:
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return quote(value)


require_arguments: Final = ArgumentCheck(
    MappingProxyType(
        {
            **TYPES,
            "float": ArgumentType("a number", "Pass a number that is not nan.", _is_number),
            "Pipeline": ArgumentType("a Pipeline", "Pass what fpipe.pipeline returned.", _has_ranks),
            "Optimizer": ArgumentType("an Optimizer", "Pass what fpipe.optimizer returned."),
            "Module": ArgumentType("a module", "Pass the model."),
            "Microbatching": ArgumentType("a Microbatching", "Write fpipe.Microbatching(batch_dims=...), say."),
            "Place": ArgumentType("a Place", "Write fpipe.Place(mesh=...), say."),
            "Recording": ArgumentType("a Recording", "Write fpipe.Recording(front_end=...), say."),
            "Gradients": ArgumentType("a Gradients", "Write fpipe.Gradients(backward=...), say."),
            "Profile": ArgumentType("a Profile", "Pass what fpipe.profile returned."),
            "Plan": ArgumentType("a Plan", "Pass what fpipe.plan returned."),
            "PathLike": ArgumentType("a path", "Pass a path as text."),
            "dtype": ArgumentType("a dtype", "Pass torch.float32, say."),
            "type": ArgumentType("a class", "Pass the class itself, such as torch.optim.AdamW."),
        }
    ),
    InputError,
    describe_argument,
    "{name}: got {value}",
)
"""Checks the arguments of a public function of fpipe, as its first line: `require_arguments(norm, locals())`."""


def require_pipeline(function: str, pipe: object) -> None:
    """Raise `InputError` unless a function was given a pipeline: without one, there are no ranks to tell."""
    if not _has_ranks(pipe):
        raise InputError(
            f"{function}: got pipe={describe_argument(pipe)}, expected a Pipeline. Pass what fpipe.pipeline returned."
        )


def require_tensors(what: str, tensors: object) -> None:
    """Raise `InputError`, naming the leaf, unless these are tensors by name."""
    if not isinstance(tensors, Mapping):
        raise InputError(
            f"{what}: got {describe_argument(tensors)}, expected a dict by name. Pass what a step returned."
        )
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            got = describe_argument(value)
            raise InputError(
                f"{what}[{name!r}]: got {got}, expected a tensor under its name. Pass what a step returned."
            )


def require_dense(what: str, tensor: Tensor, device: torch.device | None = None) -> None:
    """Raise `InputError` unless a tensor can be scaled in place: dense, of floating-point numbers, on this device."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not numbers or not dense or tensor.device != (device or tensor.device):
        got = describe_argument(tensor) if dense else f"a tensor of layout {tensor.layout}"
        place = "" if device is None else f" on {device}"
        raise InputError(
            f"{what}: got {got} on {tensor.device}, expected a dense tensor of floating-point numbers{place}. Pass "
            "what a step returned."
        )


def require_seed(seed: object) -> None:
    """Raise `InputError` unless a seed is an integer or none."""
    if seed is not None:
        require_integer("seed", seed)


def require_integer(name: str, value: object, least: int | None = None) -> None:
    """Raise `InputError` unless a value is an integer, and not below `least`."""
    if type(value) is int and (least is None or value >= least):
        return
    expected = "an integer" + ("" if least is None else f" of {least} or more")
    raise InputError(f"{name}: got {describe_argument(value)}, expected {expected}. Pass an int.")


def is_differentiated() -> bool:
    """Return whether forward-mode differentiation or a transform of torch.func is active."""
    return has_dual_level() or transform_level() is not None


def require_primal(what: str, tensors: Mapping[str, Tensor] | Mapping[int, Tensor]) -> None:
    """Raise `InputError`, naming the leaf, for a dual tensor or one inside a transform of torch.func.

    No tensor is inspected unless one of the two is active.
    """
    if not is_differentiated():
        return
    unpack: Any = forward_ad.unpack_dual
    for name, tensor in tensors.items():
        where = f"{what}[{name!r}]"
        if is_transformed(tensor):
            raise InputError(
                f"{where}: got a tensor inside a transform of torch.func, expected a plain one: a step would lose it. "
                "Call the step outside torch.func; it returns the gradients itself."
            )
        if unpack(tensor).tangent is not None:
            raise InputError(
                f"{where}: got a dual tensor of forward-mode differentiation, expected a plain one: its tangent would "
                "be lost. Pass forward_ad.unpack_dual(tensor).primal; a pipeline differentiates backward only."
            )
