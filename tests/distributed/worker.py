# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that runs named cases, one after the other, and records how each went.

    python worker.py RANK SIZE STORE REPORT NAME...

Starting a process costs seconds and a case costs a fraction of one, so a job runs many. The cases are in
`tests/distributed/cases`. A case that raises is reported with its traceback, and ends the job, since the other ranks
may then wait for messages that never come.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.distributed.cases import CASES
from tests.distributed.selection import names

PATIENCE = timedelta(minutes=10)  # ends what hangs, and nothing else, however slow the machine is
import fpipe
from fpipe.runtime import recording
from fpipe.runtime.fingerprint import describe_value
from fpipe.runtime.transport import clocks
from fpipe.runtime.transport.envelope import Envelope
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import initialize, list_leaves, reset_parameters
from schedules import (
    Action,
    B,
    F,
    Schedule,
    chimera,
    dualpipe,
    dualpipe_v,
    mirror,
    one_f_one_b,
    recompute,
    schedule,
    split_backward,
    zb_h1,
    zb_v,
)
from tests.common import collectives, gates
from tests.common.averages import Average, AverageDecoder, generate_from_scratch, texts, word_loss
from tests.common.cases import WORDS, mse
from tests.common.comparison import Result, assert_same
from tests.common.layers import linears
from tests.common.lookalikes import LOOKALIKES
from tests.common.loops import eval_loop, loop, loop_as_stated
from tests.common.running import build, run, run_reference
from tests.common.schedules import SCHEDULES, descending, looped_fill_drain, vee_fill_drain
from tests.common.scripts import SCRIPTS, require_same_training
from tests.common.zoo import ZOO

ALL_TANH = replace(ZOO["mlp"], build=lambda: linears(nn.Tanh, nn.Tanh, nn.Tanh))
CASES: dict[str, Callable[[int, int], None]] = {}
PATIENCE = timedelta(minutes=10)  # what hangs ends by it; however slow the machine is, nothing else does


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def gather(value):
    """What every rank passes, on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def raises(error: type[Exception], *words: str) -> _Raises:
    return _Raises(error, words)


class _Raises:
    """The block must raise this error, with these words in its message."""

    def __init__(self, error, words):
        self.error, self.words = error, words

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        assert kind is not None, f"nothing raised, expected {self.error.__name__}"
        if not issubclass(kind, self.error):
            return False
        self.text = str(value)
        missing = [word for word in self.words if word not in str(value)]
        assert not missing, f"{missing} are not in: {value}"
        return True


def require_whole(got: Result, want: Result, rank: int, size: int) -> None:
    """This rank's part equals the whole's, and all ranks together have the whole."""
    last = rank == size - 1
    mine = want._replace(
        outputs=want.outputs if last else None,
        grads={name: grad for name, grad in want.grads.items() if name in got.grads},
        buffers={name: buffer for name, buffer in want.buffers.items() if name in got.buffers},
    )
    assert_same(got, mine)
    names = gather((list(got.grads), list(got.buffers)))
    assert {name for grads, _ in names for name in grads} == set(want.grads)
    assert {name for _, buffers in names for name in buffers} == set(want.buffers)


def require_exact_across_ranks(
    name: str, how: Schedule, rank: int, size: int, capture: str = "export", order=None, **options: str
) -> Result:
    """One step of a case of the zoo over all ranks equals one device."""
    one = ZOO[name]
    seed = 5 if one.random else None
    pipe, model, inputs, targets = build(one, how, 2 * how.microbatches, capture=capture, **options)
    got = run(pipe, model, inputs, targets, seed=seed)
    # Outputs are on the last rank; in a vee, on the first; where stages have replicas, on both.
    turned = size - 1 if rank in how.placement.replicas(how.stages - 1) else 0
    require_whole(got, run_reference(pipe, model, inputs, targets, seed=seed), turned, size)
    if not one.random and not how.placement.mirrors and options.get("tied", "exact") == "exact":
        require_whole(got, loop(model, one.loss, inputs, targets, how.microbatches, order), turned, size)
    return got


def _zoo(name: str, front: str, kind: str) -> Callable[[int, int], None]:
    def check(rank, size):
        require_exact_across_ranks(name, SCHEDULES[kind](ranks=size, microbatches=4), rank, size, front)

    return check


for _k, (_name, _front) in enumerate((name, front) for name, one in ZOO.items() for front in one.fronts):
    _kind = ("one_f_one_b", "split_backward", "gpipe")[_k % 3]
    CASES[f"{_name}-{_front}-{_kind}"] = _zoo(_name, _front, _kind)
for _name in ("skips", "chained"):
    for _kind in SCHEDULES:
        CASES[f"{_name}-export-{_kind}"] = _zoo(_name, "export", _kind)


@case
def what_is_trained_is_verified_from_shares(rank, size):
    """Each rank passes its share; all of it is put together for the reference and the model run eagerly."""
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    params, buffers = pipe.init(model)
    moved = {name: (3 * p.detach()).requires_grad_() for name, p in params.items()}
    shifted = {name: buffer + 1 for name, buffer in buffers.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = fpipe.verify(pipe, model, inputs, targets, params=moved, buffers=shifted, steps=2)
    assert found.eager == found.reference > 2
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    other = copy.deepcopy(model)
    next(module for module in other.modules() if isinstance(module, nn.BatchNorm1d)).eps = 0.5
    with raises(fpipe.MismatchError, "got different bits from the model run eagerly"):
        fpipe.verify(pipe, other, inputs, targets, params=moved)


@case
def a_change_that_one_rank_makes_is_raised_on_all(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=3), 6)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, inputs, targets)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if rank == size - 1:
        norms[0].eps = 0.1
    with raises(fpipe.PipelineError, "attribute 'eps': got 0.1, expected 1e-05"):
        step(*state, inputs, targets)
    norms[0].eps = 0.1
    again = pipe.rebuilt(model)
    assert again.ranks is pipe.ranks
    require_whole(
        run(again, model, inputs, targets), loop(model, ZOO["normalised"].loss, inputs, targets, 3), rank, size
    )


@case
def other_numbers_of_microbatches(rank, size):
    for microbatches in range(1, 10, size // 2):
        require_exact_across_ranks(
            "tied_sequence", one_f_one_b(ranks=size, microbatches=microbatches), rank, size, "modules"
        )


@case
def two_stages_on_each_rank(rank, size):
    for factory in (looped_fill_drain, vee_fill_drain):
        for name in ("skips", "normalised", "chained"):
            require_exact_across_ranks(name, factory(ranks=2, microbatches=3, chunks=2), rank, size)


@case
def stages_on_two_ranks(rank, size):
    """The reference adds gradients per replica too; `test_replicas` holds it against a plain loop."""
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
def gradients_summed_over_stages(rank, size):
    """The reference has a copy per stage too; `test_ties` holds it against a plain loop."""
    for how in (
        one_f_one_b(ranks=size, microbatches=4),
        split_backward(one_f_one_b(ranks=size, microbatches=1)),
        looped_fill_drain(ranks=2, microbatches=3, chunks=2),
        vee_fill_drain(ranks=2, microbatches=3, chunks=2),
        dualpipe(ranks=size, microbatches=5),
    ):
        if how.ranks == size:
            require_exact_across_ranks("chained", how, rank, size, tied="sum")
            require_exact_across_ranks("one_weight", how, rank, size, capture="modules", tied="sum")


@case
def gradients_that_data_decide_about(rank, size):
    """What no rank has used is absent on every rank, tied parameters and cotangents that cross among it."""
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
    """Each rank makes its share; together they are one model, which files carry to a pipeline that is cut elsewhere."""
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


@case
def evaluation_on_two_ranks(rank, size):
    one = ZOO["several"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 8)
    for wanted in (targets, None):
        step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
        want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
        assert (step.outputs is None) == (rank not in (0, size - 1))
        turned = size - 1 if rank in (0, size - 1) else 0
        require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, turned, size)


@case
def recomputation(rank, size):
    for name in ("normalised", "dropping", "tied_sequence"):
        require_exact_across_ranks(name, recompute(one_f_one_b(ranks=size, microbatches=4)), rank, size)


@case
def graph_stages(rank, size):
    """Each process records its own stages; what the others hold is left as it is."""
    for name, how in (
        ("gpt", (zb_v if size == 2 else zb_h1)(ranks=size, microbatches=4)),
        ("dropping", zb_h1(ranks=size, microbatches=4)),
        ("normalised", recompute(zb_h1(ranks=size, microbatches=4))),
        ("tied_sequence", dualpipe(ranks=size, microbatches=4)),
    ):
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
def only_the_ends_hold_the_batch(rank, size):
    """The first rank alone has the inputs, and the last alone the targets."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    step, grads = fpipe.value_and_grad(pipe, outputs=True)(params, buffers, *mine)
    want = loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, grads, step.buffers), want, rank, size)
    step = fpipe.evaluate(pipe)(params, buffers, *mine)
    want = eval_loop(model, one.loss, inputs, targets, 4)
    require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)


