# SPDX-License-Identifier: Apache-2.0
"""What runs beside steps: profiles, timelines, other process groups, lost ranks, drop-in modules; and what is left."""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import time
import warnings
from functools import partial
from itertools import permutations
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import fpipe
from fpipe.network import measurements, recording
from fpipe.network.channels import Envelope
from fpipe.network.trail import Arrived, Trail
from fpipe.network.waiting import Awaited
from fpipe.planning.profile import PROFILE_FORMAT
from fpipe.planning.timing import MESSAGE_SIZES
from fpipe.tensors.tree import same_bits
from schedules import KINDS, Action, B, F, Link, one_f_one_b, simulate, zb_h1
from tests.common import collectives
from tests.common.growth import build_small, require_no_growth, uncollected
from tests.common.late_device import late_device, late_results
from tests.common.loops import loop
from tests.common.running import build
from tests.common.scripts import SCHEDULES, SCRIPTS, require_same_training
from tests.common.sizes import NIGHTLY
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, raises

# --------------------------------------- Profiles that all ranks make together, and the time of transfers between them

FAST = fpipe.Roofline(1e10, 1e10)


@case(sizes=[2], day=[])
def profiles_of_all_ranks(rank, size):
    """Every rank returns the same profile, of the slowest, with a link between ranks; a pipeline gives it, too."""
    one = ZOO["mlp"]
    how = one_f_one_b(ranks=size, microbatches=2)
    pipe, model, inputs, targets = build(one, how, 4, capture="trace", backward="autograd")  # as the sum of its blocks
    found = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, seconds=0)
    assert gather(found) == [found] * size
    assert found.link.latency > 0
    assert found.link.bandwidth < float("inf")
    again = fpipe.profile(pipe, inputs, targets, device=FAST, link=Link(latency=rank + 1.0))
    again.require(pipe)
    assert again.link == Link(latency=rank + 1.0), "what is passed is not measured"
    assert again.sizes(one.at(size), pipe.schedule.placement) == pipe.sizes
    assert simulate(pipe.schedule, found.costs(one.at(size)), pipe.program.graph).makespan > 0
    fpipe.verify(pipe, model, inputs, targets)


@case
def transfers_between_any_two_ranks(rank, size):
    pipe, *_ = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=2), 4)
    with pipe.ranks.enter_call("a test"):
        rows = pipe.ranks.measure_transfers(MESSAGE_SIZES)
    assert all(torch.equal(rows, other) for other in gather(rows))
    ends = [(a, b, bytes_) for a, b in permutations(range(size), 2) for bytes_ in MESSAGE_SIZES]
    assert sorted(tuple(map(int, row[:3])) for row in rows.tolist()) == sorted(ends)
    assert (rows[:, 3] > 0).all()


@case(day=[])
def actions_and_steps_take_the_time_of_their_messages(rank, size):
    """In a profile of several ranks, but not in one that is only estimated."""
    one = ZOO["mlp"]
    pipe, *_ = build(one, one_f_one_b(ranks=size, microbatches=2), 4)
    with pipe.ranks.enter_call("a test"):
        assert pipe.ranks.measure_posting() > 0
    model, inputs, targets = one.make(8)
    slow, wait = 0.125, 0.25
    with (
        patch.object(type(pipe.ranks), "measure_posting", lambda ranks: slow),
        patch("fpipe.planning.profiler._time_agreement", lambda ranks: wait),
    ):
        found = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, seconds=0)
        estimated = fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, device=FAST)
    assert min(found.fixed.F, found.fixed.B, found.fixed.I, found.fixed.C) >= slow > found.fixed.W
    assert found.step >= 2 * wait
    assert (estimated.fixed.F, estimated.step) == (0, 0)


@case(sizes=[2])
def a_profile_that_one_rank_has_kept_serves_all(rank, size):
    """Of the same model only: ranks that look for others measure together, and hear of it."""
    one, cache = ZOO["mlp"], Path(os.environ["REPORT"]) / f"kept-{rank}"
    model, inputs, targets = one.make(8)

    def profile(rows=8):
        batch = (inputs[0][:rows],), targets[:rows]
        return fpipe.profile(model, *batch, loss=one.loss, microbatches=2, device=FAST, cache=cache)

    first = PROFILE_FORMAT.write(profile())
    if rank == 0:
        for entry in cache.iterdir():
            entry.unlink()
    assert PROFILE_FORMAT.write(profile()) == first, "with the link as it was measured before"
    with raises(fpipe.InputError, "].microbatch: got float32[4, 4]", "expected float32[2, 4]"):
        profile(8 if rank else 4)


