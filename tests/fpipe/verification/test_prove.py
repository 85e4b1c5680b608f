# SPDX-License-Identifier: Apache-2.0
"""A proof says that a step is the same expression as on one device, finds what equal bits hide, and is never wrong."""

import copy
from dataclasses import dataclass

import optree
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe
from benchmarks.common.mixtures import Mixture
from fpipe.stages.stage import ModelStage
from fpipe.streams.versions import Versions
from fpipe.tensors.tree import same_bits
from fpipe.verification.expressions import Expressions
from schedules import (
    ProgramError,
    dualpipe,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    recompute,
    seq_1f1b,
    split_backward,
    zb_h1,
    zb_v,
)
from tests.common.cases import BACKWARDS, WIDTH, WORDS, cross_entropy, mse
from tests.common.comparison import assert_same
from tests.common.random_models import case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import build, run, run_reference
from tests.common.sizes import few, sampled
from tests.common.sliced_models import LanguageModel, word_loss
from tests.common.zoo import ZOO

SCHEDULES = {
    how.factory.__name__: how
    for how in (one_f_one_b(2, 4), zb_h1(4, 4), zb_v(2, 4), dualpipe(2, 4), recompute(gpipe(2, 4)))
}


def prove(name, how, seed=3, optimizer=None, **options):
    pipe, model, inputs, targets = build(ZOO[name], how, 8, capture="trace", **options)
    return fpipe.prove(pipe, model, inputs, targets, seed=seed, optimizer=optimizer)


@sampled(8)
@pytest.mark.parametrize("backward", ["graph", "autograd"])
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_proved(name, how, backward):
    try:
        found = prove(name, SCHEDULES[how], backward=backward)
    except fpipe.CutError:
        pytest.skip("the schedule has replicas, and the model modifies buffers")
    assert found.unproved == ()
    assert "loss" in found.reference
    assert (found.eager == ()) == ZOO[name].random


def test_a_proof_is_a_page():
    found = prove("mlp", one_f_one_b(2, 4))
    page = str(found)
    assert found.is_complete
    assert page.startswith(
        "10 results of a step equal those of the captured model on one device, for every input\n10 of "
    )
    assert "assumed:\n- operators depend only on their arguments" in page
    assert "it draws random numbers" in str(prove("dropping", one_f_one_b(2, 4)))


MESHES = {
    "replicas": ({"dp": 3}, {"dp": "dp"}),
    "shards": ({"fsdp": 2}, {"shard": "fsdp"}),
    "both": ({"dp": 2, "fsdp": 2}, {"dp": "dp", "shard": "fsdp"}),
    "gathered again": ({"dp": 2, "fsdp": 2}, {"dp": "dp", "shard": fpipe.Sharded("fsdp", gathered=1)}),
}