@case
def evaluation_everywhere(rank, size):
    """The loss is on every rank, the outputs are on the last stage's."""
    for name in ("normalised", "several"):
        one = ZOO[name]
        pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
        for wanted in (targets, None):
            step = fpipe.evaluate(pipe)(*pipe.init(model), inputs, wanted)
            want = eval_loop(model, one.loss if wanted is not None else None, inputs, wanted, 4)
            assert (step.outputs is None) == (rank != size - 1)
            require_whole(Result(step.loss, step.outputs, {}, step.buffers), want, rank, size)


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
    """Built, and run, one between the steps of the other."""
    one = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    two = build(ZOO["skips"], SCHEDULES["split_backward"](size, 2), 8)
    alone = run(*one), run(*two)
    steps = [fpipe.value_and_grad(built[0], outputs=True) for built in (one, two)]
    for _ in range(2):
        for (pipe, model, inputs, targets), step, want in zip((one, two), steps, alone, strict=True):
            out, grads = step(*pipe.init(model), inputs, targets)
            assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)


@case
def verify_on_every_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["normalised"], one_f_one_b(ranks=size, microbatches=4), 8)
    found = fpipe.verify(pipe, model, inputs, targets)
    assert found.reference > 0
    assert found.eager > 0


@case
def spans_are_recorded(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    assert [span.action for span in spans if not span.waits] == list(pipe.schedule.actions(rank))
    assert {span.rank for span in spans} == {rank}


@case
def timelines_of_all_ranks(rank, size):
    """Every rank gets the same one, in which nothing is used before it is made: also where clocks are far apart."""
    clock = time.perf_counter
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    for apart, tolerance in ((0.0, 0.0), (1000.0, 1.0)):
        recording.perf_counter = clocks.perf_counter = lambda late=apart * rank: clock() - late
        spans = []
        fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
        found = fpipe.timeline(pipe, spans)
        assert found == gather(found)[0]
        assert min(span.start for span in found) == 0 <= max(span.end for span in found) < 500
        require_causal(pipe, found, tolerance)
        own = [span for span in found if span.rank == rank]
        mine = spans[len(spans) - len(own) :]  # without the waits that ended before the step began elsewhere
        assert [span.action for span in own] == [span.action for span in mine]
        for got, want in zip(own[1:], mine[1:], strict=True):
            assert abs((got.end - got.start) - (want.end - want.start)) < 1e-6
        costs = fpipe.costs(pipe, found)
        assert 0 < costs.comm < 500
        assert len(costs.F) == len(costs.B) == size
        spans.clear()
        fpipe.evaluate(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
        forwards = [span.action for span in fpipe.timeline(pipe, spans) if not span.waits]
        assert forwards == [F(stage, i) for stage in range(size) for i in range(4)]
    recording.perf_counter = clocks.perf_counter = clock
    rows = pipe.ranks.gather_rows(torch.full((rank, 3), float(rank), dtype=torch.float64))
    assert [one.tolist() for one in rows] == [[[float(r)] * 3] * r for r in range(size)]
    with raises(fpipe.InputError, "spans[0]: got", f"of rank {(rank + 1) % size}", f"of ranks [{rank}]"):
        fpipe.timeline(pipe, [span for span in found if span.rank == (rank + 1) % size])


def require_causal(pipe, found, tolerance):
    """Actions are those of the schedule, and none begins, nor does the wait for it end, before its value is made."""
    ended = {span.action: span.end for span in found}
    for r in range(pipe.schedule.ranks):
        actions = [span.action for span in found if span.rank == r and not span.waits]
        assert actions == list(pipe.schedule.actions(r))
    for span in found:
        kind, s, i, peer, _ = span.action
        if kind.startswith("RECV"):
            assert span.end >= ended[Action(kind[5:], peer, i)] - tolerance
        if kind == "F" and s:
            assert span.start >= ended[F(s - 1, i)] - tolerance
        if kind == "B" and s < pipe.schedule.stages - 1:
            assert span.start >= ended[B(s + 1, i)] - tolerance


@case
def another_number_of_ranks(rank, size):
    words = (f"{size} processes", f"schedule's {size + 1} ranks", f"Start {size + 1}", f"ranks={size}")
    with raises(fpipe.TransportError, *words):
        fpipe.pipeline(
            nn.Sequential(*[nn.Linear(4, 4) for _ in range(size + 1)]),
            example=(torch.randn(4, 4),),
            loss=torch.mean,
            schedule=one_f_one_b(ranks=size + 1, microbatches=2),
        )


@case
def other_microbatches_on_one_rank(rank, size):
    how = one_f_one_b(ranks=size, microbatches=2 if rank == 1 else 4)
    with raises(fpipe.TransportError, f"rank {rank}", "- schedule: got on", "microbatches=2", "microbatches=4"):
        build(ZOO["mlp"], how, 8)


@case
def other_cuts_on_one_rank(rank, size):
    cuts = ("1", "3", "6")[: size - 1] if rank else ("2", "4", "6")[: size - 1]
    with raises(fpipe.TransportError, "- cuts: got on rank 0: before units", "; on rank"):
        build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8, cuts)


@case
def another_tie_on_one_rank(rank, size):
    with raises(fpipe.TransportError, "- tied: got on rank 0: summed: ", "; on rank", ": nothing"):
        build(ZOO["gpt"], one_f_one_b(ranks=size, microbatches=4), 8, tied="exact" if rank else "sum")


@case
def another_model_on_one_rank(rank, size):
    """Other operators, or other frozen parameters, between values of the same shapes."""
    for other, words in ((ALL_TANH, ("- model: got on rank 0", "tanh", "relu")), (ZOO["frozen_below"], ("frozen",))):
        with raises(fpipe.TransportError, *words):
            build(ZOO["mlp"] if rank else other, one_f_one_b(ranks=size, microbatches=4), 8, tuple("246")[1 - size :])


@case
def another_schedule_on_one_rank(rank, size):
    kind = "gpipe" if rank else "one_f_one_b"
    with raises(fpipe.TransportError, "- schedule: got on rank 0: one_f_one_b", " gpipe("):
        build(ZOO["mlp"], SCHEDULES[kind](ranks=size, microbatches=4), 8)


@case
def refused_on_every_rank(rank, size):
    """Each rank says what is wrong before anything is sent; then a good step works."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for _ in range(2):
        with raises(fpipe.InputError, "params", "missing"):
            step({}, buffers, inputs, targets)
    out, _ = step(params, buffers, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def refused_on_one_rank(rank, size):
    """What one rank refuses no rank computes: all of them say so at once, and a good step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    for culprit, bad, words in (
        (0, (None, targets), ["inputs[0]: got nothing", "a stage of this rank reads it"]),
        (size - 1, (inputs, None), ["targets: got nothing"]),
        (1, ([*inputs], targets), ["inputs: got the tree"]),
    ):
        if rank == culprit:
            with raises(fpipe.InputError, *words):
                step(*state, *bad)
        else:
            with raises(fpipe.TransportError, f"- rank {culprit}: InputError: ", *words):
                step(*state, inputs, targets)
    out, _ = step(*state, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def state_of_another_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    everything = dict(model.named_parameters())
    with raises(fpipe.InputError, "params", "unexpected", "pipe.init(model)"):
        fpipe.value_and_grad(pipe)(everything, {}, inputs, targets)


@case
def wrapped_models(rank, size):
    """DDP and FSDP2 modules, alone and inside a model."""
    from torch.distributed.fsdp import fully_shard

    sharded = nn.Linear(4, 4)
    fully_shard(sharded)
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    x = torch.randn(4, 4)
    for model, name in (
        (parallel, "DistributedDataParallel"),
        (nn.Sequential(nn.Linear(4, 4), parallel), "DistributedDataParallel"),
        (sharded, "FSDP"),
        (nn.Sequential(nn.Linear(4, 4), sharded), "FSDP"),
    ):
        for capture in ("export", "modules"):
            with raises(fpipe.InputError, name, "expected a plain module", "data-parallel group"):
                fpipe.pipeline(
                    model,
                    example=(x,),
                    targets=x,
                    loss=nn.functional.mse_loss,
                    schedule=one_f_one_b(ranks=size, microbatches=2),
                    stages=size,
                    capture=capture,
                )


@case
def data_parallel_pipelines(rank, size):
    """Half as many ranks, twice: each pipeline takes half of the batch, and gradients are reduced after the step."""
    half = size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    replica, mine = divmod(rank, half)
    one = ZOO["tied_sequence"]
    model, inputs, targets = one.make(8)
    how = one_f_one_b(ranks=half, microbatches=2)
    ours = inputs[0].chunk(2)[replica], targets.chunk(2)[replica]
    pipe = fpipe.pipeline(
        model,
        example=(ours[0],),
        targets=ours[1],
        loss=one.loss,
        schedule=how,
        cuts=one.at(half),
        group=groups[replica],
    )
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (ours[0],), ours[1])
    want = loop(model, one.loss, (ours[0],), ours[1], 2)
    assert same_bits(step.loss, want.loss)
    found = gather((replica, mine, grads))
    assert {name for r, _, part in found if r == replica for name in part} == set(want.grads)
    for name, grad in grads.items():
        assert same_bits(grad, want.grads[name])
        both = [part[name] for _, m, part in found if m == mine]
        whole = loop(model, one.loss, inputs, targets, 4).grads[name]
        assert torch.allclose(sum(both) / 2, whole, atol=1e-6)


@case
def collectives_in_a_module(rank, size):
    """Every process has a pipeline of its own, and the models call collectives over all of them."""
    groups = [dist.new_group([one]) for one in range(size)]
    for layer, cut, backward in (
        (collectives.Reduced, "cut inside", "autograd"),
        (collectives.Reduced, "whole", "graph"),
        (collectives.ReducedInput, "cut inside", "graph"),
        (collectives.Gathered, "cut inside", "autograd"),
        (collectives.Functional, "whole", "graph"),
        (collectives.Later, "whole", "graph"),
    ):
        collectives.require_same(layer, cut, backward, groups[rank], seed=rank)


def words_like(rows: int, length: int):
    """A batch of the transformer's; the same on every rank."""
    torch.manual_seed(rows * length)
    return (torch.randint(WORDS, (rows, length)),), torch.randint(WORDS, (rows, length))


def as_needed(inputs, targets, rank: int, size: int):
    """Inputs on the first rank and targets on the last; elsewhere their shapes."""
    return (inputs if rank == 0 else (inputs[0].to("meta"),)), (targets if rank == size - 1 else targets.to("meta"))


@case
def batches_of_other_shapes(rank, size):
    """Rows and lengths change from step to step, and microbatches differ in size."""
    one = ZOO["gpt"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for rows, length in ((7, 3), (11, 2), (7, 3)):
        inputs, targets = words_like(rows, length)
        want = loop(model, one.loss, inputs, targets, 4)
        for mine in ((inputs, targets), as_needed(inputs, targets, rank, size)):
            out, grads = step(*state, *mine)
            require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)
        out = fpipe.evaluate(pipe)(*state, *as_needed(inputs, targets, rank, size))
        want = eval_loop(model, one.loss, inputs, targets, 4)
        require_whole(Result(out.loss, out.outputs, {}, out.buffers), want, rank, size)


@case
def plans_are_forgotten_alike(rank, size):
    """Every rank keeps the plans of the same batches, in the same order of use, whatever one rank does or refuses."""
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=2)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    for k, rows in enumerate((4, 6, 4, 8, 6, 4)):
        _, inputs, targets = one.make(rows)
        if k % 3 == 2:
            given = (inputs[0].double(),) if rank == k % size else inputs
            with raises(fpipe.PipelineError, "float64"):
                step(*state, given, targets)
        if rank == k % size:
            fpipe.reference(pipe)(*whole, *one.make(rows + 8)[1:])
        out, grads = step(*state, inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
        orders = gather([str(signature) for _, signature in pipe.caches.agreements])
        assert orders == [orders[0]] * size
        assert len(orders[0]) <= 3
    with raises(fpipe.TransportError, "plans: got on rank", "4", "5"):
        build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=4 + (rank == 0))


