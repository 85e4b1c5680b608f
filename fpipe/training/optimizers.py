# SPDX-License-Identifier: Apache-2.0
"""Any class of `torch.optim` as a pair of pure functions, on parameters and state by name.

Problem. An instance of `torch.optim.AdamW` holds references to parameters, keeps its state by their identity, saves it
by their position in a list, and refuses an empty list. On several ranks, positions collide, another cut moves them, and
a rank may well hold no parameters.

Idea. As in optax, a pair of functions: `init(params)` returns the state, `update(grads, state, params)` returns new
parameters and a new state. State is a dict by parameter name, so it is saved by name and loads under any cut. An update
makes an instance of the class, puts the state in, calls its `step`, and takes the state out again: torch's own math,
with the same bits.

Invariant: the update of a parameter depends on its own gradient, state and options only. `fpipe.training.trial` refuses
classes for which that isn't so. Nothing is kept between updates but what they return. Everything is checked before
anything is updated, so arguments that are refused stay as they were.

Runs in every step, after the backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.inputs import State
from fpipe.tensors.arguments import require_arguments, require_tensors
from fpipe.tensors.names import accept_trees, restore_like
from fpipe.training.groups import Groups, Options, find_group
from fpipe.training.trial import Traits, try_optimizer
from schedules.arguments import each

OptimizerState: TypeAlias = dict[str, dict[str, Any]]
"""For each parameter, by name, its state by slot: tensors or numbers; empty until its first update."""


class Optimizer(NamedTuple):
    """A pair of pure functions.

    - `init(params)` returns the state before the first update: an empty dict for each parameter.
    - `update(grads, state, params, *, groups=None, **options)` returns the new parameters and the new state.
    """

    init: Callable[[State], OptimizerState]
    update: Callable[..., tuple[State, OptimizerState]]


def optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    groups: Mapping[str, Options] | None = None,
    names: Iterable[str] | None = None,
    donate: bool = False,
    **options: Any,
) -> Optimizer:
    """Return an optimizer of `torch.optim`, or of a library with the same interface, as a pair of pure functions.

    - `cls`: the class, such as `torch.optim.AdamW`; `options`: those that it takes, such as `lr`.
    - `groups`: options of some parameters, by pattern, as in `{"*.bias": {"weight_decay": 0.0}}`. A star matches any
      text, including dots. A parameter is in one group at most.
    - `names`: all names of the model's parameters, `pipe.names`. A process sees only its own parameters, so under
      torch.distributed a pattern that matches nothing is detected only if you pass them.
    - `donate`: update in place. Parameters, state and gradients that are passed are consumed, and the same tensors are
      returned; else nothing that is passed is modified.

    Then `init, update = fpipe.optimizer(...)`. `update(grads, state, params)` computes, bit for bit, what the class
    computes in its `step` for the parameters of one dtype. A parameter without a gradient is returned unchanged, with
    its state. Parameters are returned as leaves, with the flags that they had.

    Options may change from update to update, so a learning-rate schedule is a function of the step: `update(...,
    lr=schedule(i))`. As in `fpipe.optimizer`, options by name apply to all parameters whose group does not set them,
    and `groups={pattern: {...}}` set them for a group.

    The update does not communicate, so it does not detect ranks with different optimizers: compare them with
    `fpipe.require_same`, or use `fpipe.train_step`, which compares them. Ranks without parameters call it like all
    others.

    Raise `InputError` for a class that combines parameters or keeps state elsewhere (LBFGS does both), for options
    that it doesn't have, for patterns that overlap or match nothing, and for state of another optimizer.

    >>> import torch, fpipe
    >>> init, update = fpipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9, groups={"*.bias": {"lr": 0.25}})
    >>> params = {"0.weight": torch.ones(1, 2), "0.bias": torch.ones(1)}
    >>> grads = {name: torch.ones_like(p) for name, p in params.items()}
    >>> params, state = update(grads, init(params), params)
    >>> params, state
    ({'0.weight': tensor([[0.5000, 0.5000]]), '0.bias': tensor([0.7500])}, \
{'0.weight': {'momentum_buffer': tensor([[1., 1.]])}, '0.bias': {'momentum_buffer': tensor([1.])}})
    >>> params, state = update({"0.bias": grads["0.bias"]}, state, params, groups={"*.bias": {"lr": 0.0}})
    >>> params["0.bias"]
    tensor([0.7500])
    """
    require_arguments(optimizer, {"names": names, "donate": donate})
    parts = Groups.of(options, groups)
    traits: dict[str | None, Traits] = {None: try_optimizer(cls, options, "options")}
    traits |= {pattern: try_optimizer(cls, parts.merge(pattern), f"groups[{pattern!r}]") for pattern in parts.own}
    whole = None if names is None else tuple(each("names", names, str, InputError))
    if whole is not None:
        parts.require_partition(whole, True)

    @accept_trees("params")
    def init(params: State) -> OptimizerState:
        """Return the state before the first update."""
        require_tensors("params", params)
        parts.require_partition(params, whole is None and not dist.is_initialized())
        return {name: {} for name in params}

    @accept_trees("grads", "params", restore=restore_like("params"))
    def update(
        grads: State,
        state: OptimizerState,
        params: State,
        *,
        groups: Mapping[str, Options] | None = None,
        **options: Any,
    ) -> tuple[State, OptimizerState]:
        """Return the parameters and the state after one update."""
        now = parts.replace(options, groups)
        _require_options(cls.__name__, now, traits[None])
        require_fitting(grads, state, params)
        chosen = {name: find_group(name, tuple(parts.own)) for name in grads}
        leaves = {}
        for name, grad in grads.items():
            _require_gradient(name, grad, params[name])
            _require_own_slots(cls.__name__, name, state[name], params[name], traits[chosen[name]])
            leaves[name] = _make_leaf(params[name], grad, donate)
        held = {name: state[name] if donate else copy_slots(state[name]) for name in leaves}
        new = _step(cls, now, chosen, leaves, held)
        return _collect(params, leaves, donate), {**state, **new}

    return Optimizer(init, update)


def _make_leaf(p: Tensor, grad: Tensor, donate: bool) -> Tensor:
    """Return a tensor for torch's optimizer to update: the parameter's own memory if it is donated, else a copy."""
    leaf = p.detach() if donate else p.detach().clone()
    leaf.grad = grad.detach() if donate else grad.detach().clone()
    return leaf


def copy_slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state."""
    return {slot: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for slot, value in slots.items()}


