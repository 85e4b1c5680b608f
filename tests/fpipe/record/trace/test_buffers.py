# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward reassigns, such as statistics, counters and caches that grow, have the values of one device.

Assignments that a stage cannot carry to the next microbatch are refused by name, and so are some cuts.
"""

import copy

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import gpipe, interleaved_1f1b, mirror, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.loops import eval_loop, loop
from tests.common.options import grouped
from tests.common.running import run, run_evaluation, run_reference
from tests.common.sizes import by_day, covering, few, sampled

WIDTH = 4

HOWS = {
    "1F1B": one_f_one_b(ranks=2, microbatches=3),
    "recomputed": recompute(one_f_one_b(ranks=2, microbatches=3)),
    "ZB-V": zb_v(ranks=1, microbatches=3),
}

BACKWARDS = pytest.mark.parametrize("backward", ["autograd", "graph"])


def table(n):
    return torch.arange(n * n, dtype=torch.float32).reshape(n, n).tril() / n


class Block(nn.Module):
    """A linear layer, with functions of the block that run before and after it."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.inner, self.before, self.after = nn.Linear(WIDTH, WIDTH), before, after
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", table(2), persistent=False)
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH))
        self.register_buffer("lazy", None, persistent=False)
        self.register_buffer("waves", torch.zeros(1, WIDTH), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, x):
        x = x if self.before is None else self.before(self, x)
        h = self.inner(x).tanh()
        return h if self.after is None else self.after(self, h)


def average(block, h):
    """Multiply by the old value, which the backward needs."""
    out = h * block.mean
    block.mean = 0.9 * block.mean + 0.1 * h.detach().mean(0)
    return out


def average_without_gradients(block, h):
    with torch.no_grad():
        block.mean = block.mean.lerp(h.mean(0), 0.1)
    return h + block.mean


def average_again(block, h):
    return average_without_gradients(block, average(block, h))


def count(block, h):
    block.steps = block.steps + 1
    return h / block.steps


def remember(block, h):
    """Swap two buffers, and never read the new values."""
    block.last, block.mean = block.mean, h.detach()[0]
    return h * block.last


def mixed(block, h):
    """Change the buffer in place and reassign it."""
    block.mean.mul_(0.9)
    block.mean = block.mean + 0.1 * h.detach().mean(0)
    block.mean += 1
    return h


def put_back(block, h):
    old = block.mean
    block.mean = torch.ones(WIDTH)
    h = h * block.mean
    block.mean = old
    return h


def register(block, h):
    block.register_buffer("mean", block.mean * 0.5 + h.detach().mean(0))
    return h * block.mean


def reset(block, h):
    out = h * block.mean
    block.mean = torch.ones(WIDTH)
    return out


CHANGES = (average, average_without_gradients, average_again, count, remember, mixed, put_back, register, reset)


def cached(block, x):
    """Add the table, which is replaced if it is too short."""
    if block.table.shape[0] < len(x):
        block.table = table(len(x))
    return x + block.table[: len(x), :1]


def cached_by_registering(block, x):
    if block.table.shape[0] < len(x):
        block.register_buffer("table", table(len(x)), persistent=False)
    return x + block.table[: len(x), :1]


def cached_lazily(block, x):
    if block.lazy is None or len(block.lazy) < len(x):
        block.lazy = table(len(x))
    return x + block.lazy[: len(x), :1]


def cached_of_a_buffer(block, x):
    """Cache values that are computed from another buffer, as rotary embeddings do."""
    if len(block.waves) < len(x):
        block.waves = torch.outer(torch.arange(len(x)), block.angles).cos()
    return x * block.waves[: len(x)]


def cached_lazily_of_a_buffer(block, x):
    if block.late is None or len(block.late) < len(x):
        block.register_buffer("late", torch.outer(torch.arange(len(x)), block.angles).cos(), persistent=False)
    return x * block.late[: len(x)]