@case
def steps_are_prepared_by_all_ranks(rank, size):
    one = ZOO["mlp"]
    pipe, model, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 2, plans=3)
    with raises(fpipe.TransportError, "examples: got on rank", "1 examples", "2 examples"):
        pipe.prepare([one.make(4)[1:]] * (1 + (rank == 0)))
    with raises(fpipe.PipelineError, "got 4 kinds of batches"):
        pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 6, 7)])
    pipe.prepare([one.make(rows)[1:] for rows in (4, 5, 2)])
    plans, step = dict(pipe.planner.plans), fpipe.value_and_grad(pipe)
    for rows in (5, 2, 4):
        _, inputs, targets = one.make(rows)
        out, grads = step(*pipe.init(model), inputs, targets)
        got = Result(out.loss, None, grads, out.buffers)
        require_whole(got, loop(model, one.loss, inputs, targets, 2)._replace(outputs=None), rank, size)
    assert pipe.planner.plans == plans


@case
def uneven_microbatches_on_two_ranks_each(rank, size):
    one = ZOO["tied_sequence"]
    pipe, model, inputs, targets = build(one, dualpipe(ranks=size, microbatches=4), 7)
    got = run(pipe, model, inputs, targets)
    want = run_reference(pipe, model, inputs, targets)
    require_whole(got, want, size - 1 if rank in (0, size - 1) else 0, size)


