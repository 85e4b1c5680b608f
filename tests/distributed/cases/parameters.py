# SPDX-License-Identifier: Apache-2.0
"""Parameters and their gradients: each rank's share, tied ones, and those without a gradient."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import initialize, list_leaves, reset_parameters
from schedules import chimera, dualpipe, one_f_one_b, split_backward
from tests.common import gates
from tests.common.cases import mse
from tests.common.loops import loop, loop_as_stated
from tests.common.running import build, run, run_reference
from tests.common.schedules import looped_fill_drain, vee_fill_drain
from tests.common.sizes import NIGHTLY
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, require_exact_across_ranks
from tests.distributed.cases.registry import case


@case
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


@case
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


@case
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


@case
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
