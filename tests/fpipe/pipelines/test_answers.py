# SPDX-License-Identifier: Apache-2.0
"""A capture looks like an eager run; what a model asks about its batch is answered from each batch."""

import copy

import pytest
import torch
import torch._subclasses as subclasses
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fpipe
from fpipe.pipelines.resolver import Resolver
from fpipe.record.questions import Answer
from fpipe.record.variant import TRAINING
from schedules import gpipe, one_f_one_b
from tests.common.options import grouped
from tests.common.running import open_questions
from tests.common.sizes import covering, sampled

BACKWARDS = ("autograd", "graph")
FULL, PADDED = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True, True, False], [True, False, False]])


class Asking(nn.Module):
    """Two linear layers; between them, what `ask(hidden, mask)` makes of the first's result."""

    def __init__(self, ask):
        super().__init__()
        self.first, self.second, self.ask = nn.Linear(4, 4), nn.Linear(4, 2), ask

    def forward(self, x, mask):
        return self.second(self.ask(self.first(x), mask).tanh())


def build(ask, mask=FULL, **options):
    torch.manual_seed(0)
    model = Asking(ask)
    arguments = {"loss": torch.sum, "schedule": gpipe(ranks=2, microbatches=2), "cuts": ["second"]} | options
    return model, fpipe.pipeline(model, example=batch(mask, mask), **grouped(arguments))


def batch(*masks):
    return torch.linspace(-1, 1, 12 * 2 * len(masks)).view(2 * len(masks), 3, 4), torch.cat(masks)


def plain(model, inputs, microbatches=2):
    model = copy.deepcopy(model)
    for part in zip(*[leaf.chunk(microbatches) for leaf in inputs], strict=True):
        (model(*part).sum() / microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_same(model, pipe, inputs):
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs)
    expected = plain(model, inputs)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in grads)
    fpipe.verify(pipe, model, inputs)


def dropped(hidden, mask):
    """Skip a full mask, as libraries do."""
    return hidden if mask.all() else hidden.masked_fill(~mask[..., None], 0.5)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_batches_that_answer_differently_take_turns_through_one_pipeline(backward):
    model, pipe = build(dropped, backward=backward)
    for masks in [(FULL, FULL), (PADDED, PADDED), (FULL, PADDED), (FULL, FULL), (PADDED, FULL)]:
        require_same(model, pipe, batch(*masks))
    assert len(pipe.memo.recordings) == 2


