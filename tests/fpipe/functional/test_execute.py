# SPDX-License-Identifier: Apache-2.0
"""A program applied to stages, of models and of users, gives the bits of a plain loop."""

import queue
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.testing import check_stage
from schedules import (
    chimera,
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    recompute,
    update_weights,
    zb_h1,
    zb_v,
)
from schedules.playing.rows import edit
from tests.common.comparison import Result, assert_same
from tests.common.running import build, run
from tests.common.sizes import covering, sampled
from tests.common.zoo import ZOO

WIDTH = 3


def same(got, want):
    """Raise unless two trees have the same structure, and the same bits."""
    leaves = [optree.tree_flatten(one, none_is_leaf=True) for one in (got, want)]
    assert leaves[0][1] == leaves[1][1]
    for a, b in zip(leaves[0][0], leaves[1][0], strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(torch.as_tensor(a), torch.as_tensor(b)), f"{a} is not {b}"


# ----------------------------------------------------------------------------------------------- drawn pure functions


def widen(params, inputs):
    """Reads anything, returns a dict with a constant in it."""
    x = sum(leaf.sum(1, keepdim=True) if leaf.dim() > 1 else leaf for leaf in tensors_of(inputs))
    h = torch.tanh(x * params["a"][0] + params["a"][1])
    return {"h": h, "twice": (2 * h, x * torch.ones_like(h)), "kind": "wide"}


def mix(params, inputs):
    """Uses each of its inputs twice, and leaves a parameter unused."""
    found = [leaf for leaf in tensors_of(inputs) if leaf.dim() > 1]
    first, last = found[0], found[-1]
    return {"h": torch.sin(first @ params.weight) * last[:, :1] + first, "twice": (last, first), "kind": 3}


class Mixed(NamedTuple):
    weight: torch.Tensor
    unused: torch.Tensor


def loss(params, inputs):
    *values, y = inputs
    terms = [(leaf * params[0]).sum(1).mean() for leaf in tensors_of(values) if leaf.dim() > 1]
    total = sum(terms) * (y.square().mean() + 1)
    return total, {"rows": y.shape[0], "largest": values[0]["h"].max().detach() if isinstance(values[0], dict) else 0}


def tensors_of(tree):
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@st.composite
def graphs(draw):
    """Stages in a row; each reads one or two of what comes before it, whole or a member. And their parameters."""
    torch.manual_seed(0)
    count = draw(st.integers(2, 4))
    rows, params = {}, []
    for s in range(count):
        earlier = [name for k in range(s) for name in (f"s{k}", f"s{k}.h", f"s{k}.twice.0")]
        whole = [f"s{k}" for k in range(s)]
        choices = st.sampled_from([*(["inputs"] if s < count - 1 else []), *earlier] or ["inputs"])
        reads = draw(st.lists(choices, min_size=1, max_size=2, unique=True))
        # Reads of a tree and of a member of it are summed where they were made, not as one device does.
        reads = [one for one in reads if one in whole or one == "inputs" or one.split(".")[0] not in reads]
        if s == count - 1:
            read = {one.split(".")[0] for _, found in rows.values() for one in found}
            reads = [f"s{k}" for k in range(s) if f"s{k}" not in read] or [f"s{s - 1}"]
            rows[f"s{s}"] = loss, [*reads, "targets"]
            params.append([torch.randn(WIDTH)])
        elif draw(st.booleans()):
            rows[f"s{s}"] = widen, reads
            params.append({"a": (torch.randn(WIDTH), torch.randn(WIDTH)), "n": 2})
        else:
            rows[f"s{s}"] = mix, reads
            params.append(Mixed(torch.randn(WIDTH, WIDTH), torch.randn(2)))
    return rows, params


def has_members(rows):
    """Whether some value is read whole and by member, or by two members that overlap."""
    reads = {one for _, found in rows.values() for one in found}
    return any(one != other and other.startswith(f"{one}.") for one in reads for other in reads)


def plain_loop(rows, params, x, y, microbatches):
    """One device: the functions one after another, and autograd."""
    leaves = optree.tree_map(lambda p: p.clone().requires_grad_() if isinstance(p, torch.Tensor) else p, params)
    total, aux = None, []
    for xi, yi in zip(torch.tensor_split(x, microbatches), torch.tensor_split(y, microbatches), strict=True):
        values = {"inputs": xi, "targets": yi}
        for (name, (function, reads)), own in zip(rows.items(), leaves, strict=True):
            found = []
            for read in reads:
                first, *keys = read.split(".")
                value = values[first]
                for key in keys:
                    value = value[int(key)] if key.isdigit() else value[key]
                found.append(value)
            # What a function returns is a value of its own, also where it returns an input as it is.
            values[name] = optree.tree_map(
                lambda v: v.view_as(v) if torch.is_tensor(v) else v, function(own, tuple(found))
            )
        term, extra = values[name]
        (term / microbatches).backward()
        total = (term / microbatches).detach() if total is None else total + (term / microbatches).detach()
        aux.append(extra)
    grads = optree.tree_map(lambda p: p.grad if isinstance(p, torch.Tensor) else None, leaves)
    return total, tuple(aux), grads


HOWS = (gpipe, one_f_one_b, zb_h1, lambda **sizes: recompute(one_f_one_b(**sizes)))


@given(graphs(), st.sampled_from(HOWS), st.integers(2, 4), st.integers(0, 2))
def test_drawn_graphs_of_pure_functions_equal_a_plain_loop(drawn, how, microbatches, more):
    rows, params = drawn
    if has_members(rows):
        return
    torch.manual_seed(0)
    x, y = torch.randn(2 * microbatches + more, WIDTH), torch.randn(2 * microbatches + more, 1)
    stages = fpipe.connect_stages(rows)
    program = lower(how(ranks=len(rows), microbatches=microbatches), stages.graph)
    kept = optree.tree_map(lambda p: p.clone() if isinstance(p, torch.Tensor) else p, params)
    out, grads = fpipe.execute(program, stages, params, [()] * len(rows), x, y)
    total, aux, want = plain_loop(rows, params, x, y, microbatches)
    same(out.loss, total)
    assert len(out.aux) == microbatches
    assert [one["rows"] for one in out.aux] == [one["rows"] for one in aux]
    # A reader that passes nothing back gives zeros, where one device has no gradient at all.
    zeros = lambda p, g: torch.zeros_like(p) if g is None and isinstance(p, torch.Tensor) else g  # noqa: E731
    same(*[optree.tree_map(zeros, params, one, none_is_leaf=True) for one in (grads, want)])
    same(params, kept)


def test_what_comes_back_to_an_input_that_is_an_output_too_is_added_as_on_one_device():
    """Both readers of `s0.h` return it twice; the sum of the second enters the first before its own terms."""
    rows = {
        "s0": (mix, ["inputs"]),
        "s1": (mix, ["s0.h"]),
        "s2": (mix, ["s0.h"]),
        "s3": (loss, ["s1", "s2", "targets"]),
    }
    torch.manual_seed(1)
    params = [*[Mixed(torch.randn(WIDTH, WIDTH), torch.randn(2)) for _ in range(3)], [torch.randn(WIDTH)]]
    x, y = torch.randn(4, WIDTH), torch.randn(4, 1)
    stages = fpipe.connect_stages(rows)
    for how in HOWS:
        program = lower(how(ranks=4, microbatches=2), stages.graph)
        _, grads = fpipe.execute(program, stages, params, [()] * 4, x, y)
        want = plain_loop(rows, params, x, y, 2)[2]
        assert all(same_bits(mine.weight, theirs.weight) for mine, theirs in zip(grads[:3], want[:3], strict=True))


# ------------------------------------------------------------------------------------------------- stages of a model


@sampled(1)
@covering(
    name=["gpt", "dropping", "tied_sequence", "chained", "skips"],
    how={
        "1F1B": one_f_one_b(ranks=4, microbatches=3),
        "ZB-V": zb_v(ranks=2, microbatches=4),
        "interleaved": interleaved_1f1b(ranks=2, microbatches=4),
        "recomputed": recompute(one_f_one_b(ranks=2, microbatches=3)),
    },
)
def test_stages_of_a_model_give_the_bits_of_its_pipeline(name, how):
    case, count = ZOO[name], how.microbatches
    pipe, model, inputs, targets = build(case, how, 2 * count + 1, capture="trace")
    want, seed = run(pipe, model, inputs, targets, seed=5), 5
    part = lambda tree: optree.tree_map(lambda t: t[:2], tree)  # noqa: E731
    record = fpipe.capture(model, example=part(inputs), targets=part(targets), loss=case.loss)
    stages = fpipe.cut(record, case.at(how.stages))
    params, buffers = stages.init(model)
    program = lower(how, stages.graph)
    for state in ((params, buffers), tuple(merged(one) for one in (params, buffers))):
        out, grads = fpipe.execute(program, stages, *state, inputs, targets, seed=seed)
        got = [merged(one) if isinstance(one, list) else one for one in (grads, out.buffers)]
        assert_same(Result(out.loss, None, *got), want._replace(outputs=None))


def merged(dicts):
    return {name: value for one in dicts for name, value in one.items()}


def test_functions_of_a_stage_of_a_model_can_be_called_alone():
    """A forward, both halves of its backward, and the whole give the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(3, 4), torch.randn(3, 1)
    stages = fpipe.cut(fpipe.capture(model, example=(x,), targets=y, loss=functional.mse_loss), "3")
    params, buffers = stages.init(model)
    first, last = stages
    state = torch.random.get_rng_state()
    h, new, residuals = first.forward(params[0], buffers[0], (x,), 7)
    value, _, kept = last.forward(params[1], buffers[1], (y, h), 7)
    (dh,), grads = last.backward(kept, torch.tensor(1.0))
    _, mine = first.backward(residuals, dh)
    nothing, deferred = first.backward_input(first.forward(params[0], buffers[0], (x,), 7)[2], dh)
    same(first.backward_weight(deferred), mine)
    assert nothing == ()
    assert new["1.num_batches_tracked"] == 1
    assert buffers[0]["1.num_batches_tracked"] == 0
    assert torch.equal(state, torch.random.get_rng_state())
    model.zero_grad()
    functional.mse_loss(model[4](model[3](h)), y).backward()
    same(grads, {"4.weight": model[4].weight.grad, "4.bias": model[4].bias.grad})
    same(value, functional.mse_loss(model[4](model[3](h)), y).detach())


def test_the_record_of_an_evaluation_returns_outputs():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)), torch.randn(6, 4)
    stages = fpipe.cut(fpipe.capture(model, example=(x[:2],)), "2")
    program = lower(forward_only(ranks=2, microbatches=3), stages.graph)
    out, grads = fpipe.execute(program, stages, *stages.init(model), (x,))
    assert grads is None
    with torch.no_grad():
        same(out.outputs, tuple(model.eval()(part) for part in torch.tensor_split(x, 3)))


# ------------------------------------------------------------------------------- anything that keeps the contract


@dataclass(frozen=True)
class Line:
    """A line through numbers: no tensor anywhere."""

    slope: Fraction
    start: Fraction


def line(params, buffers, inputs, key):
    (x,) = inputs
    return params.slope * x + params.start, buffers + 1, (params, x)


def line_input(residuals, cotangent):
    params, x = residuals
    return (params.slope * cotangent,), (x, cotangent)


def line_weight(deferred):
    x, cotangent = deferred
    return Line(x * cotangent, cotangent)


optree.register_pytree_node(
    Line, lambda one: ((one.slope, one.start), None), lambda _, both: Line(*both), namespace="fpipe"
)


@pytest.mark.parametrize("how", [zb_h1(ranks=2, microbatches=3), chimera(ranks=2, microbatches=4)], ids=repr)
def test_stages_may_compute_with_anything(how):
    """Exact fractions, with a backward that is given in halves only; also a stage on two ranks."""
    one = fpipe.Stage(line, backward_input=line_input, backward_weight=line_weight)
    stages = fpipe.connect_stages([one, one], targets=False)
    params, count = [Line(Fraction(2), Fraction(1)), Line(Fraction(3), Fraction(0))], how.microbatches
    xs = [Fraction(k + 1) for k in range(count)]
    program = lower(how, stages.graph)
    out, grads = fpipe.execute(program, stages, params, [0, 0], xs, split=lambda tree, m: tree or [None] * m)
    assert out.loss == pytest.approx(float(sum(3 * (2 * x + 1) for x in xs) / count))
    assert grads[0] == Line(pytest.approx(float(sum(3 * x for x in xs) / count)), pytest.approx(3.0))
    assert grads[1] == Line(pytest.approx(float(sum(2 * x + 1 for x in xs) / count)), pytest.approx(1.0))
    assert out.buffers == [count, count] or how.placement.mirrors


# --------------------------------------------------------------------------------------------- a transport of one's own


class Mail:
    """A handle: done at once for a send, at the latest when waited for, for a receive."""

    def __init__(self, end, message, box=None):
        self.end, self.message, self.box, self.letter = end, message, box, None

    @property
    def is_done(self):
        return self.box is None or self.letter is not None

    def wait(self):
        if not self.is_done:
            sent, self.letter = self.box.get(timeout=60)
            assert sent == self.message

    def take(self):
        return self.letter


class Box:
    def __init__(self, box):
        self.box = box

    def send(self, message, payload, specs):
        self.box.put((message, payload))
        return Mail("SEND", message)

    def receive(self, message, specs):
        return Mail("RECV", message, self.box)


class Boxes:
    """One rank of many, which are threads, with a queue for each channel."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes = rank, boxes

    def channel(self, source, target):
        return Box(self.boxes[source, target])


def test_ranks_may_talk_over_a_transport_of_ones_own():
    """Receives of a channel are waited for in the order of its sends, so a queue is enough."""

    def first(weight, inputs):
        return torch.tanh(inputs[0] @ weight)

    def last(weight, inputs):
        h, y = inputs
        return functional.mse_loss(h @ weight, y)

    how, x, y = one_f_one_b(ranks=2, microbatches=3), torch.randn(6, WIDTH), torch.randn(6, 1)
    stages = fpipe.connect_stages([first, last])
    program, params = lower(how, stages.graph), [torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, 1)]
    boxes = {(a, b): queue.Queue() for a in range(2) for b in range(2)}
    found = {}

    def rank(number):
        found[number] = fpipe.execute(program, stages, params, [(), ()], (x,), y, transport=Boxes(number, boxes))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want, grads = fpipe.execute(program, stages, params, [(), ()], (x,), y)
    same(found[1][0].loss, want.loss)
    assert found[0][0].loss is None
    same([found[0][1][0], found[1][1][1]], grads)
    assert found[0][1][1] is None