@sampled(4)
@pytest.mark.parametrize("how", [one_f_one_b(2, 2), zb_h1(2, 2), zb_v(2, 2)], ids=["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "chained", "skips", "strides", "mixed_precision"])
def test_a_mesh_is_proved(name, mesh, how):
    sizes, roles = MESHES[mesh]
    place = fpipe.Place(mesh={"pp": how.ranks, **sizes}, **roles)
    pipe, model, inputs, targets = build(ZOO[name], how, 24, capture="trace", place=place)
    found = fpipe.prove(pipe, model, inputs, targets)
    assert found.unproved == ()
    assert {f"gradient {name}" for name, p in model.named_parameters() if p.requires_grad} <= {*found.reference}


OPTIMIZERS = {
    "adamw": lambda: fpipe.optimizer(torch.optim.AdamW, lr=0.125, groups={"*.bias": {"weight_decay": 0.0}}),
    "sgd": lambda: fpipe.optimizer(torch.optim.SGD, lr=0.125, momentum=0.5),
}


@sampled(4)
@pytest.mark.parametrize("adam", OPTIMIZERS)
@pytest.mark.parametrize("how", [one_f_one_b(2, 4), zb_h1(4, 4), dualpipe(2, 4)], ids=["1f1b", "zb_h1", "dualpipe"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "chained", "normalised", "frozen_below", "unused", "gpt_dropout"])
def test_updates_are_proved(name, how, adam):
    try:
        found = prove(name, how, optimizer=OPTIMIZERS[adam]())
    except fpipe.CutError:
        pytest.skip("the schedule has replicas, and the model modifies buffers")
    assert found.unproved == ()
    assert [one for one in found.reference if one.startswith("parameter ") and one.endswith(" after step 2")]
    assert [one for one in found.reference if one.startswith("state ") and one.endswith(" after step 2")]


def test_updates_of_shards_are_not_proved():
    sizes, roles = MESHES["shards"]
    place = fpipe.Place(mesh={"pp": 2, **sizes}, **roles)
    pipe, model, inputs, targets = build(ZOO["mlp"], gpipe(2, 2), 8, place=place)
    with pytest.raises(fpipe.InputError, match="optimizer: got one for parameters in 2 shards"):
        fpipe.prove(pipe, model, inputs, targets, optimizer=OPTIMIZERS["sgd"]())


STREAMS = {
    "pipedream": ("mlp", pipedream(2, 1)),
    "2bw": ("gpt", pipedream_2bw(2, 4, accumulate=4)),
    "buffers": ("normalised", pipedream(4, 1)),
    "random": ("dropping", pipedream_2bw(2, 2, accumulate=2)),
    "tied": ("tied_sequence", pipedream(2, 1)),
}


def prove_stream(name):
    model, how = STREAMS[name]
    return prove(model, how, optimizer=OPTIMIZERS["sgd"]())


@sampled(3)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_proved(name):
    found = prove_stream(name)
    assert found.unproved == ()
    assert {"loss of batch 0", "loss of batch 3"} <= {*found.reference}
    assert [one for one in found.reference if one.startswith("parameter ") and one.endswith(" at the end")]
    assert [one for one in found.reference if one.startswith("state momentum_buffer of ")]
    assert "not compared: it updates without delay" in str(found)


def take_oldest(self, s):
    """The oldest weights that are kept, where PipeDream takes the newest."""
    return min(self.kept[s])


def take_newest(self, s):
    """The newest weights, where 2BW takes those before."""
    return self.made[s]


@pytest.mark.parametrize(("name", "fault"), [("pipedream", take_oldest), ("random", take_newest)])
def test_other_versions_of_weights_are_not_proved(name, fault, monkeypatch):
    take = Versions.take

    def take_wrong(self, s, slot):
        take(self, s, slot)
        return self._leaves(s, fault(self, s), 0, self.cuts[slot])

    monkeypatch.setattr(Versions, "take", take_wrong)
    found = prove_stream(name)
    assert not found.is_complete
    assert all(one.place.startswith("rank ") for one in found.unproved)


SLICED = {
    "seq_1f1b": seq_1f1b(2, 2, slices=2),
    "split": split_backward(seq_1f1b(2, 2, slices=3)),
    "recomputed": recompute(seq_1f1b(2, 2, slices=2)),
}


def prove_slices(how, tied=False):
    torch.manual_seed(0)
    model, (x, y) = LanguageModel(tied=tied, blocks=2), torch.randint(16, (2, 4, 6))
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, schedule=how)
    return fpipe.prove(pipe, model, (x,), y)


@sampled(2)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("how", SLICED)
def test_slices_are_proved_against_the_loop_over_slices(how, tied):
    found = prove_slices(SLICED[how], tied)
    assert found.unproved == found.eager == ()
    assert len(found.reference) >= 25
    assert "not compared: it runs whole sequences" in str(found)


def test_a_fault_in_a_slice_is_not_proved(monkeypatch):
    where, change = FAULTS["weights times 1"]
    monkeypatch.setattr(ModelStage, where, change(getattr(ModelStage, where)))
    assert not prove_slices(SLICED["seq_1f1b"]).is_complete


class Attending(nn.Module):
    def forward(self, x):
        rows = x[:, None]
        return nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.0)[:, 0]


def test_attention_without_dropout_draws_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), Attending(), nn.Linear(4, 4))
    x, y = torch.randn(2, 4, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=one_f_one_b(2, 4), cuts=["2"])
    assert fpipe.prove(pipe, model, (x,), y, seed=1).is_complete


@dataclass
class Pair:
    a: Tensor
    b: Tensor


