# SPDX-License-Identifier: Apache-2.0
"""Calls that run as Python again: whole calls in every step, checkpointed functions in a backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.record.trace import comparison
from fpipe.tensors import torch_private
from schedules import gpipe, one_f_one_b, zb_h1
from tests.common.cases import WIDTH, mse, rows_of
from tests.common.options import grouped
from tests.common.running import require_loop

HOW = one_f_one_b(ranks=2, microbatches=3)


class Merging(nn.Module):
    """Uses its second argument only if the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(x)
        return x + y if x.square().sum() > 0 else x


class Skipping(nn.Module):
    """Passes its first result to its last module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Merging()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.second(y), y.sin())


@pytest.mark.parametrize("cuts", [["second"], ["last"]])
def test_a_module_that_branches_on_data_gets_all_its_arguments(cuts):
    require_loop(Skipping(), HOW, cuts, unsplittable=Merging)


AGAIN = r"module 1: got a checkpointed function .* runs it again \(got mul\[4\] in module 1, expected mul\[3\]"


class Remembering(nn.Module):
    """Scales by the number of calls in this forward; each call is checkpointed."""

    def __init__(self, looks):
        super().__init__()
        self.layers, self.looks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), looks

    def forward(self, x):
        self.seen = []
        for layer in self.layers:
            x = checkpoint(self.step, layer, x, use_reentrant=False)
        return x

    def step(self, layer, x):
        self.seen.append(1)
        return layer(x) * (len(self.seen) if self.looks else 2)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_checkpoint_that_finds_other_state_when_it_runs_again_is_refused(backward):
    for looks in (False, True):
        model, x = nn.Sequential(nn.Linear(4, 4), Remembering(looks), nn.Linear(4, 4)), torch.randn(4, 4)
        options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["2"], "backward": backward}
        with pytest.raises(fpipe.CaptureError, match=AGAIN) if looks else nullcontext():
            fpipe.verify(fpipe.pipeline(model, example=(x,), loss=torch.sum, **grouped(options)), model, (x,))


class Usual(nn.Module):
    """Does what blocks of models usually do: norms, dropout, constants, autocast, changes in place, `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device) / x.size(-1)
            self.seen.add_(not torch.is_grad_enabled())
        with torch.autocast("cpu", torch.bfloat16):
            h = self.linear(self.norm(x))
        h, gate = torch.cat([h.float(), x * scale], dim=1).chunk(2, dim=-1)
        h = self.drop(h).where(torch.isfinite(h).all(), 0)
        h[..., 1:].mul_(2)
        return x + h * gate.masked_fill(scale > 0.5, 0.0) if x.requires_grad else h


def test_ordinary_modules_are_recorded_once(monkeypatch):
    """Nothing of them runs as Python in a step, so nothing is rehearsed."""
    monkeypatch.setattr(comparison, "RepeatRecorder", lambda *_: pytest.fail("recorded again"))
    (inputs, targets), model = rows_of()(6), nn.Sequential(*[Usual() for _ in range(4)])
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=HOW,
        cuts=["2"],
        recording=fpipe.Recording(front_end="trace"),
    )
    assert "whole" not in str(pipe)


class Halving(TorchDispatchMode):
    """A dispatch mode that halves every sine."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out / 2 if func is torch.ops.aten.sin.default else out


class Watched(nn.Module):
    """Runs its operators under a dispatch mode."""

    def forward(self, x: Tensor) -> Tensor:
        with Halving():
            return x.sin()


def test_modules_that_change_operators_below_torch_run_as_a_whole():
    require_loop(nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched(), nn.Linear(WIDTH, WIDTH), nn.Tanh()), HOW, ["2"])


class Doubled(torch.autograd.Function):
    """Returns twice a tensor."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Ungraded(nn.Module):
    """Turns gradients off and on around a custom function, by a context or by hand; it always runs as a whole."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.linear = by_hand, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not self.by_hand:
            with torch.no_grad():
                y = Doubled.apply(x)
        else:
            torch.set_grad_enabled(False)
            y = Doubled.apply(x)
            torch.set_grad_enabled(True)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return x + y


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_whole_call_that_turns_gradients_off_is_exact(by_hand):
    require_loop(nn.Sequential(*[Ungraded(by_hand) for _ in range(4)]), HOW, ["2"], unsplittable=Ungraded)


class Attached(nn.Module):
    """Adds what the module around it has left in an attribute, under hooks that only a whole call keeps."""

    def __init__(self, around: list[nn.Module]) -> None:
        super().__init__()
        self.linear, self.around = nn.Linear(WIDTH, WIDTH), around

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return self.linear(x) * self.around[0].left


class Around(nn.Module):
    """Leaves a tensor in an attribute for the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.around = [self]
        self.inner = Attached(self.around)

    def forward(self, x: Tensor) -> Tensor:
        self.left = x.sin()
        return self.inner(x)


def test_a_whole_call_that_needs_the_one_around_it_runs_inside_it():
    pipe = require_loop(nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(), nn.Linear(WIDTH, WIDTH)), HOW, ["1"])
    assert "as Python   1 (Around): a call inside it cannot run without it" in str(pipe)


class CastInside(nn.Module):
    """Checkpoints a function that enters autocast and leaves grad mode for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).abs().mean()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return y.float() / scale

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_checkpointed_function_keeps_the_modes_that_it_enters(backward):
    require_loop(nn.Sequential(CastInside(), CastInside()), HOW, ["1"], backward=backward)


class Tripled(torch.autograd.Function):
    """Has a gradient of its own, which no torch call inside shows."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


double = Tripled.apply  # kept, as libraries do


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return double(self.linear(x))


@pytest.mark.parametrize("how", [gpipe(2, 2), zb_h1(2, 2)], ids=repr)
def test_a_custom_function_whose_apply_was_kept_has_its_own_gradient(how):
    """Since torch 2.14, a kept method shows nothing of a call; its module then runs as Python."""
    model, x = nn.Sequential(Doubling(), Doubling()), torch.randn(4, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1"])
    assert fpipe.verify(pipe, model, (x,))
    assert ("a call of Tripled.apply, kept under another name" in str(pipe)) == (torch_private.VERSION >= (2, 14))
