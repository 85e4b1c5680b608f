# SPDX-License-Identifier: Apache-2.0
"""What modules leave in Python is found by modules of other stages, as on one device: numbers, lists, tensors in them.

Blocks of a model write to lists, dicts and attributes that all of them share, and read them. Wherever the model is cut,
the result is that of a plain loop over microbatches.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.capture.trace import front_end as trace
from fpipe.capture.trace.comparison import RepeatRecorder
from fpipe.capture.trace.decisions import Decisions
from fpipe.capture.trace.patches import Replacements, TorchFunctions
from fpipe.capture.trace.recorder import Recorder
from fpipe.capture.trace.replay import ENDING
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import run
from tests.common.sizes import few, in_turn

BACKWARDS = ["autograd", "graph"]
CUTS = ["blocks.1", "blocks.1.b", "blocks.2", "blocks.3", "blocks.3.b"]
number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
gain = 1.0


class Counter:
    """Counts, in an object and in its class."""

    all = 0

    def __init__(self) -> None:
        self.count = 0


Act = Callable[["Shared", Tensor], Tensor]


class Block(nn.Module):
    """Two linears, after which it acts on what the model shares, itself or by a hook."""

    def __init__(self, shared: Shared, acts: Sequence[Act], hooked: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.__dict__["shared"], self.acts, self.hooked = shared, acts, hooked
        if hooked:
            self.register_forward_hook(Block.act)

    def act(self, args: tuple[Tensor], out: Tensor) -> Tensor:
        for act in self.acts:
            out = act(self.shared, out)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.b(torch.tanh(self.a(x)))
        return out if self.hooked else self.act((x,), out)


class Shared(nn.Module):
    """Blocks that share state, which is made new, or emptied, before they run or after."""

    def __init__(self, acts: Sequence[Sequence[Act]], hooked: bool = False, reset: str = "before") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reset, self.counter = reset, Counter()
        self.renew()
        self.blocks = nn.ModuleList([Block(self, one, hooked) for one in acts])

    def renew(self) -> None:
        self.count, self.found, self.table, self.last = 0, [], {}, None
        self.counter.count = 0

    def empty(self) -> None:
        self.count = self.counter.count = Counter.all = 0
        self.last = None
        self.found.clear()
        self.table.clear()
        number.set(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.reset == "anew":
            self.renew()
        if self.reset == "before":
            self.empty()
        for block in self.blocks:
            x = block(x)
        if self.reset == "after":
            self.empty()
        return x


def count(shared: Shared, out: Tensor) -> Tensor:
    shared.count += 1
    return out


def scale(shared: Shared, out: Tensor) -> Tensor:
    return out * (1 + shared.count)


def append(shared: Shared, out: Tensor) -> Tensor:
    shared.found.append(out)
    return out


def append_number(shared: Shared, out: Tensor) -> Tensor:
    shared.found.append(2.0)
    return out


def add_last(shared: Shared, out: Tensor) -> Tensor:
    return out + shared.found[-1] if shared.found else out


def add_first(shared: Shared, out: Tensor) -> Tensor:
    return out + shared.found[0] if shared.found else out


def length(shared: Shared, out: Tensor) -> Tensor:
    return out * (1 + len(shared.found))


def store(shared: Shared, out: Tensor) -> Tensor:
    shared.table["out"], shared.last = out, out
    return out


def load(shared: Shared, out: Tensor) -> Tensor:
    return out + shared.table["out"].mean() if "out" in shared.table else out.sin()


def recall(shared: Shared, out: Tensor) -> Tensor:
    return out if shared.last is None else out * shared.last.mean()


def counter(shared: Shared, out: Tensor) -> Tensor:
    shared.counter.count += 1
    return out * shared.counter.count


def in_class(shared: Shared, out: Tensor) -> Tensor:
    Counter.all += 1
    return out * Counter.all


def in_context(shared: Shared, out: Tensor) -> Tensor:
    number.set(number.get() + 1)
    return out * number.get()


def branch(shared: Shared, out: Tensor) -> Tensor:
    return out.sin() if shared.count > 1 else out.cos()


def choose(shared: Shared, out: Tensor) -> Tensor:
    return out.to(torch.float64 if shared.count > 1 else torch.float32).float()


def cast(shared: Shared, out: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=shared.count > 1):
        products = out @ out.t()
    return out + products.float() @ out


def ungraded(shared: Shared, out: Tensor) -> Tensor:
    with torch.set_grad_enabled(shared.count < 3):
        sine = out.sin()
    return out + sine


def mark(shared: Shared, out: Tensor) -> Tensor:
    first = not hasattr(out, "seen") and not shared.count
    shared.count, out.seen = shared.count + 1, True  # type: ignore[attr-defined]
    return out * 2 if first else out.exp()


def swap(shared: Shared, out: Tensor) -> Tensor:
    both = out, out.sin()
    return both[shared.count > 1]


def tried(shared: Shared, out: Tensor) -> Tensor:
    if shared.count < 2:
        with contextlib.suppress(Exception):
            return out.cos()
    return out


ACTS = [
    count,
    scale,
    append,
    append_number,
    add_last,
    add_first,
    length,
    store,
    load,
    recall,
    counter,
    branch,
    choose,
    swap,
    tried,
]


def assert_as_one_device(make: Callable[[], nn.Module], cuts: Sequence[str], backward: str = "autograd") -> None:
    (inputs, targets), model = rows_of()(6), make()
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=list(cuts), backward=backward
    )
    Counter.all = 0
    want = loop(make(), mse, inputs, targets, 3)
    for _ in range(2):
        assert_same(run(pipe, model, inputs, targets), want)


SHARING: dict[str, list[Act]] = {
    "an attribute": [count, scale],
    "a branch on an attribute": [count, branch],
    "a dtype that an attribute decides": [count, choose],
    "an attribute that decides which tensor is returned": [count, swap],
    "an attribute that decides what is tried": [count, tried],
    "the length of a list": [append_number, length],
    "the last tensor of a list": [add_last, append],
    "the first tensor of a list": [add_first, append],
    "a dict": [load, store],
    "an autocast that an attribute decides": [count, cast],
    "a gradient mode that an attribute decides": [count, ungraded],
    "an attribute of a tensor": [mark],
    "an attribute that holds a tensor": [recall, store],
    "an object": [counter],
    "a class": [in_class],
    "a context variable": [in_context],
}


@pytest.mark.parametrize(("kind", "reset"), in_turn(SHARING, ["before", "after", "anew"]))
def test_modules_find_what_modules_of_other_stages_leave_in(kind, reset):
    if reset == "anew" and kind in ("a class", "a context variable"):
        pytest.skip("they are never new")
    number.set(0)
    Counter.all = 0
    assert_as_one_device(lambda: Shared([SHARING[kind]] * 4, reset=reset), ["blocks.1", "blocks.3"])


@pytest.mark.parametrize("backward", BACKWARDS)
def test_hooks_find_what_modules_of_other_stages_leave_inside_blocks_that_are_cut(backward):
    acts = [[count, append], [count, scale, length], [count, add_last], [scale]]
    assert_as_one_device(lambda: Shared(acts, hooked=True), ["blocks.1.b", "blocks.2"], backward)


@settings(max_examples=few(8))
@given(
    st.lists(st.lists(st.sampled_from(ACTS), max_size=3), min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from(["before", "after", "anew"]),
    st.sets(st.sampled_from(CUTS), min_size=1, max_size=3),
    st.sampled_from(BACKWARDS),
)
def test_blocks_that_share_state_compute_what_one_device_computes(acts, hooked, reset, cuts, backward):
    assert_as_one_device(lambda: Shared(acts, hooked, reset), sorted(cuts), backward)


class Counting(nn.Module):
    """Multiplies by the number of calls before this one."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.__dict__["shared"], self.linear = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.shared.count += 1
        return self.linear(x) * self.shared.count


