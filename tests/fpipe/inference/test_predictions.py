# SPDX-License-Identifier: Apache-2.0
"""Predictions equal a plain loop in eval mode, and leave training as it was."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import gpipe, one_f_one_b
from tests.common.comparison import Result, assert_same
from tests.common.loops import eval_loop
from tests.common.memory import Alive
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.sizes import sampled
from tests.common.zoo import ZOO


def require_same(got, want):
    assert_same(Result(None, got, {}, {}), Result(None, want, {}, {}))


@sampled(1)
@pytest.mark.parametrize("name", ["gpt", "normalised", "gpt_dropout", "dicts", "several"])
def test_predictions_are_those_of_a_plain_loop(name):
    one = ZOO[name]
    pipe, model, inputs, targets = build(one, SCHEDULES["one_f_one_b"](ranks=2, microbatches=4), 8, capture="trace")
    want = eval_loop(model, one.loss, inputs, targets, 4).outputs
    require_same(fpipe.predict(pipe)(*pipe.init(model), inputs), want)


def test_streamed_outputs_are_those_of_each_microbatch():
    one = ZOO["gpt"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=2, microbatches=4), 8, capture="trace")
    seen = {}
    assert fpipe.stream(pipe, seen.__setitem__)(*pipe.init(model), inputs) is None
    assert list(seen) == [0, 1, 2, 3]
    again = {}
    loss = fpipe.stream(pipe, again.__setitem__)(*pipe.init(model), inputs, targets)
    assert same_bits(loss, fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets).loss)
    assert all(same_bits(again[i], seen[i]) for i in seen)
    for i in range(4):
        with torch.no_grad():
            assert same_bits(seen[i], model.eval()(inputs[0][2 * i : 2 * i + 2]))


def test_streamed_microbatches_are_numbered_copy_by_copy():
    one, seen = ZOO["mlp"], {}
    pipe, model, inputs, _ = build(one, one_f_one_b(2, 2), 8, capture="trace", mesh={"pp": 2, "dp": 2}, dp="dp")
    fpipe.stream(pipe, seen.__setitem__)(*pipe.init(model), inputs)
    with torch.no_grad():
        assert [same_bits(seen[i], model.eval()(inputs[0][2 * i : 2 * i + 2])) for i in range(4)] == [True] * 4


@sampled(1)
@pytest.mark.parametrize("cuts", [["1"], ["2"]], ids=["before logits", "after logits"])
def test_a_loss_needs_the_memory_of_a_few_microbatches(cuts):
    """Neither the outputs of all of them are kept, nor what a fast rank computes ahead of others."""
    words, ids = 500, torch.randint(50, (16, 4))
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, words), nn.LayerNorm(words))

    def entropy(out, ids):
        return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())

    pipe = fpipe.pipeline(model, example=(ids,), targets=ids, loss=entropy, schedule=one_f_one_b(2, 16), cuts=cuts)
    state = pipe.init(model)
    module = fpipe.Pipelined(model, example=(ids,), targets=ids, loss=entropy, schedule=one_f_one_b(2, 16), cuts=cuts)
    want = fpipe.evaluate(pipe)(*state, (ids,), ids).loss
    for run in (
        lambda: fpipe.evaluate(pipe, outputs=False)(*state, (ids,), ids).loss,
        lambda: fpipe.stream(pipe, lambda i, out: None)(*state, (ids,), ids),
        lambda: module.eval()(ids, targets=ids),
    ):
        run()
        with Alive() as alive:
            assert same_bits(run(), want)
        assert alive.most < 8 * 4 * words * 4, "of 16 microbatches with logits of 4 rows"


def test_without_outputs_and_targets_there_is_nothing_to_compute():
    pipe, model, inputs, _ = build(ZOO["mlp"], gpipe(ranks=2, microbatches=4), 8)
    with pytest.raises(fpipe.InputError, match="targets: got none on any rank"):
        fpipe.evaluate(pipe, outputs=False)(*pipe.init(model), inputs)


def test_an_error_of_take_comes_at_the_end_and_the_pipeline_goes_on():
    one = ZOO["mlp"]
    pipe, model, inputs, _ = build(one, gpipe(ranks=2, microbatches=4), 8)
    calls = []

    def take(i, outputs):
        calls.append(i)
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        fpipe.stream(pipe, take)(*pipe.init(model), inputs)
    assert calls == [0]
    assert fpipe.predict(pipe)(*pipe.init(model), inputs).shape[0] == 8


def test_training_is_not_disturbed():
    """Steps with predictions between them are the steps without."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def train(look):
        pipe = fpipe.pipeline(
            model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=gpipe(2, 2), cuts=["2"]
        )
        (params, buffers), step = pipe.init(model), fpipe.value_and_grad(pipe)
        torch.manual_seed(3)
        found = []
        for i in range(3):
            out, grads = step(params, buffers, (x,), y, seed=i)
            params, buffers = {n: p - grads[n] for n, p in params.items()}, out.buffers
            look(pipe, params, buffers)
            found.append((out.loss, grads, buffers))
        return found, torch.rand(3)  # the generator has not moved

    def look(pipe, params, buffers):
        fpipe.predict(pipe)(params, buffers, (x,))
        fpipe.stream(pipe, lambda i, outputs: None)(params, buffers, (x,))

    require_same(train(look), train(lambda *_: None))


