# SPDX-License-Identifier: Apache-2.0
"""Models, front ends, schedules and placements, and the share of parameters that each rank holds."""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import initialize, list_leaves, reset_parameters
from schedules import (
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    mirror,
    offload,
    one_f_one_b,
    recompute,
    split_backward,
    zb_h1,
    zb_v,
)
from tests.common import gates
from tests.common.cases import mse
from tests.common.comparison import assert_same
from tests.common.loops import loop, loop_as_stated
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES, descending, looped_fill_drain, vee_fill_drain
from tests.common.sizes import NIGHTLY, by_day, in_turn
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, require_exact_across_ranks

# ----------- Schedules and placements: several stages on a rank, stages on two ranks, recomputation, graphs, any order


@case(day=[])
def other_numbers_of_microbatches(rank, size):
    for microbatches in range(1, 10, size // 2) if NIGHTLY else (1, 2, 5):
        require_exact_across_ranks(
            "tied_sequence", one_f_one_b(ranks=size, microbatches=microbatches), rank, size, "modules"
        )


@case(sizes=[2])
def two_stages_on_each_rank(rank, size):
    for factory, name in in_turn((looped_fill_drain, vee_fill_drain), ("skips", "normalised", "chained")):
        require_exact_across_ranks(name, factory(ranks=2, microbatches=3, chunks=2), rank, size)


@case(day=[])
def stages_on_two_ranks(rank, size):
    """The reference adds gradients per replica, too; `test_replicas` compares it with a plain loop."""
    for name, how in (
        ("tied_sequence", dualpipe(ranks=size, microbatches=5)),
        ("chained", chimera(ranks=size, microbatches=4)),
        ("dropping", mirror(recompute(one_f_one_b(ranks=size, microbatches=3)))),
    ):
        got = require_exact_across_ranks(name, how, rank, size)
        grads = gather(got.grads)
        for stage in range(how.stages):
            first, second = (grads[rank] for rank in how.placement.replicas(stage))
            assert any(name in second for name in first)
            assert all(same_bits(first[name], second[name]) for name in first.keys() & second.keys())


@case
def recomputation(rank, size):
    for name in by_day(("normalised", "dropping", "tied_sequence"), 2):
        require_exact_across_ranks(name, recompute(one_f_one_b(ranks=size, microbatches=4)), rank, size)


@case
def memory_on_the_host(rank, size):
    for how in by_day((split_backward(gpipe(size, 4)), gpipe(size, 4)), 2):
        how = offload(how)
        assert any(action.kind == "OFFLOAD" for action in how.actions(0))
        require_exact_across_ranks("tied_sequence", how, rank, size)


@case
def graph_stages(rank, size):
    """Each process records its own stages only."""
    cases = (
        ("dropping", (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4)),
        ("gpt", (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4)),
        ("tied_sequence", dualpipe(ranks=size, microbatches=4)),
        ("normalised", recompute(zb_h1(ranks=size, microbatches=4))),
    )
    for name, how in by_day(cases, 2):
        require_exact_across_ranks(name, how, rank, size, "trace", backward="graph")


@case(sizes=[2])
def fused_pairs_in_a_vee(rank, size):
    require_exact_across_ranks("skips", dualpipe_v(ranks=size, microbatches=4), rank, size)


@case(day=[4])
def descending_order(rank, size):
    require_exact_across_ranks("chained", descending(ranks=size, microbatches=4), rank, size, order=[3, 2, 1, 0])


@case(day=[2, 4])
def one_process_computes_the_same(rank, size):
    """Other ranks, other cuts, other schedules: the same dropout, the same bits."""
    got = require_exact_across_ranks("dropping", one_f_one_b(ranks=size, microbatches=4), rank, size)
    again = require_exact_across_ranks("dropping", SCHEDULES["split_backward"](size, 4), rank, size)
    assert same_bits(got.loss, again.loss)
    torch.save((got.grads, got.loss), f"{os.environ['REPORT']}/dropping-{size}-{rank}.pt")


@case
def a_step_again_is_the_same(rank, size):
    built = build(ZOO["dropping"], one_f_one_b(ranks=size, microbatches=4), 8)
    before = torch.get_rng_state()
    first = run(*built, seed=1)
    assert_same(run(*built, seed=1), first)
    assert torch.equal(torch.get_rng_state(), before)
    other = run(*built, seed=2)
    assert not same_bits(other.loss, first.loss)


# ------------------------------------------------------------ Every model of the zoo, by every front end that takes it


ON_FOUR = {"skips-trace-gpipe", "unet-trace-one_f_one_b", "normalised-modules-split_backward"}
ON_FOUR |= {"tied_sequence-modules-one_f_one_b", "dropping-trace-one_f_one_b", "mlp-trace-split_backward"}
EXPORTED_BY_DAY = {"skips-export-split_backward", "chained-export-one_f_one_b"}
TRACED_BY_NIGHT = {
    "gpt_dropout",
    "recurrent",
    "contexts",
    "tied_sequence",
    "normalised",
    "constants",
    "later",
    "in_place",
}
MODULES_BY_DAY = {"dicts", "dropping", "tied_sequence", "normalised"}
"""Front ends and models differ in what they capture, which processes do not see: by day, some are enough."""


def step_of_the_zoo(name: str, front: str, kind: str, rank: int, size: int) -> None:
    require_exact_across_ranks(name, SCHEDULES[kind](ranks=size, microbatches=4), rank, size, front)


def add_step(name: str, front: str, kind: str) -> None:
    """Add the case that runs one step of a model of the zoo."""
    title = f"{name}-{front}-{kind}"
    adds_nothing = name.startswith(("gpt_dropout", "all_frozen", "constants", "own_loss", "recurrent"))  # on four ranks
    sizes = [2] if adds_nothing or (kind == "gpipe" and name != "skips") else [2, 4]
    is_daily = {
        "trace": name not in TRACED_BY_NIGHT,
        "modules": name in MODULES_BY_DAY,
        "export": title in EXPORTED_BY_DAY,
    }
    day = ([4] if title in ON_FOUR else [2]) if is_daily.get(front) else []
    case(partial(step_of_the_zoo, name, front, kind), sizes=sizes, day=day, name=title)


_FRONTS = [(name, front) for name, one in ZOO.items() for front in one.fronts]
_STEPS = [(*one, ("one_f_one_b", "split_backward", "gpipe")[k % 3]) for k, one in enumerate(_FRONTS)]
for _step in {*_STEPS, *product(("skips", "chained"), ("export",), SCHEDULES)}:
    add_step(*_step)


# -------------------------- Parameters and their gradients: each rank's share, tied ones, and those without a gradient


@case(day=[4])
def every_rank_holds_its_own_leaves(rank, size):
    pipe, model, *_ = build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=2), 4)
    params, _ = pipe.init(model)
    names = gather(sorted(params))
    assert set().union(*names) == {name for name, _ in model.named_parameters()}
    held = [rank for rank, mine in enumerate(names) if "0.weight" in mine]
    assert held == [0, size - 1], "the tied weight is on two ranks"
    assert sum(map(len, names)) == len(list(model.parameters())) + 1


