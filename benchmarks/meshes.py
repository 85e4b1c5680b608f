# SPDX-License-Identifier: Apache-2.0
"""Steps per second on a mesh over Gloo, compared with torch.distributed.pipelining on `fully_shard` or `replicate`.

    python -m benchmarks.meshes [SCHEDULE ...]

A GPT on 2 x 2 processes, one thread each: two copies of a pipeline of two ranks, whose weights are sharded over the
copies, or replicated. Torch is put together as torchtitan does it: each layer of each stage, and the stage, is
wrapped in `fully_shard` that keeps gathered weights until the end of the step, or in the `replicate` that is built on
it. Both libraries cut the same model into the same stages, and each process is passed the rows of its copy. A step is
forward and backward with fresh gradients and their reduction; both must compute the same gradients. Sides take turns in
processes of their own, as in `benchmarks/throughput.py`; medians of all timed steps.

Then the collectives of one step are counted in every process, with the bytes that it sends in them; the table has the
maximum over processes. Bytes are those of a ring or of pairs. Gloo's reduce-scatter, which only torch uses,
really sends twice as many, as an all-reduce does: with sharded weights, part of our lead comes from that.

Last, how often weights are gathered if each rank has room for those of one stage: in the order of interleaved 1F1B, and
with microbatches in groups. Counted in the schedule, and in the processes that run it. Weights are simulated as six
times what a stage keeps of a microbatch, in memory for 14 of those, so neither order has room for two stages.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Contest, Step
from benchmarks.common.jobs import taken
from benchmarks.common.models import cross_entropy, gpt, parts, starts
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import figure, least, most, row
from benchmarks.common.traffic import Traffic, measure_traffic
from benchmarks.common.traffic import most as most_traffic
from benchmarks.throughput import KEPT, take_turns
from schedules import (
    Costs,
    Schedule,
    Sizes,
    breadth_first,
    interleaved_1f1b,
    reduce_gradients,
    repeat,
    shard,
    simulate,
)

PIPELINE, COPIES = 2, 2
BLOCKS, WIDTH, HEADS, WORDS, LENGTH = 4, 256, 8, 256, 64
ROWS, MICROBATCHES, TURNS = 8, 8, rounds(3)
NAMES: Final = ("1F1B", "interleaved", "ZB-V")
LAYOUTS: Final = {"shard": "sharded over 2", "dp": "replicated 2 times"}
ORDERS: Final = {
    "interleaved_1f1b(2, 8, 2)": interleaved_1f1b(PIPELINE, MICROBATCHES, 2),
    "repeat(breadth_first(2, 4, 2), 2)": repeat(breadth_first(PIPELINE, MICROBATCHES // 2, 2), 2),
}
COSTS, SIZES, MEMORY = Costs(F=1, B=2, UNSHARD=0.5, REDUCE_GRAD=1), Sizes(activation=1, gathered=6), 14
Meshes: TypeAlias = Mapping[str, DeviceMesh]
Report: TypeAlias = dict[str, Any]


def task(copy: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the model, the same in every process, and the tokens and targets of a copy."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)
    tokens, targets = torch.randint(0, WORDS, (2, COPIES, ROWS, LENGTH))
    return model, tokens[copy], targets[copy]


def scheduled(contest: Contest) -> Schedule:
    """Return the schedule of a contest."""
    return contest.factory(ranks=PIPELINE, microbatches=MICROBATCHES)


def ours(contest: Contest, layout: str, mesh: DeviceMesh) -> Step:
    """Return this process's step in fpipe, which returns gradients."""
    dims: dict[str, Any] = {layout: layout}
    return run_schedule(scheduled(contest), mesh, mesh.get_local_rank(layout), **dims)


def run_schedule(how: Schedule, mesh: DeviceMesh, copy: int, **options: Any) -> Step:
    """Return a step in fpipe with these options of `fpipe.Place`."""
    import fpipe  # here, so that torch's processes do not import it

    model, tokens, targets = task(copy)
    cuts = [str(layer) for layer in starts(BLOCKS, how.stages)]
    pipe = fpipe.pipeline(
        model,
        example=(tokens,),
        targets=targets,
        loss=cross_entropy,
        schedule=how,
        cuts=cuts,
        place=fpipe.Place(mesh=mesh, rows="own", **options),
    )
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    return lambda: step(*state, (tokens,), targets)[1]