@case(sizes=[2], day=[])
def profiles_of_different_models_are_refused(rank, size):
    """On every rank, by what differs first; the next profile is made as if nothing had happened."""
    one = ZOO["mlp"]
    model, inputs, targets = one.make(8)
    fewer = {1: ((inputs[0][:1],), targets[:1]), 4: ((inputs[0][:4],), targets[:4]), 8: (inputs, targets)}
    with raises(fpipe.InputError, "others[", "].microbatch: got float32[4, 4]", "expected float32[2, 4]"):
        fpipe.profile(model, *fewer[8 if rank else 4], loss=one.loss, microbatches=2, device=FAST)
    with raises(fpipe.InputError if rank == size - 1 else fpipe.TransportError, "expected at least 2"):
        fpipe.profile(model, *fewer[1 if rank == size - 1 else 8], loss=one.loss, microbatches=2, device=FAST)
    assert fpipe.profile(model, inputs, targets, loss=one.loss, microbatches=2, device=FAST).blocks


# -------------------------------------------------------------- Spans, and the timeline that all ranks build from them


@case
def spans_are_recorded(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), inputs, targets)
    assert [span.action for span in spans if not span.waits] == list(pipe.schedule.actions(rank))
    assert {span.rank for span in spans} == {rank}


@case
def timelines_of_all_ranks(rank, size):
    """Every rank gets the same timeline, where no value is used before it is computed, even if clocks are far apart."""
    clock = time.perf_counter
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    for apart, tolerance in ((0.0, 0.0), (1000.0, 1.0)):
        recording.perf_counter = measurements.perf_counter = lambda late=apart * rank: clock() - late
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
    recording.perf_counter = measurements.perf_counter = clock
    rows = pipe.ranks.gather_rows(torch.full((rank, 3), float(rank), dtype=torch.float64))
    assert [one.tolist() for one in rows] == [[[float(r)] * 3] * r for r in range(size)]
    with raises(fpipe.InputError, "spans[0]: got", f"of rank {(rank + 1) % size}", f"of ranks [{rank}]"):
        fpipe.timeline(pipe, [span for span in found if span.rank == (rank + 1) % size])


def require_causal(pipe, found, tolerance):
    """Require the schedule's actions; none begins, and no wait for it ends, before its input is computed."""
    ended = {span.action: span.end for span in found}
    for r in range(pipe.schedule.ranks):
        actions = [span.action for span in found if span.rank == r and not span.waits]
        assert actions == list(pipe.schedule.actions(r))
    for span in found:
        kind, s, i, peer, _ = span.action
        if KINDS[kind].does == "RECV":
            assert span.end >= ended[Action(KINDS[kind].carries, peer, i)] - tolerance
        if kind == "F" and s:
            assert span.start >= ended[F(s - 1, i)] - tolerance
        if kind == "B" and s < pipe.schedule.stages - 1:
            assert span.start >= ended[B(s + 1, i)] - tolerance


# -------------------- Process groups other than the pipeline's: data parallelism, and collectives in a model's forward


@case(sizes=[2])
def wrapped_models(rank, size):
    """DDP and FSDP2 modules are refused, alone and inside a model."""
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
            with raises(fpipe.InputError, name, "expected a plain module", 'dp="dp"), or shard='):
                fpipe.pipeline(
                    model,
                    example=(x,),
                    targets=x,
                    loss=nn.functional.mse_loss,
                    schedule=one_f_one_b(ranks=size, microbatches=2),
                    stages=size,
                    recording=fpipe.Recording(front_end=capture),
                )


