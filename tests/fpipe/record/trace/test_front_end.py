# SPDX-License-Identifier: Apache-2.0
"""The recording front end runs modules as their author wrote them, wherever the cuts are, or refuses them.

Each model here does something that a graph of operators would lose. It is cut at modules and inside them, and must
equal a plain loop over the user's own module.
"""

import gc
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.record.captured import Call
from schedules import gpipe, one_f_one_b, split_backward
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, require_eager, require_loop, run, run_reference, staged
from tests.common.sizes import by_day, covering, few, sampled
from tests.common.unusual_models import (
    AT,
    INSIDE,
    MODELS,
    Autocast,
    Block,
    Stack,
    WithNotes,
    backward_hook,
    branching,
    checkpointed,
    differentiated,
    packed,
)


def dropping():
    def middle(module, x):
        return functional.dropout(x, 0.3, module.training)

    model = Stack(middle)
    model.blocks[2].middle = None
    model.blocks[2].b = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))
    return model


CUT = by_day(((name, cuts) for name, (_, *ways) in MODELS.items() for cuts in ways), 3)

HOWS = {"1F1B": one_f_one_b(ranks=4, microbatches=3), "split": split_backward(gpipe(ranks=4, microbatches=3))}


@sampled(2)
@covering(at={f"{name}, {cuts[0]}": (name, cuts) for name, cuts in CUT}, how=HOWS)
def test_models_that_a_graph_would_change_are_exact(at, how):
    name, cuts = at
    case = Case(MODELS[name][0], rows_of(), mse, cuts)
    built = build(case, how, 6, capture="trace")
    got = run(*built)
    assert_same(got, run_reference(*built))
    assert_same(got, loop(built[1], mse, *built[2:], how.microbatches))


@settings(max_examples=few(5))
@given(st.sets(st.sampled_from([*AT, *INSIDE, "blocks.2.b.1", "blocks.3.b"]), max_size=4), st.booleans())
def test_random_numbers_do_not_depend_on_cuts(cuts, checkpoints):
    def results(cuts):
        def make():
            model = dropping()
            model.around = checkpointed if checkpoints else None
            return model

        where = tuple(c for c in (*AT, *INSIDE, "blocks.2.b.1", "blocks.3.b") if c in cuts)
        where = tuple(sorted(where, key=lambda name: (name[:8], name)))
        where = tuple(c for c in where if not checkpoints or c.count(".") == 1)
        how = one_f_one_b(ranks=len(where) + 1, microbatches=2)
        return run(*build(Case(make, rows_of(), mse, where), how, 4, where, "trace"), seed=3)

    assert_same(results(cuts), results(()))


def test_nested_checkpoints_draw_the_same_random_numbers_again():
    """Gradients are those of another pipeline, without the inner checkpoint."""

    class Inner(Block):
        again = True

        def forward(self, x):
            x = functional.dropout(x, 0.5)
            drop = functional.dropout
            return super().forward(checkpoint(drop, x, 0.3, use_reentrant=False) if self.again else drop(x, 0.3))

    def make(again):
        model = Stack(around=checkpointed)
        model.blocks = nn.ModuleList([Inner() for _ in range(4)])
        for block in model.blocks:
            block.again = again
        return model

    how = one_f_one_b(ranks=2, microbatches=2)
    with_inner, without = (
        build(Case(lambda again=again: make(again), rows_of(), mse, ()), how, 4, ("blocks.2",), "trace")
        for again in (True, False)
    )
    assert_same(run(*with_inner, seed=3), run(*without, seed=3))
    assert_same(run(*with_inner, seed=3), run_reference(*with_inner, seed=3))


def pipeline(model, cuts):
    x = torch.randn(4, WIDTH)
    return staged(model, (x,), x, cuts)


CUT_INSIDE = ["blocks.1.b"]
REFUSED = {
    "a cut inside a checkpointed function": (Stack(around=checkpointed), CUT_INSIDE, ["blocks.1", "checkpoint"]),
    "a cut inside a module with a backward hook": (backward_hook(), CUT_INSIDE, ["blocks.1", "backward hook halved"]),
    "a cut inside saved-tensor hooks": (Stack(packed), CUT_INSIDE, ["blocks.1", "saved-tensor hooks"]),
    "a cut inside a forward that differentiates": (Stack(differentiated), CUT_INSIDE, ["blocks.1", "backward"]),
    "a cut inside a module with a vmap over its weights": (
        Stack(lambda m, x: torch.vmap(m.a)(x)), CUT_INSIDE, ["blocks.1", "vmap"]
    ),
}  # fmt: skip
for what, middle, words in (
    ("seeding", lambda m, x: (torch.manual_seed(1), x)[1], ["blocks.0", "seed"]),
    ("data-dependent control flow", lambda m, x: x if x.sum() > 0 else -x, ["blocks.0"]),
    ("data-dependent shapes", lambda m, x: x[x > 0].sum() + x, ["blocks.0"]),
    ("a generator of its own", lambda m, x: x + torch.rand(4, generator=torch.Generator()), ["blocks.0", "generator"]),
):
    REFUSED[what] = (Stack(middle), ["blocks.2"], words)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.count += 1
        return self.linear(x) * self.count


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        h = self.linear(x) if self.last is None else self.linear(x) + self.last
        self.last = h.detach()
        return h


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x):
        h = self.linear(x) * 2 if self.first else self.linear(x)
        self.first = False
        return h


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.hidden = nn.Linear(WIDTH, WIDTH), [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x):
        return self.linear(x) * self.hidden[0]


