# SPDX-License-Identifier: Apache-2.0
"""The bytes that a profile gives for stages are those that stages are measured to hold, wherever the model is cut."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import Roofline
from fpipe.cutting.partition import parse_places
from fpipe.pipelines.footprint import measure_footprints
from fpipe.planning.cut_model import CutModel, training_variant_here
from schedules import gpipe, one_f_one_b
from tests.common.cases import WIDTH
from tests.common.options import grouped
from tests.common.sizes import NIGHTLY, by_day, by_night, sampled
from tests.common.zoo import ZOO

NAMES = ("inputs", "activation", "residual")
FAST = Roofline(1e10, 1e10)
SLICES = {"unet": 0.51, "strides": 0.04, "fourier": 0.04}
"""Models in which a block saves a slice of what another made, or a view with gaps, and how far off a stage is."""
ONCE = {"gpt": 24, "gpt_dropout": 24}
"""Models whose stages compute positions themselves, once a step, and their bytes: one stage keeps them all along."""


def require_footprints(pipe, example, targets, tolerance=0.0, slack=0, tries=4):
    """Compare the profile of a pipeline's model with stages of it, cut at random."""
    profile = fpipe.profile(pipe, example, targets, device=FAST)
    variant = training_variant_here()
    batch, draw = pipe.batch(variant, example, targets), random.Random(0)
    model = CutModel.of(pipe.planner, variant, batch, parse_places(None, (), 1))
    count = len(model.blocks)
    assert model.blocks == profile.blocks
    for turn in range(tries):
        stages = min(count, 1 + turn % 4)
        cuts = sorted(draw.sample(range(1, count), stages - 1))
        how = gpipe(ranks=stages, microbatches=pipe.schedule.microbatches)
        assembly = model.plan([model.places[k - 1] for k in cuts], how).assembly
        found, sizes = measure_footprints(assembly), profile.sizes(cuts, how.placement)
        for k, name in enumerate(NAMES):
            expected = [one[k] for one in found]
            got = getattr(sizes, name)
            assert all(abs(a - b) <= tolerance * b + slack for a, b in zip(got, expected, strict=True)), (
                f"{name}, cut at {cuts}: got {got}, expected {expected}"
            )
        require_messages(profile, cuts, assembly)


def require_messages(profile, cuts, assembly):
    """Compare what stages send."""
    link = profile.stage_link(cuts)
    for stage in assembly.stages:
        for sent, got in ((stage.gives, link.bytes), (stage.pulls, link.back)):
            sizes = [sum(spec.buffer().numel() for spec in one.specs) for one in sent]
            assert got[stage.index] == max(sizes, default=0)


def one_stage(model, example, targets, loss, **options):
    how = one_f_one_b(ranks=1, microbatches=2)
    return fpipe.pipeline(model, example=example, targets=targets, loss=loss, schedule=how, **grouped(options))


@sampled(1)
@pytest.mark.parametrize("name", by_day(ZOO, every=2))
def test_bytes_of_stages_follow_from_those_of_blocks(name):
    case = ZOO[name]
    model, inputs, targets = case.make(8)
    pipe = one_stage(model, inputs, targets, case.loss, backward="autograd")
    require_footprints(pipe, inputs, targets, SLICES.get(name, 0.0), ONCE.get(name, 0), tries=40 if NIGHTLY else 4)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        return x + checkpoint(self.body, x, use_reentrant=False)


class Attribute(torch.autograd.Function):
    """Keeps its input where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.x.sign().abs()


class Keeping(nn.Module):
    def forward(self, x):
        return Attribute.apply(x)


@sampled(1)
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(WIDTH, WIDTH), Checkpointed(), nn.Sigmoid(), Checkpointed(), nn.Linear(WIDTH, WIDTH)],
        [nn.Linear(WIDTH, WIDTH), Keeping(), nn.ReLU(), nn.Linear(WIDTH, WIDTH), Keeping(), nn.Sigmoid()],
        [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.Tanh()],
    ],
    ids=["checkpoints", "attributes of a context", "modified buffers"],
)
def test_what_is_kept_in_other_ways_is_seen(layers):
    x = torch.randn(8, WIDTH)
    pipe = one_stage(nn.Sequential(*layers), (x,), None, torch.mean)
    require_footprints(pipe, (x,), None, tries=12)


def test_recorded_stages_are_measured_as_such():
    case = ZOO["mlp"]
    model, inputs, targets = case.make(8)
    pipe = one_stage(model, inputs, targets, case.loss, backward="graph")
    require_footprints(pipe, inputs, targets, 0.5)
    assert fpipe.profile(pipe, inputs, targets, device=FAST).backward == "as a graph"


@by_night
def test_weights_are_those_of_the_pipeline():
    for name in ("mlp", "tied_sequence", "frozen_below", "unused"):
        case = ZOO[name]
        model, inputs, targets = case.make(8)
        how = one_f_one_b(ranks=4, microbatches=2)
        pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=case.cuts)
        profile = fpipe.profile(pipe, inputs, targets, device=FAST)
        assert profile.sizes(case.cuts, how.placement) == pipe.sizes
