# SPDX-License-Identifier: Apache-2.0
"""What the first call of a model leaves behind, hooks and buffers, is there in every later call, in every stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.record.model.walk import Walk, contents
from tests.common.cases import BACKWARDS, WIDTH, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference, staged
from tests.common.sizes import covering, sampled
from tests.common.unusual_models import AT, INSIDE, Block, Gathering, Stack, collector

seen: list[Tensor] = []


table: dict[int, Tensor] = {}


class Twice(Block):
    """Calls its first linear twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.a(x).sin())


class Checkpointing(Gathering):
    """The same with checkpointed blocks."""

    block = Twice

    def __init__(self) -> None:
        super().__init__()
        for name, block in enumerate(self.blocks):
            self.blocks[name] = Checkpointed(block)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.a, self.b = block, block.a, block.b

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class MaskedBlock(Block):
    """Registers a buffer at its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(WIDTH).cumsum(0) / WIDTH, persistent=False)
        return super().forward(x * self.mask)


class Masked(Stack):
    block = MaskedBlock


class Helper:
    """Keeps what was computed once."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}


class Rotary(nn.Module):
    """Tables in a helper object, which the first call fills and all later ones share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.helper = nn.ModuleList([Block() for _ in range(4)]), Helper()

    def forward(self, x: Tensor) -> Tensor:
        if not self.helper.kept:
            angle = torch.arange(WIDTH).float()
            angle.mul_(0.25)
            self.helper.kept["tables"] = angle.sin(), angle.cos()
        sin, cos = self.helper.kept["tables"]
        for block in self.blocks:
            x = block(x * cos) + sin
        return x


class Scaled(Block):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Scaling(Stack):
    """Sets plain attributes of its blocks at its first call."""

    block, ready = Scaled, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            for k, block in enumerate(self.blocks):
                block.scale = 1 + k / 4
            self.ready = True
        return super().forward(x)


class Listing(Stack):
    """Hooks keep features in a list of the model's, which every forward empties."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.features.append(out)

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        x = super().forward(x)
        return x + self.features[0] * self.features[2]


class Global(Stack):
    """A hook keeps features, and a block a table, in containers of this file's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].a.register_forward_hook(lambda module, args, out: seen.append(out))

    def forward(self, x: Tensor) -> Tensor:
        seen.clear()
        if WIDTH not in table:
            table[WIDTH] = torch.arange(WIDTH) / WIDTH
        return super().forward(x * table[WIDTH]) + seen[0]


FIRST = (Gathering, Checkpointing, Masked, Rotary, Scaling, Listing, Global)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Those that the first call left in attributes, features and tables."""
    held = [one for part in module.modules() for one in (*vars(part).values(), *part._buffers.values())]
    return [one for one in (*held, *seen, *table.values(), *getattr(module, "features", ())) if isinstance(one, Tensor)]


@sampled(1)
@covering(kind=FIRST, cuts=[(), AT, INSIDE], backward=BACKWARDS)
def test_objects_that_the_first_call_leaves_exist_in_every_later_call(kind, cuts, backward):
    if kind is Checkpointing and cuts == INSIDE:
        pytest.skip("no cut may be in a checkpoint")
    seen.clear()
    table.clear()
    (inputs, targets), (model, another) = rows_of()(6), (kind(), kind())
    another.load_state_dict(model.state_dict())
    pipe = staged(model, inputs, targets, cuts, 3, backward=backward)
    assert not [one for one in tensors_of(model) if isinstance(one, FakeTensor)]
    want = loop(another, mse, inputs, targets, 3)
    for _ in range(2):
        got = run(pipe, model, inputs, targets)
        assert_same(got, want._replace(buffers=got.buffers))
    assert_same(got, run_reference(pipe, model, inputs, targets))
    assert not [one for one in tensors_of(model) if isinstance(one, FakeTensor)]


def test_no_fake_tensor_stays_in_the_copy_that_stages_run():
    class Noting(Listing):
        def forward(self, x: Tensor) -> Tensor:
            self.note = x, [x.sin()]
            return super().forward(x)

    pipe = staged(Noting(), *rows_of()(4), [])
    frame = pipe.training.assembly.captured.fuse.__self__.record.frames[0]
    walk = Walk()
    walk.follow([frame.invocation.function])
    held = [part for one in walk.containers.values() for part in contents(one)]
    assert not [
        one for part in held for one in (part if isinstance(part, tuple) else [part]) if type(one) is FakeTensor
    ]


class Shared:
    """Is what it is in a copy, too."""

    def __init__(self) -> None:
        self.note: Tensor | None = None

    def __deepcopy__(self, memo: object) -> Shared:
        return self


class Failing(nn.Module):
    """Leaves something wherever it can, and fails."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.shared.note = h
        seen.append(h)
        collector.set([h])
        return h if h.sum() > 0 else -h


def test_a_capture_that_fails_leaves_nothing_behind():
    seen.clear()
    shared = Shared()
    with pytest.raises(fpipe.CaptureError):
        staged(nn.Sequential(Failing(shared)), *rows_of()(4), [])
    assert shared.note is None
    assert not seen
    assert collector.get() is None


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_list_that_the_loss_fills_is_left_as_it_was(backward):
    history: list[Tensor] = []
    calls: list[str] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = mse(outputs, targets)
        history.append(value.detach())
        calls.append("loss")
        return value

    inputs, targets = rows_of()(4)
    pipe = staged(Stack(), inputs, targets, ["blocks.2"], loss=loss, backward=backward)
    assert not history
    assert not calls
    run(pipe, Stack(), inputs, targets)
    assert not [one for one in history if isinstance(one, FakeTensor)]
    assert not history, "a step runs what was recorded"