NAMES = ("table", "lazy", "waves", "late")

CACHES = (cached, cached_by_registering, cached_lazily, cached_of_a_buffer, cached_lazily_of_a_buffer)


def build(model, how, cuts, backward="autograd", **settings):
    torch.manual_seed(0)
    x, y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=cuts,
        **grouped({"backward": backward, **settings}),
    )
    return pipe, x, y


def without_caches(result):
    """Return a result without caches, which a step returns as they were passed."""
    return result._replace(buffers={n: b for n, b in result.buffers.items() if not n.endswith(NAMES)})


def assert_as_one_device(pipe, model, x, y, microbatches=3):
    want = loop(model, mse, (x,), y, microbatches)
    assert_same(without_caches(run(pipe, model, (x,), y)), without_caches(want))
    assert_same(without_caches(run_reference(pipe, model, (x,), y)), without_caches(want))


# ---------------------------------------------------------------------------------------------------------- reassigned


@sampled(2)
@covering(change=CHANGES, how=[*HOWS], backward=["autograd", "graph"])
def test_a_reassigned_buffer_has_the_values_of_one_device(change, how, backward):
    model = nn.Sequential(Block(after=change), nn.Linear(WIDTH, WIDTH), Block(before=change))
    pipe, x, y = build(model, HOWS[how], ["1"], backward)
    assert_as_one_device(pipe, model, x, y)


@sampled(2)
@covering(change=CHANGES, backward=["autograd", "graph"])
def test_a_module_that_is_cut_inside_reassigns_its_buffers(change, backward):
    """The change in block 1 comes before the cut, so the first stage replays it call by call."""
    model = nn.Sequential(Block(before=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1.inner"], backward)
    assert_as_one_device(pipe, model, x, y)


@sampled(2)
@pytest.mark.parametrize("change", by_day(CHANGES, 2))
def test_an_evaluation_reassigns_buffers_too(change):
    model = nn.Sequential(Block(after=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    got, want = run_evaluation(pipe, copy.deepcopy(model), (x,), y), eval_loop(model, mse, (x,), y, 3)
    assert_same(got, want._replace(outputs=got.outputs))


@BACKWARDS
def test_returned_buffers_go_into_the_next_step(backward):
    model = nn.Sequential(Block(after=average), Block(after=count))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], backward)
    params, buffers = pipe.init(model)
    for _ in range(2):
        buffers = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].buffers
    whole = loop(model, mse, (x.repeat(2, 1),), y.repeat(2, 1), 6)
    assert int(buffers["1.steps"]) == 6
    assert all(same_bits(buffers[name], buffer) for name, buffer in whole.buffers.items())
    assert int(model[1].steps) == 0


@BACKWARDS
def test_a_module_that_is_called_twice_continues_from_its_own_value(backward):
    block = Block(after=average_again)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block, block)
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], backward)
    assert_as_one_device(pipe, model, x, y)


class Keeping(nn.Module):
    """Reads the first of two values that its block assigns."""

    def __init__(self):
        super().__init__()
        self.kept, self.block, self.outer = [], Block(after=self.twice), nn.Linear(WIDTH, WIDTH)

    def twice(self, block, h):
        block.mean = h.detach().mean(0)
        self.kept.append(block.mean)
        block.mean = block.mean + 1
        return h

    def forward(self, x):
        h = self.block(self.outer(x))
        return h * self.kept.pop()


@BACKWARDS
def test_an_earlier_value_of_a_buffer_is_not_taken_for_the_current_one(backward):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping())
    pipe, x, y = build(model, HOWS["1F1B"], ["1.block"], backward)
    assert_as_one_device(pipe, model, x, y)