class Doubling(nn.Module):
    """The double of one tensor and another one: by a product, or by a sum of the same bits."""

    def __init__(self, double):
        super().__init__()
        self.double, self.first, self.last = double, nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, pair):
        return self.last(torch.tanh(self.first(self.double(pair.a) + pair.b)))


def test_tensors_of_a_dataclass_are_inputs():
    model, other = Doubling(lambda a: a * 2), Doubling(lambda a: a + a)
    other.load_state_dict(model.state_dict())
    pair = Pair(*torch.randn(2, 4, 4))
    pipe = fpipe.pipeline(model, example=(pair,), loss=torch.mean, schedule=gpipe(2, 2))
    assert fpipe.prove(pipe, model, (pair,)).is_complete
    assert fpipe.verify(pipe, other, (pair,)).eager
    assert {one.against for one in fpipe.prove(pipe, other, (pair,)).unproved} == {"the model run eagerly"}


# ------------------------------------------------------ Faults in stages: bits that are right by chance are not proved


def exchange_biases(forward):
    """Give the two equal biases of a stage to each other's layer."""

    def wrong(self):
        run = forward.func(self)
        names = list(self.parameters)
        if not {"0.bias", "2.bias"} <= {*names}:
            return run
        a, b = names.index("0.bias"), names.index("2.bias")

        def exchanged(params, buffers, inputs, key):
            given = list(params)
            given[a], given[b] = given[b], given[a]
            return run(tuple(given), buffers, inputs, key)

        return exchanged

    return wrong


def test_what_is_zero_on_both_sides_is_told_apart(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].bias)
    x, y = torch.randn(2, 6, 4)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=gpipe(2, 3),
        cuts=["4"],
        gradients=fpipe.Gradients(backward="autograd"),
    )
    assert fpipe.prove(pipe, model, (x,), y).is_complete
    monkeypatch.setattr(ModelStage, "forward", property(exchange_biases(ModelStage.forward)))
    pipe = pipe.rebuilt(model)
    out = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)[0]
    assert same_bits(out.loss, fpipe.reference(pipe)(*pipe.init(model), (x,), y)[0].loss)
    found = fpipe.prove(pipe, model, (x,), y)
    assert ("loss", "the model run eagerly") in {one[:2] for one in found.unproved}
    assert "an input" in str(found)


def after(change):
    """A fault in what a function of a stage returns."""

    def fault(function):
        def wrong(self):
            run = function.func(self)
            return lambda *given: change(self, given, run(*given))

        return property(wrong)

    return fault


def before(change):
    """A fault in what a function of a stage is passed."""

    def fault(function):
        def wrong(self):
            run = function.func(self)
            return lambda *given: run(*change(self, given))

        return property(wrong)

    return fault


def each(function, tensors):
    return tuple(None if one is None else function(one) for one in tensors)


def forward(change):
    """A fault in what the forward of a stage returns."""
    return "forward", after(lambda stage, given, made: change(given, *made))


def backward(change):
    """A fault in what the backward of a stage returns; that of the whole model has no sum so far."""
    return "backward", after(lambda stage, given, made: change(given, *made) if len(given) > 2 else made)


def cotangents(change):
    """A fault in the cotangents that a stage is passed."""
    return "backward", before(
        lambda stage, given: (given[0], each(change, given[1]), *given[2:]) if given[2:] else given
    )


def begin_with_zeros(stage, given):
    """Begin a sum with 0, to which the first gradient is added."""
    return (*given[:2], given[2] or tuple(spec.allocate().zero_() for spec in stage.totals)) if given[2:] else given


def copy_weights(stage, given):
    """Use weights that something was done to."""
    made = each(lambda x: (x.detach() * 1).requires_grad_(x.requires_grad), given[0])
    return made, *given[1:]


def move_key(stage, given):
    """Draw other numbers on the second stage."""
    return *given[:3], given[3] + 1 if stage.index else given[3]


def round_trip(x):
    """Convert there and back."""
    return x.double().float()


