# SPDX-License-Identifier: Apache-2.0
"""`fpipe.profile` finds the blocks of a model and leaves everything as it was. No test looks at measured times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fpipe
from fpipe import CutError, InputError, Profile, Roofline
from fpipe.planning.profile import PROFILE_FORMAT
from schedules import Costs, Link, gpipe, one_f_one_b, simulate
from tests.common.cases import mse
from tests.common.options import grouped
from tests.common.sizes import by_night, sampled
from tests.common.zoo import ZOO

FAST = Roofline(1e10, 1e10)


def layers(count=4, width=4):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())])


def quick(model, *batch, **options):
    """Measure as few times as possible."""
    return fpipe.profile(model, *batch, **grouped({"seconds": 0, "microbatches": 2, **options}, fpipe.profile))


def batch_of(rows=4, width=4):
    return (torch.ones(rows, width),), torch.zeros(rows, width)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_every_kind_of_action_is_measured(backward):
    profile = quick(layers(), *batch_of(), loss=mse, backward=backward)
    assert [block.name for block in profile.blocks] == [str(k) for k in range(8)]
    assert all(sum(times[k] for times in profile.times) + profile.fixed[k] > 0 for k in range(5))
    assert profile.step > 0
    assert profile.device.startswith("measured on cpu")
    assert profile.backward == {"autograd": "by autograd", "graph": "as a graph"}[backward]
    assert profile.link == Link()
    how = gpipe(ranks=4, microbatches=2)
    assert simulate(how, profile.costs(["2", "4", "6"]), sizes=profile.sizes(["2", "4", "6"])).makespan > 0


def test_layers_that_compute_the_same_take_the_same_time():
    profile = quick(layers(), *batch_of(), loss=mse)
    linear = [times for block, times in zip(profile.blocks, profile.times, strict=True) if block.name in "246"]
    assert linear[0] == linear[1] == linear[2]


@sampled(1)
@pytest.mark.parametrize("name", ["normalised", "dropping", "tied_sequence", "own_loss"])
def test_nothing_changes(name):
    case = ZOO[name]
    model, inputs, targets = case.make(8)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    quick(model, inputs, targets, loss=case.loss)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[k]) for k, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@by_night
def test_a_pipeline_is_profiled_like_its_model():
    case = ZOO["tied_sequence"]
    model, inputs, targets = case.make(8)
    how = one_f_one_b(ranks=4, microbatches=2)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=case.loss, schedule=how, cuts=case.cuts)
    one = fpipe.profile(pipe, inputs, targets, source=model, seconds=0)
    other = quick(model, inputs, targets, loss=case.loss)
    assert one.device == other.device
    assert one.merge(other).sizes(case.cuts) == pipe.sizes
    fpipe.verify(pipe, model, inputs, targets)


@by_night
def test_cuts_say_where_stages_may_begin():
    case = ZOO["gpt"]
    model, inputs, targets = case.make(8)
    for cuts, names in [
        ("blocks.*", [f"blocks.{k}" for k in range(4)]),
        (["blocks.1", "head"], ["blocks.1", "head"]),
        (nn.LayerNorm, None),
    ]:
        profile = quick(model, inputs, targets, loss=case.loss, device=FAST, cuts=cuts)
        found = [block.name for block in profile.blocks[1:]]
        assert found == names or (names is None and len(found) > 3)
    whole = quick(model, inputs, targets, loss=case.loss, device=FAST, unsplittable="blocks.*")
    assert not [block for block in whole.blocks if block.name.startswith("blocks.1.")]
    with pytest.raises(CutError, match="nothing"):
        quick(model, inputs, targets, loss=case.loss, device=FAST, cuts="nothing")


def test_a_model_without_values_is_never_run():
    """Layers of 64 GiB each, for microbatches of 8 GiB."""
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(2**17, 2**17) for _ in range(3)]), torch.empty(2 * 2**14, 2**17)
    profile = fpipe.profile(
        model,
        (x,),
        loss=torch.mean,
        microbatches=2,
        device=Roofline(1e15, 1e12),
        gradients=fpipe.Gradients(backward="graph"),
    )
    unit = 2**14 * 2**17 * 4
    assert profile.sizes(["1", "2"]).inputs == (0, unit, unit)
    costs = profile.costs(["1", "2"])
    flops = 2 * 2**14 * 2**34
    assert costs.F[0] == flops / 1e15
    assert costs.I[1] == flops / 1e15
    assert costs.B[1] > costs.W[1] > costs.I[1]
    assert profile.fixed == (0,) * 5
    assert "estimated by a roofline" in profile.device


def test_peaks_are_measured_if_they_are_not_given():
    with torch.device("meta"):
        model = layers()
    profile = quick(model, *batch_of(), loss=mse)
    assert "estimated by a roofline" in profile.device
    assert all(times.F > 0 for times in profile.times)


def test_values_of_a_model_on_meta_may_be_given():
    real = layers()
    with torch.device("meta"):
        model = layers()
    assert "measured" in quick(model, *batch_of(), loss=mse, source=real).device
    with pytest.raises(InputError, match="source"):
        quick(model, *batch_of(), loss=mse, source={})


@by_night
def test_a_profile_is_required_to_be_of_the_model():
    case = ZOO["gpt"]
    model, inputs, targets = case.make(8)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=case.loss, schedule=one_f_one_b(ranks=2, microbatches=2)
    )
    own = quick(model, inputs, targets, loss=case.loss, device=FAST)
    own.require(pipe)
    Profile.parse(PROFILE_FORMAT.write(own)).require(pipe)
    for profile, words in [
        (quick(model, inputs, targets, loss=case.loss, device=FAST, microbatches=4), "microbatch: got a profile for"),
        (quick(layers(), *batch_of(), loss=mse, device=FAST), "microbatch: got a profile for float32[2, 4]"),
        (quick(longer(case), inputs, targets, loss=case.loss, device=FAST), "pipe: got a model that has no block"),
        (quick(wider(case), inputs, targets, loss=case.loss, device=FAST), "pipe: got a block"),
    ]:
        with pytest.raises(InputError) as caught:
            profile.require(pipe)
        assert words in str(caught.value)


def longer(case):
    """Return the model with one more block."""
    model, *_ = case.make(8)
    model.blocks.append(case.make(8)[0].blocks[0])
    return model


def wider(case):
    """Return the model with another head."""
    model, *_ = case.make(8)
    model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=model.head.bias is None)
    return model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches: got 0, expected an integer of 1 or more"),
        ({"microbatches": 5}, "inputs[0]: got shape [4, 4]"),
        ({"loss": None}, "loss: got None, expected a function"),
        ({"device": "cpu"}, "device: got 'cpu', expected a Roofline"),
        ({"link": 3}, "link: got 3, expected a Link"),
        ({"seconds": -1}, "seconds: got -1, expected a number of at least 0"),
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"backward": "none"}, "backward: got 'none'"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(InputError) as caught:
        quick(layers(), *batch_of(), **{"loss": mse, **options})
    assert words in str(caught.value)


def test_a_pipeline_has_its_own_arguments():
    pipe = fpipe.pipeline(
        layers(), example=batch_of()[0], targets=batch_of()[1], loss=mse, schedule=gpipe(ranks=2, microbatches=2)
    )
    for name, value in (("loss", mse), ("microbatches", 4), ("gradients", fpipe.Gradients(backward="autograd"))):
        with pytest.raises(InputError, match=f"{name}: got .* besides a pipeline"):
            fpipe.profile(pipe, *batch_of(), **{name: value})
    with pytest.raises(InputError, match=r"inputs\[0\].*expected a batch that the model can take"):
        fpipe.profile(pipe, *batch_of(width=5))
    assert isinstance(fpipe.profile(pipe, *batch_of(8), device=FAST).costs(["2"]), Costs)


def test_a_link_is_kept_without_its_bytes():
    profile = quick(layers(), *batch_of(), loss=mse, device=FAST, link=Link(latency=1, bandwidth=2, bytes=3, back=4))
    assert profile.link == Link(latency=1, bandwidth=2)
    assert profile.costs(["2"]).transfer("F", 0, 0, 1) == 1 + 2 * 4 * 4 / 2


def test_autocast_around_a_profile_is_that_of_the_steps():
    with torch.autocast("cpu", torch.bfloat16):
        profile = quick(layers(), *batch_of(), loss=mse)
    assert profile.sizes(["2"]).activation != quick(layers(), *batch_of(), loss=mse).sizes(["2"]).activation


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        quick(layers(), *batch_of(), loss=mse)
