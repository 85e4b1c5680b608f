# SPDX-License-Identifier: Apache-2.0
"""Tied parameters, by `exact` and by `sum`: what is computed, what travels, and what is refused.

By `sum` a pipeline computes what a model with a copy of the parameter in every stage computes, the gradients of which
are added in stage order: so says a plain PyTorch loop over such a model (`models.loop_untied`).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import chimera, dualpipe, gpipe, mirror, one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.layers import linears
from tests.common.loops import loop, loop_as_stated, loop_untied
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES, descending, linear_fill_drain, looped_fill_drain, vee_fill_drain
from tests.common.sizes import covering, few, in_turn, sampled
from tests.common.zoo import ZOO

USES = {
    "gpt": {0: ("embed.weight",), 3: ("head.weight",)},
    "tied_sequence": {0: ("0.weight",), 3: ("3.weight",)},
    "chained": {0: ("a.weight",), 2: ("c.weight",), 3: ("d.weight",)},
    "one_weight": {0: ("0.weight",), 1: ("2.weight",), 2: ("4.weight",), 3: ("6.weight",)},
}
HOW = one_f_one_b(ranks=4, microbatches=3)


def program(pipe):
    return [action for rank in range(pipe.schedule.ranks) for action in pipe.program.actions(rank)]


def require_every_part(pipe):
    """Every rank computes or is sent, once, every part of the gradient of every parameter that it holds."""
    stages, placement = pipe.stages, pipe.schedule.placement
    for rank in range(pipe.schedule.ranks):
        held = placement.stages_on(rank)
        received = [a for a in pipe.program.actions(rank) if a.kind == "RECV_G" and a.peer != a.stage]
        got = [(s, name) for s in held for name in stages[s].grads]
        got += [(a.peer, name) for a in received for name in stages[a.peer].names_for(a.stage)]
        mine = {name for s in held for name in stages[s].parameters}
        wanted = {(stage.index, name) for stage in stages for name in stage.grads if name in mine}
        assert set(got) == wanted
        assert len(got) == len(wanted) or placement.mirrors, "once, where there are no replicas"


def require_sum(case, uses, how, **options):
    """Summed over stages: the plain loop with copies, the reference, and nearly what one device computes."""
    rows = 2 * how.microbatches
    built = pipe, model, inputs, targets = build(case, how, rows, tied="sum", **options)
    got = run(*built)
    assert_same(got, loop_untied(pipe, model, case.loss, inputs, targets, uses))
    assert_same(got, run_reference(*built))
    near = loop(model, case.loss, inputs, targets, how.microbatches)
    assert got.grads.keys() == near.grads.keys()
    for name in near.grads:
        torch.testing.assert_close(got.grads[name], near.grads[name])
    return got


# ----------------------------------------------------------------------------------------------------- what is computed


@sampled(2)
@pytest.mark.parametrize(("name", "way"), in_turn(USES, [("one_f_one_b", "trace"), ("split_backward", "export")]))
def test_by_sum_a_tied_parameter_is_a_copy_per_stage(name, way):
    kind, capture = way
    require_sum(ZOO[name], USES[name], SCHEDULES[kind](4, 3), capture=capture)


@sampled(2)
@covering(microbatches=[1, 5], factory=[gpipe, descending, linear_fill_drain, looped_fill_drain, vee_fill_drain])
def test_sums_are_exact_under_schedules_and_placements(factory, microbatches):
    how = factory(2 if "fill" in factory.__name__ else 4, microbatches)
    require_sum(ZOO["one_weight"], USES["one_weight"], how)


def test_uses_within_one_stage_are_not_copied():
    uses = {0: tuple(name for names in USES["chained"].values() for name in names)}
    got = require_sum(ZOO["chained"], uses, gpipe(1, 3))
    assert_same(got, run(*build(ZOO["chained"], gpipe(1, 3), 6)))


def test_each_microbatch_sends_its_own_cotangent_of_a_tied_parameter():
    """Under autograd the parameter is one leaf in all microbatches, whose `.grad` must not add up over them."""
    built = _, model, inputs, targets = build(ZOO["chained"], HOW, 6, backward="autograd")
    assert_same(run(*built), loop(model, mse, inputs, targets, 3))


@sampled(2)
@covering(name=["chained", "one_weight"], how=[dualpipe(4, 5), chimera(4, 4), mirror(one_f_one_b(4, 3))])
def test_replicas_are_summed_first(name, how):
    require_sum(ZOO[name], USES[name], how)


@pytest.mark.parametrize("tied", ["exact", "sum"])
def test_a_parameter_of_the_middle_rank_of_three(tied):
    """It has no replica, and the ranks at both ends hold the parameter too."""

    def tied_ends():
        model = linears(nn.Tanh, nn.Tanh)
        model[2].weight = model[4].weight = model[0].weight
        return model

    case = Case(tied_ends, rows_of(), mse, ("", "", ""))
    how = mirror(one_f_one_b(ranks=3, microbatches=3))
    built = pipe, model, inputs, targets = build(case, how, 12, ("2", "4"), tied=tied)
    uses = {0: ("0.weight",), 1: ("2.weight",), 2: ("4.weight",)}
    got = run(*built)
    assert_same(got, run_reference(*built))
    if tied == "exact":
        assert_same(got, loop_as_stated(pipe, model, mse, inputs, targets))
    else:
        assert_same(got, loop_untied(pipe, model, mse, inputs, targets, uses))
    require_every_part(pipe)


def test_the_order_of_addition_matters():
    """Else the tests above would not see a wrong one."""
    exact, added = (run(*build(ZOO["one_weight"], HOW, 6, tied=tied)) for tied in ("exact", "sum"))
    assert not same_bits(exact.grads["0.weight"], added.grads["0.weight"])
    assert all(same_bits(exact.grads[name], added.grads[name]) for name in exact.grads if name != "0.weight")


@sampled(1)
@covering(name=["gpt_dropout", "normalised", "in_place", "twice", "several", "contexts"], capture=["export", "trace"])
def test_sums_equal_the_reference_in_other_models(name, capture):
    case = ZOO[name]
    seed = 5 if case.random else None
    built = _, model, inputs, targets = build(case, HOW, 6, tied="sum", capture=capture)
    got = run(*built, seed=seed)
    assert_same(got, run_reference(*built, seed=seed))
    if not case.random and name != "twice":
        assert_same(got, loop(model, case.loss, inputs, targets, 3))


class Again(nn.Module):
    """The same module in two stages, checkpointed; or, as a plain model, a second one in the second."""

    def __init__(self, plain=False):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH) if plain else self.a

    def forward(self, x):
        x = self.b(checkpoint(self.a, x, use_reentrant=False).tanh())
        return checkpoint(self.again, x.tanh(), use_reentrant=False)


@pytest.mark.parametrize("kind", ["one_f_one_b", "split_backward"])
def test_a_module_called_in_two_stages(kind):
    case = Case(Again, rows_of(), mse, ("", "", ""))
    how = SCHEDULES[kind](2, 3)
    built = _, model, inputs, targets = build(case, how, 6, ("b",), capture="trace", tied="sum")
    got = run(*built)
    assert_same(got, run_reference(*built))
    plain = Again(plain=True)
    plain.load_state_dict(model.state_dict() | {f"again.{n}": p for n, p in model.a.named_parameters()})
    want = loop(plain, mse, inputs, targets, 3)
    for name in ("a.weight", "a.bias"):
        want.grads[name] = want.grads[name] + want.grads.pop(name.replace("a.", "again."))
    assert_same(got, want)


def layers(groups):
    """Linear layers; those of the same group have the same weight."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in groups])
    for k, group in enumerate(groups):
        model[k][0].weight = model[groups.index(group)][0].weight
    return model