for what, part, words in (
    ("a counter", Counting(), ["1", "'count'"]),
    ("state of the last call", Carrying(), ["1", "created and kept", "buffer"]),
    ("another way the first time", Once(), ["called again", "only once"]),
    ("a parameter that is none", Foreign(), ["1", "requires a gradient", "Register"]),
):
    REFUSED[what] = (nn.Sequential(nn.Linear(WIDTH, WIDTH), part), ["1"], words)


@sampled(2)
@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_captured_are_refused_by_name(what):
    model, cuts, words = REFUSED[what]
    with pytest.raises((fpipe.CaptureError, fpipe.CutError)) as caught:
        pipeline(model, cuts)
    message = str(caught.value)
    assert "got" in message
    assert "expected" in message
    assert not [word for word in words if word not in message], message


def test_values_other_than_tensors_may_cross_a_cut():
    """A lock is not sent; its use in a later stage is not part of the computation."""

    class Locking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Taking()

        def forward(self, x):
            lock = threading.Lock()
            return self.b(self.a(x), lock)

    class Taking(Block):
        def forward(self, x, lock):
            with lock:
                return super().forward(x)

    require_loop(Locking(), one_f_one_b(ranks=2, microbatches=2), ["b"], rows=4, capture="trace")


def checking(module, x):
    torch._check_tensor_all(x.isfinite(), lambda: "not finite")
    return torch.sin(x)


@pytest.mark.parametrize("cuts", [AT, INSIDE])
def test_checks_of_torch_run_in_every_step(cuts):
    """They pass at capture and run in every step, also in modules that are cut."""
    model, (inputs, targets) = Stack(checking), rows_of()(6)
    pipe = require_loop(model, gpipe(ranks=4, microbatches=3), cuts, capture="trace")
    with torch.no_grad():
        model.blocks[1].a.weight[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="not finite"):
        run(pipe, model, inputs, targets)


def test_control_flow_on_data_is_refused_with_its_source_line():
    with pytest.raises(fpipe.CaptureError, match=r"unusual_models.py, line \d+: return torch.tanh\(x\) if"):
        pipeline(Stack(branching), ["blocks.1"])


def test_a_weight_is_cast_once_in_an_autocast_region():
    """In two stages it would be cast twice, which gives other bits."""
    model = Autocast()
    model.stack.blocks[3].a.weight = model.stack.blocks[0].a.weight
    with pytest.raises(fpipe.CutError, match="autocast"):
        pipeline(model, ["stack.blocks.2"])
    require_loop(model, gpipe(ranks=1, microbatches=2), rows=4, capture="trace")


def test_modules_run_when_the_pipeline_is_built_and_not_in_steps():
    called = []

    class Spy(nn.Linear):
        def forward(self, x):
            called.append(not isinstance(x, torch._subclasses.FakeTensor))
            return super().forward(x)

    model = nn.Sequential(*[Block() for _ in range(2)])
    for block in model:
        block.a = Spy(WIDTH, WIDTH)
    pipe = pipeline(model, ["1.b"])
    x = torch.randn(4, WIDTH)
    fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), x)
    assert called == []


def test_no_tensor_outlives_a_step_inside_fpipe():
    """After a step, only the user holds parameters, and attributes that a forward has set are gone."""
    model = WithNotes()
    pipe = pipeline(model, ["blocks.2"])
    x, (params, buffers) = torch.randn(4, WIDTH), pipe.init(model)
    out = fpipe.value_and_grad(pipe)(params, buffers, (x,), x)
    del out
    gc.collect()
    memory = {p.data_ptr() for p in params.values()}
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    holders = [one for one in tensors if one.device.type == "cpu" and one.data_ptr() in memory]
    assert {id(one) for one in holders} == {id(p) for p in params.values()}
    assert not hasattr(model.blocks[0], "note")


def test_calls_are_nested_ranges_of_units():
    calls = pipeline(Stack(), ["blocks.2"]).training.assembly.captured.calls
    assert calls[0] == Call("", Stack, 0, calls[0].stop)
    assert [c.path for c in calls[1:4]] == ["blocks.0", "blocks.0.a", "blocks.0.b"]
    for outer, inner in pairwise(calls):
        assert inner.start >= outer.stop or (outer.start <= inner.start and inner.stop <= outer.stop)


class Moving(nn.Module):
    """Moves values to the device of its first parameter, as libraries do; the parameter has no other use."""

    def __init__(self):
        super().__init__()
        self.unused, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        first = next(self.parameters())
        assert isinstance(first, nn.Parameter)
        return self.second(self.first(x).to(first.device, first.dtype))


@pytest.mark.parametrize("cut", ["1", "1.second", "2"])
def test_a_module_may_ask_for_the_device_of_a_parameter_that_its_stage_lacks(cut):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Moving(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    require_eager(model, (x,), x, cuts=[cut])
