# SPDX-License-Identifier: Apache-2.0
"""A change of the model after its pipeline was built is an error at the next step that names the change."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fpipe
from fpipe.record.model.walk import Walk
from schedules import one_f_one_b
from tests.common.comparison import assert_same
from tests.common.loops import eval_loop, loop
from tests.common.sizes import by_day, sampled
from tests.common.watched_models import TABLE, WAYS, Loss, batch, build, run_step

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
        r"module blocks \(ModuleList\), submodule '2': got Identity, expected none",
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
        r"submodule 'forward': got Identity|attribute 'forward'",
    ),
    "tied": (
        lambda m: setattr(m.blocks[1].linear, "weight", m.blocks[0].linear.weight),
        r"parameters: got 9 different ones, expected 10",
    ),
}

BOTH = ["frozen", "a dropout rate", "an attribute"]  # the rest does not depend on how stages are differentiated


@sampled(4)
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
    with pytest.raises(fpipe.InputError, match=r"blocks\.0\.linear.*'weight'.*; and \d+ more, as when") as caught:
        run_step(pipe, model, x, y)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("backward", WAYS)
def test_state_that_no_capture_has_read_may_change(backward):
    """Such as bookkeeping on the model, a helper, the loss or in a table, and counters that nothing reads."""
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
    """A later capture compares what it reads with the values when the pipeline was built."""
    pipe, model, _, _, _ = build()
    model.blocks[0].gain = 2.0
    x, y = batch(9)
    with pytest.raises(fpipe.InputError, match=r"'gain': got 2.0, expected 1.0"):
        run_step(pipe, model, x, y)
    model.blocks[0].gain, model.blocks[0].norm.eps = 1.0, 0.1
    with pytest.raises(fpipe.InputError, match=r"'eps': got 0.1, expected 1e-05"):
        fpipe.evaluate(pipe)(*pipe.init(model), (x,), y)


REBUILT = [
    *[(what, "autograd") for what in ("frozen", "values of a tensor", "a helper object", "no bias")],
    *[(what, "graph") for what in ("another mode", "an element", "another module")],
]


@sampled(1)
@pytest.mark.parametrize(("what", "backward"), by_day(REBUILT, 2))
def test_a_rebuilt_pipeline_computes_the_changed_model(what, backward):
    pipe, model, loss, x, y = build(backward)
    CHANGES[what][0](model)
    again = pipe.rebuilt(model)
    assert_same(run_step(again, model, x, y), loop(model, loss, (x,), y, 3))
    assert (again.schedule, again.captures.cuts, again.ranks) == (pipe.schedule, pipe.captures.cuts, pipe.ranks)
    assert fpipe.verify(again, model, (x,), y).eager


@sampled(1)
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


class Hooked(nn.Linear):
    """Hooks that close over their module, and a function that holds one of its methods."""

    def __init__(self):
        super().__init__(4, 4)
        self.gain, self.scaled = 1.0, lambda x, own=self.scale: own(x)
        self.register_forward_hook(lambda module, args, out: self.scaled(out))

    def scale(self, x):
        return x * self.gain


def test_a_deleted_model_is_freed_although_its_hooks_close_over_it():
    model, x = nn.Sequential(Hooked(), Hooked()), torch.randn(6, 4)
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1"])
    state, refs = pipe.init(model), [weakref.ref(one) for one in model.modules()]
    want = fpipe.value_and_grad(pipe)(*state, (x,))[0].loss
    del model
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert torch.equal(fpipe.value_and_grad(pipe)(*state, (x,))[0].loss, want)


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
    """Sets attributes at its first call, as libraries do."""

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


def test_a_walk_over_a_model_reads_no_attributes_of_modules():
    read = set()

    class Noting(nn.Sequential):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    model = Noting(nn.Linear(2, 2), Noting(nn.Dropout()))
    read.clear()
    walk = Walk()
    walk.follow([model])
    assert id(vars(model)) in walk.containers
    assert read == {"__dict__"}  # a capture records what it reads, and each such read takes time