@BACKWARDS
def test_a_returned_buffer_has_its_own_memory(backward):
    """It shares no memory with the batch or with tensors that the model holds."""
    first, held = torch.ones(9, WIDTH), torch.ones(WIDTH)

    def remember(block, x):
        block.last, block.mean = x[-1], held
        return x * held

    model = nn.Sequential(Block(before=remember), nn.Linear(WIDTH, WIDTH))
    pipe, *_ = build(model, HOWS["1F1B"], ["1"], backward)
    params, buffers = pipe.init(model)
    after = fpipe.value_and_grad(pipe)(params, buffers, (first,), first)[0].buffers
    first.zero_()
    after["0.mean"].zero_()
    assert after["0.last"].tolist() == [1] * WIDTH
    assert held.tolist() == [1] * WIDTH


@sampled(2)
@pytest.mark.parametrize("change", by_day([*CACHES, average, remember], 2))
def test_verify_compares_reassigned_buffers_and_restores_the_model(change):
    model = nn.Sequential(Block(after=change), Block(before=change))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    assert fpipe.verify(pipe, model, (x,), y, steps=2).eager
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is buffer and same_bits(buffer, old) for name, (buffer, old) in before.items())


def count_silently(block, h):
    block.steps = block.steps + 1
    return h


def test_verify_finds_a_lost_assignment(monkeypatch):
    model = nn.Sequential(Block(after=count_silently), Block())
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    monkeypatch.setattr("fpipe.stages.autograd._new_buffer", lambda new, old: old)
    with pytest.raises(fpipe.MismatchError, match=r"buffer 0\.steps"):
        fpipe.verify(pipe, model, (x,), y)


class Branching(nn.Module):
    """Reassigns its buffer if the data say so."""

    def __init__(self, otherwise):
        super().__init__()
        self.inner, self.otherwise = nn.Linear(WIDTH, WIDTH), otherwise
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        h = self.inner(x)
        if bool(h.detach().sum() > 0) is not self.otherwise:
            return h * 2
        self.mean = self.mean + 1
        return h * self.mean


def test_a_module_that_branches_on_data_may_reassign_in_one_branch():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(otherwise=False))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"], unsplittable=Branching)
    found = {run(pipe, model, (x * scale,), y).buffers["1.mean"][0].item() for scale in (-3, -1, 1, 3)}
    assert len(found) > 1  # both branches are taken
    for scale in (-3, -1, 1, 3):
        assert_as_one_device(pipe, model, x * scale, y)


def test_a_branch_that_reassigns_unlike_the_one_at_capture_is_an_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(otherwise=True))
    pipe, x, _ = build(model, one_f_one_b(ranks=2, microbatches=9), ["1"], unsplittable=Branching)
    batches = torch.cat([x * scale for scale in (-3, -1, 1, 3)])
    with pytest.raises(fpipe.InputError, match=r"module 1: got an assignment to the buffer 'mean'"):
        run(pipe, model, (batches,), batches)


STEPS = {one.__name__: one for one in (*CHANGES, *CACHES)}


@st.composite
def models(draw):
    """Draw blocks that change their buffers before and after, some of which are called twice, and where to cut."""
    names = st.none() | st.sampled_from(sorted(STEPS))
    plans = draw(st.lists(st.tuples(names, names), min_size=2, max_size=4))
    calls = [*range(len(plans)), *draw(st.lists(st.integers(0, len(plans) - 1), max_size=1))]
    return plans, calls, draw(st.booleans())