@case
def weights_where_the_loss_is(rank, size):
    """Only the last rank weighs, and needs only what the weight reads."""
    model, *_ = ZOO["gpt"].make(8)
    inputs, targets = words_like(7, 3)
    targets[:, 1:] = -100
    targets[0] = inputs[0][0]

    def count(_, wanted):
        return (wanted != -100).sum()

    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=ZOO["gpt"].loss,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=ZOO["gpt"].at(size),
        weight=count,
    )
    mine = (inputs if rank == 0 else None), (targets if rank == size - 1 else None)
    out, grads = fpipe.value_and_grad(pipe, outputs=True)(*pipe.init(model), *mine)
    want = loop(model, ZOO["gpt"].loss, inputs, targets, 4, weight=count)
    require_whole(Result(out.loss, out.outputs, grads, out.buffers), want, rank, size)


@case
def a_batch_that_the_model_cannot_take(rank, size):
    """Every rank says so, before anything is sent; then a good step works."""
    pipe, model, inputs, targets = build(ZOO["gpt"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    with raises(fpipe.InputError, "targets: got 7 in dimension 0", "8 in dimension 0 of inputs[0]"):
        step(*state, *as_needed(inputs, targets[:7], rank, size))
    with raises(fpipe.InputError, "inputs[0]: got int64[4, 3], where the example has int64[8, 3]"):
        step(*state, *as_needed((inputs[0][:4],), targets, rank, size))
    out, _ = step(*state, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["gpt"].loss, inputs, targets, 4).loss)


@case
def other_shapes_on_one_rank(rank, size):
    pipe, model, *_ = build(ZOO["gpt"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7 if rank else 11, 3)
    with raises(fpipe.TransportError, "- batch: got on rank 0: inputs[0]: int64[11, 3]", "on rank", "int64[7, 3]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)


@case
def told_no_shapes(rank, size):
    """The ranks in the middle do not know that the batch has other shapes: all say so before anything is captured."""
    pipe, model, *_ = build(ZOO["gpt"], one_f_one_b(ranks=size, microbatches=4), 8)
    inputs, targets = words_like(7, 3)
    mine = as_needed(inputs, targets, rank, size) if rank in (0, size - 1) else (None, None)
    with raises(fpipe.TransportError, "- batch: got on ranks 0, 3: inputs[0]: int64[7, 3]", "on ranks 1-2: inputs[0]"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), *mine)


class Padding(nn.Module):
    """Fills what is padded, if anything is."""

    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(size)))

    def forward(self, x, mask):
        return self.layers(x if mask.all() else x.masked_fill(~mask[..., None], 0.5))


