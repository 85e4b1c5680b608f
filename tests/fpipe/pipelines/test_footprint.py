# SPDX-License-Identifier: Apache-2.0
"""The bytes that stages hold, counted by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import (
    B,
    Costs,
    F,
    Placement,
    Sizes,
    dualpipe,
    gpipe,
    one_f_one_b,
    recompute,
    schedule,
    simulate,
    v_half,
    zb_h1,
)
from tests.common.cases import WIDTH, mse
from tests.common.options import grouped
from tests.common.running import build
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

ROWS, WIDE, FLOAT = 3, 8, 4
SMALL, LARGE = ROWS * WIDTH * FLOAT, ROWS * WIDE * FLOAT


@schedule(placement=lambda ranks: Placement(ranks, tuple(s % ranks for s in range(3))))
def round_robin(rank, ranks, microbatches):
    mine = [s for s in range(3) if s % ranks == rank]
    for i in range(microbatches):
        yield from [F(s, i) for s in mine]
        yield from [B(s, i) for s in reversed(mine)]


def square(output):
    return output.square().mean()


def sizes_of(*modules, cuts, width=WIDTH, made=zb_h1, **options):
    """Of a sequence of modules, for microbatches of three rows."""
    model = nn.Sequential(*modules)
    how = made(ranks=1 + len(cuts), microbatches=2)
    x = torch.ones(2 * ROWS, width)
    return fpipe.pipeline(model, example=(x,), loss=square, schedule=how, cuts=cuts, **grouped(options)).sizes


def parameters(*modules):
    return sum(p.numel() * FLOAT for module in modules for p in module.parameters())


def without_fakes(module, examples):
    """A compiler of functions that need memory."""

    def run(*given):
        assert not any(isinstance(tensor, FakeTensor) for tensor in given)
        return module(*given)

    return run


@sampled(2)
@pytest.mark.parametrize("backward", ["autograd", "graph", without_fakes])
@pytest.mark.parametrize("made", [one_f_one_b, zb_h1])
def test_bytes_of_linear_layers(backward, made):
    """What a layer was given is kept, and from the input half on the gradient of its output."""
    layers = [nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    sizes = sizes_of(*layers, cuts=["1", "4"], made=made, backward=backward)
    recorded = backward != "autograd" or made == zb_h1
    assert sizes.inputs == (0, LARGE, SMALL)
    assert sizes.weight == tuple(map(parameters, layers[::2]))
    assert sizes.residual == ((LARGE, LARGE + SMALL, 2 * SMALL) if recorded else sizes.weight)
    both = LARGE + SMALL  # what the two tanh return; autograd keeps what they are given and the loss, too
    assert sizes.activation == ((0, both, 2 * SMALL) if recorded else (0, both + LARGE, 2 * SMALL + FLOAT))


def test_the_input_half_frees_what_the_weight_half_does_not_need():
    """The input of the stage goes with the activation; so does all that is between the layers."""
    wide = [nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), *[nn.Tanh() for _ in range(9)]]
    sizes = sizes_of(nn.Linear(WIDTH, WIDTH), *wide, nn.Linear(WIDTH, WIDTH), cuts=["1"])
    assert sizes.activation[1] > 10 * SMALL
    assert sizes.residual[1] == 4 * SMALL, "two inputs, two gradients"


class Checkpointed(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_a_checkpoint_keeps_its_input():
    def body():
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)])

    plain, saved = (
        sizes_of(nn.Linear(WIDTH, WIDTH), made(body()), nn.Sigmoid(), cuts=["1"])
        for made in (nn.Sequential, Checkpointed)
    )
    assert plain.activation[1] > 5 * SMALL
    assert saved.activation[1] == 2 * SMALL, "its input; what the sigmoid returned"


class Shared(nn.Module):
    """What the first layer returns is added in stages 1 and 2; no stage saves it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        z = self.b(x.tanh()) + y
        return self.c(z.tanh()) + y


