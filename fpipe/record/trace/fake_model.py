# SPDX-License-Identifier: Apache-2.0
"""Run a model's skeleton on fake tensors: fresh fakes of its parameters, buffers and batch in every run.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError, PipelineError
from fpipe.record.captured import BatchLeaf, Buffer, Parameter, Source, Value
from fpipe.record.fakes.generators import Generators
from fpipe.record.model.places import (
    LOSS,
    advise_on_errors,
    advise_on_values,
    blame,
    differentiates,
    traceback_line,
)
from fpipe.record.model.skeleton import Absent, absent, skeleton
from fpipe.record.numbers import Number, learn
from fpipe.record.objective import Computed, Loss, Objective, Way
from fpipe.record.questions import Ask, refuse_questions
from fpipe.record.trace.checks import require_in_place
from fpipe.record.trace.patches import watch_torch
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.whole_calls import Seat, Seating
from fpipe.tensors.fake import as_parameter, fake, fake_mode
from fpipe.tensors.tree import first_names, flatten_all

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FakeModel:
    """A model that runs on fake tensors.

    - `skeleton`: the copy without tensors that runs, or what a front end `made` of one. `seats`: where its modules keep
      parameters and buffers.
    - `state`: the model's parameters and buffers. `leaves`: the tensors of an example microbatch.
    - `opaque`: the modules that may branch on data, submodules included. `seals`: why modules are sealed, by name.
    - `mode`: the fake tensor mode.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        leaves: Sequence[Tensor],
        opaque: Collection[str],
        seals: Mapping[str, str],
        made: nn.Module | None = None,
    ) -> None:
        self.model, self.skeleton = model, skeleton(model, Absent.like) if made is None else made
        self.objective, self.leaves, self.seals = objective, leaves, seals
        self.opaque = (*opaque, *(name for name, module in self.skeleton.named_modules() if _reads_counter(module)))
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self.mode = fake_mode()
        self.newest: Recorder | None = None
        self.trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self.state: list[tuple[Source, Tensor]] = [
            *((Parameter(name), tensor) for name, tensor in model.named_parameters()),
            *((Buffer(name), tensor) for name, tensor in model.named_buffers()),
        ]
        self.seats = find_seats(self.skeleton, model)
        for source, tensor in self.state if made is not None else ():
            empty = absent(tensor)
            for table, name in self.seats.get(source, ()):
                table[name] = empty

    def sources(self) -> dict[Value, tuple[Source, Tensor]]:
        """Return fresh fake tensors for the model's state and the batch, each with its source, by value."""
        made: list[tuple[Source, Tensor]] = []
        for source, tensor in self.state:
            new = fake(self.mode, tensor, self.device)
            trained = tensor.requires_grad and source[0] in self.trainable
            made.append((source, as_parameter(new, trained) if isinstance(source, Parameter) else new))
        made += [(BatchLeaf(k), fake(self.mode, leaf, self.device)) for k, leaf in enumerate(self.leaves)]
        return {Value(k): one for k, one in enumerate(made)}

    def recorder(self, ask: Ask = refuse_questions, generators: Generators | None = None) -> Recorder:
        """Return a recorder for one run on fresh fake tensors."""
        self.newest = Recorder(self.skeleton, self.sources(), ask, self.opaque, generators, self.objective.way)
        self.newest.ranks_of = self.objective.ranks_of
        return self.newest

    @property
    def other_ways(self) -> list[Way]:
        """The ways to record the model that may work if the newest run did not."""
        run = self.newest
        sampled = [False, True] if run is not None and run.has_assumed else [False]
        plain = [False, True] if run is not None and run.numbers else [False]
        return [Way(one, other) for other in plain for one in sampled if one or other]

    # ------------------------------------------------------------------------------------------------------------ seats

    def seats_by_value(self) -> dict[Value, list[Seat]]:
        """Return the skeleton's seats of each parameter and buffer, by value."""
        return {Value(k): self.seats.get(source, []) for k, (source, _) in enumerate(self.state)}

    def seat(self, fakes: Mapping[Value, Tensor]) -> Seating:
        """Return a context in which these tensors are in their seats."""
        filled = {value: seats for value, seats in self.seats_by_value().items() if seats}
        numbered = [(*seat, k) for k, seats in enumerate(filled.values()) for seat in seats]
        return Seating(numbered, [fakes[value] for value in filled])

    def remove_seat(self, seat: Seat) -> None:
        """Stop filling a seat: the tensor in it now stays there."""
        table, name = seat
        for seats in self.seats.values():
            seats[:] = [other for other in seats if (id(other[0]), other[1]) != (id(table), name)]

    # -------------------------------------------------------------------------------------------------------------- run

    def run(self, recorder: Recorder) -> Computed:
        """Run the model once and return its results; raise `CaptureError` if the run cannot be captured."""
        fakes = recorder.values.tensors
        try:
            with self.seat(fakes), self.watch(recorder):
                loss, *others = self._objective(recorder)(self.skeleton, self._batch(recorder))
                computed = Computed(loss, *map(_learn_numbers, others))
                for error in recorder.fake_errors:
                    raise error  # in case the forward swallowed it
                self._require_kept_state(recorder)
                return computed
        except PipelineError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    @contextmanager
    def watch(self, recorder: Recorder) -> Iterator[None]:
        """Report everything that the skeleton does inside to a recorder."""
        with (
            self.mode.note(recorder.effects, recorder.check_operator),
            watch_torch(recorder, self.skeleton, self.seals),
        ):
            yield

    def _batch(self, recorder: Recorder) -> tuple[Tensor, ...]:
        values = recorder.values
        return tuple(values.tensors[v] for v, source in values.sources.items() if isinstance(source, BatchLeaf))

    def _objective(self, recorder: Recorder) -> Objective:
        """Return the objective, with calls of its loss recorded as frames, like those of a module."""
        loss, sealed = self.objective.loss, self.seals.get(LOSS, "")
        return self.objective if loss is None else replace(self.objective, loss=_in_frame(loss, recorder, sealed))

    def _require_kept_state(self, recorder: Recorder) -> None:
        """Raise `CaptureError` if a tensor that the run assigned in place of a parameter or buffer would be lost."""
        reassignments, values = recorder.reassignments, recorder.values
        reassignments.require_carried(recorder.record)
        reassignments.require_not_repeated(recorder.record)
        current = reassignments.current_values
        for value, seats in self.seats_by_value().items():
            require_in_place(values, value, values.tensors[current.get(value, value)], seats)

    def _explain(self, error: Exception) -> CaptureError:
        """Return the error for an exception that the model or the loss raised."""
        module = blame(error.__traceback__, self.skeleton)
        if differentiates(error.__traceback__):
            return CaptureError(
                f"{module}: got {type(error).__name__}: {error}{traceback_line(error.__traceback__)}, expected "
                "gradients with respect to what is computed there. A gradient with respect to inputs, as in a gradient "
                "penalty, goes through all stages: compute it in the forward of the model, on a copy of the input that "
                "requires a gradient, and return it for the loss. That module can't be cut."
            )
        may_lack_values = not isinstance(error, LookupError | NameError | ImportError)
        repair = advise_on_values(module, self.opaque) if may_lack_values else advise_on_errors()
        return CaptureError(
            f"{module}: got {type(error).__name__}: {error}{traceback_line(error.__traceback__)}, expected a forward "
            "that runs on a copy of the model, on fake tensors, which have shapes but no values. "
            f"{repair}"
        )