class Skipping(nn.Module):
    """The mask goes from the first part to the third, if it is not full."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, mask):
        hidden = self.first(x)
        weight = hidden.sigmoid()[..., :1] if not mask.all() else None
        hidden = self.second(hidden)
        return self.third(hidden if weight is None else hidden * weight)


@sampled(1)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_microbatches_of_one_batch_may_use_different_edges(backward):
    torch.manual_seed(0)
    model = Skipping()
    pipe = fpipe.pipeline(
        model,
        example=batch(FULL, FULL),
        loss=torch.sum,
        schedule=one_f_one_b(ranks=3, microbatches=2),
        cuts=["second", "third"],
        gradients=fpipe.Gradients(backward=backward),
    )
    for masks in [(FULL, PADDED), (PADDED, FULL), (FULL, FULL), (PADDED, PADDED)]:
        require_same(model, pipe, batch(*masks))
    assert [len(one.assemblies) for one in pipe.memo.recordings.values()] == [2, 2]  # with outputs and without


def test_operators_that_an_eager_run_skips_are_not_in_a_stage():
    _, pipe = build(dropped)
    assert not any("masked_fill" in unit.does for unit in pipe.training.assembly.captured.units)


@sampled(2)
@covering(
    ask=[
        lambda h, m: h * m.sum().item(),
        lambda h, m: h * float(m.float().mean()),
        lambda h, m: h * sum(map(sum, m.tolist())),
        lambda h, m: h if torch.equal(m, FULL) else -h,
        lambda h, m: h if True in m[:, -1] else -h,
        lambda h, m: h[:, : max(1, int(m.long().sum(-1).max()))],
        lambda h, m: h * m.nonzero().sum(),
        lambda h, m: h * h.new_zeros(2, 3).masked_fill_(m, 2.0)[m].sum(),
        lambda h, m: h * nn.functional.one_hot(m.sum(-1)).size(-1),
        lambda h, m: h[:, [1, 0, 2][int(m.all())]],
        lambda h, m: h if m.clone().logical_not_().any() else -h,
        lambda h, m: h if m.all() and m.sum() > 4 and bool(m[0, 0]) else -h,
        lambda h, m: h + h[m].sum(),
        lambda h, m: h + h[:, m[0], 1:].sum(),
        lambda h, m: h + h.masked_select(m[..., None]).sum(),
    ],
    backward=BACKWARDS,
)
def test_every_question_about_the_batch_is_answered(ask, backward):
    model, pipe = build(ask, backward=backward)
    for mask in (FULL, PADDED):
        require_same(model, pipe, batch(mask, mask))


def test_a_question_does_not_change_the_batch():
    def ask(hidden, mask):
        return hidden if mask.logical_not_().any() else -hidden

    _, pipe = build(ask)
    inputs = batch(FULL, PADDED)
    pipe.batch(TRAINING, inputs, None)
    assert torch.equal(inputs[1], torch.cat([FULL, PADDED]))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_questions_about_constants_are_answered_during_the_capture(backward):
    def ask(hidden, mask):
        steps = torch.arange(hidden.size(1)).diff()
        return hidden * steps.sum().item() if (steps == 1).all() else -hidden

    model, pipe = build(ask, backward=backward)
    require_same(model, pipe, batch(FULL, FULL))
    assert not open_questions(pipe)
    assert not pipe.captures.batchings[True].example.answers


def test_a_constant_kept_by_the_first_call_is_computed_during_the_capture():
    class Keeping(Asking):
        def forward(self, x, mask):
            if not hasattr(self, "steps"):
                self.steps = torch.arange(3)
            return super().forward(x if self.steps.sum() == 3 else -x, mask)

    torch.manual_seed(0)
    model = Keeping(lambda hidden, mask: hidden)
    pipe = fpipe.pipeline(
        model, example=batch(FULL, FULL), loss=torch.sum, schedule=gpipe(ranks=2, microbatches=2), cuts=["second"]
    )
    require_same(model, pipe, batch(FULL, FULL))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_model_cannot_see_that_tensors_are_fake(backward):
    def ask(hidden, mask):
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.compiler.is_exporting()
        fake = isinstance(hidden, (subclasses.FakeTensor, FakeTensor))
        other = type(hidden) is not torch.Tensor or type(mask) is not type(hidden) or not isinstance(int, type)
        return -hidden if traced or fake or other else hidden

    model, pipe = build(ask, backward=backward)
    require_same(model, pipe, batch(FULL, FULL))
    assert subclasses.FakeTensor is FakeTensor
    assert isinstance(hidden_type(), FakeTensor)
    assert "type" not in globals()


class Typing(Asking):
    def forward(self, x, mask):
        return super().forward(x if type(self.first.weight) is nn.Parameter else -x, mask)


def test_a_parameter_has_the_type_of_a_parameter():
    model, given = Typing(dropped), batch(FULL, FULL)
    pipe = fpipe.pipeline(model, example=given, loss=torch.sum, schedule=gpipe(2, 2), cuts=["second"])
    assert fpipe.verify(pipe, model, given).eager


def hidden_type():
    with subclasses.FakeTensorMode():
        return torch.ones(1)


@pytest.mark.parametrize(
    ("ask", "depends"),
    [
        (lambda h, m: h if h.sum() > 0 else -h, "depend on the parameter 'first.weight'"),
        (lambda h, m: h if torch.rand(()) > 0.5 else -h, "depend on random numbers"),
    ],
)
def test_a_question_that_the_batch_alone_does_not_answer_is_refused(ask, depends):
    with pytest.raises(fpipe.CaptureError, match=depends) as caught:
        build(ask)
    assert "test_answers.py, line" in str(caught.value)
    assert "and name this in unsplittable" in str(caught.value)


def test_an_unsplittable_module_asks_the_batch_itself():
    _, pipe = build(dropped)
    assert open_questions(pipe)
    torch.manual_seed(0)
    model = Outer(Asking(dropped))
    inputs = batch(FULL, PADDED)
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        loss=torch.sum,
        schedule=gpipe(ranks=2, microbatches=2),
        cuts=["last"],
        recording=fpipe.Recording(unsplittable=["inner"]),
    )
    assert not open_questions(pipe)
    require_same(model, pipe, inputs)


class Outer(nn.Module):
    """A module around another."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(2, 2)

    def forward(self, x, mask):
        return self.last(self.inner(x, mask))