def incumbents(contest: Contest, layout: str, mesh: DeviceMesh) -> Step:
    """Return this process's step in torch, which returns gradients."""
    from torch.distributed import pipelining

    model, tokens, targets = task(mesh.get_local_rank(layout))
    how = scheduled(contest)
    held, firsts = how.placement.stages_on(mesh.get_local_rank("pp")), [0, *starts(BLOCKS, how.stages)]
    modules = parts(model, firsts[1:])
    for s in held:
        wrap(modules[s], layout, mesh[layout])
    group, cpu = mesh.get_group("pp"), torch.device("cpu")
    stages = [pipelining.PipelineStage(modules[s], s, how.stages, cpu, group=group) for s in held]
    made: Any = getattr(pipelining, contest.incumbent)
    runner = made(stages[0] if contest.single else stages, MICROBATCHES, loss_fn=scaled_loss, scale_grads=False)
    given = (tokens,) if any(stage.is_first for stage in stages) else ()
    last = any(stage.is_last for stage in stages)
    wanted: dict[str, Any] = {"target": targets, "losses": []} if last else {}
    named = {rename(name, firsts[s]): value for s in held for name, value in modules[s].named_parameters()}

    def step() -> dict[str, Tensor]:
        for parameter in named.values():
            parameter.grad = None
        runner.step(*given, **wanted, return_outputs=False)
        return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}

    return step


def wrap(part: nn.Sequential, layout: str, mesh: DeviceMesh) -> None:
    """Shard or replicate each layer of a stage, and the stage."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    apply: Any = partial(fully_shard, reshard_after_forward=False) if layout == "shard" else replicate
    for module in (*part, part):
        apply(module, mesh=mesh)


def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a microbatch's part of the mean over microbatches."""
    return cross_entropy(outputs, targets) / MICROBATCHES


def rename(name: str, first: int) -> str:
    """Return the name in the whole model of a parameter of the stage that begins at layer `first`."""
    layer, _, rest = name.partition(".")
    return f"{first + int(layer)}.{rest}"


SIDES: Final[dict[str, Callable[[Contest, str, DeviceMesh], Step]]] = {
    "fpipe": ours,
    "incumbent": incumbents,
}


def contest(side: str, name: str, meshes: Meshes) -> Report:
    """Return the seconds of each step of a side, the norms of its gradients in this process, and its traffic."""
    layout, schedule = name.split(" ")
    step = SIDES[side](CONTESTS[schedule], layout, meshes[layout])
    grads = step()
    times = take_turns(side, name, TURNS, step)
    norms = {name: float(local(grad).double().norm()) for name, grad in grads.items()}
    return {"times": times, "norms": norms, "traffic": measure_traffic(step, meshes[layout].get_group(layout))}


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathers(meshes: Meshes) -> dict[str, int]:
    """Return how often this process gathers weights in a step of each order."""
    import fpipe

    mesh, found = meshes["shard"], {}
    for name, how in ORDERS.items():
        step = run_schedule(how, mesh, mesh.get_local_rank("shard"), shard=fpipe.Sharded("shard", gathered=1))
        found[name] = measure_traffic(step).calls["gather"]
    return found


