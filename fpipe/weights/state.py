# SPDX-License-Identifier: Apache-2.0
"""Checks of parameters and buffers that are passed as dicts keyed by the model's own names.

Runs in every step, and when values are loaded or initialized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.tensors.spec import Spec
from fpipe.tensors.tangents import require_primal


def require_state_names(wanted: Iterable[str], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise `InputError` if evaluation reads a parameter or buffer on a different rank than training does."""
    missing = [name for name in wanted if name not in params and name not in buffers]
    if missing:
        raise InputError(
            f"params, buffers: got none of {missing}, expected them: in eval mode, stages of this rank read them, in "
            "train mode those of another. Cut the model where both modes call the same modules."
        )


def require_state(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Spec]) -> None:
    """Raise `InputError`, naming the leaf, unless `got` has these names with these shapes, dtypes and devices."""
    if not isinstance(got, Mapping):
        raise InputError(
            f"{what}: got {type(got).__name__}, expected a dict by name. Pass what pipe.init(model) returned."
        )
    if got.keys() != expected.keys():
        missing = [name for name in expected if name not in got]
        surplus = [name for name in got if name not in expected]
        raise InputError(
            f"{what}: got {len(got)} leaves, expected {len(expected)} (missing {missing}, unexpected {surplus}). Pass "
            "what pipe.init(model) returned, updated leaf by leaf."
        )
    require_primal(what, got)
    for name, spec in expected.items():
        require_leaf(what, name, got[name], spec)
        if got[name].layout is not torch.strided:
            raise InputError(
                f"{what}[{name!r}]: got a tensor of layout {got[name].layout}, expected a dense one. Pass it dense."
            )
        if got[name].device != spec.device:
            raise InputError(
                f"{what}[{name!r}]: got {spec} on {got[name].device}, expected it on {spec.device}. Move it, or build "
                "the pipeline from the model as it is now."
            )


def require_flags(params: Mapping[str, Tensor], trainable: Collection[str], returned: Mapping[int, Tensor]) -> None:
    """Raise `InputError`, naming the leaf, for flags and hooks that a step would ignore.

    A tensor without `requires_grad` may be any value, such as the result of a function of parameters. But a module's
    parameter, or a tensor that was `returned` as trainable, must have been frozen since.
    """
    for name, p in params.items():
        flag = p.requires_grad
        if flag is not (name in trainable) and (flag or isinstance(p, nn.Parameter) or returned.get(id(p)) is p):
            raise InputError(
                f"params[{name!r}]: got requires_grad={flag}, expected {not flag}, as in the model when the pipeline "
                "was built. Set the flag of the model's parameter, too, and make a new pipeline with "
                "pipe.rebuilt(model); or pass the parameter detached."
            )
        hooks = p._backward_hooks or p._post_accumulate_grad_hooks
        if hooks and not isinstance(p, nn.Parameter):
            hook = next(iter(hooks.values()))
            raise InputError(
                f"params[{name!r}]: got a hook on its gradient, {getattr(hook, '__qualname__', repr(hook))}, expected "
                "none: it would never run. Register it on the model's parameter before the pipeline is built, or apply "
                "it to the gradients that the step returns."
            )


def require_leaf(what: str, name: str, leaf: object, spec: Spec) -> None:
    """Raise `InputError` unless `leaf` is a tensor with values and with the spec's shape and dtype, on any device."""
    where = f"{what}[{name!r}]: got"
    if isinstance(leaf, Tensor) and leaf.is_nested:  # it has no shape to compare
        raise InputError(f"{where} a nested tensor, expected a tensor {spec}. Pass the tensor that the pipeline has.")
    if isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype) and not leaf.is_meta:
        return
    if not isinstance(leaf, Tensor):
        raise InputError(f"{where} {type(leaf).__name__}, expected a tensor {spec}. Pass the tensor itself.")
    if leaf.device.type == "meta":
        raise InputError(
            f"{where} a tensor on the meta device, expected values. Make this process's share with "
            "pipe.init(state_dict), pipe.init(fpipe.safetensors(path)) or pipe.initialise(function, seed=0)."
        )
    raise InputError(
        f"{where} {Spec.of(leaf)}, expected {spec}; values are never cast. Convert it, or build the pipeline from a "
        "model of these shapes and dtypes."
    )
