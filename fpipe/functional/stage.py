# SPDX-License-Identifier: Apache-2.0
"""A stage as pure functions on pytrees: written by a user, derived from a forward, or cut from a model.

All have one contract, on pytrees of whatever optree knows:

    forward(params, buffers, inputs, key)  -> outputs, buffers', residuals
    backward(residuals, cotangents)        -> input_cotangents, grads
    backward_input(residuals, cotangents)  -> input_cotangents, deferred
    backward_weight(deferred)              -> grads

`inputs` is a tuple, one tree for each of the stage's reads; `input_cotangents` is a tuple with one tree for each, in
which `None` stands for no cotangent. `cotangents` has the structure of `outputs`, `grads` that of `params`. No argument
is modified. Residuals and deferred state are used once.

Runs when a stage is made, and in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optree

from fpipe.errors import InputError
from fpipe.functional.derived import Derived, Read
from fpipe.tensors.tree import NAMESPACE

Forward = Callable[[Any, Any, tuple[Any, ...], int], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Stage:
    """A stage made from your functions: its forward, and its backward, unsplit, in halves, or both.

    Without halves, a schedule that splits backwards runs the unsplit backward instead of the input half. Without an
    unsplit backward, the halves run one after the other. Without either, schedules with backwards are rejected.

    - `forward(params, buffers, inputs, key)` returns outputs, new buffers and residuals.
    - `backward(residuals, cotangents)` returns the cotangents of the inputs, and the gradients.
    - `backward_input(residuals, cotangents)` returns the cotangents of the inputs, and what the weight half needs.
    - `backward_weight(deferred)` returns the gradients.
    - `name`: its name in errors and pictures. `derived`: set by `fpipe.stage`.
    - `carries`: true for a stage with a carry: the last of its inputs is the carry of the previous slice, `None` at the
      first slice of a microbatch, and it returns outputs as a pair of these and the carry for the next slice.

    >>> import fpipe
    >>> def forward(weight, buffers, inputs, key):
    ...     (x,) = inputs
    ...     return weight * x, buffers, (weight, x)
    >>> def backward(residuals, cotangent):
    ...     weight, x = residuals
    ...     return (weight * cotangent,), x * cotangent
    >>> times = fpipe.Stage(forward, backward)
    >>> out, _, residuals = times.forward(3.0, (), (2.0,), 0)
    >>> out, times.backward(residuals, 1.0)
    (6.0, ((3.0,), 2.0))
    """

    forward: Forward
    backward: Callable[[Any, Any], tuple[tuple[Any, ...], Any]] | None = None
    backward_input: Callable[[Any, Any], tuple[tuple[Any, ...], Any]] | None = None
    backward_weight: Callable[[Any], Any] | None = None
    name: str = ""
    derived: Derived | None = field(default=None, repr=False, compare=False)
    carries: bool = False

    def __post_init__(self) -> None:
        if (self.backward_input is None) != (self.backward_weight is None):
            given, missing = ("backward_input", "backward_weight")[:: 1 if self.backward_weight is None else -1]
            raise InputError(
                f"{self}: got {given} without {missing}, expected both halves of a backward or none. Pass {missing}, "
                "or only backward=."
            )
        for what in ("forward", "backward", "backward_input", "backward_weight"):
            if getattr(self, what) is not None and not callable(getattr(self, what)):
                raise InputError(f"{self}: got {getattr(self, what)!r} as {what}, expected a function. Pass one.")

    @property
    def is_differentiable(self) -> bool:
        """True if the stage has a backward."""
        return self.backward is not None or self.backward_input is not None

    def __str__(self) -> str:
        return f"stage {self.name or getattr(self.forward, '__name__', type(self.forward).__name__)!r}"


def stage(forward: Callable[..., Any], name: str = "", carries: bool = False) -> Stage:
    """Return the stage of a pure function of tensors, with a backward and its halves derived from it.

    - `forward`: `forward(params, inputs)`, which returns outputs, or `forward(params, buffers, inputs, key)`, which
      returns outputs and new buffers. All are pytrees of tensors and constants; `inputs` is a tuple. It gets a gradient
      for each floating-point tensor in `params`, and a cotangent for each in `inputs`. Put tensors without a gradient
      into `buffers`. Torch's default generators are seeded from the key before it runs, so dropout works.
    - `name`: the stage's name in errors and pictures; by default the function's name.
    - `carries`: true if the last of `inputs` is the carry, and the outputs are a pair of the outputs and the carry for
      the next slice, as in `fpipe.Stage`.

    For each new structure and shapes of its arguments, the function is recorded on fake tensors, forward and backward;
    then only the recorded operators run. So it must be pure: its Python runs only while it is recorded. A function that
    can't be recorded, because it reads values of tensors or its `key`, runs as Python, and its backward is not split.

    Raise `InputError` when it is first called with arguments that it modifies, or outputs that are not tensors.

    >>> import torch, fpipe
    >>> def affine(params, inputs):
    ...     (x,) = inputs
    ...     return x @ params["weight"] + params["bias"]
    >>> one = fpipe.stage(affine)
    >>> params = {"weight": torch.eye(2), "bias": torch.ones(2)}
    >>> y, _, residuals = one.forward(params, (), (torch.ones(3, 2),), 0)
    >>> (dx,), grads = one.backward(residuals, torch.ones(3, 2))
    >>> y[0].tolist(), dx[0].tolist(), grads["bias"].tolist()
    ([2.0, 2.0], [1.0, 1.0], [3.0, 3.0])
    """
    return _of(Derived(forward, name or getattr(forward, "__name__", type(forward).__name__)), carries)


def _of(one: Derived, carries: bool) -> Stage:
    return Stage(one.forward, one.backward, one.backward_input, one.backward_weight, one.name, one, carries)


def specialize(one: Stage, passes: tuple[int, ...], read: tuple[Read, ...] | None) -> Stage:
    """Return a stage that also returns these of its inputs, for a later stage: its outputs are then a pair.

    What comes back for an input that was passed on is added to its cotangent. `read` selects what later stages read of
    the outputs; nothing comes back for the rest.
    """
    if one.derived is not None:
        return _of(replace(one.derived, passes=passes, read=read, plans={}), one.carries)
    if not passes:
        return one

    def forward(params: Any, buffers: Any, inputs: tuple[Any, ...], key: int) -> tuple[Any, Any, Any]:
        outputs, new, residuals = one.forward(params, buffers, inputs, key)
        return (outputs, tuple([inputs[k] for k in passes])), new, residuals

    def adding(function: Callable[[Any, Any], tuple[tuple[Any, ...], Any]] | None) -> Any:
        def backward(residuals: Any, cotangents: Any) -> tuple[tuple[Any, ...], Any]:
            own, passed = cotangents
            found, rest = function(residuals, own)  # type: ignore[misc]
            sums = list(found)
            for k, term in zip(passes, passed, strict=True):
                sums[k] = add_trees(term, sums[k])
            return tuple(sums), rest

        return None if function is None else backward

    return replace(one, forward=forward, backward=adding(one.backward), backward_input=adding(one.backward_input))


def add_trees(first: Any, *others: Any) -> Any:
    """Return the sum of one or two trees of the same structure; `None` for a leaf or a tree adds nothing."""
    if not others or others[0] is None:
        return first
    (second,) = others
    if first is None:
        return second

    def add(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return optree.tree_map(add, first, second, none_is_leaf=True, namespace=NAMESPACE)