def _step(
    cls: Any, groups: Groups, chosen: Mapping[str, str | None], leaves: State, state: OptimizerState
) -> OptimizerState:
    """Update the leaves and their state in place, by an instance of the class; return the state.

    Each dtype is a group of its own: in a group, `torch.optim.Adafactor` takes its epsilon from the first dtype.
    """
    members: dict[tuple[str | None, torch.dtype], list[Tensor]] = {}
    for name, leaf in leaves.items():
        members.setdefault((chosen[name], leaf.dtype), []).append(leaf)
    if not members:
        return {}
    listed = [{"params": some, **groups.merge(pattern)} for (pattern, _), some in members.items()]
    try:
        instance = cls(listed, **groups.options)
    except (TypeError, ValueError) as error:
        got = [dict(groups.merge(pattern)) for pattern in (None, *groups.own)]
        raise InputError(
            f"options: got {got}, which {cls.__name__} refuses ({error}), expected options that it takes. Correct them."
        ) from error
    for name, leaf in leaves.items():
        if state[name]:
            instance.state[leaf] = state[name]
    try:
        instance.step()
    except RuntimeError as error:
        if "gradients" not in str(error):  # of another kind than the class takes, before anything was updated
            raise
        raise InputError(
            f"grads: got gradients that {cls.__name__} refuses ({error}), expected those that it takes. Choose another "
            "optimizer, or convert them."
        ) from error
    return {name: dict(instance.state.get(leaf, {})) for name, leaf in leaves.items()}


def _collect(params: State, leaves: State, donate: bool) -> State:
    """Return the parameters after an update, as leaves with the flags that they had."""
    new = dict(params)
    for name, leaf in leaves.items():
        leaf.grad = None
        if not donate:
            new[name] = leaf.requires_grad_(params[name].requires_grad)
    return new


def _require_options(cls: str, groups: Groups, traits: Traits) -> None:
    listed = {"options": groups.options} | {f"groups[{pattern!r}]": own for pattern, own in groups.own.items()}
    for where, options in listed.items():
        unknown = [key for key in options if key not in traits.options]
        if unknown:
            raise InputError(
                f"{where}: got {unknown}, expected options of {cls}: {sorted(traits.options)}. Correct the name."
            )


def require_fitting(grads: Mapping[str, object], state: Mapping[str, object], params: Mapping[str, object]) -> None:
    """Raise `InputError`, naming the leaf, unless these are dicts by parameter name that fit together."""
    for what, one in (("grads", grads), ("state", state), ("params", params)):
        if not isinstance(one, Mapping):
            raise InputError(
                f"{what}: got {type(one).__name__}, expected a dict by parameter name. Call update(grads, state, "
                "params)."
            )
    missing = [name for name in params if name not in state]
    surplus = [name for name in state if name not in params]
    if missing or surplus:
        raise InputError(
            f"state: got one for {len(state)} parameters, expected {len(params)} (missing {missing}, unexpected "
            f"{surplus}). Pass what init(params) or the last update returned, or load it with fpipe.load."
        )
    for name in grads:
        if name not in params:
            raise InputError(
                f"grads[{name!r}]: got a gradient of none of the {len(params)} parameters, expected names of params. "
                "Pass the gradients and the parameters of the same step."
            )


def _require_gradient(name: str, grad: object, p: Tensor) -> None:
    if isinstance(grad, Tensor) and (grad.shape, grad.dtype, grad.device) == (p.shape, p.dtype, p.device):
        return
    got = f"{grad.dtype} of shape {list(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
    want = f"{p.dtype} of shape {list(p.shape)}"
    if got == want:
        got, want = (f"a gradient on {one.device}" for one in (grad, p) if isinstance(one, Tensor))
    raise InputError(
        f"grads[{name!r}]: got {got}, expected {want}, as the parameter. Pass the gradients that a step returned; for "
        "float32 gradients of parameters in lower precision, see fpipe.masters."
    )


def _require_own_slots(cls: str, name: str, slots: Mapping[str, Any], p: Tensor, traits: Traits) -> None:
    where = f"state[{name!r}]"
    if not isinstance(slots, Mapping):
        raise InputError(f"{where}: got {type(slots).__name__}, expected a dict. Pass what the last update returned.")
    if slots and traits.slots and frozenset(slots) not in traits.slots:
        expected = " or ".join(str(sorted(one)) for one in sorted(traits.slots, key=sorted))
        raise InputError(
            f"{where}: got {sorted(slots)}, expected {expected}, as {cls} keeps with these options. Pass the state of "
            "this optimizer; to begin, call init(params)."
        )
    for slot, value in slots.items():
        if slot in traits.alike and isinstance(value, Tensor) and value.shape != p.shape:
            raise InputError(
                f"{where}[{slot!r}]: got shape {list(value.shape)}, expected {list(p.shape)}, as the parameter. Pass "
                "the state of this parameter."
            )