class Sealed(nn.Module):
    """Hooks on what is saved, with which a module cannot be opened, around one that reads what others leave."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.inner = Counting(shared)

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return self.inner(x)


def test_an_unsplittable_module_that_reads_what_other_stages_leave_is_refused():
    model, (inputs, targets) = Shared([[]] * 4), rows_of()(4)
    model.blocks = nn.ModuleList([Sealed(model) for _ in range(4)])
    said = (
        r"module blocks\.0: got saved-tensor hooks around what it calls, expected a call that can run as a whole, but "
        r"this one finds other Python state in its stage \(got mul\[5\] in module blocks\.0\.inner, expected mul\[1\] "
        r"in module blocks\.0\.inner\).*pass what it uses as arguments"
    )
    with pytest.raises(fpipe.CutError, match=said):
        fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(2, 2), cuts=["blocks.2"])


class Amplifying(Counting):
    """The same, by a global."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * gain


def test_state_outside_the_model_that_a_cut_module_reads_is_watched(monkeypatch):
    model, (inputs, targets) = Shared([[]] * 4), rows_of()(4)
    model.blocks = nn.ModuleList([Amplifying(model) for _ in range(4)])
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(2, 2), cuts=["blocks.2"]
    )
    run(pipe, model, inputs, targets)
    monkeypatch.setitem(globals(), "gain", 2.0)
    with pytest.raises(fpipe.InputError, match=r"global 'gain': got 2\.0, expected 1\.0"):
        run(pipe, model, inputs, targets)


