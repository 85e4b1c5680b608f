# SPDX-License-Identifier: Apache-2.0
"""Schedules and placements: several stages on a rank, stages on two ranks, recomputation, graphs, any order."""

from __future__ import annotations

import os

import torch

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import chimera, dualpipe, dualpipe_v, mirror, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.comparison import Result, assert_same
from tests.common.running import build, run
from tests.common.schedules import SCHEDULES, descending, looped_fill_drain, vee_fill_drain
from tests.common.sizes import NIGHTLY, by_day, in_turn
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, require_exact_across_ranks
from tests.distributed.cases.registry import case


@case
def other_numbers_of_microbatches(rank, size):
    for microbatches in range(1, 10, size // 2) if NIGHTLY else (1, 2, 5):
        require_exact_across_ranks(
            "tied_sequence", one_f_one_b(ranks=size, microbatches=microbatches), rank, size, "modules"
        )


@case
def two_stages_on_each_rank(rank, size):
    for factory, name in in_turn((looped_fill_drain, vee_fill_drain), ("skips", "normalised", "chained")):
        require_exact_across_ranks(name, factory(ranks=2, microbatches=3, chunks=2), rank, size)


@case
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


@case
def fused_pairs_in_a_vee(rank, size):
    require_exact_across_ranks("skips", dualpipe_v(ranks=size, microbatches=4), rank, size)


@case
def descending_order(rank, size):
    require_exact_across_ranks("chained", descending(ranks=size, microbatches=4), rank, size, order=[3, 2, 1, 0])


@case
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


@case
def two_pipelines_in_turns(rank, size):
    """Pipelines can be built and run one between the steps of the other."""
    one = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    two = build(ZOO["skips"], SCHEDULES["split_backward"](size, 2), 8)
    alone = run(*one), run(*two)
    steps = [fpipe.value_and_grad(built[0], outputs=True) for built in (one, two)]
    for _ in range(2):
        for (pipe, model, inputs, targets), step, want in zip((one, two), steps, alone, strict=True):
            out, grads = step(*pipe.init(model), inputs, targets)
            assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)