def rank(side: str, *names: str) -> None:
    """Run one process of a side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = {layout: init_device_mesh("cpu", (PIPELINE, COPIES), mesh_dim_names=("pp", layout)) for layout in LAYOUTS}
    found: Report = {name: contest(side, name, meshes) for name in names}
    ranks.report(found | ({"gathers": gathers(meshes)} if side == "fpipe" else {}))
    dist.destroy_process_group()


def require_equal(name: str, jobs: Mapping[str, Sequence[Report]]) -> None:
    """Raise `AssertionError` unless all sides have computed the same gradients in each process, up to rounding."""
    for side, found in jobs.items():
        for one, other in zip(found, jobs["incumbent"], strict=True):
            mine, theirs = one[name]["norms"], other[name]["norms"]
            assert mine.keys() == theirs.keys(), (name, side, sorted(mine), sorted(theirs))
            far = [leaf for leaf, norm in mine.items() if not math.isclose(norm, theirs[leaf], rel_tol=1e-4)]
            assert not far, (name, side, far)


def rows(name: str, jobs: Mapping[str, Sequence[Report]], model: str) -> Iterator[str]:
    """Yield the rows of a contest: steps per second, and bytes."""
    layout, schedule = name.split(" ")
    what = f"{CONTESTS[schedule].title}, 2 ranks {LAYOUTS[layout]}, {model}"
    speed = {side: 1 / statistics.median(found[0][name]["times"]) for side, found in jobs.items()}
    yield row(what, "steps/s", speed["fpipe"], speed["incumbent"], least(1.03, of="ratio"))
    sent = [bulk(most_of(name, jobs[side])) / 1e6 for side in SIDES]
    yield row(f"{what}, sent by a process to gather and to reduce", "MB", sent[0], sent[1], most(1, of="ratio"))


def most_of(name: str, found: Sequence[Report]) -> Traffic:
    """Return the maximum over processes of a side's traffic."""
    return most_traffic([Traffic(*one[name]["traffic"]) for one in found])


def bulk(found: Traffic) -> int:
    """Return the bytes of weights and gradients."""
    return found.sent["gather"] + found.sent["reduce"]


def counts(names: Sequence[str], jobs: Mapping[str, Sequence[Report]]) -> Iterator[str]:
    """Yield a table of the collectives of each side."""
    yield "\n## Collectives of a step on a mesh\n"
    yield "A reduction of ours is one message to the other copy, and, if weights are replicated, another.\n"
    yield "| schedule | weights | library | gathers | reductions | MB | small ones | bytes | messages | MB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in names:
        layout, schedule = name.split(" ")
        for side in SIDES:
            found = most_of(name, jobs[side])
            calls, sent = found
            cells = [schedule, LAYOUTS[layout], side, calls["gather"], calls["reduce"], f"{bulk(found) / 1e6:.3f}"]
            cells += [calls["small"], sent["small"], calls["send"], f"{sent['send'] / 1e6:.3f}"]
            yield f"| {' | '.join(map(str, cells))} |"


def orders(found: Sequence[Report]) -> Iterator[str]:
    """Yield a table of how often each order gathers weights."""
    yield "\n### Weights gathered with room for one stage\n"
    yield "| order of 8 microbatches | gathers by rank | in the processes | peak memory | with room for two stages |"
    yield "|---|---|---|---|---|"
    for name, how in ORDERS.items():
        reduced = reduce_gradients(how)
        sharded = shard(reduced, limit=1)
        planned = [sum(action.kind == "UNSHARD" for action in sharded.actions(r)) for r in range(PIPELINE)]
        counted = [one["gathers"][name] for one in found]
        peaks = [max(simulate(shard(reduced, limit=k), COSTS, sizes=SIZES).peak_memory) for k in (1, 2)]
        assert peaks[0] <= MEMORY < peaks[1], (name, peaks)
        cells = [f"`{name}`", planned, counted, *map(figure, peaks)]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Run all contests and print their rows."""
    names = [f"{layout} {name}" for layout in LAYOUTS for name in sys.argv[1:] or NAMES]
    jobs = taken("benchmarks.meshes", PIPELINE * COPIES, [*SIDES], dict.fromkeys(names, TURNS), **KEPT)
    model = f"GPT of {sum(parameter.numel() for parameter in task(0)[0].parameters()) / 1e6:.1f} million parameters"
    for name in names:
        require_equal(name, jobs)
        print(*rows(name, jobs, model), sep="\n")
    print(*counts(names, jobs), *orders(jobs["fpipe"]), sep="\n")


if __name__ == "__main__":
    rank(*sys.argv[1:]) if ranks.inside() else main()
