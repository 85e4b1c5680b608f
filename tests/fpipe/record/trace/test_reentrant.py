"""Checkpoints in modules: where they begin, what they are given, and those that torch calls reentrant."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe
from schedules import one_f_one_b, zb_v
from tests.common.cases import WIDTH, mse
from tests.common.sizes import covering

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])
HOWS = {"1F1B": one_f_one_b(ranks=2, microbatches=2), "ZB-V": zb_v(ranks=2, microbatches=4)}
reentrant = partial(checkpoint, use_reentrant=True)


class Body(nn.Module):
    """Asks for the number of dimensions first, which is a torch call that computes nothing."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x, scale=None):
        assert x.dim() == 2
        h = functional.dropout(self.a(x).sin() * self.b(x), self.dropout, self.training) + x
        return h if scale is None else h * scale


class Stack(nn.Module):
    """Blocks, each called by `around(model, block, x)`."""

    def __init__(self, around, **options):
        super().__init__()
        self.blocks, self.around = nn.ModuleList([Body(**options) for _ in range(4)]), around
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        for block in self.blocks:
            x = self.around(self, block, x)
        return x


def verify(model, how, backward, cuts=("blocks.1", "blocks.2", "blocks.3"), **options):
    cuts = cuts[1:2] if how.stages == 2 else cuts
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=how, cuts=cuts, backward=backward, **options
    )
    return fpipe.verify(pipe, model, (x,), y, seed=3)


@covering(how=HOWS, backward=["autograd", "graph"])
def test_a_stage_may_begin_with_a_checkpoint_whose_first_calls_compute_nothing(how, backward):
    def around(model, block, x):
        return checkpoint(block, x, use_reentrant=False)

    assert verify(Stack(around), how, backward).eager


@BACKWARDS
def test_a_checkpointed_function_may_be_a_partial_without_tensors(backward):
    def around(model, block, x):
        return checkpoint(partial(block, scale=None), x, use_reentrant=False)

    assert verify(Stack(around), HOWS["ZB-V"], backward).eager


@covering(how=HOWS, backward=["autograd", "graph"])
def test_a_reentrant_checkpoint_is_exact(how, backward):
    """The input of a block is used three times inside; the second argument is the same for all blocks."""

    def around(model, block, x):
        return reentrant(block, x, model.gain.sin())

    model = Stack(around)
    assert verify(model, how, backward).eager
    assert model.gain.requires_grad


@BACKWARDS
def test_a_reentrant_checkpoint_draws_the_same_numbers_again(backward):
    model = Stack(lambda model, block, x: reentrant(block, x + model.gain), dropout=0.4)
    got = [gradients(model, backward, 3), gradients(model, backward, 3), gradients(model, backward, 4)]
    plain = Stack(lambda model, block, x: block(x + model.gain), dropout=0.4)
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, backward, 3)
    for name, grad in expected.items():
        assert torch.equal(got[0][name], grad), name
        assert torch.equal(got[1][name], grad), name
    assert not torch.equal(got[0]["gain"], got[2]["gain"])


def gradients(model, backward, seed):
    torch.manual_seed(0)
    x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=mse, schedule=HOWS["1F1B"], cuts=["blocks.2"], backward=backward
    )
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y, seed=seed)
    assert torch.isfinite(step.loss)
    return grads


@BACKWARDS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameters_in_a_reentrant_checkpoint_without_differentiable_inputs_get_no_gradient(backward):
    """The first block gets the batch alone, so torch records nothing of it."""
    model = Stack(lambda model, block, x: reentrant(block, x) * model.gain)
    assert verify(model, HOWS["1F1B"], backward).eager


@BACKWARDS
def test_a_reentrant_checkpoint_under_autocast_casts_in_both_runs(backward):
    def around(model, block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return reentrant(block, x + model.gain).float()

    assert verify(Stack(around), HOWS["1F1B"], backward).eager


@BACKWARDS
def test_a_reentrant_checkpoint_in_another_checkpoint_is_exact(backward):
    def around(model, block, x):
        return checkpoint(lambda x: reentrant(block, x), x + model.gain, use_reentrant=False)

    assert verify(Stack(around), HOWS["1F1B"], backward).eager


def shared(model, block, x):
    return reentrant(lambda x: block(x) * model.gain, x + model.gain)


def hidden(model, block, x):
    h = (x + model.gain).sin()
    return reentrant(lambda x: block(x) * h, x + h)


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (shared, ["'gain'", "used outside of it", "use_reentrant=False"]),
        (hidden, ["closure", "use_reentrant=False"]),
        (lambda m, b, x: reentrant(b, x, preserve_rng_state=False), ["preserve_rng_state"]),
    ],
    ids=["a shared parameter", "a tensor of a closure", "other numbers"],
)
def test_a_reentrant_checkpoint_that_cannot_be_exact_is_refused(around, words):
    with pytest.raises((fpipe.CaptureError, fpipe.CutError)) as caught:
        verify(Stack(around), HOWS["1F1B"], "autograd")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("backward", "settings"), [("autograd", {}), ("graph", {"gradient_checkpointing_kwargs": {"use_reentrant": True}})]
)
def test_gradient_checkpointing_of_transformers_is_exact(backward, settings):
    """Without dropout, so that it is compared with the model run eagerly; a stage begins with each layer."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **sizes)).train()
    model.gradient_checkpointing_enable(**settings)
    ids = torch.randint(3, 32, (4, 8))
    batch, how = {"input_ids": ids, "labels": ids, "use_cache": False}, zb_v(ranks=1, microbatches=2)
    cuts = ["model.layers.1"]
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.loss, schedule=how, cuts=cuts, backward=backward)
    assert fpipe.verify(pipe, model, batch).eager
