# SPDX-License-Identifier: Apache-2.0
"""A parameter has a gradient exactly where the plain loop sets `.grad`, though data decide which modules use it.

The model is a row of gates, each of which asks the batch which way to go; Hypothesis says what each asks of each
microbatch. What no branch has used has no gradient on any rank, and zeros keep their signs.
"""

import copy
from queue import SimpleQueue

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

import fpipe
from fpipe.record.trace.branching import attach, certain_leaves
from fpipe.stages.autograd import Autograd
from fpipe.stages.recorded import Recorded
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import same_bits
from schedules import chimera, interleaved_1f1b, mirror, one_f_one_b, recompute, split_backward, zb_h1, zb_v
from tests.common.cases import WIDTH, mse
from tests.common.comparison import Result, assert_same
from tests.common.gates import BRANCHES, Gate, Gates, batch, build
from tests.common.loops import loop, loop_as_stated
from tests.common.options import grouped
from tests.common.sizes import by_day, by_night, covering, few, sampled

MICROBATCHES = 3


HOWS = [
    one_f_one_b(ranks=3, microbatches=MICROBATCHES),
    one_f_one_b(ranks=1, microbatches=MICROBATCHES),
    zb_h1(ranks=3, microbatches=MICROBATCHES),
    split_backward(one_f_one_b(ranks=4, microbatches=MICROBATCHES)),
    recompute(one_f_one_b(ranks=3, microbatches=MICROBATCHES), stages=(0, 1)),
    interleaved_1f1b(ranks=2, microbatches=MICROBATCHES + 1, chunks=2),
    zb_v(ranks=2, microbatches=MICROBATCHES + 1),
]
questions = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=4, max_size=4)
kinds = st.lists(st.sampled_from(list(BRANCHES)), min_size=3, max_size=3)
ties = st.sampled_from([[], [(0, 2)], [(0, 1)], [(0, 1), (0, 2)]])


@settings(max_examples=few(5))
@given(kinds, ties, st.booleans(), questions, st.sampled_from(HOWS), st.sampled_from(["autograd", "graph"]))
def test_gradients_are_present_exactly_where_one_device_has_them(kinds, ties, residual, answers, how, backward):
    model = Gates(kinds, ties, residual)
    example, targets = batch(answers[: how.microbatches])
    pipe = build(model, how, example, targets, backward=backward)
    params, buffers = pipe.init(model)
    for turn in range(2):
        inputs, targets = batch((answers[turn:] + answers)[: how.microbatches], turn)
        out, grads = fpipe.value_and_grad(pipe, outputs=True)(params, buffers, inputs, targets)
        want = loop(model, mse, inputs, targets, how.microbatches)
        assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)
    assert fpipe.verify(pipe, model, inputs, targets).eager


NEGATIVE = ["other", "other", "negative"]  # whose gradients are -0 everywhere, which is not none


@settings(max_examples=few(3))
@example(NEGATIVE, [[False, True, False]] * 4, mirror(split_backward(one_f_one_b(2, 4))), False)
@given(kinds, questions, st.sampled_from([chimera(2, 4), mirror(split_backward(one_f_one_b(2, 4)))]), st.booleans())
def test_replicas_agree_which_gradients_are_present(kinds, answers, how, tie):
    """Each adds those of its microbatches; where one has none the other's is the sum."""
    model = Gates(kinds, [(0, 2)] if tie else [], False, counting=False)
    inputs, targets = batch(answers)
    pipe = build(model, how, inputs, targets)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop_as_stated(pipe, model, mse, inputs, targets).grads
    assert grads.keys() == want.keys()
    assert all(same_bits(grads[name], want[name]) for name in want)
    fpipe.verify(pipe, model, inputs, targets)


@settings(max_examples=few(3))
@given(kinds, st.sampled_from([[(0, 1)], [(0, 1), (0, 2)]]), questions, st.sampled_from(HOWS))
def test_absent_gradients_add_nothing_to_sums_over_stages(kinds, ties, answers, how):
    model = Gates(kinds, ties, False)
    inputs, targets = batch(answers[: how.microbatches])
    pipe = build(model, how, inputs, targets, tied="sum")
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert grads.keys() == loop(model, mse, inputs, targets, how.microbatches).grads.keys()
    fpipe.verify(pipe, model, inputs, targets)


