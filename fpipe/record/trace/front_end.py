# SPDX-License-Identifier: Apache-2.0
"""The default front end: run the model on fake tensors, record the run, and build the segments that stages run.

A stage runs the torch calls that were recorded, wherever its cuts are. Only whole calls run as Python again, with the
step's parameters in place (`fpipe.record.trace.whole`).

Runs when a plan is made; the segments that it builds run in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fpipe.errors import CaptureError, PipelineError
from fpipe.record.captured import NAMED, Call, Captured
from fpipe.record.objective import USUAL, Objective, WayError
from fpipe.record.questions import refuse_questions
from fpipe.record.trace.checks import (
    find_observers,
    require_own_attributes,
    require_own_parameters,
    require_same_variables,
)
from fpipe.record.trace.comparison import Rehearsal, require_same_reruns
from fpipe.record.trace.fake_model import FakeModel
from fpipe.record.trace.frames import PART, Frame, all_frames, outermost_checkpoints
from fpipe.record.trace.placing import find_placed, fuse_placed, has_holders
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.segments import Segments
from fpipe.record.trace.settling import SettledRun, Settling
from fpipe.record.trace.whole import WholeCalls
from fpipe.tensors.fake import fake
from fpipe.tensors.placed import Arrivals, local_part, require_whole_result
from fpipe.tensors.tree import flatten


def trace_model(
    model: nn.Module,
    objective: Objective,
    leaves: Sequence[Tensor],
    opaque: Collection[str] = (),
    whole: Collection[str] = (),
    parts: Collection[str] = (),
) -> Captured:
    """Capture `model` and its loss for one microbatch; see `CaptureFunction`.

    Modules named in `opaque`, and modules inside them, may branch on data; a step makes calls that do as Python. So it
    does those of modules named in `whole`. No stage may begin inside a module named in `parts`.
    """
    # What asks knows the cache that will hold this capture. So the capture does not keep it: a dropped pipeline would
    # wait for Python's collector.
    fake_model = FakeModel(model, replace(objective, ask=refuse_questions), leaves, opaque, _seals(whole, parts))
    settling = Settling(fake_model)
    try:
        return assemble_capture(fake_model, settling, settling.run(objective.ask))
    except PipelineError as error:
        if objective.way == USUAL and (others := fake_model.other_ways):
            raise WayError(others) from error
        raise


def _seals(whole: Collection[str], parts: Collection[str]) -> Mapping[str, str]:
    """Return the reason why each of these modules is sealed, by name."""
    return dict.fromkeys(parts, PART) | dict.fromkeys(whole, NAMED)


def assemble_capture(model: FakeModel, settling: Settling, run: SettledRun) -> Captured:
    """Return the capture of a recorded run; raise `CaptureError` if its checkpoints cannot be rerun exactly."""
    record, values, reassigned = run.recorder.record, run.recorder.values, run.recorder.reassignments.next_values
    computed = run.computed
    tensors, structure = flatten(computed.outputs, opaque=True)
    beside, aux_structure = flatten(computed.aux, opaque=True)
    placed, arrivals = find_placed(values.tensors), Arrivals()
    require_own_parameters(record)
    require_own_attributes(model.skeleton, record)
    require_same_variables(outermost_checkpoints(record.frames))
    outputs, aux = tuple(map(values.read, tensors)), tuple(map(values.read, beside))
    loss = None if computed.loss is None else values.read(computed.loss)
    require_whole_result("loss", None if loss is None else placed.get(loss))
    results = (*outputs, *aux, *(() if loss is None else (loss,)), *reassigned.values())
    rehearse = Rehearsal(model, record, run.state, settling.empty_caches)
    segments = Segments(record, model.seats_by_value(), results, run.written, rehearse)
    require_same_reruns(record, segments.whole, bool(run.written), rehearse)
    _require_numbers_outside(run.recorder, segments.whole)
    calls = tuple([_summarize(frame, segments.whole) for frame in all_frames(record.frames)])
    python = [call.path for call in calls if call.python]
    return Captured(
        units=tuple(record.units),
        sources=values.sources,
        loss=loss,
        outputs=outputs,
        structure=structure,
        aux=aux,
        aux_structure=aux_structure,
        fakes={value: fake(model.mode, local_part(values.tensors[value]), model.device) for value in values.sources},
        mode=model.mode,
        trainable=model.trainable,
        calls=calls,
        observed=record.observed(),
        dynamic=model.trainable if any(frame.branching for frame in record.frames) else frozenset(),
        fuse=fuse_placed(segments.fuse, placed, arrivals) if has_holders(values.tensors.values()) else segments.fuse,
        placed=placed,
        arrivals=arrivals,
        reassigned=reassigned,
        moved=run.changed_attributes,
        observers=find_observers(model.skeleton, model.objective.loss, run.written, python),
    )


def _require_numbers_outside(recorder: Recorder, whole: WholeCalls) -> None:
    """Raise `CaptureError` if a call that runs as Python deals with recorded numbers: it has Python numbers there."""
    for frame in whole.outermost(recorder.record.frames):
        units = recorder.record.units[frame.start : frame.stop]
        used = {value for unit in units for value in (*unit.reads, *unit.makes)}
        if not recorder.numbers.isdisjoint(used.union(frame.invocation.reads)):
            raise CaptureError(f"module {frame.path or '(root)'}: got recorded numbers in a call that runs as Python.")


def _summarize(frame: Frame, whole: WholeCalls) -> Call:
    python = whole.reason(frame)
    return Call(
        path=frame.path,
        kind=frame.kind,
        start=frame.start,
        stop=frame.stop,
        sealed=whole.seal(frame),
        python=python,
        checkpointed=frame.checkpoint,
        has_hooks=bool(python) and _has_hooks(frame),
    )


def _has_hooks(frame: Frame) -> bool:
    """Return whether a module that is called in a frame has hooks."""
    called = [one.invocation.function for one in all_frames([frame])]
    modules = [one for one in called if isinstance(one, nn.Module)]
    return any(one._forward_pre_hooks or one._forward_hooks for one in modules)
