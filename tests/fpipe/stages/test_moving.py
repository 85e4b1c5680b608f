# SPDX-License-Identifier: Apache-2.0
"""What forwards keep, moved off the device and back: the same bits, and the memory that is simulated."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fpipe
from fpipe.stages.moving import Mover, Restoration
from schedules import (
    Action,
    Costs,
    chimera,
    gis,
    gpipe,
    interleaved_1f1b,
    offload,
    one_f_one_b,
    recompute,
    simulate,
    summarize,
)
from schedules import zb_h1 as zero_bubble
from tests.common.cases import WIDTH, mse, rows_of
from tests.common.running import build, require_exact, require_loop
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

MOVED = [
    offload(one_f_one_b(ranks=4, microbatches=6)),
    offload(zero_bubble(ranks=4, microbatches=6)),
    offload(gpipe(ranks=4, microbatches=6), stages=(1, 2)),
    offload(interleaved_1f1b(ranks=2, microbatches=6, chunks=2)),
    offload(gis(ranks=2, microbatches=6)),
    offload(recompute(gpipe(ranks=4, microbatches=6), stages=(0,))),
]


@sampled(4)
@pytest.mark.parametrize("name", ["mlp", "skips", "gpt", "gpt_dropout", "normalised", "twice", "frozen_below"])
@pytest.mark.parametrize("how", MOVED, ids=repr)
def test_what_comes_back_has_the_bits_of_what_went(how, name):
    assert any(a.kind == "OFFLOAD" for rank in range(how.ranks) for a in how.actions(rank))
    require_exact(ZOO[name], how)


def test_replicas_move_memory_too():
    require_exact(ZOO["mlp"], offload(chimera(ranks=4, microbatches=8)))


def count_bytes(states, others):
    """The bytes of the memory that tensors in these states have, if it is not that of others."""
    tensors = [one for state in states if isinstance(state, list) for one in state if isinstance(one, torch.Tensor)]
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for place, size in memory.items() if place not in others)


def measure_peaks(pipe, model, x):
    """The most bytes that each rank holds for backwards, after any of its actions."""
    plan, peaks = pipe.training, dict.fromkeys(range(pipe.schedule.ranks), 0)
    params, buffers = pipe.init(model)
    others = {one.untyped_storage().data_ptr() for one in (*params.values(), x)}

    def watch(handler):
        def run(execution, action, stage, arrived):
            values = handler(execution, action, stage, arrived)
            coming = [one for one in execution.posted.values() if isinstance(one, Restoration)]
            states = [*execution.residuals.values(), *execution.deferred.values()]
            states += [[memory for memory, _ in one.coming.values()] for one in coming]
            peaks[execution.rank] = max(peaks[execution.rank], count_bytes(states, others))
            return values

        return run

    for rank, program in plan.programs.items():
        instructions = [one._replace(handler=watch(one.handler)) for one in program.instructions]
        plan.programs[rank] = program._replace(instructions=tuple(instructions))
    fpipe.value_and_grad(pipe)(params, buffers, (x,))
    return [*peaks.values()]


@pytest.mark.parametrize("made", [one_f_one_b, gpipe, zero_bubble])
def test_measured_memory_is_that_of_the_simulation(made):
    """With moves that take no time: a CPU moves at once."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(16, WIDTH)
    found = []
    for how in (made(ranks=4, microbatches=8), offload(made(ranks=4, microbatches=8))):
        graph = {"gradients": fpipe.Gradients(backward="graph")}
        pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1", "2", "3"], **graph)
        sizes, peaks = replace(pipe.sizes, weight=0), measure_peaks(pipe, model, x)
        assert peaks == [*simulate(how, Costs(), sizes=sizes).peak_memory]
        found.append(peaks[0])
    assert found[1] < found[0]


def test_memory_that_tensors_share_is_moved_once_and_shared_again():
    base = torch.arange(12.0).view(3, 4)
    kept = [base, base.t(), base[1:], torch.ones(2).expand(3, 2), torch.zeros(())]
    want = [(one.clone(), one.stride(), one.storage_offset()) for one in kept]
    mover = Mover(range(5))
    moved = mover.move_out(kept)
    assert not any(isinstance(one, torch.Tensor) for one in moved)
    assert len({id(one.stored) for one in moved}) == 3
    base.zero_()
    ((first, second, *_),) = [back] = mover.move_back(Action("RELOAD", 0, 0), moved).take()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    for one, (values, stride, offset) in zip(back, want, strict=True):
        assert torch.equal(one, values)
        assert (one.stride(), one.storage_offset()) == (stride, offset)


def test_parameters_and_the_batch_stay():
    pipe, *_ = build(ZOO["mlp"], MOVED[0], 12)
    for stage in pipe.stages:
        kept = [state for state in [stage.functions.movable] if state]
        assert stage.functions.below_autograd
        assert kept or not stage.index, "the first stage keeps its part of the batch only"


def test_a_stage_that_cannot_be_recorded_keeps_everything_where_it_is():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else -self.inner(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    how = offload(gpipe(ranks=4, microbatches=3))
    pipe = require_loop(model, how, ["1", "2", "3"], unsplittable=Branching)
    assert pipe.stages[1].functions.movable == ()
    assert "by autograd" in str(pipe)


def test_the_proof_of_a_pipeline_holds_with_moves():
    torch.manual_seed(0)
    model, ((x,), y) = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]), rows_of()(12)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=MOVED[0], cuts=["1", "2", "3"])
    assert fpipe.prove(pipe, model, (x,), y).is_complete


def test_each_move_is_recorded_once():
    how = offload(one_f_one_b(ranks=4, microbatches=6))
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 12)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    for rank in range(4):
        done = [span.action for span in spans if span.rank == rank and not span.waits]
        assert done == [*how.actions(rank)]
    assert summarize(spans, how).peak_memory == simulate(how).peak_memory