def test_weight_decay_moves_the_parameters_that_it_moves_on_one_device():
    """With momentum, too: a parameter that is used in one step keeps moving in others only if it has a gradient."""
    model, how = Gates(["other", "detached", "other"], [], True), one_f_one_b(ranks=3, microbatches=2)
    plain = copy.deepcopy(model)
    inputs, targets = batch([[1, 1, 1], [1, 0, 1]])
    pipe = build(model, how, inputs, targets)
    params, buffers = pipe.init(model)
    mine, theirs = (torch.optim.SGD(some, 0.1, 0.9, weight_decay=0.1) for some in (params.values(), plain.parameters()))
    step = fpipe.value_and_grad(pipe)
    for turn, answers in enumerate(([[1, 1, 1], [1, 0, 1]], [[0, 0, 1], [0, 1, 1]], [[0, 1, 1], [1, 1, 1]])):
        inputs, targets = batch(answers, turn)
        out, grads = step(params, buffers, inputs, targets)
        buffers = out.buffers
        for name, parameter in params.items():
            parameter.grad = grads.get(name)
        mine.step()
        theirs.zero_grad()
        for part, said, target in zip(*(one.chunk(2) for one in (*inputs, targets)), strict=True):
            (mse(plain(part, said), target) / 2).backward()
        theirs.step()
        assert all(same_bits(params[name], parameter) for name, parameter in plain.named_parameters())


@pytest.mark.parametrize("residual", [False, True])
def test_cotangents_are_optional_only_where_data_decide(residual):
    """A residual connection brings one whatever the gate does, so nothing more is sent."""
    model = Gates(["other", "detached", "other"], [(0, 2)], residual)
    inputs, targets = batch([[1, 1, 1]] * 3)
    pipe = build(model, one_f_one_b(ranks=3, microbatches=3), inputs, targets)
    kinds = {type(spec) for stage in pipe.stages for one in stage.pulled_by for spec in one.specs}
    assert OptionalSpec in kinds
    assert (Spec in kinds) == residual


class Chain(nn.Module):
    """Recorded stages before a gate, which lets gradients through or not."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Gate(kind, counting=False)

    def forward(self, x, answers):
        return self.gate(torch.tanh(self.b(torch.relu(self.a(x)))), answers[:, 0])


@settings(max_examples=few(3))
@given(
    st.sampled_from(["detached", "constant", "dead", "other"]),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([one_f_one_b(3, 4), zb_h1(3, 4)]),
    st.sampled_from(["graph", "aot_eager"]),
)
@example("detached", [True, False, True, False], one_f_one_b(3, 4), "graph")
@example("detached", [False, True, False, True], zb_h1(3, 4), "graph")
def test_recorded_stages_skip_absent_cotangents(kind, answers, how, backward):
    model = Chain(kind)
    inputs, targets = batch([[answer] for answer in answers])
    options = {"cuts": ["b", "gate"], "unsplittable": Gate, "backward": backward}
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, **grouped(options))
    assert [type(stage.functions) for stage in pipe.stages] == [Recorded, Recorded, Autograd]
    if backward == "graph":
        fpipe.verify(pipe, model, inputs, targets)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert grads.keys() == loop(model, mse, inputs, targets, 4).grads.keys()


class Fickle(torch.autograd.Function):
    """Has a gradient or not, and who records it cannot know: it is gone when the queue is."""

    gradients = SimpleQueue()

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None if Fickle.gradients.empty() else grad


class Whimsical(nn.Module):
    def forward(self, x):
        return Fickle.apply(x)


def test_a_backward_that_unexpectedly_returns_no_gradient_is_refused():
    """It is not known beforehand that a cotangent may be absent, so nobody could be told."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Whimsical()), torch.ones(2, WIDTH)
    Fickle.gradients.put(1)
    how = {"schedule": one_f_one_b(2, 2), "cuts": ["1"], "backward": "autograd"}
    pipe = fpipe.pipeline(model, example=(x,), targets=x, loss=mse, **grouped(how))
    Fickle.gradients.get()
    with pytest.raises(fpipe.InputError, match=r"got no gradient for .* return zeros instead"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), x)