@case
def questions_that_one_rank_can_answer(rank, size):
    """The first rank alone is given the mask that the model asks about, padded and unpadded batches in turns."""
    torch.manual_seed(0)
    model, x = Padding(size), torch.randn(8, 3, 4)
    full, padded = torch.ones(8, 3, dtype=torch.bool), torch.arange(24).view(8, 3) > 7
    how, cuts = one_f_one_b(ranks=size, microbatches=4), [f"layers.{k}" for k in range(1, size)]
    pipe = fpipe.pipeline(model, example=(x, full), loss=torch.sum, schedule=how, cuts=cuts)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True)
    for mask in (padded, full, padded):
        mine = (x, mask) if rank == 0 else (x.to("meta"), mask.to("meta"))
        found, grads = step(*state, mine)
        want = loop(model, torch.sum, (x, mask), None, 4)
        require_whole(Result(found.loss, found.outputs, grads, found.buffers), want, rank, size)
    with raises(fpipe.InputError, "got batches on ranks", "__bool__ finds", "the same batch on every rank"):
        step(*state, (x, padded if rank else full))
    with raises(fpipe.InputError, "got no values of inputs[1]", "Pass the values on some rank"):
        step(*state, (x, mask.to("meta")))


@case
def one_batch_ahead(rank, size):
    """With two sizes that all ranks have seen; afterwards they go on."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, evaluate = pipe.init(model), fpipe.value_and_grad(pipe), fpipe.evaluate(pipe)
    batches = [(inputs, targets), ((inputs[0][:4],), targets[:4])]
    for batch in batches:
        step(*state, *batch)
        evaluate(*state, *batch)
    for function, called in ((step, "a step (call"), (evaluate, "an evaluation (call")):
        words = ("inputs[0]: float32[8, ", "inputs[0]: float32[4, ", "on rank 0")
        with raises(fpipe.TransportError, f"rank {rank}, {called}", "- batch: got", *words) as raised:
            function(*state, *batches[rank == 0])
        assert len(raised.text) < 700
    assert same_bits(step(*state, *batches[0])[0].loss, loop(model, one.loss, *batches[0], 4).loss)


@case
def a_skipped_evaluation(rank, size):
    """One rank goes on with the next step, or puts a timeline together."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, evaluate = pipe.init(model), fpipe.value_and_grad(pipe), fpipe.evaluate(pipe)
    with raises(fpipe.TransportError, "- call: got on rank 0: an evaluation (call", "a step (call"):
        (step if rank else evaluate)(*state, inputs, targets)
    with raises(fpipe.TransportError, "- call: got on rank 0: timeline (call", "a step (call"):
        step(*state, inputs, targets) if rank else fpipe.timeline(pipe, [])
    assert same_bits(evaluate(*state, inputs, targets).loss, loop(model, one.loss, inputs, targets, 4).loss)


