# SPDX-License-Identifier: Apache-2.0
"""Random schedules for random models, and the reasons for which a random model may be refused."""

from hypothesis import assume, event
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
from tests.common.options import grouped

LINEAR = [gpipe, one_f_one_b, zb_h1, lambda **sizes: split_backward(one_f_one_b(**sizes))]


TWO_EACH = [interleaved_1f1b, breadth_first, interleaved_zero_bubble, v_1f1b, v_half, zb_v]


REFUSALS = {  # what the message says, and of which models it may say so
    "under one autocast": lambda model: model.repeats and model.has("autocast"),
    "the buffer": lambda model: model.repeats and model.has("norm", "average"),
    "draws random numbers in a checkpointed function": lambda model: model.random and model.sequence,
    "changes a buffer in a checkpointed function": lambda model: model.has("checkpoint") and model.has("norm"),
    "without a gradient for any parameter": lambda model: model.has("no_grad"),
    "a checkpointed function that reads a buffer": lambda model: model.has("checkpoint") and model.has("average"),
    "gets an object in which tensors may hide": lambda model: model.has("checkpoint") and model.has("object"),
    "a call inside it cannot run without it": lambda model: model.repeats and model.has("object"),
}


@st.composite
def schedules_of(draw, stages, microbatches):
    """A schedule of so many stages, some of which may be recomputed."""
    made = draw(st.sampled_from([*LINEAR, *TWO_EACH] if stages % 2 == 0 else LINEAR))
    try:
        how = made(ranks=stages // 2 if made in TWO_EACH else stages, microbatches=microbatches)
        again = draw(st.none() | st.sets(st.integers(0, stages - 1)).map(lambda found: tuple(sorted(found))))
        return recompute(how, again) if again else how
    except SizeError:
        assume(False)


def build_unless_refused(description, case, how, rows, cuts, **options):
    """A pipeline, cut evenly if `cuts` are none; `None` if it was refused for a reason that the model gives."""
    model, inputs, targets = case.make(rows)
    try:
        pipe = fpipe.pipeline(
            model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=cuts, **grouped(options)
        )
    except (fpipe.CutError, fpipe.CaptureError) as error:
        reasons = [words for words, may in REFUSALS.items() if words in str(error) and may(description)]
        if not reasons:
            raise
        event(f"refused: {reasons[0]}")
        return None
    return pipe, model, inputs, targets
