# SPDX-License-Identifier: Apache-2.0
"""Any model, cut anywhere, under any schedule, computes what one device computes, bit for bit."""

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import fpipe
from schedules import (
    SizeError,
    breadth_first,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    recompute,
    split_backward,
    v_1f1b,
    v_half,
    zb_h1,
    zb_v,
)
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.random_models import case_of, descriptions, places
from tests.common.running import run, run_reference
from tests.common.sizes import few

SEED = 5
LINEAR = [gpipe, one_f_one_b, zb_h1, lambda **sizes: split_backward(one_f_one_b(**sizes))]
TWO_EACH = [interleaved_1f1b, breadth_first, interleaved_zero_bubble, v_1f1b, v_half, zb_v]

REFUSALS = {  # what the message says, and of which models it may say so
    "under one autocast": lambda model: model.repeats and model.has("autocast"),
    "the buffer": lambda model: model.repeats and model.has("norm", "average"),
    "draws random numbers in a checkpointed function": lambda model: model.random and model.sequence,
    "changes a buffer in a checkpointed function": lambda model: model.has("checkpoint") and model.has("norm"),
    "no parameter has a gradient of": lambda model: model.has("no_grad"),
    "reads a buffer which one changes": lambda model: model.has("checkpoint") and model.has("average"),
}


@st.composite
def schedules(draw, stages, microbatches):
    """A schedule of so many stages, some of which may be recomputed."""
    made = draw(st.sampled_from([*LINEAR, *TWO_EACH] if stages % 2 == 0 else LINEAR))
    try:
        how = made(ranks=stages // 2 if made in TWO_EACH else stages, microbatches=microbatches)
        again = draw(st.none() | st.sets(st.integers(0, stages - 1)).map(lambda found: tuple(sorted(found))))
        return recompute(how, again) if again else how
    except SizeError:
        assume(False)


def expected(description, rows, microbatches):
    """What a plain loop computes; of a model whose own backward fails, nothing is expected."""
    case = case_of(description)
    model, inputs, targets = case.make(rows)
    try:
        return loop(model, case.loss, inputs, targets, microbatches)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise


def built_or_refused(description, case, how, rows, cuts, capture):
    """A pipeline, cut evenly if `cuts` are none; `None` if it was refused for a reason that the model gives."""
    model, inputs, targets = case.make(rows)
    try:
        pipe = fpipe.pipeline(
            model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=cuts, capture=capture
        )
    except (fpipe.CutError, fpipe.CaptureError) as error:
        reasons = [words for words, may in REFUSALS.items() if words in str(error) and may(description)]
        if not reasons:
            raise
        event(f"refused: {reasons[0]}")
        return None
    return pipe, model, inputs, targets


def require_exact(description, data, capture, names):
    """Cut it at some of `names`, and compare it with everything that it must be equal to."""
    microbatches = data.draw(st.integers(1, 3))
    rows = 3 * microbatches - data.draw(st.sampled_from([0, 0, 1]))
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules(len(cuts) + 1, microbatches))
    evenly = data.draw(st.sampled_from([False, False, False, True]))
    case, want = case_of(description), expected(description, rows, microbatches)
    built = built_or_refused(description, case, how, rows, None if evenly else cuts, capture)
    if built is None:
        return
    got = run(*built, seed=SEED if case.random else None)
    assert_same(got, run_reference(*built, seed=SEED if case.random else None))
    if not case.random:
        assert_same(got, want)


@settings(max_examples=few(24))
@given(descriptions(), st.data())
def test_any_model_cut_anywhere(description, data):
    require_exact(description, data, "trace", places(description))


@settings(max_examples=few(6))
@given(descriptions(sequence=True), st.data())
def test_any_sequence_of_parts(description, data):
    names = [f"{k}" for k in range(2, len(description.parts) + 2)]
    require_exact(description, data, data.draw(st.sampled_from(["modules", "trace"])), names)


@settings(max_examples=few(4))
@given(descriptions(graph=True), st.data())
def test_any_graph(description, data):
    capture = data.draw(st.sampled_from(["fx", "export", "dynamo"]))
    require_exact(description, data, capture, [name for name in places(description) if "@" not in name])
