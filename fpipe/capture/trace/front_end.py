# SPDX-License-Identifier: Apache-2.0
"""Front end: run the model once on fake tensors, record the run, and play it back stage by stage.

A module that lies wholly inside one stage is called as is, with the step's parameters in place, so custom autograd
functions, checkpointing, hooks, autocast and anything else its author wrote keep working. Only the code between such
modules is played back torch call by torch call. An uncut model is called as is.

The model runs on a skeleton that holds no tensors, and it runs twice, because microbatches must not depend on each
other: the second run may read only constants of what the first run left behind, and must do the same work. The second
run is the one recorded: by then, whatever models do only on their first call (install hooks, fill caches) has happened,
and stays in the skeleton.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fpipe.capture.advice import advise_on_errors, advise_on_values
from fpipe.capture.generators import Drawing, Generators, drawing_error
from fpipe.capture.guards import blame, plain_state, require_unchanged, traceback_line
from fpipe.capture.leftovers import defining_files, remove_fakes, user_classes, user_files
from fpipe.capture.originals import changed_attributes
from fpipe.capture.trace.patches import intercepted
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.reentrant_checks import require_own_parameters
from fpipe.capture.trace.rehearsal import Again, Rehearsal
from fpipe.capture.trace.replay import Replay
from fpipe.capture.trace.reruns import require_same_again
from fpipe.capture.trace.seats import require_seated
from fpipe.capture.trace.segment_builder import SegmentBuilder
from fpipe.capture.trace.settling import fill_caches, real, settle
from fpipe.capture.trace.values import KeptError
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.captured import BatchLeaf, Buffer, Call, Captured, Parameter, Source, Value
from fpipe.ir.objective import Loss, Objective
from fpipe.ir.questions import Answer, Ask, Question, refuse_questions
from fpipe.ir.tape import Frame, Tape
from fpipe.model.snapshot import CACHED, ContainerState, Snapshot, Walk, contents
from fpipe.model.stateless import Absent, skeleton
from fpipe.runtime.segments.seats import Seat, Seating
from fpipe.tensors.attributes import as_parameter
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.tree import first_names, flatten

Via: TypeAlias = Callable[[nn.Module, Recorder], Callable[..., Any]]
Settled: TypeAlias = tuple[
    Recorder, Tensor | None, Any, tuple[ContainerState, ...], tuple[ContainerState, ...], frozenset[str]
]


def trace(
    model: nn.Module,
    objective: Objective,
    leaves: Sequence[Tensor],
    whole: Collection[str] = (),
    opaque: Collection[str] = (),
    via: Via = lambda skeleton, recorder: skeleton,
) -> Captured:
    """Capture `model` and its loss for one microbatch; see `FrontEnd`.

    Modules named in `whole` are never opened. Modules inside those named in `opaque` may branch on data; one that does
    is not opened. `via(skeleton, recorder)` returns the callable that is run instead of the skeleton.
    """
    return _Tracer(model, objective, leaves, whole, opaque, via).captured()


class _Tracer:
    """Runs a model on fake tensors."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        leaves: Sequence[Tensor],
        whole: Collection[str],
        opaque: Collection[str],
        via: Via,
    ) -> None:
        self.objective, self.leaves, self.whole, self.opaque, self.via = objective, leaves, whole, opaque, via
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self.mode = fake_mode()
        self.model, self.skeleton = model, skeleton(model, Absent.like)
        self.trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self.state: list[tuple[Source, Tensor]] = [
            *((Parameter(name), tensor) for name, tensor in model.named_parameters()),
            *((Buffer(name), tensor) for name, tensor in model.named_buffers()),
        ]
        self.seats = _seats(self.skeleton)
        self.left: list[Any] = []
        self.caches: list[ContainerState] = []
        self.filled: dict[int, ContainerState] = {}

    def sources(self) -> dict[Value, tuple[Source, Tensor]]:
        """Return fresh fake tensors for the model's state and for the batch."""
        made: list[tuple[Source, Tensor]] = []
        for source, tensor in self.state:
            new = fake(self.mode, tensor, self.device)
            trained = tensor.requires_grad and source[0] in self.trainable
            made.append((source, as_parameter(new, trained) if isinstance(source, Parameter) else new))
        made += [(BatchLeaf(k), fake(self.mode, leaf, self.device)) for k, leaf in enumerate(self.leaves)]
        return dict(enumerate(made))

    def captured(self) -> Captured:
        """Run the model, record it, and check that it would do the same again."""
        recorder, loss, outputs, written, state, left = self._settled_at_last()
        tensors, structure = flatten(outputs, opaque=True)
        values, tape = recorder.values, recorder.tape()
        wanting = frozenset(value for value, tensor in values.tensors.items() if tensor.requires_grad)
        require_own_parameters(tape.frames, tape.units, values.sources, wanting)
        results, made = tuple(map(values.read, tensors)), None if loss is None else values.read(loss)
        needed = (*results, *(() if made is None else (made,)), *recorder.reassigned.next.values())
        rehearsal = self._rehearsal(tape, values.sources, state)
        with rehearsal.begun() as rehearse:
            require_same_again(tape, rehearse)
        builder = SegmentBuilder(tape, self._seats_by_value(), set(values.sources), needed, written, rehearsal.begun)
        calls = [*_within(tape.frames)]
        return Captured(
            units=tape.units,
            sources=values.sources,
            loss=made,
            outputs=results,
            structure=structure,
            fakes={value: fake(self.mode, values.tensors[value], self.device) for value in values.sources},
            mode=self.mode,
            trainable=self.trainable,
            calls=tuple([_call(frame, builder) for frame in calls]),
            observed=recorder.observed(),
            dynamic=self.trainable if any(frame.branching for frame in tape.frames) else frozenset(),
            fuse=builder.fuse,
            reassigned=recorder.reassigned.next,
            moved=left,
            differing=lambda positions: _numbers(calls, builder.differing_frames(positions)),
        )

    def _settled_at_last(self) -> Settled:
        """Run the model; if it fails and leaves something behind, watch that and run it again."""
        try:
            return copy_context().run(self._settled)
        except CaptureError as error:
            classes = user_classes(self.model)
            near = defining_files(classes, self.objective.loss)
            self.left = remove_fakes(user_files() if isinstance(error, KeptError) else near, classes)
            if not self.left:
                raise
            return copy_context().run(self._settled)

    def _settled(self) -> Settled:
        """Run the model twice; return the second run's recorder, loss and outputs, two lists of containers, and names.

        The first list is what a run changes, the second what any call may change. The names are those of attributes
        that only the first run changes. Call this in a copied context, which discards changes to context variables.
        """
        original = Walk()
        original.follow([self.model])
        roots = self.skeleton, original.containers.keys(), self.objective.loss, *self.left
        before = Snapshot.of(*roots)
        self.caches = [one for one in before.containers.values() if isinstance(one.container, CACHED)]
        try:
            asked: list[Answer] = []
            first = Recorder(self.skeleton, self.sources(), _noting(self.objective.ask, asked), self.opaque)
            self._run(first)
            first.reassigned.restore()
            held = plain_state(self.skeleton)
            self._keep_caches(first)
            fill_caches(before, Snapshot.of(*roots), first, self.mode)
            settled = Snapshot.of(*roots)
            recorder = Recorder(self.skeleton, self.sources(), _repeating(asked), self.opaque)
            loss, outputs = self._run(recorder)
            recorder.reassigned.restore()
            require_unchanged(held, plain_state(self.skeleton), "each microbatch would see another value")
            _require_alike(first, recorder)
            left = changed_attributes(self.skeleton, before, settled)
        except BaseException:
            before.restore()
            raise
        changed = [ContainerState(one.table, contents(one.table), False) for one in recorder.reassigned.found.values()]
        written = (*settle(before, settled, self.mode), *changed, *self.filled.values())
        return recorder, loss, outputs, written, tuple(settled.containers.values()), left

    def _keep_caches(self, recorder: Recorder) -> None:
        """Leave in place caches that a run computed from constants alone and stored in buffers.

        They are the same for every run.
        """
        constants = recorder.constants().values
        for one in recorder.reassigned.caches:
            tensor = real(recorder, one.new) if one.new in constants else None
            if tensor is not None:
                one.table[one.name], place = tensor, (id(one.table), one.name)
                for seats in self.seats.values():
                    seats[:] = [(table, name) for table, name in seats if (id(table), name) != place]

    def _run(self, recorder: Recorder) -> tuple[Tensor | None, Any]:
        """Return the loss and outputs of one run.

        Raise `CaptureError` if it draws from generators other than torch's.
        """
        generators = Generators()
        try:
            return self._recorded(recorder)
        finally:
            self._empty()
            drawing = generators.look("model")
            if drawing is not None:
                raise drawing_error(self._drawing() or drawing)

    def _empty(self) -> None:
        """Empty the caches of functions that hold what a run has made."""
        for one in self.caches:
            if one.has_changed:
                self.filled[id(one.container)] = one
                one.restore()

    def _drawing(self) -> Drawing | None:
        """Run once more to find out who draws."""
        generators = Generators()
        with suppress(PipelineError):
            self._recorded(Recorder(self.skeleton, self.sources(), opaque=self.opaque, generators=generators))
        return generators.drawing

    def _recorded(self, recorder: Recorder) -> tuple[Tensor | None, Any]:
        """Return the loss and outputs of one run."""
        fakes = recorder.values.tensors
        leaves = tuple(fakes[v] for v, source in recorder.values.sources.items() if isinstance(source, BatchLeaf))
        objective, loss = self.objective, self.objective.loss
        if loss is not None:
            objective = replace(objective, loss=_recorded(loss, recorder))
        called = self.via(self.skeleton, recorder)
        try:
            with self._seated(fakes), self._inside(recorder):
                made = objective(called, leaves)
                for error in filter(None, recorder.raised):
                    raise error  # the forward swallowed it
                recorder.require_carried()
                for value, where in self._seats_by_value().items():
                    require_seated(recorder, value, where)
                return made
        except PipelineError:
            raise
        except Exception as error:
            module = blame(error.__traceback__, self.skeleton)
            repair = advise_on_values(module, self.opaque) if _is_about_values(error) else advise_on_errors()
            raise CaptureError(
                f"{module}: got {type(error).__name__}: {error}{traceback_line(error.__traceback__)}, expected a "
                "forward that runs on a copy of the model, on fake tensors, which have shapes but no values. "
                f"{repair}"
            ) from error

    @contextmanager
    def _inside(self, recorder: Recorder) -> Iterator[None]:
        """Enter the context in which a recorder sees what the skeleton does."""
        with self.mode.note(recorder.effects), intercepted(recorder, self.skeleton, self.whole):
            yield

    def _seated(self, fakes: Mapping[Value, Tensor]) -> Seating:
        return Seating([(*seat, value) for value, seats in self._seats_by_value().items() for seat in seats], fakes)

    def _rehearsal(self, tape: Tape, sources: Mapping[Value, Source], state: Sequence[ContainerState]) -> Rehearsal:
        def fresh() -> Mapping[Value, Tensor]:
            return {value: tensor for value, (_, tensor) in self.sources().items()}

        again = partial(Again, self.skeleton, tape, sources, self.opaque)
        replay = partial(Replay, self.skeleton, tape, self.mode)
        return Rehearsal(tape, replay, again, self._inside, fresh, self._seated, state, self._empty)

    def _seats_by_value(self) -> dict[Value, list[Seat]]:
        return {value: self.seats[source] for value, (source, _) in enumerate(self.state)}