@case
def tied_copies_do_not_drift(rank, size):
    for tied in ("exact", "sum"):
        _require_same_copies(tied, size)


def _require_same_copies(tied, size):
    how = one_f_one_b(ranks=size, microbatches=4)
    pipe, model, inputs, targets = build(ZOO["tied_sequence"], how, 8, capture="modules", tied=tied)
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for _ in range(3):
        out, grads = step(params, buffers, inputs, targets)
        params = {name: p - 0.1 * grads[name] if name in grads else p for name, p in params.items()}
        buffers = out.buffers
    copies = [copy for copy in gather(params.get("0.weight")) if copy is not None]
    assert len(copies) == 2
    assert same_bits(*copies)


@case
def norms_count_every_parameter_once(rank, size):
    for how in (one_f_one_b(ranks=size, microbatches=4), dualpipe(ranks=size, microbatches=4)):
        pipe, model, inputs, targets = build(ZOO["chained"], how, 8)
        got = run(pipe, model, inputs, targets)
        owned = [name for names in gather(pipe.owned) for name in names]
        assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
        squares = sum((got.grads[name].square().sum() for name in pipe.owned if name in got.grads), torch.zeros(()))
        dist.all_reduce(squares)
        whole = run_reference(pipe, model, inputs, targets).grads
        torch.testing.assert_close(squares, sum(grad.square().sum() for grad in whole.values()))


