# SPDX-License-Identifier: Apache-2.0
"""Check parameters and buffers that are passed as dicts keyed by the model's own names.

Problem. A model may have tens of thousands of parameters, and each can be wrong in a dozen ways in any step: `.data`,
`requires_grad_` and hooks change a tensor in place, so that it is the tensor of the last step proves nothing.

Idea. A step looks at each leaf once, for what an ordinary leaf has (`Form.is_plain`). Only if one is not ordinary, all
checks run, one after the other; they say what is wrong, or find that it makes no difference.

Invariant: what `Form.is_plain` accepts, no check refuses.

Runs in every step, and when values are loaded or initialized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.tensors.arguments import is_differentiated, require_primal
from fpipe.tensors.placed import Placed, unwrap_state
from fpipe.tensors.spec import Spec

_ORDINARY = (Tensor, nn.Parameter)


@dataclass(frozen=True, eq=False)
class Form:
    """The form that one of a step's arguments must have.

    - `what`: its name, `params` or `buffers`.
    - `specs`: the names of its leaves, with the specs of their plain tensors; `placed`: the places of DTensors.
    - `trainable`: the parameters that require a gradient; `None` for buffers.
    """

    what: str
    specs: Mapping[str, Spec]
    placed: Mapping[str, Placed]
    trainable: Collection[str] | None = None

    def unwrap(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the plain tensors of leaves; raise `InputError`, naming the leaf, unless they have this form."""
        return given if self.is_plain(given) else self._unwrap(given)

    def unwrap_for_backward(self, given: dict[str, Tensor], returned: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return them for a training step; raise `InputError` also for a leaf that a backward can't use as it is.

        `returned` are trainable parameters that fpipe has made, by id.
        """
        if self.is_plain(given):
            return given
        plain = self._unwrap(given)
        if self.trainable is not None:
            require_flags(given, self.trainable, returned)
        require_recordable(plain, self.what)
        return plain

    def is_plain(self, given: object) -> bool:
        """Return whether all leaves are ordinary tensors of this form, about which no check has anything to say."""
        if not isinstance(given, Mapping) or len(given) != len(self._rows) or self.placed or is_differentiated():
            return False
        for name, shape, dtype, device, is_trainable in self._rows:
            leaf: Any = given.get(name)
            # A subclass may answer otherwise, and a nested tensor has no shape: both are asked nothing more.
            if type(leaf) not in _ORDINARY or leaf.is_nested or leaf.shape != shape or leaf.dtype is not dtype:
                return False
            if leaf.device != device or leaf.layout is not torch.strided or leaf.requires_grad is not is_trainable:
                return False
            if leaf.is_inference() or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
        return True

    @cached_property
    def _rows(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device, bool], ...]:
        flags = self.trainable or ()
        return tuple((name, s.shape, s.dtype, s.device, name in flags) for name, s in self.specs.items())

    def _unwrap(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = unwrap_state(self.what, given, self.placed)
        require_state(self.what, plain, self.specs)
        return plain


class Forms(NamedTuple):
    """The forms of the parameters and of the buffers that a process holds."""

    params: Form
    buffers: Form


def require_state_names(wanted: Iterable[str], params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Raise `InputError` if evaluation reads a parameter or buffer on a different rank than training does."""
    missing = [name for name in wanted if name not in params and name not in buffers]
    if missing:
        raise InputError(
            f"params, buffers: got none of {missing}, expected them: in eval mode, stages of this rank read them, but "
            "in train mode, stages of another rank do. Cut the model where both modes call the same modules."
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


def require_recordable(leaves: Mapping[str, object], what: str = "") -> None:
    """Raise `InputError`, naming the leaf, for a tensor made in inference mode, which no backward can use."""
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.is_inference():
            where = f"{what}[{name!r}]" if what else name
            raise InputError(
                f"{where}: got a tensor that was made in torch.inference_mode, expected a plain one: a training step "
                "keeps it for the backward. Make it outside inference mode, or pass its clone()."
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