class Voting(nn.Module):
    """Counts the batches that it likes, as data decide; the model makes the list new before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.liked = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        if x.square().sum() > 0:
            self.liked.append(1)
        return self.linear(x) * len(self.liked)


class Poll(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Voting(), Voting()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.liked = []
            x = block(x)
        return x


def test_a_list_that_every_forward_starts_over_is_restored_where_data_decide_its_items():
    (inputs, targets), model = rows_of()(6), Poll()
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(2, 3), cuts=["blocks.1"],
        unsplittable=Voting,
    )  # fmt: skip
    assert_same(run(pipe, model, inputs, targets), loop(Poll(), mse, inputs, targets, 3))


class Merging(nn.Module):
    """Uses its second argument only if data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(x)
        return x + y if x.square().sum() > 0 else x


class Skipping(nn.Module):
    """Hands what it has computed first to the module at its end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Merging()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.second(y), y.sin())


@pytest.mark.parametrize("cuts", [["second"], ["last"]])
def test_a_module_that_branches_on_data_gets_all_its_arguments(cuts):
    (inputs, targets), model = rows_of()(6), Skipping()
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(2, 3), cuts=cuts, unsplittable=Merging
    )
    assert_same(run(pipe, model, inputs, targets), loop(Skipping(), mse, inputs, targets, 3))


AGAIN = r"module 1: got a checkpointed function .* runs it again \(got mul\[4\] in module 1, expected mul\[3\]"


class Remembering(nn.Module):
    """Scales by how many calls came before it in this forward; what is called is checkpointed."""

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
            fpipe.verify(fpipe.pipeline(model, example=(x,), loss=torch.sum, **options), model, (x,))


class Usual(nn.Module):
    """What blocks of models do: norms, dropout, constants, autocast, changes in place, here and there no gradients."""

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


def test_ordinary_modules_are_not_recorded_again(monkeypatch):
    """Which calls differ is then known sooner."""
    monkeypatch.setattr(trace, "RepeatRecorder", lambda *_: pytest.fail("recorded again"))
    (inputs, targets), model = rows_of()(6), nn.Sequential(*[Usual() for _ in range(4)])
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=nn.functional.mse_loss, schedule=one_f_one_b(2, 3), cuts=["2"]
    )
    assert pipe


def test_a_replay_may_end_wherever_a_recorder_watches_torch():
    recorder = Recorder(nn.Linear(1, 1), {})
    decisions = Decisions(recorder.stack, ExitStack())
    watching = Replacements(recorder, nn.Linear(1, 1), (), TorchFunctions.now(), decisions)
    watched = {(owner, name) for owner, name, _ in watching.replacements()}
    module, cast = ("__call__", "__setattr__", "register_buffer"), ("__enter__", "__exit__")
    others = {(nn.Module, name) for name in module} | {(torch.autocast, name) for name in cast}
    assert watched == {*ENDING, *others, (torch.autograd.Function, "apply")}


class Operators(TorchDispatchMode):
    """Sees all operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Watched(nn.Module):
    """Has its operators seen by a mode."""

    def forward(self, x: Tensor) -> Tensor:
        with Operators():
            return x.sin()


def test_modules_whose_operators_are_watched_are_recorded_again(monkeypatch):
    again = []
    monkeypatch.setattr(
        trace, "RepeatRecorder", lambda *args, **kwargs: again.append(1) or RepeatRecorder(*args, **kwargs)
    )
    (inputs, targets), linear = rows_of()(6), nn.Linear(WIDTH, WIDTH)
    for module in (nn.Tanh(), Watched()):
        how, model = one_f_one_b(2, 3), nn.Sequential(linear, module, nn.Linear(WIDTH, WIDTH), nn.Tanh())
        fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["2"])
        assert bool(again) is isinstance(module, Watched)


class Functions(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self, seen: list[object]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args))
        return func(*args, **kwargs or {})


def test_private_names_of_torch_mean_what_they_did():
    depth = torch._C._len_torch_dispatch_stack()
    with Operators():
        assert torch._C._len_torch_dispatch_stack() == depth + 1
    with Functions(seen := []), torch.no_grad():
        assert [(function, args) for function, args in seen] == [(torch._C._set_grad_enabled, (False,))]


class Doubled(torch.autograd.Function):
    """Twice a tensor."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Ungraded(nn.Module):
    """Turns gradients off and on around a custom function, by a context or by hand; it cannot be opened."""

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
def test_a_replay_that_ends_where_gradients_are_off_leaves_them_on(by_hand):
    (inputs, targets), model = rows_of()(6), nn.Sequential(*[Ungraded(by_hand) for _ in range(4)])
    how = one_f_one_b(2, 3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["2"], unsplittable=Ungraded
    )
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))
