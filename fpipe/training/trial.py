# SPDX-License-Identifier: Apache-2.0
"""A trial of an optimizer class: it must update each parameter from that parameter's own gradient and state.

Problem. `fpipe.optimizer` makes a new instance of the class for every update, from the parameters of one process. An
optimizer that keeps something outside of parameters would forget it, and one that combines all parameters would combine
those of one rank.

Idea. Try it: run two steps on two small tensors, and on one of them alone. Compare what was computed, and look at what
the instance keeps. The trial runs the same way on every rank, those without parameters included, so all ranks refuse
the same classes, before anything is updated. It also shows which state the class keeps for a parameter.

Invariant: the trial changes nothing outside of itself; the generator of random numbers is restored.

Runs once, when an optimizer is made.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.tensors.tree import same_bits

SHAPES = ((2, 3), (3,))
"""The shapes of the tensors that are tried: a matrix and a vector, for which some classes keep other state."""
GRADIENT_SIZES = (3.0, 1e-3, 1e5)
"""The sizes of the gradients that are tried: small ones, and ones that a class may clip."""


class Traits(NamedTuple):
    """The traits of a class with certain options, found in a trial.

    - `options`: the names of the options that the class has.
    - `slots`: the sets of state that it may keep for a parameter; empty if it refused the gradients of the trial.
    - `alike`: the state that has the shape of its parameter.
    """

    options: frozenset[str]
    slots: frozenset[frozenset[str]]
    alike: frozenset[str]


def try_optimizer(cls: type[torch.optim.Optimizer], options: Mapping[str, Any], where: str) -> Traits:
    """Return the traits of a class with these options, found in a trial.

    Raise `InputError`, naming the reason, if the class can't be used or refuses the options; `where` names them.
    """
    _require_optimizer(cls)
    errors, trials = list[Exception](), list[Traits]()
    with torch.random.fork_rng(devices=[]):
        for shape in SHAPES:
            alone, pair = _make_probes(shape)
            try:
                instances = cls(alone, **options), cls(pair, **options)
            except (TypeError, ValueError, RuntimeError) as error:
                errors.append(error)
            else:
                trials.append(_try_steps(*instances, alone, pair))
    if not trials:
        raise InputError(
            f"{where}: got {dict(options)}, which {cls.__name__} refuses ({errors[0]}), expected options that it "
            "takes. Correct them."
        ) from errors[0]
    slots = frozenset(kept for one in trials for kept in one.slots)
    return Traits(trials[0].options, slots, frozenset.intersection(*(one.alike for one in trials)))


def is_independent(instance: torch.optim.Optimizer) -> bool | None:
    """Return whether an optimizer updates each parameter on its own, as far as a trial shows; `None` without a trial.

    The trial makes new instances of its class, with the options of each group, and gives them gradients of several
    sizes, since a class may clip by a norm.
    """
    cls = type(instance)
    if _list_needs(cls):
        return False
    named = inspect.signature(cls.__init__).parameters
    found: list[bool] = []
    with torch.random.fork_rng(devices=[]):
        for group in instance.param_groups:
            known = vars(instance) | group
            options = {name: known[name] for name in list(named)[2:] if name in known}
            for shape, size in itertools.product(SHAPES, GRADIENT_SIZES):
                alone, pair = _make_probes(shape)
                try:
                    instances = cls(alone, **options), cls(pair, **options)
                    for _ in range(3):
                        _step(instances, (*alone, *pair), size)
                except (TypeError, ValueError, RuntimeError, AttributeError):
                    continue
                found.append(same_bits(alone[0], pair[0]))
    return all(found) if found else None


def _make_probes(shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return a tensor alone, and the same one together with another."""
    first, second = (torch.linspace(*ends, math.prod(shape)).reshape(shape) for ends in ((-1, 1), (2, 5)))
    return [first.clone()], [first, second]


def _step(instances: Iterable[torch.optim.Optimizer], probes: Iterable[Tensor], size: float) -> None:
    """Run a step of each optimizer, with gradients of this size."""
    for tensor in probes:
        tensor.grad = size * tensor.detach()
    for one in instances:
        one.step()


def _list_needs(cls: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of the arguments that the class's step needs."""
    parameters = list(inspect.signature(cls.step).parameters.values())[1:]
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


def _require_optimizer(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(
            f"cls: got {cls!r}, expected a class of optimizers, such as torch.optim.AdamW. Pass the class, and its "
            "options by name."
        )
    needs = _list_needs(cls)
    if needs:
        raise InputError(
            f"cls: got {cls.__name__}, whose step needs {needs}, expected an optimizer that updates only from "
            "gradients: it would run the model again inside its step, and combine all parameters, which are on several "
            "ranks. Choose a first-order optimizer, such as torch.optim.AdamW."
        )


def _try_steps(
    single: torch.optim.Optimizer, both: torch.optim.Optimizer, alone: list[Tensor], pair: list[Tensor]
) -> Traits:
    """Return what two steps show: on one tensor alone, and on the same one together with another."""
    before = _list_memory(both)
    found = Traits(frozenset(both.defaults), frozenset(), frozenset())
    for _ in range(2):
        try:
            _step((single, both), (*alone, *pair), 3)
        except (RuntimeError, ValueError):  # it wants gradients of another kind, such as sparse ones
            return found
    _require_independent(both, before, pair, same_bits(alone[0], pair[0]))
    kept = both.state.get(pair[0], {})
    alike = [slot for slot, value in kept.items() if isinstance(value, Tensor) and value.shape == pair[0].shape]
    return found._replace(slots=frozenset({frozenset(kept)}), alike=frozenset(alike))


def _list_memory(instance: torch.optim.Optimizer) -> dict[str, str]:
    """Return what an instance keeps outside of the state of its parameters, as text: options and attributes."""
    options = {f"option {key!r}": value for group in instance.param_groups for key, value in group.items()}
    del options["option 'params'"]
    known = vars(torch.optim.SGD([torch.ones(1)]))
    attributes = {f"attribute {key!r}": value for key, value in vars(instance).items() if key not in known}
    return {key: repr(value) for key, value in (options | attributes).items()}


def _require_independent(
    instance: torch.optim.Optimizer, before: Mapping[str, str], probes: list[Tensor], same: bool
) -> None:
    """Raise `InputError` unless an instance kept state for these tensors only, and updated the first on its own."""
    after = _list_memory(instance)
    changed = [key for key in after if before.get(key) != after[key]]
    reason = ""
    if changed:
        reason = f"changes its {changed[0]} in a step, which would be lost"
    elif {id(holder) for holder in instance.state} - {id(probe) for probe in probes}:
        reason = "keeps state outside parameters, which would be lost"
    elif not same:
        reason = "updates a parameter in a way that depends on others, and a rank holds only some of them"
    if reason:
        raise InputError(
            f"cls: got {type(instance).__name__}, which {reason}, expected an optimizer that updates each parameter "
            "from its own gradient and state. Choose another, or write the update as a function of gradients, state "
            "and params."
        )
