# SPDX-License-Identifier: Apache-2.0
"""The overhead of the executor, and the total cost of an action, compared with torch.distributed.pipelining.

    python -m benchmarks.overhead

A compute action is a forward, a backward or half of one, of one stage of Linear(8, 8) for one microbatch. All ranks are
in this process, with one thread. Medians of many interleaved rounds, per compute action:

- the executor: the time beyond that of a bare loop that calls the same stage functions in the same order and
  accumulates gradients. For torch, the loop calls the same modules and the `.backward()` of each. Every value
  of ours goes through the transport; torch holds all stages on one rank, since its transport needs a process
  per rank, and sends nothing.
- in total: a whole step divided by its number of actions.

The second table also compares with a loop that runs one microbatch after another, which is kinder to the CPU caches,
and has stages that do nothing, for the executor's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import fpipe
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import figure, most, row
from benchmarks.common.turns import Function, device, medians
from fpipe.network.ranks import Ranks
from fpipe.pipelines.inputs import scatter
from fpipe.pipelines.step import run_plan
from fpipe.record.variant import TRAINING
from fpipe.runtime.contract import StageCrossing, StageLike
from fpipe.runtime.executor import Execution, Inputs
from fpipe.runtime.instructions import link
from fpipe.runtime.local import LocalHandle
from fpipe.runtime.transport import Transport
from fpipe.stages.backends import Backward
from schedules import Action, B, F, Schedule, Span, gpipe, interleaved_1f1b, lower, one_f_one_b, zb_h1

STAGES, MICROBATCHES, WIDTH, ROUNDS = 4, 32, 8, rounds(40)
COMPUTE = ("F", "B", "I", "W")
SCHEDULES = {
    "1F1B": one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES),
    "GPipe": gpipe(ranks=STAGES, microbatches=MICROBATCHES),
    "interleaved 1F1B": interleaved_1f1b(ranks=STAGES // 2, microbatches=MICROBATCHES),
    "ZB-H1": zb_h1(ranks=STAGES, microbatches=MICROBATCHES),
}


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss."""
    return (outputs - targets).square().mean()


def layers() -> list[nn.Module]:
    """Return the stages to measure."""
    return [nn.Linear(WIDTH, WIDTH, device=device()) for _ in range(STAGES)]


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    x, y = torch.randn(2, MICROBATCHES, WIDTH, device=device())
    return x, y


def count(how: Schedule) -> int:
    """Return the number of compute actions in a step."""
    return sum(1 for rank in range(how.ranks) for _ in how.actions(rank))


def executor(how: Schedule) -> dict[str, Function]:
    """Return a step of the executor under a schedule, and the bare loops over the same stage functions."""
    model, (x, y) = layers(), batch()
    cuts = [str(stage) for stage in range(1, STAGES)]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mean_square, schedule=how, cuts=cuts)
    inputs = scatter(pipe.training, *pipe.init(model), pipe.batch(TRAINING, (x,), y), None)
    spans: list[Span] = []
    run_plan(pipe, pipe.training, inputs, spans.append)
    order = [span.action for span in spans if span.action.kind in COMPUTE]
    return {
        "run": lambda: run_plan(pipe, pipe.training, inputs),
        "bare": lambda: bare(pipe.stages, inputs, order),
        "plain": lambda: bare(pipe.stages, inputs, [a for i in range(MICROBATCHES) for a in microbatch(i, order)]),
    }


def microbatch(i: int, order: Sequence[Action]) -> list[Action]:
    """Return the actions of one microbatch, forward in stage order and then back, with weight halves last."""
    mine = [action for action in order if action.microbatch == i]
    backward = sorted((a for a in mine if a.kind in "BI"), key=lambda a: -a.stage)
    return [F(s, i) for s in range(STAGES)] + backward + [a for a in mine if a.kind == "W"]


