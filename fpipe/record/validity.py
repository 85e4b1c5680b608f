# SPDX-License-Identifier: Apache-2.0
"""Validate the output of a front end, which may be a user's own.

Check every invariant of `Captured` that can be checked without running anything: each value is made once and before it
is read, every parameter and buffer of the model is a source, the loss and the outputs exist, and module calls nest.
Only `fpipe.verify` can tell whether the units compute what the model computes.

A front end need not report the side effects of its units. If it does not, `observe` runs them all once on fake tensors,
under a dispatch mode that sees every operator with its schema.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import (
    BatchLeaf,
    Buffer,
    Captured,
    CaptureFunction,
    Constant,
    Labels,
    Observed,
    Parameter,
    Source,
    Unit,
    Value,
)
from fpipe.record.exchanges import require_joined
from fpipe.record.objective import Objective
from fpipe.record.refusals import data_dependence_error, own_generator_error, unregistered_write_error
from fpipe.tensors.effects import EffectsMode, storage_id
from fpipe.tensors.random import label
from fpipe.tensors.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensor


def require_valid(
    captured: Any, front_end: str, model: nn.Module, objective: Objective, leaves: Sequence[Tensor]
) -> None:
    """Raise `CaptureError`, naming the front end and the fault, unless `captured` is a valid `Captured`."""
    _Check(f"front end {front_end}").captured(captured, model, objective, len(leaves))


def name_of(front_end: CaptureFunction) -> str:
    """Return the name of a front end for error messages."""
    front_end = front_end.func if isinstance(front_end, partial) else front_end
    return getattr(front_end, "__qualname__", type(front_end).__name__)


def require_results(unit: Unit, made: Any) -> None:
    """Raise `CaptureError` unless `made` is a tuple of tensors, one for each value that the unit makes."""
    if isinstance(made, tuple) and len(made) == len(unit.makes) and all(isinstance(one, Tensor) for one in made):
        return
    got = [type(one).__name__ for one in made] if isinstance(made, tuple) else type(made).__name__
    raise CaptureError(
        f"module {unit.path or '(root)'}: got {got} from the unit's call, expected a tuple of {len(unit.makes)} "
        "tensors, one for each value that it makes. Return what `makes` says."
    )


def observe(captured: Captured) -> Observed:
    """Return what the front end observed; if it observed nothing, run every unit once on fake tensors.

    Raise `CaptureError` for a unit that depends on data, draws from a generator other than the default, writes to an
    unregistered tensor, or does not return what it `makes`.
    """
    if captured.observed is not None:
        return captured.observed
    values = dict(captured.fakes)
    written: dict[Unit, frozenset[int]] = {}
    random: dict[Unit, Labels] = {}
    collective: set[Unit] = set()
    ordinals: dict[str, int] = {}
    with captured.mode, torch.no_grad():
        for unit in captured.units:
            where = f"module {unit.path or '(root)'}"
            try:
                check = partial(require_joined, captured.ranks_of, partial(str, where))
                with EffectsMode() as watch, watch.effects.observe(check):
                    made = unit.call(*[values[value] for value in unit.reads])
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise data_dependence_error(where, error) from error
            require_results(unit, made)
            if watch.effects.unregistered:
                raise unregistered_write_error(where)
            if watch.effects.foreign:
                raise own_generator_error(where)
            values.update(zip(unit.makes, made, strict=True))
            written[unit] = frozenset(watch.effects.written)
            collective.update({unit} if watch.effects.communicates else ())
            if watch.effects.drawn:
                ordinal = ordinals[unit.path] = ordinals.get(unit.path, -1) + 1
                random[unit] = Labels(label(unit.path, ordinal), tuple(watch.effects.drawn))
    storage = {value: storage_id(tensor) for value, tensor in values.items()}
    views = frozenset(value for value, tensor in values.items() if tensor._is_view())
    return Observed(storage, written, random, views, collective=frozenset(collective))


class _Check:
    """Checks that raise `CaptureError` on behalf of the front end `who`."""

    def __init__(self, who: str) -> None:
        self.who = who

    def captured(self, captured: Any, model: nn.Module, objective: Objective, leaves: int) -> None:
        """Run all checks."""
        if not isinstance(captured, Captured):
            self._refuse(f"got {type(captured).__name__}, expected a Captured", "Return one")
        self._sources(captured, model, leaves)
        known = self._units(captured)
        self._results(captured, objective, known)
        self._reassigned(captured)
        self._calls(captured)

    def _sources(self, captured: Captured, model: nn.Module, leaves: int) -> None:
        for value, source in captured.sources.items():
            self._source(value, source, leaves)
            fake = captured.fakes.get(value)
            if not isinstance(fake, FakeTensor) or fake.fake_mode is not captured.mode:
                got = "a fake tensor of another mode" if isinstance(fake, FakeTensor) else type(fake).__name__
                self._refuse(
                    f"got {got} as the fake of value {value} ({source}), expected one of the captured mode",
                    "Make it with fpipe.tensors.fake.fake(mode, tensor, device)",
                )
        for kind, wanted in ((Parameter, dict(model.named_parameters())), (Buffer, dict(model.named_buffers()))):
            found = Counter(source.name for source in captured.sources.values() if isinstance(source, kind))
            if found != Counter(wanted.keys()):
                missing, surplus = wanted.keys() - found.keys(), found.keys() - wanted.keys()
                twice = [name for name, count in found.items() if count > 1]
                self._refuse(
                    f"got other {kind.__name__.lower()}s among its sources than the model has (missing "
                    f"{sorted(missing)}, unknown {sorted(surplus)}, repeated {twice}), expected each once, by its "
                    "first name, used or not",
                    "Go through the model's named_parameters() and named_buffers()",
                )
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if captured.trainable != trainable:
            self._refuse(
                f"got the trainable parameters {sorted(captured.trainable)}, expected {sorted(trainable)}",
                "Name those that require a gradient",
            )

    def _source(self, value: Value, source: Source, leaves: int) -> None:
        if not isinstance(source, Parameter | Buffer | BatchLeaf | Constant):
            self._refuse(f"got {source!r} as the source of value {value}, expected a Source", "Use one of the contract")
        if isinstance(source, BatchLeaf) and source.leaf not in range(leaves):
            self._refuse(f"got {source} for value {value}, expected a leaf below {leaves}", "Number the given leaves")
        if isinstance(source, Constant) and isinstance(source.tensor, FakeTensor):
            self._refuse(f"got a constant without values for value {value}, expected a real tensor", "Keep the model's")

    def _units(self, captured: Captured) -> set[Value]:
        """Check that each value is made before it is read, and only once; return all values."""
        known = set(captured.sources)
        for position, unit in enumerate(captured.units):
            if not isinstance(unit, Unit):
                self._refuse(f"got {type(unit).__name__} as unit {position}, expected a Unit", "Wrap it in one")
            where = f"unit {position} ({unit.path or '(root)'})"
            self._known(where, unit.reads, known)
            again = [value for value in unit.makes if value in known]
            if again or len(set(unit.makes)) < len(unit.makes):
                self._refuse(
                    f"{where} makes {list(unit.makes)}, of which {again} exist already or twice; expected new values",
                    "Number each tensor that a unit makes anew",
                )
            known.update(unit.makes)
        return known

    def _results(self, captured: Captured, objective: Objective, known: Collection[Value]) -> None:
        if (captured.loss is None) is not (objective.loss is None):
            got = "no loss" if captured.loss is None else "a loss"
            self._refuse(f"got {got}, expected what the objective asks for", "See Objective.loss")
        self._known("the loss", () if captured.loss is None else (captured.loss,), known)
        self._known("the outputs", captured.outputs, known)
        self._known("the loss's aux", captured.aux, known)
        if len(captured.outputs) != len(captured.structure.names):
            self._refuse(
                f"got {len(captured.outputs)} outputs for a tree of {len(captured.structure.names)} tensors, expected "
                "as many",
                "Take both from fpipe.tensors.tree.flatten(outputs)",
            )

    def _reassigned(self, captured: Captured) -> None:
        made = {value for unit in captured.units for value in unit.makes}
        for buffer, new in captured.reassigned.items():
            if not isinstance(captured.sources.get(buffer), Buffer) or new not in made:
                self._refuse(
                    f"got {captured.sources.get(buffer)} (value {buffer}) that is assigned value {new}, expected a "
                    "buffer and a value that a unit makes",
                    "Let a unit make the buffer's next value",
                )

    def _calls(self, captured: Captured) -> None:
        around: list[int] = []
        before = 0
        for call in captured.calls:
            if not before <= call.start <= call.stop <= len(captured.units):
                self._refuse(
                    f"got {call}, expected one that starts at {before} or later and stops at {len(captured.units)} or "
                    "before",
                    "List calls as they begin, and each before those inside it",
                )
            before = call.start
            while around and around[-1] <= call.start:
                around.pop()
            if around and call.stop > around[-1]:
                self._refuse(f"got {call}, which ends after the call around it, expected it inside", "End it before")
            around.append(call.stop)

    def _known(self, where: str, values: Sequence[Value], known: Collection[Value]) -> None:
        unknown = [value for value in values if value not in known]
        if unknown:
            self._refuse(
                f"{where} reads the values {unknown}, which nothing has made yet; expected values of sources or of "
                "earlier units",
                "Put the units into the order in which one device runs them",
            )

    def _refuse(self, what: str, repair: str) -> NoReturn:
        raise CaptureError(f"{self.who}: {what}. {repair}.")