@case(day=[])
def gradients_summed_over_stages(rank, size):
    """The reference has a copy per stage, too; `test_ties` compares it with a plain loop."""
    for how in (
        one_f_one_b(ranks=size, microbatches=4),
        split_backward(one_f_one_b(ranks=size, microbatches=1)),
        looped_fill_drain(ranks=2, microbatches=3, chunks=2),
        vee_fill_drain(ranks=2, microbatches=3, chunks=2),
        dualpipe(ranks=size, microbatches=5),
    ):
        if how.ranks == size:
            require_exact_across_ranks("one_weight", how, rank, size, capture="modules", tied="sum")
            if NIGHTLY:
                require_exact_across_ranks("chained", how, rank, size, tied="sum")


@case(day=[])
def gradients_that_data_decide_about(rank, size):
    """A parameter that no rank uses has no gradient on any rank, even if it is tied or a cotangent crosses ranks."""
    how, replicas = one_f_one_b(ranks=size, microbatches=3), chimera(ranks=size, microbatches=4)
    for kinds, ties in ((["other", "detached", "constant"], [(0, 2)]), (["dead", "other", "negative"], [(0, 1)])):
        model = gates.Gates(kinds, ties, False, counting=False)
        pipes = [gates.build(model, one, *gates.batch([[1] * 3] * one.microbatches)) for one in (how, replicas)]
        for answers in ([[0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 1]], [[0, 0, 0]] * 4, [[1, 1, 0], [0, 0, 1]] * 2):
            for pipe in pipes:
                inputs, targets = gates.batch(answers[: pipe.schedule.microbatches])
                _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
                want = loop_as_stated(pipe, model, mse, inputs, targets).grads
                assert grads.keys() == want.keys() & pipe.init(model)[0].keys()
                assert all(same_bits(grad, want[name]) for name, grad in grads.items())


@case(sizes=[4], day=[])
def a_model_on_meta(rank, size):
    """Each rank initializes its share of one model, which files carry to a pipeline that is cut elsewhere."""
    one = ZOO["gpt"]
    real, inputs, targets = one.make(4)
    with torch.device("meta"):
        model = one.build()
    how = one_f_one_b(ranks=size, microbatches=2)
    pipe, other = (
        fpipe.pipeline(model, example=inputs, targets=targets, loss=one.loss, schedule=how, cuts=cuts)
        for cuts in (one.at(size), ["blocks.0", "blocks.3", "head"][: size - 1])
    )
    params, buffers = pipe.initialise(seed=3)
    whole = initialize(pipe.model, list_leaves(pipe.model), reset_parameters, seed=3)
    assert set(params) < set(whole)
    assert all(same_bits(params[name], whole[name]) for name in params)
    assert set().union(*gather(set(params))) == set(whole)

    real.load_state_dict(whole, strict=False)
    step, _ = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
    assert same_bits(step.loss, loop(real, one.loss, inputs, targets, 2).loss)

    files, store = (Path(os.environ["REPORT"]) / f"{kind}-{size}" for kind in ("files", "store"))
    files.mkdir(exist_ok=True)
    save_file(params, files / f"{rank}.safetensors")
    dcp.save(params, checkpoint_id=store)
    from_files, _ = other.init(fpipe.safetensors(files))
    from_store, _ = other.initialise(seed=4)
    dcp.load(from_store, checkpoint_id=store)
    for read in (from_files, from_store):
        assert any(gather(read.keys() != params.keys()))
        assert all(same_bits(read[name], whole[name]) for name in read)