class Writing(nn.Module):
    def forward(self, x):
        return x.relu_() if x.sum() > 0 else x + 1


def test_a_branch_that_changes_its_input_is_refused():
    """At capture the other branch was taken, so nobody has made a copy; the user's batch would change, too."""
    model, x = nn.Sequential(Writing(), nn.Linear(WIDTH, WIDTH)), torch.ones(2, WIDTH)
    how = one_f_one_b(2, 2)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=x,
        loss=mse,
        schedule=how,
        cuts=["1"],
        recording=fpipe.Recording(unsplittable=Writing),
    )
    with pytest.raises(fpipe.InputError, match=r"an in-place change of an argument, float32\[1, 4\]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), x)


def test_a_branch_may_ignore_an_argument():
    """Whatever stands for it is a fake tensor, in real steps as well."""
    model = nn.ModuleDict({"gate": Ignoring(), "last": nn.Linear(WIDTH, WIDTH)})
    whole = Sequence(model)
    torch.manual_seed(0)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        whole,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=["parts.last"],
        recording=fpipe.Recording(unsplittable=Ignoring),
    )
    assert fpipe.verify(pipe, whole, (x,), y).eager


class Ignoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, unused):
        return self.linear(x) if x.sum() > -9 else x


class Sequence(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["last"](self.parts["gate"](x, x + 1))


class Holding(nn.Module):
    """Holds a layer that only its caller uses, and a parameter that nobody does; the gate inside branches."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Linear(WIDTH, WIDTH), Gate("other", counting=False)
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, answers):
        return self.gate(x, answers[:, 0])


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.holding, self.last = Holding(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, answers):
        return self.last(self.holding(self.holding.embed(x), answers))


@sampled(2)
@covering(cuts=[["holding"], ["last"]], backward=["autograd", "graph"])
def test_a_module_around_a_branch_may_hold_parameters_of_other_stages(cuts, backward):
    """A language model is handed embeddings that were looked up outside; only the branch inside needs parameters."""
    model = Embedding()
    inputs, targets = batch([[1], [0]])
    options = {"loss": mse, "schedule": one_f_one_b(2, 2), "cuts": cuts, "backward": backward, "unsplittable": Gate}
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, **grouped(options))
    fpipe.verify(pipe, model, inputs, targets)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    want = loop(model, mse, inputs, targets, 2).grads
    assert grads.keys() == want.keys()
    assert "holding.spare" not in grads
    assert all(same_bits(grads[name], want[name]) for name in want)


@by_night
@pytest.mark.parametrize("backward", by_day(["graph", "autograd"], 2))
def test_experts_without_tokens_have_no_gradients(backward):
    """As in transformers, where the router of a sparse layer says which experts run."""
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in LAYERS.items()}
    config = NllbMoeConfig(vocab_size=32, d_model=16, num_experts=4, expert_capacity=8, use_cache=False, **sizes)
    torch.manual_seed(0)
    model = NllbMoeForConditionalGeneration(config).eval()
    ids = torch.randint(3, 32, (4, 6))
    batch, how = {"input_ids": ids, "labels": ids}, one_f_one_b(ranks=2, microbatches=2)
    options = {"loss": lambda out: out.loss, "stages": 2, "unsplittable": NllbMoeSparseMLP, "backward": backward}
    pipe = fpipe.pipeline(model, example=batch, schedule=how, **grouped(options))
    assert fpipe.verify(pipe, model, batch).eager
    params, buffers = pipe.init(model)
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, batch)
    absent = [name for name in params if name not in grads]
    assert absent
    assert all("expert" in name for name in absent)


LAYERS = {"layers": 2, "attention_heads": 2, "ffn_dim": 16, "sparse_step": 2, "layerdrop": 0.0}


def test_outputs_are_connected_only_while_shapes_are_inferred():
    linear, x = nn.Linear(2, 2), torch.ones(2)
    assert attach((x,), linear.parameters())[0] is x
    with FakeTensorMode(allow_non_fake_inputs=True):
        (made,) = attach((torch.ones(2),), linear.parameters())
        assert certain_leaves([made]) == frozenset()
        assert certain_leaves([linear(made)]) == {id(p) for p in linear.parameters()}