@case(sizes=[4], day=[])
def data_parallel_pipelines(rank, size):
    """Two pipelines of half of the ranks take half of the batch each; gradients are averaged after the step."""
    half = size // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "pp"))
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
        place=fpipe.Place(group=mesh["pp"]),
    )
    with raises(fpipe.InputError, "the dimensions ['dp', 'pp']", 'group=mesh["pp"]'):
        fpipe.pipeline(
            model, example=inputs, targets=targets, loss=one.loss, schedule=how, place=fpipe.Place(group=mesh)
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


@case(day=[])
def collectives_in_a_module(rank, size):
    """Every process has its own pipeline, and the models call collectives over all processes."""
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


# ------------------------------------------------------------------------- The drop-in module, and scripts that use it


def script_has_the_bits_of_one_device(name: str, schedule: str, rank: int, size: int) -> None:
    with mock.patch.dict(os.environ, WORLD_SIZE=str(size)):  # as under torchrun
        names = gather(require_same_training(name, schedule))
    assert len(set().union(*names)) > max(map(len, names)), "every rank holds a part"


for _name, _schedule in itertools.product(SCRIPTS, SCHEDULES):
    _title = f"a_script_that_can_{_name}_under_{_schedule}"
    case(partial(script_has_the_bits_of_one_device, _name, _schedule), day=[], name=_title)


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
    plain = torch.cat([net(rows).detach() for rows in x.chunk(4)])  # kernels depend on the number of rows
    assert same_bits(model.eval()(x), plain)
    model.train().zero_grad()
    handle = model.get_submodule("0").register_forward_hook(lambda module, args, out: out * 2)
    hooked = model(x)
    handle.remove()
    net[0].register_forward_hook(lambda module, args, out: out * 2)
    with raises(fpipe.InputError, "change it in the fpipe.Pipelined, which follows it"):
        model(x)
    net[0]._forward_hooks.clear()
    assert not same_bits(hooked, model(x))
    model.pipe.recheck()
    model.load_state_dict(net.state_dict())  # the names of other ranks are ignored
    with raises(RuntimeError, "Unexpected key(s)", "strange"):
        model.load_state_dict({**net.state_dict(), "strange": x})


class Clipped(torch.optim.SGD):
    """Clips by the norm of all its gradients, as Lamb does."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_(1 / max(1.0, norm.item()))
        return super().step(closure)


class Halved(torch.optim.SGD):
    """Updates each parameter on its own."""

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.grad.mul_(0.5)
        return super().step(closure)


@case
def an_optimizer_that_combines_parameters_is_refused(rank, size):
    """It would combine those of a rank, and each rank would compute other numbers without a word."""
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.ones(4, 4)
    how = one_f_one_b(ranks=size, microbatches=2)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    model(x).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Clipped(model.parameters(), lr=0.1)
    for _ in range(2):
        with raises(fpipe.InputError, "got Clipped, whose update of a parameter depends on other parameters"):
            optimizer.step()
    assert all(map(same_bits, before, [p.detach() for p in model.parameters()]))
    Halved(model.parameters(), lr=0.1).step()
    torch.optim.AdamW(model.parameters()).step()
    alone = nn.Linear(4, 4)
    alone(x).sum().backward()
    Clipped(alone.parameters(), lr=0.1).step()  # none of this rank's share


class Tied(nn.Module):
    """The first layer and the last one have the same weight."""

    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size + 1)])
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(x)


@case
def torchs_own_clipping_is_that_of_one_device(rank, size):
    """Under any of its names, with tied parameters on several ranks, and on a rank that has no gradients."""
    for frozen in (False, True):
        torch.manual_seed(3)
        net, x = Tied(size), 10 * torch.randn(8, 4)
        if frozen:
            net = net.layers[1:]
            net[0].requires_grad_(False)
        how = one_f_one_b(ranks=size, microbatches=4)
        model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
        for k in range(4):
            for rows in x.chunk(4):
                (net(rows).square().mean() / 4).backward()
            model(x).backward()
            if k == 3:
                clip_grad_value_(net.parameters(), 1e-3)
                clip_grad_value_(model.parameters(), 1e-3)
            else:
                order = (2.0, math.inf, 1.0)[k]
                grads, share = ([p.grad for p in one.parameters() if p.grad is not None] for one in (net, model))
                whole = get_total_norm(grads, order)
                assert same_bits(whole, get_total_norm(share, order))
                assert same_bits(whole, clip_grad_norm_(net.parameters(), 0.1, order))
                assert same_bits(whole, clip_grad_norm_(model.parameters(), 0.1, order, error_if_nonfinite=True))
            plain = dict(net.named_parameters(remove_duplicate=False))
            for name, p in model.named_parameters():
                assert p.grad is None if plain[name].grad is None else same_bits(p.grad, plain[name].grad), name
            net.zero_grad()
            model.zero_grad()


@case
def a_rank_without_trainable_parameters_has_an_optimizer(rank, size):
    torch.manual_seed(3)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.randn(4, 4)
    net[0].requires_grad_(False)
    how = one_f_one_b(ranks=size, microbatches=2)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == (20 if rank else 0)
    optimizer = torch.optim.AdamW(trained)
    for _ in range(2):
        model(x).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
    assert list(model.state_dict()) == [f"{rank}.weight", f"{rank}.bias"]


class WithMethods(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.parts, self.width = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), 4

    def forward(self, x):
        return self.parts(x)

    def generate(self, x):
        return self(x)

    def norms(self):
        return [part.weight.norm() for part in self.parts]

    def describe(self):
        return self.width

    def save_pretrained(self, path):
        torch.save(self.state_dict(), path)


@case
def methods_of_a_model_that_run_it_are_refused(rank, size):
    how = one_f_one_b(ranks=size, microbatches=2)
    x = torch.ones(4, 4)
    model = fpipe.Pipelined(WithMethods(size), loss=torch.mean, example=(x,), schedule=how)
    assert model.describe() == 4
    with raises(fpipe.InputError, "generate: got a call of WithMethods in it", "fpipe.generate(model.pipe, ...)"):
        model.generate(x)
    with raises(fpipe.InputError, "norms: got the error 'NoneType' object has no attribute 'norm'"):
        model.norms()
    with raises(fpipe.InputError, "save_pretrained: got a read of its state dict in it", "fpipe.export"):
        model.save_pretrained("weights")
    assert len(model.state_dict()) == 2
    model(x).backward()


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


@case(sizes=[4])
def the_first_script_of_the_readme_verifies(rank, size):
    """Processes that nobody has seeded are in other states."""
    torch.manual_seed(rank)
    script = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "README.md").read_text(), re.DOTALL)[0]
    exec(compile(script, "README", "exec"), {"__name__": "readme"})


@case(sizes=[2])
def models_of_other_values_are_told_of(rank, size):
    """Else the stages of a model without ties would be parts of several models; but a checkpoint may be loaded next."""
    torch.manual_seed(rank)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.ones(4, 4)
    how = one_f_one_b(ranks=size, microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        fpipe.Pipelined(net, loss=torch.mean, example=(x,), schedule=how)
    assert "got models with different values on the ranks" in str(found[0].message)
    assert found[0].filename == __file__
    fpipe.Pipelined(net, loss=torch.mean, example=(x,), schedule=how, weights=net.state_dict())  # as they are


@case(sizes=[2])
def a_backward_on_one_rank_only_is_found_at_the_next_forward(rank, size):
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.ones(4, 4)
    how = one_f_one_b(ranks=size, microbatches=2)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    model(x)  # a loss without a backward on any rank
    loss = model(x)
    if rank == 0:
        loss.backward()
    with raises(fpipe.InputError, "got loss.backward() of the last forward on ranks [0] of 2"):
        model(x)
    if rank == 1:
        loss.backward()
    model(x).backward()


# --- Processes that build many pipelines, or run many steps, hold no more threads, descriptors and objects than before


@case(sizes=[2], day=[])
def dropped_and_closed_pipelines_leave_nothing(rank, size):
    """Ranks end theirs in their own ways, without waiting for each other."""

    def run(k):
        pipe, step = build_small(zb_h1(ranks=size, microbatches=3))
        for _ in range(2):
            step(6)
        if (k + rank) % 2:
            pipe.close()
            pipe.close()
            with raises(fpipe.InputError, "a step: got a closed pipeline", "build the pipeline again"):
                step(6)

    grown = require_no_growth(run, 100 if NIGHTLY else 2, 1000 if NIGHTLY else 5)
    assert not NIGHTLY or grown < 8 * 2**20


@case(sizes=[2], day=[])
def a_dropped_pipeline_leaves_the_collector_nothing(rank, size):
    """Channels, handshakes and the guards of a rank included."""

    def use():
        pipe, step = build_small(zb_h1(ranks=size, microbatches=3))
        step()
        step(6)
        return pipe, step

    use()
    held = [use()]
    with uncollected() as dropped:
        held.clear()
    assert not dropped


@case(sizes=[2])
def a_closed_pipeline_leaves_the_group_of_the_user(rank, size):
    """So do pipelines that go on: another one over the same group, and one rebuilt from what was dropped."""
    group = dist.new_group(range(size))
    how = one_f_one_b(ranks=size, microbatches=2)
    pipe, step = build_small(how, group=group)
    other, other_step = build_small(how, group=group)
    step()
    pipe.close()
    other_step()
    rebuilt = other.rebuilt(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    del other, other_step
    fpipe.value_and_grad(rebuilt)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == size
    dist.destroy_process_group(group)


@case(sizes=[2], day=[])
def two_thousand_steps_do_not_grow_or_slow_down(rank, size):
    """Nor do they hold more of anything."""
    _, step = build_small(one_f_one_b(ranks=size, microbatches=2))
    took = []

    def run(k):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)

    assert require_no_growth(run, 100, 2000) < 8 * 2**20
    assert statistics.median(took[-500:]) < 3 * statistics.median(took[100:600])


# --------------------------------------------------------- Lost messages, lost ranks, and a process group that is gone


class Reached:
    """An event that the device has reached."""

    def query(self):
        return True

    def synchronize(self):
        """Nothing is left to wait for."""


@case
def a_head_that_is_read_late(rank, size):
    """A wrong message that one rank reads late, as on an accelerator, raises on all ranks in the next step."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, cpu = pipe.init(model), fpipe.value_and_grad(pipe), torch.device("cpu")
    awaited, came = (Envelope(Action("SEND_F", 0, i, 1), (), cpu) for i in (2, 3))
    if rank == 1:
        trail = pipe.ranks.transport.trail = Trail(lambda headers: (headers, Reached()))
        trail.add(Arrived(came.header, awaited.require, Awaited("0SEND_F2>1", (0,), None)))
        trail.close_lap(trail.open[0].awaited)
    with raises(fpipe.TransportError, "got 0SEND_F3>1 of 0 bytes, expected that of 1RECV_F2<0"):
        step(*state, inputs, targets)
    if rank == 1:
        with raises(fpipe.TransportError, "got a pipeline that failed midway"):
            step(*state, inputs, targets)


@case(sizes=[2])
def a_rank_fails_while_another_waits_for_its_device(rank, size):
    """Whoever waits for a device hears of it, in a call and after it; all name the first cause, and can go on."""
    one, how = ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4)
    boom = raises(ValueError, "boom") if rank == 1 else raises(fpipe.RankError, "rank 1", "ValueError: boom")
    fourth = list(how.actions(1))[3]

    def record(span):
        if rank == 1 and span.action == fourth:
            raise ValueError("boom")

    with late_device():
        pipe, model, inputs, targets = build(one, how, 8)
        with boom:
            fpipe.value_and_grad(pipe, record=record)(*pipe.init(model), inputs, targets)
    with late_device() as device:
        pipe, *_ = build(one, how, 8)
        state, step = pipe.init(model), fpipe.value_and_grad(pipe)
        step(*state, inputs, targets)
        if rank == 1:
            with patch.object(pipe.ranks, "broadcast", side_effect=ValueError("boom")), boom:
                step(*state, inputs, targets)
        else:
            with late_results(pipe, device):
                step(*state, inputs, targets)
            device.synchronize()
            assert device.is_broken
            with boom:
                step(*state, inputs, targets)
        with raises(fpipe.TransportError, "got a pipeline that failed midway"):
            step(*state, inputs, targets)
    pipe, *_ = build(one, how, 8)
    fpipe.verify(pipe, model, inputs, targets)


@case(sizes=[])
def dies_in_the_middle(rank, size):
    """Rank 2 exits without notice in the middle of a step; the others fail at once, not by a timeout."""
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


@case(sizes=[])
def dies_while_another_waits_for_its_device(rank, size):
    """Rank 1 exits without notice. A device that waits for it does not notice, but its rank does, before a timeout."""
    with late_device() as device:
        pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
        last = list(pipe.schedule.actions(1))[3]

        def record(span):
            if rank == 1 and span.action == last:
                os._exit(7)

        with raises(fpipe.RankError, "rank 0", "rank 1", "it died, or left") as error:
            fpipe.value_and_grad(pipe, record=record)(*pipe.init(model), inputs, targets)
        assert device.is_broken
    raise RuntimeError(f"failed as it should: {error.text}")


@case(day=[2, 4])
def after_the_group_is_gone(rank, size):
    """The last case of a job: existing pipelines are refused, and so is a new one that would run all ranks in here."""
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
