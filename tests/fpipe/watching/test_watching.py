# SPDX-License-Identifier: Apache-2.0
"""What changes after a pipeline was built is followed, or an error at the next step that names it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.watching.code_names import find_names
from fpipe.watching.containers import Expectations
from schedules import one_f_one_b
from tests.common.comparison import assert_same
from tests.common.loops import eval_loop, loop
from tests.common.running import run

FACTOR = 1.0
TABLE = {"scale": 1.0, "unread": 0}
WAYS = ["autograd", "graph"]


class Settings:
    """A helper object."""

    def __init__(self):
        self.temperature, self.unread, self.nested = 1.0, 0, {"shift": 0.5}
        self.calls = 0


def shifted(x, settings):
    return x + settings.nested["shift"]


class Block(nn.Module):
    kind = 1.0

    def __init__(self, common):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4)
        self.common, self.gain, self.unread, self.mask = common, 1.0, 0, torch.ones(4)
        self.gains = [1.0, 2.0]

    def forward(self, x):
        self.common.calls += 1
        x = shifted(self.drop(self.linear(x)) * self.mask, self.common) * self.gain * self.gains[1]
        return self.norm(x).tanh() / self.common.temperature * self.kind


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        common = Settings()
        self.blocks, self.head = nn.ModuleList(Block(common) for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * FACTOR  # a cut goes through this one
        return self.head(x)


class Loss:
    def __init__(self):
        self.weight, self.unread = 1.0, 0

    def __call__(self, outputs, targets):
        return (outputs - targets).square().mean() * self.weight * TABLE["scale"]


def batch(rows=6):
    return torch.randn(rows, 4), torch.randn(rows, 2)


def build(backward="autograd", model=None, loss=None, **options):
    torch.manual_seed(0)
    model, loss, (x, y) = model or Model(), loss or Loss(), batch()
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=loss, schedule=how, cuts=["blocks.1"], backward=backward, **options
    )
    return pipe, model, loss, x, y


def run_step(pipe, model, x, y):
    return run(pipe, model, (x,), y)


# ---------------------------------------------------------------------------------------------------------- the model

CHANGES = {
    "frozen": (
        lambda m: m.blocks[0].linear.weight.requires_grad_(False),
        r"module blocks.0.linear \(Linear\), parameter 'weight': got requires_grad=False, expected requires_grad=True",
    ),
    "a hook on a gradient": (
        lambda m: m.blocks[0].linear.weight.register_hook(lambda grad: None),
        r"parameter 'weight': got requires_grad=True and 1 hooks on its gradient, expected requires_grad=True",
    ),
    "another class": (
        lambda m: setattr(m.blocks[0].drop, "__class__", nn.AlphaDropout),
        r"module blocks.0.drop \(Dropout\): got AlphaDropout, expected Dropout",
    ),
    "another mode": (
        lambda m: m.blocks[1].norm.eval(),
        r"module blocks.1.norm \(BatchNorm1d\), attribute 'training': got False, expected True",
    ),
    "a dropout rate": (
        lambda m: setattr(m.blocks[0].drop, "p", 0.5),
        r"blocks.0.drop \(Dropout\), attribute 'p': got 0.5, expected 0.0",
    ),
    "eps of a norm": (
        lambda m: setattr(m.blocks[0].norm, "eps", 0.1),
        r"blocks.0.norm \(BatchNorm1d\), attribute 'eps': got 0.1, expected 1e-05",
    ),
    "an attribute": (
        lambda m: setattr(m.blocks[1], "gain", 2.0),
        r"blocks.1 \(Block\), attribute 'gain': got 2.0, expected 1.0",
    ),
    "another type": (
        lambda m: setattr(m.blocks[1], "gain", 1),
        r"blocks.1 \(Block\), attribute 'gain': got 1, expected 1.0",
    ),
    "minus zero": (lambda m: setattr(m.blocks[0].drop, "p", -0.0), r"attribute 'p': got -0.0, expected 0.0"),
    "a class attribute of one": (
        lambda m: setattr(m.blocks[1], "kind", 2.0),
        r"blocks.1 \(Block\), attribute 'kind': got 2.0 of its own, expected that of its class",
    ),
    "an element": (
        lambda m: m.blocks[0].gains.__setitem__(1, 3.0),
        r"blocks.0 \(Block\), attribute 'gains'\[1\]: got 3.0, expected 2.0",
    ),
    "a helper object": (
        lambda m: setattr(m.blocks[1].common, "temperature", 2.0),
        r"attribute 'common'.temperature: got 2.0, expected 1.0",
    ),
    "inside a helper object": (
        lambda m: m.blocks[1].common.nested.update(shift=1.0),
        r"'common'.nested\['shift'\]: got 1.0, expected 0.5",
    ),
    "another helper object": (
        lambda m: setattr(m.blocks[0], "common", 3),
        r"blocks.0 \(Block\), attribute 'common': got 3, expected Settings",
    ),
    "another tensor": (
        lambda m: setattr(m.blocks[1], "mask", torch.zeros(4)),
        r"attribute 'mask': got another value, a tensor float32\[4\], expected a tensor",
    ),
    "values of a tensor": (
        lambda m: m.blocks[1].mask.mul_(2),
        r"attribute 'mask': got a tensor float32\[4\] with other values",
    ),
    "a hook": (
        lambda m: m.blocks[0].register_forward_hook(lambda *_: None),
        r"blocks.0 \(Block\), attribute '_forward_hooks': got OrderedDict, expected an empty OrderedDict",
    ),
    "another class of nothing": (
        lambda m: setattr(m.blocks[0], "_forward_hooks", {}),
        r"blocks.0 \(Block\), attribute '_forward_hooks': got dict, expected an empty OrderedDict",
    ),
    "another module": (
        lambda m: setattr(m, "head", nn.Linear(4, 2)),
        r"module \(root\) \(Model\), submodule 'head': got another Linear, expected Linear",
    ),
    "one more module": (
        lambda m: m.blocks.append(nn.Identity()),
        r"module blocks \(ModuleList\), submodule '2': got another Identity, expected none",
    ),
    "no bias": (
        lambda m: setattr(m.head, "bias", None),
        r"module head \(Linear\), parameter 'bias': got none, expected requires_grad=True",
    ),
    "a buffer": (
        lambda m: m.head.register_buffer("more", torch.ones(1)),
        r"module head \(Linear\), buffer 'more': got a tensor, expected none",
    ),
    "another forward": (
        lambda m: setattr(m.head, "forward", nn.Identity()),
        r"submodule 'forward': got another Identity|attribute 'forward'",
    ),
    "tied": (
        lambda m: setattr(m.blocks[1].linear, "weight", m.blocks[0].linear.weight),
        r"parameters: got 9 different ones, expected 10",
    ),
}


BOTH = ["frozen", "a dropout rate", "an attribute"]  # the rest does not depend on how stages are differentiated


@pytest.mark.parametrize(
    ("what", "backward"), [(what, "autograd") for what in CHANGES] + [(what, "graph") for what in BOTH]
)
def test_a_changed_model_is_an_error_at_the_next_step_that_names_the_change(what, backward):
    change, words = CHANGES[what]
    pipe, model, _, x, y = build(backward)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, (x,), y)
    change(model)
    with pytest.raises(fpipe.InputError, match=words + r".*pipe\.rebuilt\(model\)"):
        step(*state, (x,), y)


@pytest.mark.parametrize("backward", WAYS)
def test_a_change_that_is_undone_is_allowed(backward):
    pipe, model, _, x, y = build(backward)
    before = run_step(pipe, model, x, y)
    for name, change, back in [("gain", 2.0, float("1.0")), ("mask", None, model.blocks[1].mask)]:
        setattr(model.blocks[1], name, change)
        with pytest.raises(fpipe.InputError, match=name):
            run_step(pipe, model, x, y)
        setattr(model.blocks[1], name, back)
        assert_same(run_step(pipe, model, x, y), before)


def test_an_error_lists_only_a_few_changes():
    pipe, model, _, x, y = build()
    model.eval().requires_grad_(False)
    with pytest.raises(fpipe.InputError, match=r"blocks\.0\.linear.*'bias'.*; and \d+ more, as when") as caught:
        run_step(pipe, model, x, y)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("backward", WAYS)
def test_state_that_no_capture_has_read_may_change(backward):
    """Bookkeeping on a model, a helper, a loss or in a table, and counters that only count."""
    pipe, model, loss, x, y = build(backward)
    run_step(pipe, model, x, y)
    model.epoch = model.blocks[0].unread = model.blocks[0].common.unread = loss.unread = 7
    TABLE["unread"] += 1
    model.head.train(False)  # a linear layer has no modes
    model(x)  # counts its calls
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    got = run_step(pipe, model, x, y)
    model.zero_grad()
    assert_same(got, loop(model, loss, (x,), y, 3))


def test_evaluations_have_their_own_modes_and_flags():
    pipe, model, loss, x, y = build()
    fpipe.evaluate(pipe)(*pipe.init(model), (x,), y)
    state = pipe.init(model)
    model.eval().requires_grad_(False)
    got = fpipe.evaluate(pipe)(*state, (x,), y)
    assert torch.equal(got.loss, eval_loop(model, loss, (x,), y, 3).loss)
    model.blocks[0].norm.eps = 0.1
    with pytest.raises(fpipe.InputError, match=r"blocks.0.norm \(BatchNorm1d\), attribute 'eps'"):
        fpipe.evaluate(pipe)(*state, (x,), y)


def test_the_reference_and_verify_notice_too():
    pipe, model, _, x, y = build()
    model.blocks[0].gain = 2.0
    state = dict(model.named_parameters()), dict(model.named_buffers())
    for call in (lambda: fpipe.reference(pipe)(*state, (x,), y), lambda: fpipe.verify(pipe, model, (x,), y)):
        with pytest.raises(fpipe.InputError, match=r"'gain': got 2.0, expected 1.0"):
            call()


def test_a_change_before_another_kind_of_batch_is_noticed():
    """What a later capture reads is compared with what was there when the pipeline was built, not with what is."""
    pipe, model, _, _, _ = build()
    model.blocks[0].gain = 2.0
    x, y = batch(9)
    with pytest.raises(fpipe.InputError, match=r"'gain': got 2.0, expected 1.0"):
        run_step(pipe, model, x, y)
    model.blocks[0].gain, model.blocks[0].norm.eps = 1.0, 0.1
    with pytest.raises(fpipe.InputError, match=r"'eps': got 0.1, expected 1e-05"):
        fpipe.evaluate(pipe)(*pipe.init(model), (x,), y)


# ------------------------------------------------------------------------------------------------- outside of the model


def counted_loss(weight):
    def loss(outputs, targets):
        return (outputs - targets).square().mean() * weight

    def change(value):
        nonlocal weight
        weight = value

    return loss, change


def test_by_autograd_a_loss_reads_current_values():
    loss, change = counted_loss(1.0)
    pipe, model, _, x, y = build(loss=loss)
    run_step(pipe, model, x, y)
    change(3.0)
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_by_autograd_a_loss_reads_its_current_attributes(monkeypatch):
    pipe, model, loss, x, y = build()
    run_step(pipe, model, x, y)
    loss.weight = 3.0
    monkeypatch.setitem(TABLE, "scale", 0.5)
    monkeypatch.setattr(Block, "kind", 2.0)  # blocks run as themselves
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_changing_what_a_recorded_loss_closes_over_is_an_error():
    loss, change = counted_loss(1.0)
    pipe, model, _, x, y = build("graph", loss=loss)
    run_step(pipe, model, x, y)
    change(3.0)
    words = r"counted_loss.<locals>.loss, which closes over 'weight': got 3.0, expected 1.0, as when it was captured"
    with pytest.raises(fpipe.InputError, match=words + r".*pass it with the batch.*pipe\.rebuilt"):
        run_step(pipe, model, x, y)
    assert_same(run_step(pipe.rebuilt(model), model, x, y), loop(model, loss, (x,), y, 3))


OUTSIDE = {
    "a global": (lambda m, patch: patch.setitem(globals(), "FACTOR", 2.0), r"global 'FACTOR': got 2.0, expected 1.0"),
    "a global table": (lambda m, patch: patch.setitem(TABLE, "scale", 2.0), r"'TABLE'\['scale'\]: got 2.0, expected 1"),
    "a class": (lambda m, patch: patch.setattr(Block, "kind", 2.0), r"class Block, attribute 'kind': got 2.0, expect"),
    "a loss": (lambda m, patch: patch.setattr(m, "weight", 2.0), r"the 'loss'.weight: got 2.0, expected 1.0"),
    "a function": (
        lambda m, patch: patch.setitem(globals(), "shifted", max),
        r"global 'shifted': got max, expected sh",
    ),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_changing_state_outside_the_model_that_a_graph_has_read_is_an_error(what, monkeypatch):
    change, words = OUTSIDE[what]
    pipe, model, loss, x, y = build("graph")
    run_step(pipe, model, x, y)
    change(loss, monkeypatch)
    with pytest.raises(fpipe.InputError, match=words):
        run_step(pipe, model, x, y)
    monkeypatch.undo()
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


def test_changing_state_that_a_cut_module_has_read_is_an_error(monkeypatch):
    pipe, model, _, x, y = build("autograd")
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    with pytest.raises(fpipe.InputError, match=r"global 'FACTOR': got 2.0, expected 1.0"):
        run_step(pipe, model, x, y)


def test_changing_a_loss_module_is_noticed():
    for backward in WAYS:
        loss = nn.SmoothL1Loss()
        pipe, model, _, x, y = build(backward, loss=loss)
        loss.beta = 0.5
        if backward == "autograd":
            assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))
        else:
            with pytest.raises(
                fpipe.InputError, match=r"\(SmoothL1Loss\) of the loss, attribute 'beta': got 0.5, expe"
            ):
                run_step(pipe, model, x, y)


@pytest.mark.parametrize("capture", ["export", "dynamo", "fx"])
def test_front_ends_that_make_a_graph_notice_every_change(capture, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    x, y = batch()
    loss = Loss()
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=["2"], capture=capture)
    run_step(pipe, model, x, y)
    for change, words in [
        (lambda: setattr(model[1], "p", 0.5), r"module 1 \(Dropout\), attribute 'p': got 0.5"),
        (lambda: model[0].requires_grad_(False), r"module 0 \(Linear\), parameter 'weight'"),
        (lambda: setattr(loss, "weight", 2.0), r"the 'loss'.weight: got 2.0"),
    ]:
        change()
        with pytest.raises(fpipe.InputError, match=words):
            run_step(pipe, model, x, y)
        pipe = pipe.rebuilt(model)


# ------------------------------------------------------------------------------------------------------ built again


@pytest.mark.parametrize(
    ("what", "backward"),
    [
        *[(what, "autograd") for what in ("frozen", "values of a tensor", "a helper object", "no bias")],
        *[(what, "graph") for what in ("another mode", "an element", "another module")],
    ],
)
def test_a_rebuilt_pipeline_computes_the_changed_model(what, backward):
    pipe, model, loss, x, y = build(backward)
    CHANGES[what][0](model)
    again = pipe.rebuilt(model)
    assert_same(run_step(again, model, x, y), loop(model, loss, (x,), y, 3))
    assert (again.schedule, again.captures.cuts, again.ranks) == (pipe.schedule, pipe.captures.cuts, pipe.ranks)
    assert fpipe.verify(again, model, (x,), y).eager


# ---------------------------------------------------------------------------------------------------- the model is gone


@pytest.mark.parametrize("backward", WAYS)
def test_a_deleted_model_is_freed_and_not_compared(backward):
    pipe, model, loss, x, y = build(backward)
    state, want = pipe.init(model), loop(model, loss, (x,), y, 3)
    held = [model, model.blocks[0].common, model.blocks[0].mask, *model.parameters(), *model.modules()]
    refs = [weakref.ref(one) for one in held]
    del model, held
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert torch.equal(fpipe.value_and_grad(pipe)(*state, (x,), y)[0].loss, want.loss)


def test_a_part_that_outlives_the_model_is_still_compared():
    pipe, model, _, x, y = build()
    state, norm = pipe.init(model), model.blocks[1].norm
    del model
    gc.collect()
    step = fpipe.value_and_grad(pipe)
    step(*state, (x,), y)
    norm.eval()
    with pytest.raises(fpipe.InputError, match=r"blocks.1.norm \(BatchNorm1d\), attribute 'training'"):
        step(*state, (x,), y)


class Lazy(nn.Module):
    """Settles things at its first call, as libraries do."""

    def __init__(self):
        super().__init__()
        self.linear, self.ready, self.common = nn.Linear(4, 2), False, SimpleNamespace(width=None)

    def forward(self, x):
        if not self.ready:
            self.ready = True
        if self.common.width is None:
            self.common.width = x.shape[-1]
        return self.linear(x) * self.common.width


def test_state_that_the_model_sets_itself_is_not_a_change():
    model, (x, y), loss = nn.Sequential(nn.Linear(4, 4), Lazy()), batch(), Loss()
    model[1].ready = True  # without which the capture refuses it
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, cuts=["1"])
    assert fpipe.verify(pipe, model, (x,), y).eager, "which calls the model"
    assert_same(run_step(pipe, model, x, y), loop(model, loss, (x,), y, 3))


# --------------------------------------------------------------------------------------------------------------- parts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.sampled_from(["", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | inner.map(lambda one: SimpleNamespace(x=one))
    ),
    max_leaves=6,
)


def exact(value):
    """A value with the type of everything in it."""
    if isinstance(value, dict):
        return dict, sorted((key, exact(one)) for key, one in value.items())
    if isinstance(value, list):
        return list, [exact(one) for one in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace, exact(vars(value))
    return type(value), repr(value)


@settings(max_examples=200)
@given(VALUES, VALUES)
def test_an_expectation_holds_for_exactly_equal_values(value, other):
    expectation = Expectations().expect(value)
    assert expectation.holds(value)
    assert not list(expectation.differences(value, "here"))
    if repr(exact(value)) != repr(exact(other)):
        assert not expectation.holds(other)
        assert list(expectation.differences(other, "here"))


def test_an_expectation_of_an_object_that_contains_itself():
    inside = SimpleNamespace(n=1)
    inside.me, inside.all = inside, [inside]
    expectation = Expectations().expect(inside)
    assert expectation.holds(inside)
    inside.n = 2
    assert [one.where for one in expectation.differences(inside, "x")] == ["x.n"]


def test_names_that_are_only_written_are_not_read():
    def function(self, calls=[]):  # noqa: B006
        global FACTOR  # noqa: PLW0603
        FACTOR += 1
        self.helper.count += 1
        TABLE["unread"] += 1
        self.seen.append(self.width)
        return [WAYS for _ in range(2)], lambda: TABLE["scale"]

    found = find_names(function.__code__)
    assert found.outer == {"TABLE", "WAYS", "range"}
    assert found.attributes == {"helper", "width"}
    assert "scale" in found.keys
    assert "unread" not in found.keys
    assert found.stored == {"FACTOR", "count"}
