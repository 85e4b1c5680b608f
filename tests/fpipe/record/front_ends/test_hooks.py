# SPDX-License-Identifier: Apache-2.0
"""Forward hooks: those that hold parts of the model hold the copy's, and what they collect is there in later stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.common.cases import BACKWARDS, WIDTH, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.running import require_eager, run, staged
from tests.common.sizes import NIGHTLY, covering, few, sampled
from tests.common.unusual_models import AT, INSIDE, Block, Gathering, Stack


class Closing(Stack):
    """Hooks that close over the model, over a list of its own, or have a part of it as a default."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.pooled: dict[str, Tensor] = {}
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))
        features = self.features

        def keep(module: nn.Module, args: object, out: Tensor) -> None:
            self.features.append(out)
            self.seen += 1

        def kept(module: nn.Module, args: object, out: Tensor, pooled: dict[str, Tensor] = self.pooled) -> Tensor:
            pooled["mean"] = out.mean() * self.scale
            return out + len(features)

        self.blocks[0].register_forward_hook(keep)
        self.blocks[2].register_forward_hook(partial(kept))

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        return super().forward(x) + self.features[0] * self.pooled["mean"]


@sampled(2)
@covering(cuts={"uncut": (), "at blocks": AT, "inside": INSIDE}, backward=BACKWARDS)
def test_hooks_that_hold_parts_of_the_model_hold_those_of_the_copy(cuts, backward):
    (inputs, targets), (model, another) = rows_of()(6), (Closing(), Closing())
    another.load_state_dict(model.state_dict())
    pipe = staged(model, inputs, targets, cuts, 3, backward=backward)
    got = run(pipe, model, inputs, targets)
    assert not model.features
    assert not model.seen.any()
    # deepcopy, which the loop uses, leaves hooks with the original: so that one is called, and its tensors are compared
    another.zero_grad()
    for x, y in zip(inputs[0].chunk(3), targets.chunk(3), strict=True):
        (mse(another(x), y) / 3).backward()
    want = {name: p.grad for name, p in another.named_parameters()}
    assert_same(got, got._replace(grads=want, buffers=dict(another.named_buffers())))


class Counted(Block):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


counted = nn.Sequential(Counted(), Block())