def _learn_numbers(outputs: Any) -> Any:
    """Return outputs with Python numbers in place of recorded ones."""
    leaves, spec = flatten_all(outputs)
    if not any(isinstance(leaf, Number) for leaf in leaves):
        return outputs
    return optree.tree_unflatten(spec, map(learn, leaves))


def _in_frame(loss: Loss, recorder: Recorder, sealed: str) -> Loss:
    """Return the loss as a function whose calls are recorded as frames."""

    def run(*args: Any) -> Tensor:
        frame = recorder.open_frame(LOSS, type(loss), loss, args, {}, sealed)
        return cast("Tensor", recorder.call_in_frame(frame, lambda: loss(*args)))

    return run


def _reads_counter(module: nn.Module) -> bool:
    """Return whether a module is a batch normalization that averages by a counter, the value of which it reads."""
    return isinstance(module, BATCH_NORMS) and module.momentum is None and module.track_running_stats


def find_seats(model: nn.Module, names: nn.Module) -> dict[Source, list[Seat]]:
    """Return the places in which the modules of `model` keep the parameters and buffers that `names` has.

    One for each name in `model`. Other buffers are constants; raise `CaptureError` for other parameters.
    """
    found: dict[Source, list[Seat]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for kind, table in (("parameters", "_parameters"), ("buffers", "_buffers")):
        known = first_names(names, kind)
        for name in first_names(model, kind):
            if name not in known and kind == "parameters":
                raise CaptureError(
                    f"parameter {name}: got one that the model does not have, expected the model's own, by their "
                    "names. Register what the forward uses in the model, or keep the model's names."
                )
            path, _, last = name.rpartition(".")
            if name in known:
                source: Source = Parameter(known[name]) if kind == "parameters" else Buffer(known[name])
                found.setdefault(source, []).append((getattr(modules[path], table), last))
    return found
