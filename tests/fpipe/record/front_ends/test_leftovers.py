# SPDX-License-Identifier: Apache-2.0
"""Tensors that a forward keeps for later, in caches of functions, classes or globals: no fake tensor stays in them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fpipe
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse
from tests.common.sizes import covering


class Masked(nn.Module):
    """A linear, and a mask that a function makes."""

    def __init__(self, mask: Callable[[int], Any]) -> None:
        super().__init__()
        self.linear, self.__dict__["mask"] = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the mask."""
        made: Tensor = self.mask(x.shape[1])[0] @ self.linear(x)
        return made


class Tabled(nn.Module):
    """A linear, a method that caches and a property that is computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def table(self, length: int) -> Tensor:
        """Return a mask."""
        return torch.ones(length, length).tril()

    @functools.cached_property
    def scale(self) -> Tensor:
        """Return a factor."""
        return torch.full((WIDTH,), 1 / 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use both."""
        made: Tensor = self.table(x.shape[1]) @ self.linear(x) * self.scale
        return made


class Keeping(nn.Module):
    """A linear, and a mask that is kept in one of several places."""

    table: ClassVar[dict[int, Tensor]] = {}
    mask: Tensor | None = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the mask."""
        made: Tensor = PLACES[self.where](x.shape[1]) @ self.linear(x)
        return made


def make_mask(length: int) -> Tensor:
    """Return a mask."""
    return torch.ones(length, length).tril() / 3


def of_class(length: int) -> Tensor:
    if Keeping.mask is None or len(Keeping.mask) != length:
        Keeping.mask = make_mask(length)
    return Keeping.mask


def of_local(length: int) -> Tensor:
    if not hasattr(local, "kept"):
        local.kept = {}
    return local.kept.setdefault(length, make_mask(length))


def of_object(length: int) -> Tensor:
    if length not in box.kept:
        box.kept[length] = [make_mask(length)]
    return box.kept[length][0]


class Box:
    """An object of the user's."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}


local, box = threading.local(), Box()
PLACES: dict[str, Callable[[int], Tensor]] = {
    "a dict of a class": lambda length: Keeping.table.setdefault(length, make_mask(length)),
    "a class": of_class,
    "a thread's own": of_local,
    "an object": of_object,
}


@covering(where=[*PLACES], backward=["autograd", "graph"])
def test_tensors_kept_outside_the_model_are_exact_and_never_fake(where: str, backward: Any) -> None:
    model = nn.Sequential(Keeping(where), nn.ReLU(), Keeping(where))
    x, y = batch(4)
    how = one_f_one_b(2, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["2"], backward=backward)
    assert type(model(x)) is Tensor
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
    x, y = batch(6)
    assert fpipe.verify(pipe, model, (x,), y).eager
    assert type(model(x)) is Tensor
    Keeping.table.clear()
    Keeping.mask = None
    box.kept.clear()
    vars(local).clear()


def masks(maxsize: int | None) -> Any:
    """Return a function that caches what it makes."""

    @functools.lru_cache(maxsize=maxsize)
    def causal(length: int) -> tuple[Tensor, int]:
        return torch.ones(length, length).tril() / 3, length

    return causal


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    x, y = torch.randn(2, 8, length, WIDTH)
    return x, y


@covering(maxsize=[None, 1, 4], backward=["autograd", "graph"])
def test_cached_functions_are_exact_and_keep_nothing_of_a_capture(maxsize: int | None, backward: Any) -> None:
    causal = masks(maxsize)
    model = nn.Sequential(Masked(causal), nn.ReLU(), Masked(causal))
    x, y = batch(4)
    how = one_f_one_b(2, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["2"], backward=backward)
    assert type(causal(4)[0]) is Tensor
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
    x, y = batch(6)
    assert fpipe.verify(pipe, model, (x,), y).eager
    assert all(type(causal(length)[0]) is Tensor for length in (4, 6))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("capture", ["fx", "dynamo"])
def test_front_ends_that_read_operators_keep_nothing_of_a_capture(capture: str) -> None:
    causal = masks(None)
    model = nn.Sequential(Masked(lambda length: causal(4)), nn.ReLU(), Masked(lambda length: causal(4)))
    x, y = batch(4)
    how = one_f_one_b(2, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["2"], capture=capture)
    assert type(causal(4)[0]) is Tensor
    assert fpipe.verify(pipe, model, (x,), y).eager


@pytest.mark.parametrize("capture", ["trace", "export", "fx", "dynamo"])
def test_a_capture_that_fails_keeps_nothing(capture: str) -> None:
    causal = masks(None)

    def refused(module: nn.Module, args: Any, made: Tensor) -> Tensor:
        raise ValueError(f"after {type(causal(4)[0])}")

    model = nn.Sequential(Masked(causal), nn.Linear(WIDTH, WIDTH))
    model[1].forward = lambda x: refused(model[1], (), x)  # type: ignore[method-assign]
    x, y = batch(4)
    how = one_f_one_b(2, 4)
    with pytest.raises(fpipe.CaptureError):
        fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["1"], capture=capture)
    assert not isinstance(causal(4)[0], FakeTensor)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_methods_that_cache_and_properties_that_are_computed_once_are_exact(backward: Any) -> None:
    model = nn.Sequential(Tabled(), nn.ReLU(), Tabled())
    x, y = batch(4)
    how = one_f_one_b(2, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=how, cuts=["2"], backward=backward)
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
    assert all(type(tabled.table(4)) is type(tabled.scale) is Tensor for tabled in (model[0], model[2]))