def by_name(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return out * counted[0].calls


def test_a_hook_that_uses_the_model_by_the_name_of_a_global_is_refused():
    handle = counted[1].register_forward_hook(by_name)
    with pytest.raises(fpipe.CaptureError, match=r"by_name: got the global 'counted', which is a part of the model"):
        staged(counted, *rows_of()(4), [])
    handle.remove()


class Holder:
    """Holds the model, which does not hold it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def scale(self, out: Tensor) -> Tensor:
        return out * self.model[0].calls


class CountedAnew(Counted):
    """Assigns its count."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, x)


@pytest.mark.parametrize("counted", [Counted, CountedAnew])
def test_a_hook_that_reads_a_changing_buffer_of_the_original_is_refused(counted):
    model = nn.Sequential(counted(), Block())
    holder = Holder(model)
    model[1].register_forward_hook(lambda module, args, out: holder.scale(out))
    with pytest.raises(fpipe.CaptureError, match=r"buffer 0\.calls: got a use of it from outside the model"):
        staged(model, *rows_of()(4), [])


class Ragged(Block):
    """What it returns has as many rows as data say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unique()


class Deciding(Stack):
    """Asks for a value in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def deciding(outputs: Tensor, targets: Tensor) -> Tensor:
    value = mse(outputs, targets)
    return value if value > 1 else value * 2


@pytest.mark.parametrize(
    ("model", "options", "words", "never"),
    [
        (nn.Sequential(Block(), Deciding()), {}, "name the module in unsplittable", "of its own"),
        (Deciding(), {}, "put that part into a separate module, and name this in unsplittable", "name the module"),
        (nn.Sequential(Block(), Ragged()), {"unsplittable": Ragged}, "move such shapes out of", "name the"),
        (
            Stack(),
            {"loss": deciding},
            "pass fpipe.Recording(unsplittable=['loss']), and it runs as Python",
            "name the module",
        ),
    ],
    ids=["a module", "the model itself", "a module that is named already", "the loss"],
)
def test_an_error_names_a_repair_that_works(model, options, words, never):
    with pytest.raises(fpipe.CaptureError) as caught:
        staged(model, *rows_of()(4), [], **options)
    assert words in str(caught.value)
    assert never not in str(caught.value)


def test_errors_do_not_mention_hooks_of_libraries():
    """What cannot be run as a whole is named, and the hook if it is the reason."""
    model = Gathering()
    model.blocks[1].register_full_backward_hook(lambda module, incoming, outgoing: None)
    with pytest.raises(fpipe.CutError, match=r"inside 'blocks\.1' \(Block\): the backward hook .*<lambda>"):
        staged(model, *rows_of()(4), ["blocks.1.b"])


PLACES = [f"blocks.{k}{inner}" for k in range(4) for inner in ("", ".a", ".b")]


def collect(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
    root.collected.append(out * weight)


def collect_first(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor]) -> None:
    root.collected.append(args[0] * weight)


def scale(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out * weight


def mix(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out + weight * (root.collected[-1] if root.collected else root.shift)


def shift(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + weight * root.shift,)


class Hooked(Stack):
    """Hooks of all kinds, from the start or from the first call on; what they collect is added up at the end."""

    def __init__(self, hooks: list[tuple[str, Any, float]], lazy: bool, checkpoints: bool) -> None:
        super().__init__()
        self.hooks, self.installed, self.checkpoints = hooks, False, checkpoints
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.collected: list[Tensor] = []
        if not lazy:
            self.install()

    def install(self) -> None:
        for name, hook, weight in self.hooks:
            module = self.get_submodule(name)
            before = hook in (collect_first, shift)
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            register(partial(hook, self, weight))
        self.installed = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.install()
        self.collected = []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return sum((one * (k + 1) for k, one in enumerate(self.collected)), x + self.shift)


def test_a_hook_finds_what_modules_of_other_stages_put_into_a_list():
    """The list holds the very tensor that the module gets, so nothing shows that the hook has read it."""

    def keep(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        root.collected.append(out)

    torch.manual_seed(0)
    model = Hooked([("blocks.0", keep, 1), ("blocks.1", mix, 0.5)], False, False)
    require_eager(model, *rows_of()(4), cuts=["blocks.1"])


CUTS = (*AT, *INSIDE, "blocks.3.b")


KINDS = [collect, collect_first, scale, mix, shift]


HOOK = st.tuples(st.sampled_from(PLACES), st.sampled_from(KINDS), st.sampled_from([0.5, 1, 1.5]))


@settings(max_examples=few(6))
@given(
    st.lists(HOOK, max_size=6),
    st.sets(st.sampled_from(CUTS), max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(BACKWARDS if NIGHTLY else ["autograd"]),
)
def test_hooks_of_all_kinds_are_part_of_the_forward_or_refused(hooks, cuts, lazy, checkpoints, backward):
    def make() -> Hooked:
        torch.manual_seed(0)
        return Hooked(hooks, lazy, checkpoints)

    (inputs, targets), model, another = rows_of()(4), make(), make()
    try:
        pipe = staged(model, inputs, targets, sorted(cuts, key=lambda name: (name[:8], name)), backward=backward)
    except (fpipe.CutError, fpipe.CaptureError):
        assert checkpoints
        return
    got = run(pipe, model, inputs, targets)
    values = []
    for x, y in zip(inputs[0].chunk(2), targets.chunk(2), strict=True):
        values.append(mse(another(x), y) / 2)
        values[-1].backward()
    assert torch.equal(got.loss, values[0].detach() + values[1].detach())
    assert_same(got, got._replace(grads={name: p.grad for name, p in another.named_parameters() if p.grad is not None}))
    assert not model.collected
