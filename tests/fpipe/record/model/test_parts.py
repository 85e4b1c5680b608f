# SPDX-License-Identifier: Apache-2.0
"""Modules as a graph: what a graph computes, how it is cut, and what it says of graphs that are none."""

import copy
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe import ModuleGraph, Part
from schedules import gpipe, interleaved_1f1b, one_f_one_b, split_backward
from tests.common.cases import WIDTH, Case, cross_entropy, mse, rows_of, words
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run, run_reference
from tests.common.sizes import few, in_turn, sampled
from tests.common.unusual_models import Negated

FRONTS = ["modules", "trace", "export", "fx", "dynamo"]


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Tower(nn.Module):
    """Returns a tree, and does what no graph of operators keeps."""

    def __init__(self, odd=False):
        super().__init__()
        self.linear, self.odd = linear(), odd

    def forward(self, x):
        x = self.linear(x).tanh()
        return {"features": Negated.apply(x) if self.odd else x, "pooled": (x.mean(-1, keepdim=True), None), "count": 3}


def scaled(x, factors):
    return x * factors[0] + factors[1][0]


def two_towers(odd=False):
    return ModuleGraph(
        {
            "text": Part(Tower(odd), "tokens"),
            "image": Part(Tower(odd), "pixels"),
            "both": Part(torch.add, "text['features']", "image['features']", alpha=2),
            "head": Part(linear(), "both"),
            "scaled": Part(
                lambda x, weights: x * weights[0] + weights[1][0], "head", ["image['pooled'][0]", ("both",)]
            ),
        },
        inputs=["tokens", "pixels"],
        outputs={"logits": "scaled", "more": ["text['pooled'][0]", "text['count']"]},
    )


def branch():
    """Listed in another order than it runs; one input goes far."""
    return ModuleGraph(
        {
            "joined": Part(lambda a, b, x: a * b + x, "left", "right", x="x"),
            "right": Part(nn.Sequential(linear(), nn.Tanh()), "stem"),
            "left": Part(linear(), "stem"),
            "stem": Part(linear(), "x"),
        },
        inputs=["x"],
        outputs="joined",
    )