@given(
    models(),
    st.sampled_from([gpipe, one_f_one_b, zb_h1, interleaved_1f1b]),
    st.booleans(),
    st.sampled_from(["autograd", "graph"]),
)
@settings(max_examples=few(6), deadline=None)
def test_buffers_reassigned_in_any_way_have_the_values_of_one_device(made, kind, again, backward):
    plans, calls, inside = made
    torch.manual_seed(1)
    blocks = [Block(*[STEPS.get(name) for name in plan]) for plan in plans]
    model = nn.Sequential(*[blocks[k] for k in calls], nn.Linear(WIDTH, WIDTH))
    how = kind(ranks=2, microbatches=4) if kind is not interleaved_1f1b else interleaved_1f1b(ranks=1, microbatches=4)
    how = recompute(how) if again else how
    cut = "1.inner" if inside else str(len(blocks) // 2)
    x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    try:
        pipe = fpipe.pipeline(
            model,
            example=(x,),
            targets=y,
            loss=mse,
            schedule=how,
            cuts=[cut],
            gradients=fpipe.Gradients(backward=backward),
        )
    except (fpipe.CutError, fpipe.CaptureError) as error:
        event("refused")
        if "modified by an inplace operation" in str(error):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loop(model, mse, (x,), y, 4)
            return
        if "the buffer" in str(error) and (len(calls) > len(plans) or inside):
            return
        raise
    event("run")
    assert_as_one_device(pipe, model, x, y, 4)


# -------------------------------------------------------------------------------------------------------------- caches


@sampled(1)
@covering(cache=CACHES, backward=["autograd", "graph"])
def test_a_cache_in_a_buffer_may_grow(cache, backward):
    """In a module that runs as a whole and in one that is cut, for every size; a step returns it as it was passed."""
    model = nn.Sequential(Block(before=cache), Block(before=cache))
    pipe, x, y = build(model, HOWS["1F1B"], ["1.inner"], backward)
    assert_as_one_device(pipe, model, x, y)
    assert_as_one_device(pipe, model, x.repeat(2, 1), y.repeat(2, 1))
    assert_as_one_device(pipe, model, x, y)
    assert run(pipe, model, (x,), y).buffers["0.table"].shape == (2, 2)


def test_a_cache_computed_from_constants_is_made_once():
    made = []

    def counting(block, x):
        if len(block.table) < len(x):
            made.append(len(x))
            block.table = table(len(x))
        return x + block.table[: len(x), :1]

    model = nn.Sequential(Block(before=counting), nn.Linear(WIDTH, WIDTH))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    made.clear()
    run(pipe, model, (x,), y)
    assert not made


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_the_user_fills_is_no_change_of_the_model(cache):
    model = nn.Sequential(Block(before=cache), Block(before=cache))
    pipe, x, y = build(model, HOWS["1F1B"], ["1"])
    params, buffers = pipe.init(model)
    want = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].loss
    model(x)
    assert [len(buffer) for name, buffer in model[0].named_buffers() if name in NAMES and len(buffer) > 2] == [9]
    assert same_bits(fpipe.value_and_grad(pipe)(params, buffers, (x,), y)[0].loss, want)


# ------------------------------------------------------------------------------------------------------------- refused


def test_a_cut_between_two_uses_of_a_reassigned_buffer_is_refused_and_not_chosen():
    block = Block(after=average)
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH))
    with pytest.raises(fpipe.CutError, match=r"'0\.mean', which is assigned"):
        build(model, HOWS["1F1B"], ["1"])
    pipe, x, y = build(model, HOWS["1F1B"], None, stages=2)
    assert_as_one_device(pipe, model, x, y)