def _is_about_values(error: Exception) -> bool:
    """Return whether an exception may come from values that fake tensors lack, judging by its class."""
    return not isinstance(error, LookupError | NameError | ImportError)


def _seats(model: nn.Module) -> dict[Source, list[Seat]]:
    """Return where the modules of `model` keep each parameter and buffer, under all of its names."""
    found: dict[Source, list[Seat]] = {}
    for kind, table in (("parameters", "_parameters"), ("buffers", "_buffers")):
        for name, first in first_names(model, kind).items():
            path, _, last = name.rpartition(".")
            source: Source = Parameter(first) if kind == "parameters" else Buffer(first)
            found.setdefault(source, []).append((getattr(model.get_submodule(path), table), last))
    return found


def _within(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield all frames, each before the frames inside it."""
    for frame in frames:
        yield frame
        yield from _within(frame.inner)


def _call(frame: Frame, builder: SegmentBuilder) -> Call:
    return Call(
        frame.path, frame.kind, frame.start, frame.stop, frame.sealed, builder.obstacles.find(frame) is not None
    )


def _numbers(frames: Sequence[Frame], wanted: Collection[Frame]) -> frozenset[int]:
    return frozenset(k for k, frame in enumerate(frames) if frame in wanted)


def _recorded(loss: Loss, recorder: Recorder) -> Loss:
    """Return the loss, with its call recorded as a module's is."""

    def recorded(*args: Any) -> Tensor:
        frame = recorder.frame("loss", type(loss), loss, args, {})
        return cast("Tensor", recorder.called(frame, lambda: loss(*args)))

    return recorded


def _require_alike(first: Recorder, second: Recorder) -> None:
    """Raise `CaptureError` unless the second run did the same as the first, or less.

    It may do less because constants may have been cached.
    """
    created = second.created() - first.created()
    assigned = first.reassigned.next.keys() != second.reassigned.next.keys()
    calls = [*zip_longest(first.varying(), second.varying(), fillvalue=("", "", ()))]
    if not all(_is_alike(*pair) for pair in calls) or created or assigned:
        where = next((f"module {path or '(root)'}" for path, _ in created), "model")
        raise CaptureError(
            f"{where}: got a forward that does something else when it is called again, expected one that keeps "
            "nothing from one call to the next but buffers. Take what it does the first time out of it."
        )


def _is_alike(first: tuple[str, str, Sequence[Value]], second: tuple[str, str, Sequence[Value]]) -> bool:
    """Compare two torch calls by module, name and state.

    A module created during the first run has no path there yet.
    """
    (path, *call), (where, *again) = first, second
    return call == again and f"{where}.".startswith(f"{path}." if path else "")


def _noting(ask: Ask, asked: list[Answer]) -> Ask:
    """Return `ask`, also appending each of its answers to `asked`."""

    def noted(question: Question) -> Answer:
        asked.append(ask(question))
        return asked[-1]

    return noted


def _repeating(asked: Iterable[Answer]) -> Ask:
    """Return a function that gives the same answers again, in order."""
    answers = iter(asked)
    return lambda question: next(answers, None) or refuse_questions(question)