@case
def outputs_on_every_rank_and_as_they_come(rank, size):
    """Merged outputs are the same everywhere; streamed ones come on the last rank only, whose error is its own."""
    one = ZOO["normalised"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, seen = pipe.init(model), {}
    want = eval_loop(model, one.loss, inputs, targets, 4).outputs
    assert same_bits(fpipe.predict(pipe)(*state, inputs if rank == 0 else None), want)
    fpipe.stream(pipe, seen.__setitem__)(*state, inputs)
    assert list(seen) == ([0, 1, 2, 3] if rank == size - 1 else [])
    assert all(same_bits(seen[i], want[2 * i : 2 * i + 2]) for i in seen)

    def refuse(i, outputs):
        raise ValueError("full")

    with raises(ValueError, "full") if rank == size - 1 else nullcontext():
        fpipe.stream(pipe, refuse)(*state, inputs)
    step, _ = fpipe.value_and_grad(pipe)(*state, inputs, targets)
    assert same_bits(step.loss, loop(model, one.loss, inputs, targets, 4).loss)
    with raises(fpipe.InputError, "params: got 0 leaves") if rank == 0 else raises(fpipe.TransportError, "0 leaves"):
        fpipe.predict(pipe)({} if rank == 0 else state[0], state[1], inputs)


@case
def tokens_on_every_rank(rank, size):
    """A cache per stage, four groups in turn; every rank gets the tokens of a plain loop, and every error."""
    torch.manual_seed(0)
    model, prompts = Average(), texts(8, 5)
    cuts = {2: ["mix"], 4: ["middle", "mix", "head"]}[size]
    pipe = fpipe.pipeline(
        model,
        example=(prompts,),
        targets=prompts,
        loss=word_loss,
        schedule=one_f_one_b(ranks=size, microbatches=4),
        cuts=cuts,
    )
    state, generate = pipe.init(model), fpipe.generate(pipe, 12, decoder=AverageDecoder)
    want = generate_from_scratch(model, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)
    drawn = fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fpipe.sample(top=5))(*state, prompts, 6, seed=2)
    assert all(torch.equal(drawn, other) for other in gather(drawn))
    with raises(fpipe.TransportError, "prompts: got", "on rank 0"):
        generate(*state, prompts if rank else prompts.flip(0), 7)
    with raises(fpipe.TransportError, "arguments: got", "count 3"):
        generate(*state, prompts, 7 - 4 * (rank == 0))

    def fail(logits, generator):
        raise ValueError("no choice")

    last = rank == size - 1
    with raises(ValueError, "no choice") if last else raises(fpipe.TransportError, "token 0", f"on rank {size - 1}"):
        fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=fail)(*state, prompts, 7)
    assert torch.equal(generate(*state, prompts, 7), want)


@case
def predictions_of_two_ranks(rank, size):
    """Each replica of the last stage has the outputs of half of the microbatches; all ranks get all of them."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, mirror(one_f_one_b(ranks=size, microbatches=4)), 16)
    want = eval_loop(model, one.loss, inputs, targets, 8).outputs
    assert same_bits(fpipe.predict(pipe)(*pipe.init(model), inputs), want)


@case
def another_pipeline_on_one_rank(rank, size):
    how = one_f_one_b(ranks=size, microbatches=4)
    one, two = (build(ZOO[name], how, 8, ("2", "4", "6")[: size - 1]) for name in ("mlp", "frozen_below"))
    pipe, model, *batch = two if rank else one
    step = fpipe.value_and_grad(pipe)
    with raises(fpipe.TransportError, "- pipeline: got on rank 0: parameters: ", "trained", "frozen"):
        step(*pipe.init(model), *batch)


def backwards(count):
    return reversed(range(count))


def in_order(order):
    """A schedule of a user's, whose name and arguments say nothing of its body."""

    @schedule()
    def mine(rank, ranks, microbatches):
        for i in order(microbatches):
            yield F(rank, i)
        for i in order(microbatches):
            yield B(rank, i)

    return mine


@case
def another_body_of_a_schedule(rank, size):
    how = in_order(range if rank else backwards)(size, 4)
    words = ("- program: got on rank 0: rank 0: 0F3 0F2", "rank 0: 0F0 0F1")
    with raises(fpipe.TransportError, *words) as raised:
        build(ZOO["mlp"], how, 8)
    assert "- schedule" not in raised.text
    assert len(raised.text) < 800


def counting(factor):
    return lambda inputs, targets: len(targets) * factor


def cutting(first):
    return lambda leaf, microbatches: list(leaf.chunk(microbatches)) if first else list(leaf.split(2))


@case
def other_functions_on_one_rank(rank, size):
    """What cells hold, and bodies; names and addresses do not count."""
    one = ZOO["mlp"]
    model, inputs, targets = one.make(8)
    common = {"example": inputs, "targets": targets, "cuts": one.at(size), "loss": one.loss}
    common["schedule"] = one_f_one_b(ranks=size, microbatches=4)
    for options, words in (
        ({"weight": counting(1 + (rank == 1))}, ("- weight: got on", "cell factor: 1", "on rank 1: cell factor: 2")),
        ({"batch_dims": cutting(rank == 1)}, ("- batch_dims: got on", "on rank 1: cell first: True")),
        ({"batch_dims": cutting(True) if rank else 0}, ("- batch: got on rank 0",)),
        ({"loss": one.loss if rank else lambda x, y: one.loss(y, x)}, ("- loss: got on rank 0",)),
    ):
        with raises(fpipe.TransportError, *words):
            fpipe.pipeline(model, **(common | options))
    fpipe.pipeline(model, **(common | {"weight": counting(3), "batch_dims": cutting(True)}))