@pytest.mark.parametrize(("ranks", "kept"), [(2, SMALL), (3, 0)])
def test_what_a_rank_keeps_for_its_later_stage_counts(ranks, kept):
    """On two ranks, stages 0 and 2 share one."""
    how = round_robin(ranks=ranks, microbatches=2)
    x = torch.ones(2 * ROWS, WIDTH)
    pipe = fpipe.pipeline(Shared(), example=(x,), loss=square, schedule=how, cuts=["b", "c"])
    assert pipe.sizes.activation[0] == kept
    assert pipe.sizes.inputs[0] == kept
    assert pipe.sizes.residual[0] == SMALL, "the gradient of what the layer returned"
    assert pipe.stages[0].keeps == ((1,) if kept else ())


def test_frozen_stages_keep_nothing():
    assert (
        sizes_of(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH), cuts=["1"]).activation[0] == 0
    )
    pipe, *_ = build(ZOO["all_frozen"], gpipe(ranks=4, microbatches=2), 4)
    assert pipe.sizes.activation == pipe.sizes.residual == (0,) * 4


def test_a_parameter_counts_once_on_each_rank():
    """Under a V the first and last stages are on one rank, which has one copy of what both use."""
    for how, weight in (
        (gpipe(ranks=4, microbatches=4), 176),
        (v_half(ranks=2, microbatches=4), 0),
        (dualpipe(4, 4), 0),
    ):
        pipe, *_ = build(ZOO["gpt"], how, 8)
        assert pipe.sizes.weight[3] == weight
        assert pipe.sizes.weight[0] == 880


def test_sizes_allocate_and_compute_nothing():
    """Three layers of 64 GiB each, for microbatches of 8 GiB."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**17, 2**17) for _ in range(3)])
        x = torch.empty(2 * 2**14, 2**17)
    before = torch.random.get_rng_state()
    pipe = fpipe.pipeline(model, example=(x,), loss=square, schedule=zb_h1(ranks=3, microbatches=2), cuts=["1", "2"])
    sizes = pipe.sizes
    assert torch.equal(torch.random.get_rng_state(), before)
    unit = 2**14 * 2**17 * FLOAT
    assert sizes.inputs == (0, unit, unit)
    assert sizes.residual == (unit, 2 * unit, 2 * unit)
    assert sizes.weight == (2**36 + 2**19,) * 3


def test_random_modules_leave_the_generator_alone():
    pipe, *_ = build(ZOO["gpt_dropout"], one_f_one_b(ranks=4, microbatches=2), 4)
    before = torch.random.get_rng_state()
    assert isinstance(pipe.sizes, Sizes)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sizes_do_not_change_a_step():
    pipe, model, inputs, targets = build(ZOO["normalised"], zb_h1(ranks=4, microbatches=2), 4, capture="trace")
    assert pipe.sizes is pipe.sizes, "found once"
    fpipe.verify(pipe, model, inputs, targets)


def test_simulated_peaks_are_in_bytes():
    """Recomputation costs the inputs of all, and the activations of one."""
    how = gpipe(ranks=2, microbatches=4)
    layers = [nn.Linear(WIDTH, WIDTH), *[nn.Tanh() for _ in range(6)], nn.Linear(WIDTH, WIDTH)]
    x = torch.ones(4 * ROWS, WIDTH)

    def peak(how):
        pipe = fpipe.pipeline(nn.Sequential(*layers), example=(x,), targets=x, loss=mse, schedule=how, cuts=["1"])
        return pipe.sizes, simulate(how, Costs(), pipe.program.graph, pipe.sizes).peak_memory[1]

    sizes, most = peak(how)
    assert most == 4 * sizes.activation[1] + sizes.weight[1]
    sizes, most = peak(recompute(how))
    assert most == 3 * sizes.inputs[1] + sizes.activation[1] + sizes.weight[1]