class Between(nn.Module):
    """Reads the buffer before its layer, and assigns it after."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        h = self.inner(x * self.mean)
        self.mean = h.detach().mean(0)
        return h


def test_a_cut_between_reading_and_reassigning_is_refused():
    with pytest.raises(fpipe.CutError, match=r"'1\.mean', which is assigned there and used in stage 0"):
        build(nn.Sequential(nn.Linear(WIDTH, WIDTH), Between()), HOWS["1F1B"], ["1.inner"])


def test_replicas_may_not_reassign_buffers():
    model = nn.Sequential(Block(after=average), Block(after=average))
    how = mirror(one_f_one_b(ranks=2, microbatches=4))
    with pytest.raises(fpipe.CutError, match="modified buffers"):
        fpipe.pipeline(model, example=(torch.ones(8, WIDTH),), loss=torch.mean, schedule=how, cuts=["1"])


def assigns(name, value):
    """A change that assigns `value(block, h)` to a buffer."""

    def change(block, h):
        setattr(block, name, value(block, h))
        return h

    return change


def of_a_changing_buffer(block, h):
    block.mean = block.mean + 1
    block.table = block.mean[:3] * 1
    return h


def a_buffer_that_changes(block, h):
    block.last.add_(1)
    block.mean = block.last
    return h


def unseen(block, h):
    block._buffers["mean"] = h.detach().mean(0)
    return h


def read_in_a_checkpoint(block, h):
    out = checkpoint(lambda h: h * block.mean, h, use_reentrant=False)
    block.mean = h.detach().mean(0)
    return out


def first_time_only(block, h):
    if not hasattr(block, "called"):
        block.called = True
        block.mean = torch.ones(WIDTH)
    return h


REFUSED = {
    "requires a gradient": (
        assigns("mean", lambda block, h: 0.9 * block.mean + 0.1 * h.mean(0)),
        r"module 0.*requires a gradient to the buffer 'mean'.*\.detach\(\)",
    ),
    "another dtype": (
        assigns("mean", lambda block, h: h.detach().double().mean(0)),
        r"module 0.*float64\[4\] to the buffer 'mean', which is float32\[4\].*depends on the parameter.*copy_",
    ),
    "grown": (
        assigns("table", lambda block, h: torch.cat([block.table, block.table])),
        r"module 0.*float32\[4, 2\] to the buffer 'table', which is float32\[2, 2\].*depends on the buffer '0\.table'",
    ),
    "of the batch": (
        assigns("mean", lambda block, h: h.detach()),
        r"module 0.*float32\[3, 4\] to the buffer 'mean', which is float32\[4\]",
    ),
    "of the batch, lazily": (
        assigns("lazy", lambda block, h: h.detach()),
        r"module 0.*float32\[3, 4\] to the buffer 'lazy', which is None",
    ),
    "of chance": (assigns("table", lambda block, h: torch.rand(3)), "module 0.*depends on random numbers"),
    "of a parameter": (
        assigns("table", lambda block, h: block.inner.weight.detach()[0] * 1),
        r"module 0.*depends on the parameter '0\.inner\.weight'",
    ),
    "of a changing buffer": (of_a_changing_buffer, r"module 0.*depends on the buffer '0\.mean'"),
    "laid out otherwise": (
        assigns("table", lambda block, h: torch.ones(2, 2).t() * h.detach().sum()),
        r"module 0.*of strides \[1, 2\] to the buffer 'table'",
    ),
    "a parameter": (
        assigns("mean", lambda block, h: block.inner.bias.detach()),
        r"module 0.*share with the parameter '0\.inner\.bias'.*clone\(\)",
    ),
    "a buffer that changes": (a_buffer_that_changes, r"module 0.*share with the buffer '0\.last'"),
    "none": (assigns("mean", lambda block, h: None), "module 0.*an assignment of a NoneType to the buffer 'mean'"),
    "unseen": (unseen, r"buffer 0\.mean: got a forward that replaces it"),
    "in a checkpoint": (
        lambda block, h: checkpoint(average, block, h, use_reentrant=False),
        r"module 0.*checkpointed function that uses or assigns a buffer.*\(mean\)",
    ),
    "read in a checkpoint": (
        read_in_a_checkpoint,
        r"module 0.*checkpointed function that uses or assigns a buffer.*\(mean\)",
    ),
    "first time only": (first_time_only, "behaves differently when it is called again"),
}


@sampled(6)
@pytest.mark.parametrize("name", REFUSED)
def test_buffers_that_cannot_be_carried_are_refused_by_name(name):
    change, message = REFUSED[name]
    with pytest.raises(fpipe.CaptureError, match=message):
        build(nn.Sequential(Block(after=change), Block()), HOWS["1F1B"], ["1"])