def _script(name: str) -> Callable[[int, int], None]:
    def check(rank, size):
        with mock.patch.dict(os.environ, WORLD_SIZE=str(size)):  # as under torchrun
            names = gather(require_same_training(name))
        assert len(set().union(*names)) > max(map(len, names)), "every rank holds a part"

    return check


for _name in SCRIPTS:
    CASES[f"a_script_that_can_{_name}"] = _script(_name)


@case
def drop_in_modules_follow_what_one_rank_sees(rank, size):
    """A frozen parameter is known to one rank only, and a hook; all build the same pipeline, or all refuse."""
    torch.manual_seed(3)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 * size)]), torch.randn(8, 4)
    how = one_f_one_b(ranks=size, microbatches=4)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    model(x).backward()
    model.zero_grad()
    model.get_submodule("0").requires_grad_(False)  # on the other ranks, it has no parameters
    model(x).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    assert ("0.weight" in whole) is (rank == 0)
    assert all((grad is None) is (name in ("0.weight", "0.bias")) for name, grad in whole.items())
    assert same_bits(model.eval()(x), net(x).detach())
    model.train()
    model.load_state_dict(net.state_dict())  # the names of other ranks are ignored
    with raises(RuntimeError, "Unexpected key(s)", "strange"):
        model.load_state_dict({**net.state_dict(), "strange": x})


@case
def a_drop_in_module_refused_on_one_rank(rank, size):
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.ones(4, 4)
    how = one_f_one_b(ranks=size, microbatches=2)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    torch.manual_seed(rank)
    if rank:
        next(model.parameters()).register_hook(print)
        with raises(fpipe.InputError, "got a hook on its gradient"):
            model(x)
    else:
        with raises(fpipe.TransportError, "got a hook on its gradient"):
            model(x)
    if rank:
        next(model.parameters())._backward_hooks.clear()
    model(x).backward()


class Shifted(nn.Sequential):
    """Adds a tensor that is neither parameter nor buffer."""

    def __init__(self, by):
        super().__init__(*[nn.Linear(6, 6) for _ in range(4)])
        self.by = torch.full((6,), by)

    def forward(self, x):
        return super().forward(x) + self.by


@case
def other_tensor_attributes(rank, size):
    def built(by):
        torch.manual_seed(0)
        x = torch.randn(4, 6)
        how = one_f_one_b(ranks=size, microbatches=2)
        return fpipe.pipeline(Shifted(by), example=(x,), loss=torch.sum, schedule=how)

    with raises(
        fpipe.TransportError, "- tensors that are neither parameters nor buffers: got on rank 0", "[6] of values"
    ):
        built(float(rank == 0))
    built(1.0)


@case
def other_settings_on_one_rank(rank, size):
    """Autocast and the default dtype; and the seed, which is an argument."""
    pipe, model, inputs, targets = build(ZOO["dropping"], one_f_one_b(ranks=size, microbatches=4), 8, capture="trace")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    with (
        raises(fpipe.TransportError, "- variant: got on rank 0: Variant(", "torch.bfloat16"),
        torch.autocast("cpu", enabled=rank == 0),
    ):
        step(*state, inputs, targets, seed=1)
    torch.set_default_dtype(torch.float32 if rank else torch.float64)
    try:
        refused = fpipe.TransportError if rank else fpipe.InputError
        with raises(refused, "torch: the default dtype: got torch.float64, expected torch.float32"):
            step(*state, inputs, targets, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    with raises(fpipe.TransportError, "- seed: got on rank 0: 0; on rank 1: 1"):
        step(*state, inputs, targets, seed=rank)
    step(*state, inputs, targets, seed=1)


@case
def other_values_of_what_several_ranks_hold(rank, size):
    """Tied parameters and stages with replicas are compared before the first step."""
    for name, how in (
        ("tied_sequence", one_f_one_b(ranks=size, microbatches=4)),
        ("mlp", dualpipe(ranks=size, microbatches=4)),
    ):
        pipe, model, inputs, targets = build(ZOO[name], how, 8)
        params, buffers = pipe.init(model)
        first = next(iter(params)) if rank == size - 1 else None
        other = {n: p + 1 if n == first else p for n, p in params.items()}
        with raises(fpipe.TransportError, "hold copies: got different values on ranks 0 and", "checkpoint"):
            fpipe.value_and_grad(pipe)(other, buffers, inputs, targets)
        fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)


@case
def a_second_thread(rank, size):
    """While one thread is in a step another is refused by name, and changes nothing."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, found = pipe.init(model), []

    def elsewhere():
        with raises(fpipe.TransportError, "in thread 'another'", "one thread at a time") as raised:
            fpipe.evaluate(pipe)(*state, inputs, targets)
        found.append(raised.text)

    def record(span):
        thread = threading.Thread(target=elsewhere, name="another")
        thread.start()
        thread.join()

    out, _ = fpipe.value_and_grad(pipe, record=record)(*state, inputs, targets)
    assert len(found) > 8
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def a_head_that_is_read_late(rank, size):
    """As on an accelerator: what was wrong with the last step's messages on one rank is an error on all in the next."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, cpu = pipe.init(model), fpipe.value_and_grad(pipe), torch.device("cpu")
    awaited, came = (Envelope(("F", 0, i, 1), (), cpu) for i in (2, 3))
    if rank == 1:
        pipe.ranks.transport.unread.append((awaited, came.header))
    with raises(fpipe.TransportError, "got 0SEND_F3>1 of 0 bytes, expected that of 1RECV_F2<0"):
        step(*state, inputs, targets)
    if rank == 1:
        with raises(fpipe.TransportError, "got a pipeline that failed midway"):
            step(*state, inputs, targets)


