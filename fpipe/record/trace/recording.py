# SPDX-License-Identifier: Apache-2.0
"""Turn a finished recording into a tape, and into the facts that a capture reports.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

from fpipe.record.capture.fast_paths import FUSED
from fpipe.record.captured import Buffer, Observed
from fpipe.record.trace.effect_checks import ATTACHING
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.replaced import ASKING
from fpipe.record.trace.tape import Tape


def build_tape(recorder: Recorder) -> Tape:
    """Return the recording as a tape."""
    history, values, draws = recorder.history, recorder.values, recorder.draws
    ticks, replies = recorder.torch_calls.by_function, recorder.questions.replies
    buffers = {values.storage[value] for value, source in values.sources.items() if isinstance(source, Buffer)}
    changed = [history.facts[unit].written & buffers for unit in history.units]
    return Tape(
        units=tuple(history.units),
        invocations={unit: facts.invocation for unit, facts in history.facts.items()},
        modes={unit: facts.modes for unit, facts in history.facts.items()},
        ticks={unit: facts.ticks for unit, facts in history.facts.items()},
        returned=recorder.torch_calls.results,
        casts={unit: facts.casts for unit, facts in history.facts.items()},
        frames=tuple(recorder.stack.roots),
        streams=tuple(draws.streams),
        draws=draws.outside_streams(),
        replies=tuple(replies),
        calls={reply.function: ticks[reply.function] for reply in replies},
        outside={draw.function: draws.ticks_outside_streams(ticks[draw.function]) for draw in draws.found},
        hooked=tuple(recorder.hooked),
        fused=tuple(tick for function in FUSED for tick in ticks[function]),
        rewriters={k: memory for k, memory in enumerate(changed) if memory},
        fakes=values.tensors,
    )


def build_observed(recorder: Recorder) -> Observed:
    """Return the facts about the units and values of the run."""
    facts, values, labels = recorder.history.facts, recorder.values, recorder.draws.labels()
    return Observed(
        storage=values.storage,
        written={unit: known.written for unit, known in facts.items()},
        random={unit: labels[known.draw] for unit, known in facts.items() if known.draw is not None},
        views=values.views(),
        asking=any(recorder.torch_calls.by_function[function] for function in ASKING),
        undecided=recorder.draws.stream_devices,
        collective=frozenset(unit for unit, known in facts.items() if known.communicates),
        attached=frozenset(
            v for known in facts.values() if known.invocation.function in ATTACHING for v in known.invocation.reads
        ),
    )