FAULTS = {
    "an output to which 0 is added": forward(lambda given, out, *others: (each(lambda x: x + 0, out), *others)),
    "an output times 1": forward(lambda given, out, *others: (each(lambda x: x * 1, out), *others)),
    "an output that is converted": forward(lambda given, out, *others: (each(round_trip, out), *others)),
    "a buffer that is not passed on": forward(lambda given, out, buffers, kept: (out, given[1], kept)),
    "another key": ("forward", before(move_key)),
    "weights times 1": ("forward", before(copy_weights)),
    "a cotangent that is lost": cotangents(torch.zeros_like),
    "a cotangent times 1": cotangents(lambda x: x * 1),
    "a cotangent that is converted": cotangents(round_trip),
    "a gradient that is doubled": backward(lambda given, pulled, grads: (pulled, each(lambda x: x * 2, grads))),
    "a gradient from which 0 is taken": backward(lambda given, pulled, grads: (pulled, each(lambda x: x - 0, grads))),
    "a sum that begins with 0": ("backward", before(begin_with_zeros)),
}


@sampled(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_not_proved(fault, monkeypatch):
    name = {"a buffer that is not passed on": "normalised", "another key": "dropping"}.get(fault, "mlp")
    where, change = FAULTS[fault]
    monkeypatch.setattr(ModelStage, where, change(getattr(ModelStage, where)))
    found = prove(name, one_f_one_b(2, 4), backward="autograd")
    assert not found.is_complete
    assert all(why for *_, why in found.unproved)


# ------------------------------------------------- Never wrong: equal expressions have equal bits, for any other values

SHAPE = (3, 4)
UNARY = {
    "neg": torch.neg,
    "tanh": torch.tanh,
    "clone": torch.clone,
    "half": lambda x: x * 0.5,
    "turn": lambda x: x.t().contiguous().t(),
    "sum": lambda x: x.sum(0, keepdim=True).expand(SHAPE),
    "first": lambda x: torch.cat([x[:1], x[1:]]),
    "last": lambda x: torch.cat([x[1:], x[:1]]),
    "double": lambda x: x.double().float(),
    "power": lambda x: x.pow(1),
    "fill": lambda x: torch.full_like(x, 2.0),
}
BINARY = {
    "pieces": lambda x, y: torch.cat([x[:1] + y[:1], x[1:] + y[1:]]),
    "crossed": lambda x, y: torch.cat([x[1:] + y[:2], x[:1] + y[2:]]),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
}
IN_PLACE = {
    "add": lambda x, y: x.add_(y),
    "copy": lambda x, y: x.copy_(y),
    "row": lambda x, y: x[0].copy_(y[1]),
    "column": lambda x, y: x[:, 1].mul_(y[:, 2]),
    "zero": lambda x, y: x[:, ::2].zero_(),
    "corner": lambda x, y: x[1:, 1:].add_(y[:2, :3]),
}

steps = st.lists(
    st.tuples(
        st.sampled_from(
            [("1", one) for one in UNARY] + [("2", one) for one in BINARY] + [("!", one) for one in IN_PLACE]
        ),
        st.integers(0, 30),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
)


def interpret(program, values):
    """Run a program on a pool of tensors; return what the pool holds in the end."""
    pool = [one.clone() for one in values]
    for (kind, name), a, b in program:
        x, y = pool[a % len(pool)], pool[b % len(pool)]
        if kind == "1":
            pool.append(UNARY[name](x))
        elif kind == "2":
            pool.append(BINARY[name](x, y))
        elif x.stride(0):
            IN_PLACE[name](x, y.clone())
    return pool


@settings(max_examples=few(300), deadline=None)
@given(steps, steps, st.integers(0, 2**31))
def test_equal_expressions_have_equal_bits(one, other, seed):
    torch.manual_seed(seed)
    inputs, others = torch.randn(2, 3, *SHAPE).unbind()
    ledger = Expressions()
    with ledger:
        ledger.declare(inputs.unbind())
        numbers = [ledger.value(x) for program in (one, other) for x in interpret(program, inputs.unbind())]
    values = [x for program in (one, other) for x in interpret(program, others.unbind())]
    seen = {}
    for number, value in zip(numbers, values, strict=True):
        assert same_bits(seen.setdefault(number, value), value)


@settings(max_examples=few(60), deadline=None)
@given(steps)
def test_a_program_has_the_expressions_of_itself(program):
    values = torch.randn(3, *SHAPE).unbind()
    ledger = Expressions()
    with ledger:
        first, second = ([ledger.value(x) for x in interpret(program, values)] for _ in range(2))
    assert first == second


def test_lemmas_are_those_that_are_stated():
    x, y = torch.randn(2, *SHAPE).unbind()
    alike = [
        (lambda: x + y, lambda: y + x),
        (lambda: x.sum(0), lambda: x.sum(0, keepdim=True).squeeze(0)),
        (lambda: x / 4, lambda: x / torch.tensor(4.0)),
        (lambda: x * 2, lambda: torch.mul(x, 2.0, out=torch.empty_like(x))),
        (lambda: x.add(y), lambda: x.clone().add_(y)),
        (x.clone, lambda: x.pow(1)),
        (lambda: -x + -y, lambda: torch.cat([(-x)[:1] + (-y)[:1], (-x)[1:] + (-y)[1:]])),
        (lambda: -x + -y, lambda: ((-x).flatten() + (-y).flatten()).view(SHAPE)),
        (lambda: x * 3, lambda: copy.deepcopy(x * 3)),
    ]
    different = [
        lambda: x - y,
        lambda: y - x,
        lambda: x + y + 0,
        lambda: (x + y) * 1,
        lambda: x.sum(1),
        lambda: x * 2.5,
        lambda: torch.cat([(-x)[:1] + (-y)[1:2], (-x)[1:] + (-y)[1:]]),
        lambda: (-x)[1:] + (-y)[:2],
        lambda: (-x)[:2] + (-y)[1:],
    ]
    ids = torch.arange(3)
    different += [lambda k=k: ids + k for k in (2**53, 2**53 + 1)]
    different += [lambda k=k: ids * torch.tensor(k) for k in (2**53, 2**53 + 1)]
    ledger = Expressions()
    with ledger:
        ledger.declare([x, y, ids])
        found = [(ledger.value(form()), ledger.value(other())) for form, other in alike]
        numbers = {ledger.value(one()) for one in different}
    assert all(mine == theirs for mine, theirs in found)
    assert len(numbers) == len(different)
    assert not numbers & {mine for mine, _ in found}


@settings(max_examples=few(24), deadline=None)
@given(descriptions(), st.data())
def test_what_is_proved_of_drawn_pipelines_has_equal_bits(description, data):
    """Models, cuts and schedules at random: where a proof is complete, a step has the bits of one device."""
    names, microbatches = places(description), data.draw(st.integers(1, 3))
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules_of(len(cuts) + 1, microbatches))
    backward = data.draw(st.sampled_from(BACKWARDS))
    case = case_of(description)
    built = build_unless_refused(description, case, how, 3 * microbatches, cuts, capture="trace", backward=backward)
    if built is None:
        return
    seed = data.draw(st.integers(0, 9)) if case.random else None
    try:
        found = fpipe.prove(*built, seed=seed)
    except RuntimeError as error:  # the model's own backward fails
        assume("modified by an inplace operation" not in str(error))
        raise
    event(f"proved: {found.is_complete}")
    if found.is_complete:
        assert_same(run(*built, seed=seed), run_reference(*built, seed=seed))


# ----------------------------------------------------------------------------------------------------- Without values


def lose_values(leaf):
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def without_values(model):
    """Return a copy on meta, with the same tensors tied."""
    tensors = [*model.parameters(), *model.buffers()]
    held = {id(one): one.detach().to("meta").requires_grad_(one.requires_grad) for one in tensors}
    parameters = {id(p): nn.Parameter(held[id(p)], p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, {**held, **parameters})


@sampled(4)
@pytest.mark.parametrize("backward", ["graph", "autograd"])
@pytest.mark.parametrize("name", ZOO)
def test_a_model_on_meta_is_proved_like_one_with_values(name, backward):
    case = ZOO[name]
    pipe, model, inputs, targets = build(case, zb_h1(2, 4), 8, capture="trace", backward=backward)
    wanted = fpipe.prove(pipe, model, inputs, targets, seed=3)
    shadow = without_values(model)
    given = [optree.tree_map(lose_values, tree) for tree in (inputs, targets)]
    pipe = fpipe.pipeline(
        shadow,
        example=given[0],
        targets=given[1],
        loss=case.loss,
        schedule=zb_h1(2, 4),
        cuts=case.at(2),
        gradients=fpipe.Gradients(backward=backward),
    )
    found = fpipe.prove(pipe, shadow, *given, seed=3)
    assert (found.reference, found.eager, found.unproved) == (wanted.reference, wanted.eager, ())
    assert all(p.is_meta for p in shadow.parameters())


def test_few_rows_prove_the_stages_and_formulas_the_program(monkeypatch):
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(2**20, 2**20) for _ in range(4)]), torch.empty(64, 2**20)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=zb_h1(4, 64))
    found = fpipe.prove(pipe, model, (x[:2],))
    assert found.is_complete
    assert found.microbatches == (2, 64)
    assert "in 2 microbatches; formulas show the same for all 64 microbatches" in str(found)
    monkeypatch.setattr(type(pipe.schedule), "actions", skipping(type(pipe.schedule).actions))
    with pytest.raises(ProgramError):
        fpipe.prove(pipe, model, (x[:2],))