@settings(max_examples=few(8))
@given(data=st.data(), capture=st.sampled_from(["trace", "export", "modules"]), microbatches=st.integers(1, 4))
def test_any_ties_are_exact_wherever_the_model_is_cut(data, capture, microbatches):
    """One group of layers is summed, the others are exact."""
    groups = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    cuts = data.draw(st.sets(st.integers(1, len(groups) - 1), max_size=4).map(sorted))
    chosen = data.draw(st.sampled_from(range(len(groups))))
    case = Case(lambda: layers(groups), rows_of(), mse, ("", "", ""))
    stages = len(cuts) + 1
    folded = [factory(stages // 2, microbatches) for factory in (looped_fill_drain, vee_fill_drain) if stages % 2 == 0]
    linear = [factory(stages, microbatches) for factory in SCHEDULES.values()]
    how = data.draw(st.sampled_from([*linear, *folded, mirror(one_f_one_b(stages, microbatches))]))
    options = {"tied": {f"{chosen}.0.weight": "sum"}, "capture": capture}
    rows = 2 * how.microbatches
    built = pipe, model, inputs, targets = build(case, how, rows, tuple(map(str, cuts)), **options)
    require_every_part(pipe)
    got = run(*built)
    uses = {}
    for k, group in enumerate(groups):
        if group == groups[chosen]:
            stage = sum(cut <= k for cut in cuts)
            uses[stage] = (*uses.get(stage, ()), f"{k}.0.weight")
    assert_same(got, run_reference(*built))
    assert_same(got, loop_untied(pipe, model, mse, inputs, targets, uses))


def test_gradients_of_one_microbatch_are_new_memory():
    pipe, model, inputs, targets = build(ZOO["chained"], one_f_one_b(4, 1), 2, tied="sum")
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    _, first = step(*state, inputs, targets)
    kept = first["a.weight"].clone()
    for grad in first.values():
        grad.fill_(torch.nan)
    assert same_bits(step(*state, inputs, targets)[1]["a.weight"], kept)


def test_by_sum_an_evaluation_is_the_same():
    case = ZOO["tied_sequence"]
    got, want = (
        fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets)
        for pipe, model, inputs, targets in (build(case, HOW, 6, tied=tied) for tied in ("sum", "exact"))
    )
    assert same_bits(got.loss, want.loss)
    assert same_bits(got.outputs, want.outputs)


# --------------------------------------------------------------------------------------------------------- what travels

CHAIN = {(0, 1), (1, 2), (2, 3)}


def test_by_sum_no_cotangent_travels():
    exact, added = (build(ZOO["chained"], HOW, 6, tied=tied)[0].program.graph for tied in ("exact", "sum"))
    assert (exact.cotangents, exact.gradients) == (CHAIN | {(0, 2)}, {(0, 2), (0, 3)})
    assert added.cotangents == CHAIN
    assert added.gradients == {(s, t) for s in (0, 2, 3) for t in (0, 2, 3) if s != t}


@sampled(1)
@pytest.mark.parametrize("tied", ["exact", "sum"])
def test_stages_on_one_rank_send_each_other_nothing(tied):
    """In a vee, first and last stage are on the first rank."""
    built = pipe, model, inputs, targets = build(ZOO["gpt"], vee_fill_drain(2, 3), 6, tied=tied)
    assert not pipe.program.graph.gradients
    assert not [action for action in program(pipe) if {action.stage, action.peer} == {0, 3} or "_G" in action.kind]
    if tied == "exact":
        assert_same(run(*built), loop(model, ZOO["gpt"].loss, inputs, targets, 3))


@pytest.mark.parametrize("tied", ["exact", "sum"])
def test_replicas_of_all_users_send_each_other_nothing(tied):
    """Both ends of a bidirectional pipeline hold first and last stage; the sums over replicas are all there is."""
    pipe, *_ = build(ZOO["gpt"], chimera(4, 4), 8, tied=tied)
    assert not pipe.program.graph.gradients


@pytest.mark.parametrize(("tied", "sent"), [("exact", {(0, 1)}), ("sum", {(0, 1), (1, 0), (2, 1), (3, 0)})])
def test_a_rank_is_sent_a_gradient_once(tied, sent):
    """One weight in four stages on two ranks."""
    pipe, *_ = build(ZOO["one_weight"], looped_fill_drain(2, 3), 6, tied=tied)
    found = [(action.stage, action.peer) for action in program(pipe) if action.kind == "SEND_G"]
    assert sorted(found) == sorted(sent)


@pytest.mark.parametrize("tied", ["exact", "sum"])
def test_gradients_of_frozen_parameters_are_not_sent(tied):
    def frozen():
        model = ZOO["chained"].build()
        model.a.weight.requires_grad_(False)
        return model

    case = Case(frozen, rows_of(), mse, ZOO["chained"].cuts)
    built = pipe, model, inputs, targets = build(case, HOW, 6, tied=tied)
    assert pipe.program.graph.cotangents == CHAIN
    assert not pipe.program.graph.gradients
    got = run(*built)
    assert "a.weight" not in got.grads
    assert_same(got, loop(model, mse, inputs, targets, 3))


class Detached(nn.Module):
    """One weight in four stages, of which the second and the last do not pass on a gradient to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.b.weight = self.c.weight = self.d.weight = self.a.weight

    def forward(self, x):
        x = self.a(x).tanh()
        x = x + self.b(x).detach().tanh()
        x = self.c(x)
        return x * self.d(x).detach()


def test_stages_without_a_gradient_receive_that_of_the_others():
    case = Case(Detached, rows_of(), mse, ("b", "c", "d"))
    uses = {0: ("a.weight",), 1: ("b.weight",), 2: ("c.weight",), 3: ("d.weight",)}
    require_sum(case, uses, HOW)
    pipe, *_ = build(case, HOW, 6, tied="sum")
    assert pipe.program.graph.gradients == {(0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 3)}


class Pairs(nn.Module):
    """Two tied weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.c.weight, self.d.weight = self.a.weight, self.b.weight

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d):
            x = layer(x).tanh()
        return x