def bare(stages: Sequence[StageLike], inputs: Inputs, order: list[Action]) -> None:
    """Call the stage functions of a chain in this order."""
    totals: list[tuple[Tensor, ...]] = [()] * STAGES
    values: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    kept = {}
    for kind, s, i, _, _ in order:
        stage = stages[s]
        if kind == "F":
            arguments = inputs.batch(s, i) + values.pop((s, i), ())
            values[s + 1, i], _, kept[s, i] = stage.forward(inputs.params[i][s], (), arguments, 0)
            if s == STAGES - 1:
                values[s, i] = ()
            continue
        if kind == "I":
            values[s - 1, i], kept[s, i] = stage.backward_input(kept.pop((s, i)), values.pop((s, i)))
            continue
        if kind == "B":
            values[s - 1, i], totals[s] = stage.backward(kept.pop((s, i)), values.pop((s, i)), totals[s])
        else:
            totals[s] = stage.backward_weight(kept.pop((s, i)), totals[s])


def _crossing(source: int, target: int) -> StageCrossing:
    return StageCrossing(source, target, (None,), ((),))


class Empty:
    """A stage of a chain whose functions return immediately, to measure the executor's own time."""

    def __init__(self, s: int) -> None:
        first, last = s == 0, s == STAGES - 1
        self.gets, self.pulls = [_crossing(s - 1, s)] * (not first), [_crossing(s, s - 1)] * (not first)
        self.gives, self.pulled_by = [_crossing(s, s + 1)] * (not last), [_crossing(s + 1, s)] * (not last)
        self.shares: list[StageCrossing] = []
        self.shared_by: list[StageCrossing] = []
        self.totals: tuple[()] = ()
        self.results = ((),) * last

    def forward(self, *_: object) -> tuple[tuple[int], tuple[()], int]:
        """Return one output."""
        return (0,), (), 0

    def evaluate(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """Return one output."""
        return (0,), ()

    def backward(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """Return one cotangent."""
        return (0,), ()

    def offload(self, *_: object) -> int:
        """Return what is kept."""
        return 0

    def reload(self, action: Action, *_: object) -> LocalHandle:
        """Return what is kept."""
        return LocalHandle("GROUP", action)

    def backward_input(self, *_: object) -> tuple[tuple[int], tuple[()]]:
        """Return one cotangent."""
        return (0,), ()

    def backward_weight(self, *_: object) -> tuple[()]:
        """Return no gradients."""
        return ()

    def zero_cotangents(self) -> tuple[int]:
        """Return one cotangent."""
        return (0,)

    def add(self, *_: object) -> tuple[()]:
        """Return no gradients."""
        return ()

    def complete(self, total: object) -> object:
        """Return the sum."""
        return total

    def gradients_for(self, *_: object) -> tuple[()]:
        """Return no gradients."""
        return ()


def empty(how: Schedule) -> dict[str, Function]:
    """Return a step of the executor with empty stages, and the bare loop over them."""
    program, nothing = lower(how), dict.fromkeys(range(STAGES), ())
    stages = [Empty(s) for s in range(STAGES)]
    inputs = Inputs([nothing] * MICROBATCHES, [nothing] * MICROBATCHES, lambda s, i: (), [0] * MICROBATCHES)
    held = [{s: stages[s] for s in how.placement.stages_on(rank)} for rank in range(how.ranks)]
    linked = [link(program.actions(rank), held[rank], how.placement) for rank in range(how.ranks)]

    def run(rank: int, transport: Transport) -> Execution:
        return Execution(rank, linked[rank], transport, inputs)

    order = [a(s, i) for i in range(MICROBATCHES) for a, way in ((F, 1), (B, -1)) for s in range(STAGES)[::way]]
    return {"run": lambda: Ranks(how.ranks).run([run]), "bare": lambda: bare(stages, inputs, order)}


def step(backward: Backward = "autograd") -> Function:
    """Return a whole step of 1F1B, as users call it."""
    model, (x, y) = layers(), batch()
    cuts = [str(stage) for stage in range(1, STAGES)]
    how = SCHEDULES["1F1B"]
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=mean_square,
        schedule=how,
        cuts=cuts,
        gradients=fpipe.Gradients(backward=backward),
    )
    function, state = fpipe.value_and_grad(pipe), pipe.init(model)
    return lambda: function(*state, (x,), y)


def incumbents() -> dict[str, Function]:
    """Return steps of torch's two runtimes, all stages in this process, and bare loops of their modules."""
    modules, (x, y) = layers(), batch()
    single = Schedule1F1B(PipelineStage(modules[0], 0, 1, device()), MICROBATCHES, loss_fn=mean_square)
    stages: list[Any] = [PipelineStage(module, s, STAGES, device()) for s, module in enumerate(modules)]
    general = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=mean_square)

    def loop(used: list[nn.Module]) -> None:
        for a, b in zip(x.split(1), y.split(1), strict=True):
            given, made = [a], []
            for module in used:  # separate stages, as in the runtime
                made.append(module(given[-1]))
                given.append(made[-1].detach().requires_grad_())
            (mean_square(made[-1], b) / MICROBATCHES).backward()
            for value, cut in zip(reversed(made[:-1]), reversed(given[1:-1]), strict=True):
                value.backward(cut.grad)

    def stepping(runner: Schedule1F1B | ScheduleInterleaved1F1B) -> Callable[[], None]:
        def step() -> None:
            for module in modules:
                module.zero_grad(set_to_none=True)
            runner.step(x, target=y, return_outputs=False)

        return step

    return {
        "single": stepping(single),
        "single, bare": lambda: loop(modules[:1]),
        "general": stepping(general),
        "general, bare": lambda: loop(modules),
    }