class Decoder(nn.Module):
    """Attends to what an encoder made."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x, memory, mask=None):
        return x + self.attention(x, memory, memory, attn_mask=mask, need_weights=False)[0]


def encoder_decoder():
    """One embedding in three places: both ends of two stacks."""
    embedding, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    head.weight = embedding.weight
    return ModuleGraph(
        {
            "source": Part(embedding, "ids"),
            "encoder": Part(nn.Sequential(linear(), nn.ReLU(), linear()), "source"),
            "target": Part(embedding, "ids"),
            "first": Part(Decoder(), "target", memory="encoder"),
            "second": Part(Decoder(), "first", memory="encoder"),
            "head": Part(head, "second"),
        },
        inputs=["ids"],
        outputs="head",
    )


def towers_batch(rows):
    return {"tokens": torch.randn(rows, WIDTH), "pixels": torch.randn(rows, WIDTH)}, torch.randn(rows, WIDTH)


def logits_loss(outputs, targets):
    return mse(outputs["logits"], targets) + outputs["more"][0].mean() * outputs["more"][1]


CASES = {
    "two towers": Case(two_towers, towers_batch, logits_loss, ("image", "both", "head")),
    "branch": Case(branch, rows_of(), mse, ("right", "left", "joined")),
    "encoder-decoder": Case(encoder_decoder, words, cross_entropy, ("encoder", "first", "second")),
}
SCHEDULES = [split_backward(one_f_one_b(ranks=4, microbatches=3)), interleaved_1f1b(ranks=2, microbatches=4, chunks=2)]


@sampled(1)
@pytest.mark.parametrize(("what", "capture"), in_turn(CASES, FRONTS))
def test_a_module_graph_is_exact(what, capture):
    one = CASES[what]
    for how in SCHEDULES if capture in ("modules", "trace") else SCHEDULES[:1]:
        built = pipe, model, inputs, targets = build(one, how, 2 * how.microbatches, capture=capture)
        got = run(*built)
        assert_same(got, loop(model, one.loss, inputs, targets, how.microbatches))
        assert_same(got, run_reference(*built))
    assert fpipe.verify(pipe, model, inputs, targets).eager


class Pair(NamedTuple):
    """Two of something."""

    first: torch.Tensor
    second: list[torch.Tensor]


def test_a_path_leads_through_attributes_keys_and_indices():
    model = ModuleGraph(
        {
            "pair": Part(lambda x: Pair(x, [x + 1, {"a b": x + 2}]), "x"),
            "sum": Part(lambda *args: sum(args), "pair.first", "pair.second[-2]", "pair.second[1]['a b']", "pair[0]"),
        },
        inputs="x",
        outputs="sum",
    )
    assert torch.equal(model(torch.zeros(2)), torch.full((2,), 3.0))


def edges(pipe):
    return set(pipe.training.assembly.graph.values)


def test_values_go_from_part_to_part_directly():
    pipe, *_ = build(CASES["two towers"], SCHEDULES[0], 6, capture="modules")
    assert edges(pipe) == {(0, 2), (1, 2), (2, 3), (1, 3), (0, 3)}
    pipe, *_ = build(CASES["branch"], SCHEDULES[0], 6, capture="modules")
    assert edges(pipe) == {(0, 1), (1, 2), (1, 3), (2, 3)}, "from user to user"


@sampled(1)
@pytest.mark.parametrize("capture", ["modules", "trace"])
def test_parts_may_do_what_a_graph_of_operators_loses(capture):
    one = Case(lambda: two_towers(odd=True), towers_batch, logits_loss, ("image", "both", "head"))
    built = _, model, inputs, targets = build(one, SCHEDULES[0], 6, capture=capture)
    got = run(*built)
    assert_same(got, loop(model, one.loss, inputs, targets, 3))
    plain = build(CASES["two towers"], SCHEDULES[0], 6, capture=capture)
    assert not torch.equal(got.grads["text.linear.weight"], run(*plain).grads["text.linear.weight"])
    with pytest.raises(fpipe.CaptureError, match=r"module text .*custom autograd function Negated"):
        build(one, SCHEDULES[0], 6, capture="export")


def test_parts_are_cut_inside_except_by_the_front_end_for_modules():
    one = CASES["encoder-decoder"]
    cuts = ("encoder", "encoder.2", "second")
    with pytest.raises(fpipe.CutError, match="a part, which is never cut"):
        build(one, SCHEDULES[0], 6, cuts, "modules")
    built = _, model, inputs, targets = build(one, SCHEDULES[0], 6, cuts, "trace")
    assert_same(run(*built), loop(model, one.loss, inputs, targets, 3))


def test_a_module_in_two_parts_can_be_cut_at_either():
    built = _, model, inputs, targets = build(
        CASES["encoder-decoder"], SCHEDULES[0], 6, ("encoder", "target", "second"), "modules"
    )
    assert_same(run(*built), loop(model, cross_entropy, inputs, targets, 3))


def test_a_module_graph_is_a_module():
    model = branch()
    x = torch.randn(2, WIDTH)
    assert list(model._modules) == ["stem", "right", "left", "joined"], "each after what it reads, otherwise as listed"
    assert torch.equal(model(x), model(x=x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert "joined = joined(left, right, x=x)" in str(model)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        model()


def graph(parts, inputs=("x",), outputs="a"):
    return lambda: ModuleGraph(
        {name: Part(lambda *args: args[0], *reads) for name, reads in parts.items()}, inputs=inputs, outputs=outputs
    )


WRONG = {
    "nothing": (graph({}), "parts: got none"),
    "cycle": (
        graph({"a": ["b"], "b": ["x", "d"], "c": ["a"], "d": ["c[0]"]}, outputs="d"),
        r"got a cycle, (a -> c -> d -> b -> a|.*), expected an order",
    ),
    "cycle beside": (graph({"a": ["x", "c"], "b": ["c"], "c": ["b"]}), r"got a cycle, (b -> c -> b|c -> b -> c), "),
    "self-reference": (graph({"a": ["x", "a"]}), "got a cycle, a -> a,"),
    "unknown": (graph({"a": ["x"], "mask": ["a", "mesk"]}, outputs="mask"), "part 'mask': got 'mesk'.*Did you mean"),
    "unknown output": (graph({"a": ["x"]}, outputs=["a", "b"]), "outputs: got 'b'"),
    "unused part": (graph({"a": ["x"], "b": ["a"]}), r"got \['b'\], which neither"),
    "unused input": (graph({"a": ["x"]}, inputs=("x", "y")), r"got \['y'\], which neither"),
    "taken": (graph({"a": ["x"], "x": ["a"]}), "the name 'x': got it twice"),
    "input twice": (graph({"a": ["x"]}, inputs=("x", "x")), "the name 'x': got it twice"),
    "no identifier": (graph({"a.b": ["x"]}), "the name 'a.b': got a name that is not an identifier"),
    "a module's own name": (graph({"forward": ["x"]}, outputs="forward"), "a name that modules use themselves"),
    "no way": (graph({"a": ["x + 1"]}), "part 'a': got 'x \\+ 1', expected a name, optionally followed"),
    "a call": (graph({"a": ["x.mean()"]}), "part 'a': got 'x.mean\\(\\)', expected a name"),
    "no part": (lambda: ModuleGraph({"a": nn.ReLU()}, inputs="x", outputs="a"), "part 'a': got ReLU, expected a Part"),
    "nothing to call": (lambda: Part("a", "x"), "a part: got 'a', expected a module or a function"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_module_graphs_are_refused(what):
    make, message = WRONG[what]
    with pytest.raises(fpipe.GraphError, match=message):
        make()


@st.composite
def graphs(draw):
    """Random graphs of linear layers, of which each reads some before it; listed in any order."""
    count = draw(st.integers(2, 6))
    reads = {}
    for k in range(count):
        reads[f"p{k}"] = draw(st.sets(st.sampled_from(["x", *reads]), min_size=1))
    used = {name for names in reads.values() for name in names}
    ends = [name for name in reads if name not in used] + ([] if "x" in used else ["x"])
    return {name: sorted(reads[name]) for name in draw(st.permutations(sorted(reads)))}, sorted(ends)


class Mixed(nn.Module):
    """Adds what it is given, scaled, and returns it with something else."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, *values):
        return self.linear(sum(values) / len(values)).tanh(), len(values)


