# SPDX-License-Identifier: Apache-2.0
"""What no pipeline can be made of is refused when it is built, whatever the front end; what only looks so is exact.

A lock, a generator, a closure over what another module made, inputs that are changed in place. Each model is either
refused, with a message that names what it was, or computes what a plain loop does; never something else.
"""

import threading

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import by_day, covering, sampled

FRONTS = ["trace", "modules", "export", "fx", "dynamo"]


class Part(nn.Module):
    """A linear layer and what `does` makes of it."""

    def __init__(self, does):
        super().__init__()
        self.linear, self.does = nn.Linear(WIDTH, WIDTH), does

    def forward(self, *args):
        return self.does(self.linear, *args)


def parts(*does):
    """A sequence of them, cut between all."""
    return lambda: nn.Sequential(*map(Part, does)), tuple(str(k) for k in range(1, len(does)))


class Two(nn.Module):
    """`does(a, b, x)` of two linear layers; cut at the second."""

    def __init__(self, does):
        super().__init__()
        self.a, self.b, self.does = nn.Linear(WIDTH, WIDTH), Part(lambda linear, *args: linear(args[0])), does

    def forward(self, x):
        return self.does(self, x)


def two(does, second=None):
    def make():
        model = Two(does)
        model.b.does = second or model.b.does
        return model

    return make, ("b",)


def several(linear, x):
    h = linear(x)
    return (h * k for k in range(1, 4))


def in_a_lock(linear, given):
    h, lock = given
    with lock:
        return linear(h)


def closing_over(model, x):
    h = model.a(x)
    return model.b(x, lambda z: z * h)


def left_in_an_attribute(model, x):
    h = model.a(x)
    model.b.does = lambda linear, z: linear(z) * h
    return model.b(x)


def with_a_generator(model, x):
    return model.b(model.a(x)) + torch.rand(WIDTH, generator=torch.Generator())


def doubled(linear, x):
    x.mul_(2)
    return linear(x)


def changed_later(model, x):
    return model.b(model.a(x.detach().clone()), x)


def changed_by_its_user(linear, h, x):
    x.add_(1)
    return linear(h) + x


def changed_and_used_again(model, x):
    return model.a(x * 1) * model.b(x) + x


def changed_twice(model, x):
    h = model.a(x * 1)
    x.mul_(2)
    return model.b(h) + x


def needed_by_the_backward(model, x):
    h = model.a(x).exp()
    y = model.b(h)
    h.add_(1)
    return y


def returning(thing):
    def does(linear, x):
        return {"y": linear(x), "more": thing()}

    return does


MODELS = {  # what is exact if it is not said to be refused, and by whom
    "a generator between parts": parts(several, lambda m, xs: m(sum(xs))),
    "a lock between parts": parts(lambda m, x: (m(x), threading.Lock()), in_a_lock),
    "a lock handed through a part": parts(
        lambda m, x: (m(x), threading.Lock()), lambda m, given: (m(given[0]), given[1]), in_a_lock
    ),
    "a closure over a value": two(closing_over, lambda linear, x, function: function(linear(x))),
    "a closure in an attribute": two(left_in_an_attribute),
    "a generator of random numbers": two(with_a_generator),
    "an input changed in the first stage": parts(doubled, lambda m, x: m(x)),
    "a value changed in the second stage": parts(lambda m, x: m(x), doubled),
    "an input changed where it is last used": two(changed_later, changed_by_its_user),
    "an input changed between": two(changed_twice),
    "an input changed in the second stage": two(changed_and_used_again, doubled),
    "a change of what the backward needs": two(needed_by_the_backward),
}
WHOLE = "expected a call that can run as a whole"
ATTRIBUTE = "(got an assignment to the attribute 'does'|attribute 'does': got a forward that changes it)"
OWN = "(a generator argument|got 'model.lifted_custom_0' .Generator. among|aten.rand.generator|could not read it: )"
IN_PLACE = "stage 0: got a value from another stage that is modified in place and used in stage 1 too"
REFUSED = {
    ("a lock between parts", "dynamo"): r"module 0 \(Part\): the front end dynamo could not read it",
    ("a lock handed through a part", "dynamo"): r"module 0 \(Part\): the front end dynamo could not read it",
    ("an input changed between", "trace"): IN_PLACE,
    ("an input changed between", "fx"): IN_PLACE,
    **{("a closure in an attribute", front): rf"module b \(Part\).*{ATTRIBUTE}" for front in FRONTS},
    **{("a generator of random numbers", front): OWN for front in FRONTS},
    **{("a change of what the backward needs", front): "stage 1, its backward.*: got RuntimeError" for front in FRONTS},
}
CASES = [
    (what, front)
    for what, (make, cuts) in MODELS.items()
    for front in FRONTS
    if front != "modules" or isinstance(make(), nn.Sequential)
]


def build_model(what, front, loss=mse):
    make, cuts = MODELS[what]
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=2)
    return build(Case(make, rows_of(), loss, ("", "", "")), how, 4, cuts, front)


@sampled(2)
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
@pytest.mark.parametrize(("what", "front"), by_day(CASES, 2))
def test_questionable_models_are_refused_or_exact(what, front):
    if (what, front) in REFUSED:
        with pytest.raises((fpipe.CaptureError, fpipe.CutError), match=f"(?s)^.*{REFUSED[what, front]}"):
            build_model(what, front)
    else:
        _, model, inputs, targets = made = build_model(what, front)
        got = run(*made)
        assert_same(got, run_reference(*made))
        assert_same(got, loop(model, mse, inputs, targets, 2))


THINGS = {"lock": threading.Lock, "generator": lambda: (k for k in range(2)), "object": object}


@sampled(2)
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
@covering(front=FRONTS, thing=[*THINGS])
def test_outputs_that_cannot_be_returned_are_refused_when_requested(front, thing):
    """It may be there as long as nobody asks for outputs; graphs ask when they are made."""
    make, cuts = parts(lambda m, x: m(x), returning(THINGS[thing]))
    case, how = Case(make, rows_of(), lambda out, y: mse(out["y"], y), ("", "", "")), one_f_one_b(2, 2)
    named = rf"outputs, at \['more'\]: got {thing}|could not read it: .*{thing}|dynamo could not read it"
    with pytest.raises((fpipe.InputError, fpipe.CaptureError), match=f"(?s){named}"):
        fpipe.value_and_grad(build(case, how, 4, cuts, front)[0], outputs=True)
    if front in ("trace", "modules"):
        pipe, model, inputs, targets = build(case, how, 4, cuts, front)
        _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
        assert grads.keys() == dict(model.named_parameters()).keys()
