# SPDX-License-Identifier: Apache-2.0
"""Tensors that a forward keeps for later, in caches of functions, classes or globals: no fake tensor stays in them."""

import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fpipe
from tests.common.cases import BACKWARDS, WIDTH
from tests.common.running import require_eager, staged
from tests.common.sizes import covering, sampled


class Masked(nn.Module):
    """A linear, and a mask that a function of the length returns."""

    def __init__(self, mask):
        super().__init__()
        self.linear, self.mask = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x):
        return self.mask(x.shape[1]) @ self.linear(x)


class Tabled(nn.Module):
    """A linear, a method that caches and a property that is computed once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def table(self, length):
        return torch.ones(length, length).tril()

    @functools.cached_property
    def scale(self):
        return torch.full((WIDTH,), 1 / 3)

    def forward(self, x):
        return self.table(x.shape[1]) @ self.linear(x) * self.scale


def make_mask(length):
    return torch.ones(length, length).tril() / 3


def model_of(mask):
    return nn.Sequential(Masked(mask), nn.ReLU(), Masked(mask))


def batch(length):
    x, y = torch.randn(2, 8, length, WIDTH)
    return (x,), y


def require_real(model, pipe, batch, steps=1):
    """The model computes real tensors, also after a verification."""
    assert type(model(*batch[0])) is Tensor
    assert fpipe.verify(pipe, model, *batch, steps=steps).eager
    assert type(model(*batch[0])) is Tensor


class Kept:
    """A class and an object of the user's, which keep masks."""

    table, mask = {}, None

    def __init__(self):
        self.kept = {}


def of_class(length):
    if Kept.mask is None or len(Kept.mask) != length:
        Kept.mask = make_mask(length)
    return Kept.mask


def of_local(length):
    if not hasattr(local, "kept"):
        local.kept = {}
    return local.kept.setdefault(length, make_mask(length))


def of_object(length):
    if length not in box.kept:
        box.kept[length] = [make_mask(length)]
    return box.kept[length][0]


local, box = threading.local(), Kept()
PLACES = {
    "a dict of a class": lambda length: Kept.table.setdefault(length, make_mask(length)),
    "a class": of_class,
    "a thread's own": of_local,
    "an object": of_object,
    **{
        f"a function that caches {maxsize}": functools.lru_cache(maxsize=maxsize)(make_mask) for maxsize in (None, 1, 4)
    },
}


@sampled(1)
@covering(where=PLACES, backward=BACKWARDS)
def test_tensors_kept_outside_the_model_are_exact_and_never_fake(where, backward):
    model = model_of(where)
    pipe = staged(model, *batch(4), ["2"], 4, backward=backward)
    require_real(model, pipe, batch(4), steps=2)
    require_real(model, pipe, batch(6))
    assert all(type(where(length)) is Tensor for length in (4, 6))
    Kept.table.clear()
    Kept.mask = None
    box.kept.clear()
    vars(local).clear()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("capture", ["fx", "dynamo"])
def test_front_ends_that_read_operators_keep_nothing_of_a_capture(capture):
    causal = functools.lru_cache(maxsize=None)(make_mask)
    model = model_of(lambda length: causal(4))
    pipe = staged(model, *batch(4), ["2"], 4, capture=capture)
    assert type(causal(4)) is Tensor
    assert fpipe.verify(pipe, model, *batch(4)).eager


@pytest.mark.parametrize("capture", ["trace", "export", "fx", "dynamo"])
def test_a_capture_that_fails_keeps_nothing(capture):
    causal = functools.lru_cache(maxsize=None)(make_mask)

    def refused(x):
        raise ValueError(f"after {type(causal(4))}")

    model = nn.Sequential(Masked(causal), nn.Linear(WIDTH, WIDTH))
    model[1].forward = refused
    with pytest.raises(fpipe.CaptureError):
        staged(model, *batch(4), ["1"], 4, capture=capture)
    assert not isinstance(causal(4), FakeTensor)


@sampled(1)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_methods_that_cache_and_properties_that_are_computed_once_are_exact(backward):
    model = nn.Sequential(Tabled(), nn.ReLU(), Tabled())
    require_eager(model, *batch(4), steps=2, cuts=["2"], microbatches=4, backward=backward)
    assert all(type(tabled.table(4)) is type(tabled.scale) is Tensor for tabled in (model[0], model[2]))