def test_predictions_need_no_targets_and_no_loss():
    """A model that computes its own loss predicts all of its outputs."""
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(1, 3))
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), (x,)), torch.cat([model(p) for p in x.chunk(3)]).detach())


def test_bad_arguments_are_refused():
    one = ZOO["mlp"]
    pipe, model, inputs, _ = build(one, gpipe(ranks=2, microbatches=4), 8)
    params, buffers = pipe.init(model)
    for call in (fpipe.predict(pipe), fpipe.stream(pipe, print)):
        with pytest.raises(fpipe.InputError, match="params: got 0 leaves"):
            call({}, buffers, inputs)
        with pytest.raises(fpipe.InputError, match="inputs"):
            call(params, buffers, (inputs[0][:, :2],))


class Optional(nn.Module):
    """A model that may take a shift, and labels of the same shape; with labels, it computes a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, shift=None, labels=None):
        out = self.last(self.first(x) if shift is None else self.first(x) + shift)
        return {"out": out} if labels is None else {"out": out, "loss": (out - labels).square().mean()}


def test_predictions_need_no_inputs_that_the_loss_alone_needs():
    """Leaves of one shape, so that only what is lacking tells batches apart."""
    model, x = Optional(), torch.randn(4, 4)
    whole = {"x": x, "shift": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=whole, loss=lambda out: out["loss"], schedule=how)
    params, buffers = pipe.init(model)
    run = fpipe.predict(pipe)
    for names in (["x", "shift"], ["x", "labels"], ["x"], ["x", "shift", "labels"]):
        batch = {name: whole[name] for name in names}
        got = run(params, buffers, batch)["out"]
        assert same_bits(
            got, torch.cat([model(**{n: one[k : k + 2] for n, one in batch.items()})["out"] for k in (0, 2)])
        )
        assert same_bits(got, run(params, buffers, batch | dict.fromkeys(set(whole) - set(names)))["out"])
    labeled = {"x": x, "labels": whole["labels"]}
    for function in (fpipe.value_and_grad(pipe), fpipe.evaluate(pipe)):
        with pytest.raises(fpipe.InputError, match=r"got nothing at \['shift'\], expected a tensor at \['shift'\]"):
            function(params, buffers, labeled)
    with pytest.raises(fpipe.InputError, match=r"got nothing at \['labels'\], a tensor at \['mask'\]"):
        run(params, buffers, {"x": x, "shift": x, "mask": x})
    with pytest.raises(
        fpipe.InputError, match=r"inputs\['labels'\], inputs\['x'\]: got nothing, where the example has"
    ):
        run(params, buffers, {"shift": x})