def measured() -> dict[str, float]:
    """Return the median seconds of everything measured."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    functions = {f"incumbent, {name}": function for name, function in incumbents().items()}
    dist.destroy_process_group()
    for name, how in SCHEDULES.items():
        functions |= {f"{name}, {part}": function for part, function in executor(how).items()}
    functions |= {f"empty, {part}": function for part, function in empty(SCHEDULES["1F1B"]).items()}
    functions["step"] = step()
    functions["step, graph"] = step(backward="graph")
    return medians(functions, ROUNDS)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = {name: seconds * 1e6 for name, seconds in measured().items()}
    actions = 2 * MICROBATCHES * STAGES
    general = (times["incumbent, general"] - times["incumbent, general, bare"]) / actions
    for name, how in SCHEDULES.items():
        over = (times[f"{name}, run"] - times[f"{name}, bare"]) / count(how)
        what = f"executor per compute action, {name}, {how.ranks} ranks; torch: general runtime"
        print(row(what, "us", over, general, most(5)))
    whole = times["incumbent, general"] / actions
    for name, title in (("step", "autograd"), ("step, graph", "graph")):
        if name in times:
            reach = most(12) if title == "graph" else None
            what = f"whole cost per compute action of Linear(8, 8), 1F1B, {title} stages"
            print(row(what, "us", times[name] / actions, whole, reach))
    details(times, actions, general)


def details(times: dict[str, float], actions: int, general: float) -> None:
    """Print the second table."""
    single = (times["incumbent, single"] - times["incumbent, single, bare"]) / (2 * MICROBATCHES)
    print("\n## The executor per compute action\n\n| us | over the same order | over microbatches | the loop itself |")
    print("|---|---|---|---|")
    for name, how in SCHEDULES.items():
        run, loop, plain = (times[f"{name}, {part}"] / count(how) for part in ("run", "bare", "plain"))
        print(f"| {name}, {how.ranks} ranks | {figure(run - loop)} | {figure(run - plain)} | {figure(loop)} |")
    run, loop = (times[f"empty, {part}"] / actions for part in ("run", "bare"))
    print(f"| 1F1B, empty stages | {figure(run - loop)} | {figure(run - loop)} | {figure(loop)} |")
    bares = times["incumbent, single, bare"] / (2 * MICROBATCHES), times["incumbent, general, bare"] / actions
    print(f"| torch, 1F1B, one stage | {figure(single)} | {figure(single)} | {figure(bares[0])} |")
    print(f"| torch, general runtime, 1 rank | {figure(general)} | {figure(general)} | {figure(bares[1])} |")


if __name__ == "__main__":
    main()