@settings(max_examples=few(12))
@given(found=graphs(), microbatches=st.integers(1, 4), capture=st.sampled_from(["modules", "trace"]), data=st.data())
def test_any_module_graph_is_exact(found, microbatches, capture, data):
    reads, ends = found

    def make():
        named = {name: [one if one == "x" else f"{one}[0]" for one in names] for name, names in reads.items()}
        return ModuleGraph(
            {name: Part(Mixed(), *names) for name, names in named.items()},
            inputs=["x"],
            outputs=[one if one == "x" else f"{one}[0]" for one in ends],
        )

    def loss(outputs, targets):
        return sum(mse(one, targets) for one in outputs)

    names = list(make()._modules)
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(names[1:]), min_size=1)), key=names.index))
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=microbatches)
    one = Case(make, rows_of(), loss, cuts)
    built = _, model, inputs, targets = build(one, how, 2 * microbatches, cuts, capture)
    assert_same(run(*built), loop(model, loss, inputs, targets, microbatches))


def test_the_front_end_for_modules_needs_a_sequence_or_a_module_graph():
    with pytest.raises(fpipe.CaptureError, match=r"got Linear, expected .*a ModuleGraph"):
        build(Case(linear, rows_of(), mse, ()), gpipe(ranks=1, microbatches=1), 2, (), "modules")