def test_each_parameter_may_be_tied_in_its_own_way():
    """Any of its names will do; others are exact."""
    case = Case(Pairs, rows_of(), mse, ("b", "c", "d"))
    built = pipe, model, inputs, targets = build(case, HOW, 6, tied={"d.weight": "sum", "a.bias": "exact"})
    assert pipe.program.graph.cotangents == CHAIN | {(0, 2)}
    assert pipe.program.graph.gradients == {(0, 2), (1, 3), (3, 1)}
    got, want = run(*built), loop(model, mse, inputs, targets, 3)
    assert_same(got, loop_untied(pipe, model, mse, inputs, targets, {1: ("b.weight",), 3: ("d.weight",)}))
    assert all(same_bits(got.grads[name], want.grads[name]) for name in want.grads if name != "b.weight")


def test_a_pipeline_prints_which_stages_share_a_parameter():
    pipe, *_ = build(ZOO["gpt"], HOW, 6, tied="sum")
    assert "shares embed.weight with stage 3" in str(pipe.stages[0])
    assert "shares embed.weight with stage 0" in str(pipe.stages[3])


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_compares_sums_with_the_reference_only():
    pipe, model, inputs, targets = build(ZOO["one_weight"], HOW, 6, tied="sum")
    found = fpipe.verify(pipe, model, inputs, targets)
    assert (found.reference, found.eager) == (7, 6), "loss, outputs, four biases, and the weight"