@sampled(1)
@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_a_mixture_of_experts_that_asks_for_no_value_is_proved(where):
    sizes = {
        "words": WORDS,
        "width": 8,
        "layers": 4,
        "dense": 1,
        "widest": 16,
        "heads": 2,
        "head": 4,
    }
    with torch.device(where):
        model = Mixture(**sizes, latents=(4, 4), inner=8, experts=4, chosen=2, capacity=5)
        x, y = torch.zeros(2, 8, 6, dtype=torch.int64)
    if where == "cpu":
        x, y = torch.randint(WORDS, (2, 8, 6))
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=cross_entropy, schedule=zb_h1(4, 8))
    found = fpipe.prove(pipe, model, (x[:2],), y[:2])
    assert found.unproved == ()
    assert len(found.eager) == 2 + len([*model.parameters()])


def skipping(function):
    """A schedule that leaves out a weight gradient of a late microbatch."""
    return lambda self, rank: (one for one in function(self, rank) if str(one) != "1W40")


@sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_not_proved_without_values_either(fault, monkeypatch):
    name = {"a buffer that is not passed on": "normalised", "another key": "dropping"}.get(fault, "mlp")
    where, change = FAULTS[fault]
    case = ZOO[name]
    _, model, inputs, targets = build(case, one_f_one_b(2, 4), 8, capture="trace")
    given = [optree.tree_map(lose_values, tree) for tree in (inputs, targets)]
    shadow = without_values(model)
    how = {"loss": case.loss, "schedule": one_f_one_b(2, 4), "cuts": case.at(2)}
    how["gradients"] = fpipe.Gradients(backward="autograd")
    monkeypatch.setattr(ModelStage, where, change(getattr(ModelStage, where)))
    pipe = fpipe.pipeline(shadow, example=given[0], targets=given[1], **how)
    assert not fpipe.prove(pipe, shadow, *given, seed=3).is_complete