@case
def functions_are_described_alike(rank, size):
    """In every process, each of which hashes strings in its own way."""
    for one, two in LOOKALIKES.values():
        found = gather((describe_value(one), describe_value(two)))
        assert found == [found[0]] * size


@case
def dies_in_the_middle(rank, size):
    """Rank 2 ends without a word while the others work; they fail as soon as they notice, not by a timeout."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state = pipe.init(model)
    fourth = list(pipe.schedule.actions(2))[3]

    def record(span):
        if rank == 2 and span.action == fourth:
            os._exit(7)

    try:
        fpipe.value_and_grad(pipe, record=record)(*state, inputs, targets)
    except RuntimeError as error:
        told = "imed out" not in str(error)
        raise RuntimeError(f"failed {'at once' if told else 'too late'}: {error}") from error


@case
def after_the_group_is_gone(rank, size):
    """The last case of a job: a pipeline of before is refused, and so is a new one that would run all ranks here."""
    built = [build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8) for _ in range(2)]
    found = [(fpipe.value_and_grad(pipe), pipe.init(model), batch) for pipe, model, *batch in built]
    for step, state, batch in found:
        step(*state, *batch)
    dist.barrier()  # who leaves while others still talk to it may break their connection
    dist.destroy_process_group()
    for step, state, batch in found:
        with raises(fpipe.TransportError, "its process group was destroyed"):
            step(*state, *batch)
    os.environ["WORLD_SIZE"] = str(size)
    with raises(fpipe.TransportError, f"has started {size} processes", "init_process_group"):
        build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)


# What four ranks add nothing to, and what takes long.
NEEDS_TWO = {
    "what_is_trained_is_verified_from_shares",
    "a_change_that_one_rank_makes_is_raised_on_all",
    "fused_pairs_in_a_vee",
    "two_stages_on_each_rank",
    "wrapped_models",
    "batches_of_other_shapes",
    "state_of_another_rank",
    *(name for name in CASES if name.startswith(("gpt_dropout", "all_frozen", "constants", "own_loss", "recurrent"))),
    *(name for name in CASES if name.endswith("-gpipe") and not name.startswith("skips")),
}
NEEDS_FOUR = {"a_model_on_meta", "data_parallel_pipelines", "dies_in_the_middle", "told_no_shapes"}
ALONE = {"dies_in_the_middle"}


# Front ends and models differ in what they capture, which processes do not see: by day, some are enough.
ZOO_CASES = {name: name.split("-")[:2] for name in CASES if name.count("-") == 2}
BY_DAY, ON_FOUR = {"mlp", "skips", "chained"}, {"mlp", "skips", "tied_sequence", "normalised", "unet", "dropping"}
NEEDS_NIGHT = {
    name for name, (model, front) in ZOO_CASES.items() if model not in BY_DAY and front not in ("trace", "modules")
}
# What ranks tell each other before they compute, and refuse, does not depend on how many there are.
REFUSED = {name for name in CASES if name.endswith("_on_one_rank") and name != "refused_on_one_rank"}
NEEDS_NIGHT_ON_FOUR = REFUSED | {
    *("norms_count_every_parameter_once", "tied_copies_do_not_drift", "a_batch_that_the_model_cannot_take"),
    *("a_head_that_is_read_late", "functions_are_described_alike", "another_body_of_a_schedule", "a_second_thread"),
    "a_script_that_can_language",
    *("other_tensor_attributes", "two_pipelines_in_turns", "evaluation_everywhere", "recomputation"),
}
NEEDS_NIGHT_ON_FOUR |= {
    name for name, (model, front) in ZOO_CASES.items() if model not in ON_FOUR or front not in ("trace", "modules")
}


def names(size: int) -> list[str]:
    """The cases that one job of this size runs."""
    left = ALONE | (NEEDS_TWO if size != 2 else set()) | (NEEDS_FOUR if size != 4 else set())
    if os.environ.get("HYPOTHESIS_PROFILE") != "nightly":
        left |= NEEDS_NIGHT_ON_FOUR if size == 4 else NEEDS_NIGHT
    return [name for name in CASES if name not in left]


def groups() -> set[dist.ProcessGroup]:
    """Return the process groups that exist now."""
    return set(distributed_c10d._world.pg_map)


def end(made: set[dist.ProcessGroup]) -> None:
    """Destroy the channels of a case's pipelines: each has threads, and a thousand slow down all later cases."""
    if made and dist.is_initialized():
        dist.barrier()
        for group in made:
            if not group.group_desc.startswith("control group"):
                dist.destroy_process_group(group)


def main(rank: int, size: int, store: str, report: str, chosen: list[str]) -> None:
    """Run the chosen cases, or all of a job of this size, and write the results to `report`/`rank`.json."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The tensor attributes self.model.*_flat_weights")  # torch's own, of nn.GRU
    os.environ["REPORT"] = report
    method = {} if store == "env" else {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=PATIENCE, **method)
    results: dict[str, str] = {}
    path = Path(report) / f"{rank}.json"
    try:
        for name in chosen or names(size):
            start, before = time.perf_counter(), groups()
            CASES[name](rank, size)
            end(groups() - before)
            results[name] = f"passed in {time.perf_counter() - start:.2f} s"
            path.write_text(json.dumps(results))
    except BaseException:
        results[name] = traceback.format_exc()
        path.write_text(json.dumps(results))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env", sys.argv[1], [])
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