def test_verify_finds_a_wrong_sum(monkeypatch):
    from fpipe.pipelines import results

    monkeypatch.setattr(results, "add", lambda a, b: b + a * (1 + 2**-20))
    pipe, model, inputs, targets = build(ZOO["one_weight"], HOW, 6, tied="sum")
    with pytest.raises(fpipe.MismatchError, match=r"gradient 0\.weight: got different bits from the reference"):
        fpipe.verify(pipe, model, inputs, targets)


def test_every_parameter_is_owned_once():
    pipe, model, *_ = build(ZOO["unused"], HOW, 6)
    assert pipe.owned == tuple(name for name, _ in model.named_parameters())


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("tied", "why"),
    [
        ("mean", r"tied: got 'mean', expected one of \['exact', 'sum'\]"),
        (None, "tied: got None, expected a text or a dict"),
        ({"a.weight": "mean"}, r"tied\['a.weight'\]: got 'mean', expected one of"),
        ({"a.wait": "sum"}, r"tied\['a.wait'\]: got an unknown name.*'a.weight'"),
        ({3: "sum"}, r"tied\[3\]: got an unknown name"),
        ({"a.weight": "sum", "d.weight": "exact"}, r"tied\['d.weight'\]: got 'exact', expected 'sum', as for another"),
    ],
)
def test_invalid_ties_are_refused(tied, why):
    with pytest.raises(fpipe.InputError, match=why):
        build(ZOO["chained"], HOW, 6, tied=tied)