# --------------------------------------------------------------------------------------------------------- Refusals


class Asking(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_what_cannot_be_proved_is_refused():
    pipe, model, inputs, targets = build(
        ZOO["mlp"], one_f_one_b(2, 4), 16, capture="trace", place=fpipe.Place(mesh={"pp": 2, "dp": 2}, dp="dp")
    )
    pipe.ranks.processes = (0, 1)
    with pytest.raises(fpipe.InputError, match=r"pipe: got one on 2 processes for each rank, expected one: a process"):
        fpipe.prove(pipe, model, inputs, targets)
    pipe, model, inputs, targets = build(ZOO["dropping"], one_f_one_b(2, 4), 8, capture="trace")
    with pytest.raises(fpipe.InputError, match="seed: got none"):
        fpipe.prove(pipe, model, inputs, targets)
    with torch.device("meta"):
        model, x = Asking(WIDTH, WIDTH), torch.empty(4, WIDTH)
    how = {"recording": fpipe.Recording(unsplittable=Asking), "schedule": gpipe(1, 2)}
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, **how)
    with pytest.raises(fpipe.InputError, match="model: got one on meta that asks for the values of a tensor"):
        fpipe.prove(pipe, model, (x,))
    pipe, model, inputs, targets = build(ZOO["mlp"], pipedream(2, 1), 2, capture="trace")
    with pytest.raises(fpipe.InputError, match=r"optimizer: got none for pipedream\(ranks=2, microbatches=1\), which"):
        fpipe.prove(pipe, model, inputs, targets)