def test_an_answer_that_does_not_fit_into_a_signature_is_refused():
    with pytest.raises(fpipe.InputError, match="expected at most 4096"):
        build(lambda h, m: h * m.repeat(100, 100).tolist()[0][0])
    with pytest.raises(fpipe.InputError, match="got ndarray for an answer"):
        build(lambda h, m: h * m.numpy().sum())


def test_an_answer_needs_the_values_of_the_batch():
    model, pipe = build(dropped)
    with pytest.raises(fpipe.InputError, match=r"microbatch 0: got no values of inputs\[1\].*they decide .* __bool__"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), None)


def test_an_example_without_values_answers_no():
    model, pipe = build(dropped, FULL.to("meta"))
    assert any("masked_fill" in unit.does for unit in pipe.training.assembly.captured.units)
    require_same(model, pipe, batch(FULL, PADDED))


def test_the_first_rank_with_values_answers_for_all():
    _, pipe = build(dropped)
    cut = pipe.captures.batchings[True].split_batch(*batch_and_none(PADDED))
    yes, no = '["true", "true"]', "[null, null]"
    heard = []

    def tell(text):
        heard.append(text)
        return [no, yes, no]

    answered = Resolver(pipe.captures, TRAINING, cut, tell).resolve()
    assert heard == ['["false", "false"]']
    assert answered.signature.answers == ((Answer("true"),), (Answer("true"),))
    with pytest.raises(fpipe.InputError, match=r"got batches on ranks \[0, 1\] about which .* finds"):
        Resolver(pipe.captures, TRAINING, cut, lambda text: [text, yes]).resolve()


def batch_and_none(mask):
    return batch(mask, mask), None


def test_an_evaluation_asks_too():
    model, pipe = build(dropped)
    for masks in [(FULL, FULL), (PADDED, FULL)]:
        inputs = batch(*masks)
        out = fpipe.evaluate(pipe)(*pipe.init(model), inputs)
        parts = zip(*[leaf.chunk(2) for leaf in inputs], strict=True)
        assert torch.equal(out.outputs, torch.cat([model(*part) for part in parts]))


def test_a_loss_may_ask_about_targets():
    def loss(out, labels):
        return out.sum() * 0 if (labels == 0).all() else out[labels > 0].sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    labels = torch.tensor([0, 0, 1, 1])
    x = torch.randn(4, 4)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=labels, loss=loss, schedule=one_f_one_b(ranks=2, microbatches=2), cuts=["2"]
    )
    for some in (labels, labels.flip(0), torch.ones(4, dtype=torch.int64)):
        fpipe.verify(pipe, model, (x,), some)


def aligned(hidden, mask):
    """Weigh by how likely labels are whose number the mask tells, as recognizers of speech do in their forward."""
    likely = torch.nn.functional.log_softmax(hidden, -1).transpose(0, 1)
    mask, times = mask[:, :2], torch.full((len(mask),), 3)
    labels = torch.ones_like(mask, dtype=torch.int64).masked_select(mask)
    return hidden * torch.nn.functional.ctc_loss(likely, labels, times, mask.sum(-1), zero_infinity=True)


@sampled(1)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_ctc_loss_reads_lengths_in_the_step(backward):
    model, pipe = build(aligned, backward=backward)
    require_same(model, pipe, batch(FULL, PADDED))
    lengths = torch.tensor([2, 1, 1, 2])

    def loss(out, targets):
        labels, lengths = targets
        return torch.nn.functional.ctc_loss(
            out.log_softmax(-1).transpose(0, 1), labels, torch.full((len(labels),), 3), lengths
        )

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    inputs, targets = (torch.randn(4, 3, 4),), (torch.ones(4, 2, dtype=torch.int64), lengths)
    options = {"schedule": gpipe(ranks=2, microbatches=2), "cuts": ["1"], "backward": backward}
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=loss, **grouped(options))
    fpipe.verify(pipe, model, inputs, targets)
