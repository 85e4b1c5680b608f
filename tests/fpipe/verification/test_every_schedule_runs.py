# SPDX-License-Identifier: Apache-2.0
"""Every schedule of the literature, and what transforms make of it, computes what one device computes.

Held against the plain loop of `models`, which adds gradients in the order that the schedule states. What can only be
checked and simulated yet is refused before anything happens.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from schedules import (
    Factory,
    SizeError,
    families,
    forward_only,
    merge_backward,
    mirror,
    offload,
    overlap,
    pipedream,
    pipedream_2bw,
    recompute,
    seq_1f1b,
    split_backward,
)
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import eval_loop, loop_as_stated
from tests.common.routes import SEVERAL_ROUTES
from tests.common.sizes import few

IN_FLIGHT = (pipedream, pipedream_2bw)
OTHERS = (*IN_FLIGHT, seq_1f1b, forward_only)
SYNCHRONOUS = [made for made in vars(families).values() if isinstance(made, Factory) and made not in OTHERS]
SYNCHRONOUS += SEVERAL_ROUTES
TRANSFORMS = [split_backward, merge_backward, recompute, offload, mirror, overlap]


@st.composite
def schedules(draw):
    """Any of them, at a size at which it means something, as it is or transformed."""
    made = draw(st.sampled_from(SYNCHRONOUS))
    most = {"ranks": 4, "microbatches": 6, "memory": 8}
    numbers = [name for name, parameter in made.signature.parameters.items() if parameter.annotation in (int, "int")]
    try:
        how = made(**{name: draw(st.integers(1, most.get(name, 2))) for name in numbers})
        for change in draw(st.lists(st.sampled_from(TRANSFORMS), max_size=2, unique=True)):
            how = change(how)
    except SizeError:
        assume(False)
    assume(how.stages <= 8)
    return how


def model_of(stages: int) -> nn.Sequential:
    """A layer for each stage; the last has the weight of the first."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    layers[-1][0].weight = layers[0][0].weight
    return nn.Sequential(*layers)


def build(how):
    model = model_of(how.stages)
    x, y = torch.randn(2, 2 * how.microbatches, WIDTH)
    cuts = [str(s) for s in range(1, how.stages)]
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=cuts,
        recording=fpipe.Recording(front_end="modules"),
    )
    return pipe, model, (x,), y


@settings(max_examples=few(25))
@given(schedules())
def test_every_synchronous_schedule_runs(how):
    pipe, model, inputs, targets = build(how)
    out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), inputs, targets)
    got = Result(out.loss, out.outputs, grads, out.buffers)
    assert_same(got, loop_as_stated(pipe, model, mse, inputs, targets))
    out, grads = fpipe.reference(pipe, outputs=True)(dict(model.named_parameters()), {}, inputs, targets)
    assert_same(got, Result(out.loss, out.outputs, grads, out.buffers))


@settings(max_examples=few(6))
@given(schedules())
def test_every_synchronous_schedule_goes_on_from_earlier_sums(how):
    pipe, model, inputs, targets = build(how)
    state, step, total = pipe.init(model), fpipe.value_and_grad(pipe), 3 * how.microbatches
    plain, reference = fpipe.reference(pipe), (dict(model.named_parameters()), {})
    onto, wanted, other = None, {}, None
    for k in range(3):
        batch = (inputs[0] + k,), targets
        _, onto = step(*state, *batch, onto=onto, total=total)
        _, other = plain(*reference, *batch, onto=other, total=total)
        wanted = loop_as_stated(pipe, model, mse, *batch, wanted, total).grads
    assert_same(Result(None, None, onto, {}), Result(None, None, wanted, {}))
    assert_same(Result(None, None, other, {}), Result(None, None, wanted, {}))


@settings(max_examples=few(6))
@given(schedules())
def test_every_synchronous_schedule_evaluates(how):
    pipe, model, inputs, targets = build(how)
    out = fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
    assert_same(
        Result(out.loss, out.outputs, {}, out.buffers), eval_loop(model, mse, inputs, targets, how.microbatches)
    )


def test_a_schedule_without_backward_evaluates_only():
    pipe, model, inputs, targets = build(forward_only(ranks=3, microbatches=4))
    out = fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
    assert_same(Result(out.loss, out.outputs, {}, out.buffers), eval_loop(model, mse, inputs, targets, 4))
    for use in (fpipe.value_and_grad, fpipe.reference):
        with pytest.raises(fpipe.InputError, match=r"got forward_only\(.*no backward.*Call evaluate"):
            use(pipe)


@pytest.mark.parametrize("made", IN_FLIGHT)
def test_a_batch_of_a_schedule_that_updates_in_flight_is_what_an_update_applies(made):
    with pytest.raises(
        fpipe.InputError, match=r"expected one of each stage after microbatches 3 and 7.*pipedream_2bw\("
    ):
        build(made(ranks=2, microbatches=4))


def test_a_sliced_schedule_is_refused_for_a_model_without_a_carry():
    with pytest.raises(fpipe.InputError, match=r"whose forward takes no carry.*schedule of whole microbatches"):
        build(seq_1f1b(ranks=2, microbatches=4))