# ------------------------------------------------------------------------------------------------------------ refusals


def affine(params, inputs):
    return inputs[0] * params


def scalar(params, inputs):
    return (inputs[0] * params).mean()


def in_place(params, inputs):
    return inputs[0].add_(params)


def branching(params, buffers, inputs, key):
    return inputs[0] * params


def steal(params, buffers, inputs, key):
    return inputs[0] * params, buffers["n"] + 1


TWO = fpipe.connect_stages([affine, scalar], targets=False)
ONES = [torch.ones(2), torch.ones(2)]
X = torch.ones(4, 2)
HOW = one_f_one_b(ranks=2, microbatches=2)
BACKLESS = fpipe.Stage(lambda params, buffers, inputs, key: (inputs[0], buffers, ()), name="backless")


def execute(stages=TWO, how=HOW, params=ONES, buffers=((), ()), x=X, **options):
    return fpipe.execute(lower(how, TWO.graph), stages, params, list(buffers), x, **options)


REFUSALS = {
    "another graph": (lambda: execute(fpipe.connect_stages([affine, affine, scalar], targets=False)), "lowered for"),
    "too few parameters": (lambda: execute(params=ONES[:1]), "params: got 1 trees, expected a sequence with one"),
    "one tree of parameters": (lambda: execute(params={"a": 1}), "params: got dict, expected a sequence"),
    "too few rows": (lambda: execute(x={"a": [X[:1]]}), "leaf a.0: got shape [1, 2], expected at least 2 rows"),
    "an update": (lambda: execute(how=update_weights(HOW)), "which updates weights"),
    "a text in place of an action": (lambda: execute(how=edit(HOW, (("0F0",), ()))), "rank 0, position 0, 0F0: got"),
    "no backward": (lambda: execute([BACKLESS, scalar]), "stage '0': got no backward"),
    "a loss of two numbers": (lambda: execute([affine, affine]), "the last: got float32[2, 2], expected a floating"),
    "an argument is modified": (lambda: execute([in_place, scalar]), "'in_place': got a function that modifies"),
    "one result of four arguments": (lambda: execute([branching, scalar]), "got a single result from forward(params"),
    "other buffers": (
        lambda: execute([steal, scalar], buffers=({"n": torch.zeros(1)}, ())),
        "'steal': got new buffers",
    ),
    "a stage that nobody reads": (
        lambda: fpipe.connect_stages({"a": (affine, ["inputs"]), "b": (scalar, ["inputs"])}),
        "stage 'a': got no later stage that reads it",
    ),
    "a read of nothing": (lambda: fpipe.connect_stages({"a": (affine, ["b"])}), "stage 'a': got a read of 'b'"),
    "no stages": (lambda: fpipe.connect_stages([]), "stages: got none"),
    "no function": (lambda: fpipe.connect_stages([3]), "stages: got 3, expected a stage or a function"),
    "half a backward": (lambda: fpipe.Stage(affine, backward_input=affine), "without backward_weight"),
    "three arguments": (lambda: fpipe.stage(lambda a, b, c: a), "got a function of 3 arguments"),
    "another structure": (
        lambda: fpipe.stage(affine).backward(fpipe.stage(affine).forward(ONES[0], (), (X,), 0)[2], (X, X)),
        "its backward: got cotangents",
    ),
    "no record": (lambda: fpipe.cut(nn.Linear(2, 2)), "record: got Linear"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_stages_and_arguments_are_refused(name):
    call, words = REFUSALS[name]
    with pytest.raises(fpipe.PipelineError) as caught:
        call()
    assert words in str(caught.value)


def test_values_that_differ_under_a_shared_name_are_refused():
    case = ZOO["tied_sequence"]
    model, inputs, targets = case.make(4)
    stages = fpipe.cut(fpipe.capture(model, example=inputs, targets=targets, loss=case.loss), "2")
    params, buffers = stages.init(model)
    params[1]["0.weight"] = params[1]["0.weight"] + 1
    program = lower(one_f_one_b(ranks=2, microbatches=2), stages.graph)
    with pytest.raises(fpipe.InputError, match=r"params\[1\], '0.weight': got another value"):
        fpipe.execute(program, stages, params, buffers, inputs, targets)


# ----------------------------------------------------------------------------------------------------- check a stage


def scale(weight, buffers, inputs, key):
    return inputs[0] * weight, buffers, (weight, inputs[0])


def right(residuals, cotangent):
    weight, x = residuals
    return (weight * cotangent,), (x * cotangent).sum(0)


SEEN = []


def remembers(weight, buffers, inputs, key):
    SEEN.append(1)
    return inputs[0] * weight * len(SEEN), buffers, (weight, inputs[0])


def writes(weight, buffers, inputs, key):
    return inputs[0].mul_(weight), buffers, (weight, inputs[0])


def writes_cotangent(residuals, cotangent):
    return right(residuals, cotangent.mul_(1.5))


FAULTS = {
    "its arguments after the forward": fpipe.Stage(writes, right),
    "outputs and buffers of a second run": fpipe.Stage(remembers, right),
    "cotangents after the backward": fpipe.Stage(scale, writes_cotangent),
    "cotangents of the inputs": fpipe.Stage(scale, lambda r, c: (r[0] * c, right(r, c)[1])),
    "gradients: got": fpipe.Stage(scale, lambda r, c: (right(r, c)[0], [1])),
    "both halves of the backward": fpipe.Stage(
        scale, right, lambda r, c: (right(r, c)[0], (r, c)), lambda deferred: 2 * right(*deferred)[1]
    ),
    "gradients and cotangents: got a slope": fpipe.Stage(scale, lambda r, c: ((c,), right(r, c)[1])),
    "new buffers": fpipe.Stage(lambda w, b, i, k: (i[0] * w, 3, (w, i[0])), right),
}


@pytest.mark.parametrize("words", FAULTS)
def test_check_stage_finds(words):
    with pytest.raises(AssertionError) as caught:
        check_stage(FAULTS[words], torch.rand(2), (), (torch.rand(3, 2),))
    assert words in str(caught.value)


@pytest.mark.parametrize("stage", [fpipe.Stage(scale, right), fpipe.stage(lambda w, i: {"y": torch.sin(i[0] @ w)})])
def test_check_stage_passes(stage):
    check_stage(stage, torch.rand(2, 2) if stage.derived else torch.rand(2), (), (torch.rand(3, 2),))


def test_a_function_that_branches_on_values_is_not_split():
    """It runs as it is, and gives the gradients of autograd."""

    def clipped(weight, inputs):
        y = inputs[0] * weight
        return y * 2 if y.sum() > 0 else y

    stage = fpipe.stage(clipped)
    for x in (torch.ones(3), -torch.ones(3)):
        y, _, residuals = stage.forward(torch.ones(3), (), (x,), 0)
        (dx,), grad = stage.backward(residuals, torch.ones(3))
        same((y, dx, grad), (x * 2, 2 * torch.ones(3), 2 * x) if x[0] > 0 else (x, torch.ones(3), x))


def test_constants_of_other_types_are_other_programs():
    """Although they are equal."""
    stage = fpipe.stage(lambda n, inputs: inputs[0] * n if isinstance(n, float) else inputs[0] + n)
    x = torch.full((2,), 3.0)
    same([stage.forward(n, (), (x,), 0)[0] for n in (1, 1.0)], [x + 1, x])


def test_autocast_around_a_stage_of_a_function_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fpipe.InputError, match="got autocast around it"):
        fpipe.stage(affine).forward(torch.ones(2), (), (X,), 0)


def test_dropout_depends_on_the_key_alone():
    stage = fpipe.stage(lambda params, inputs: functional.dropout(inputs[0] * params, 0.5))
    ones, x = torch.ones(64), torch.ones(64)
    found = [stage.forward(ones, (), (x,), key)[0] for key in (1, 1, 2)]
    same(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(fpipe.PipelineError, match="seed"):
        fpipe.execute(lower(gpipe(ranks=2, microbatches=2), TWO.graph), [stage, scalar], [ones[:1]] * 2, [(), ()], x)


def test_a_loss_of_a_model_may_return_aux():
    model, x, y = nn.Linear(4, 1), torch.randn(4, 4), torch.randn(4, 1)
    loss = lambda out, y: (functional.mse_loss(out, y), {"largest": out.max()})  # noqa: E731
    stages = fpipe.cut(fpipe.capture(model, example=(x[:2],), targets=y[:2], loss=loss))
    out, _ = fpipe.execute(lower(gpipe(ranks=1, microbatches=2), stages.graph), stages, *stages.init(model), (x,), y)
    same([one["largest"] for one in out.aux], [model(part).max().detach() for part in (x[:2], x[2:])])


# ----------------------------------------------------------------------------------------------------------- as values


def record_of(width=4, act=nn.Tanh, loss=functional.mse_loss, rows=2, **options):
    model = nn.Sequential(nn.Linear(WIDTH, width), act(), nn.Linear(width, 1))
    return fpipe.capture(model, example=(torch.ones(rows, WIDTH),), targets=torch.ones(rows, 1), loss=loss, **options)


def test_records_and_stages_are_equal_if_they_compute_the_same():
    one, again = record_of(), record_of()
    assert one == again
    assert hash(one) == hash(again)
    graph = {"gradients": fpipe.Gradients(backward="autograd")}
    others = [{"width": 5}, {"act": nn.ReLU}, {"loss": functional.l1_loss}, {"rows": 3}, graph]
    assert not any(record_of(**other) == one for other in others)
    assert one != str(one)
    stages = fpipe.cut(one, at="2")
    assert stages == fpipe.cut(again, at="2")
    assert hash(stages) == hash(fpipe.cut(again, at="2"))
    assert stages not in (fpipe.cut(again, at="1"), fpipe.cut(record_of(width=5), at="2"), stages[:])
    assert len({one, again, stages, fpipe.cut(again, at="2")}) == 2


def test_records_and_stages_say_how_they_were_made():
    record = record_of()
    assert repr(record) == "capture(Sequential, inputs[0]: float32[2, 3], targets: float32[2, 1], loss=mse_loss)"
    assert repr(fpipe.cut(record, at="2")) == f"cut({record!r}, at=['2'])"
    evaluation = fpipe.capture(nn.Linear(WIDTH, 1), example=(torch.ones(2, WIDTH),))
    assert repr(evaluation) == "capture(Linear, inputs[0]: float32[2, 3])"
