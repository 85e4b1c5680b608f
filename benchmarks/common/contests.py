# SPDX-License-Identifier: Apache-2.0
"""The same model under the same schedule by both libraries: functions that take one step, forward and backward.

Both start from new gradients in every step and make the loss known where it arises; neither puts outputs together. The
gradients are what a step returns; nothing else of it stays alive.
`torch.distributed.pipelining` has no ZB-H1 of that name; its `ScheduleInterleavedZeroBubble` with one stage per rank is
the paper's ZB-1P, the same order up to where the weight halves stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.models import cross_entropy, parts, starts
from schedules import Schedule, interleaved_1f1b, one_f_one_b, zb_h1, zb_v

Step = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Contest:
    """A schedule, by our factory and by the name of the incumbent's class; `single`: that takes one stage, not many."""

    name: str
    factory: Callable[..., Schedule]
    incumbent: str
    single: bool = False

    @property
    def title(self) -> str:
        """Both names."""
        return f"{self.name} (`{self.factory.__name__}`, `{self.incumbent}`)"


CONTESTS: Final = {
    contest.name: contest
    for contest in (
        Contest("1F1B", one_f_one_b, "Schedule1F1B", single=True),
        Contest("interleaved", interleaved_1f1b, "ScheduleInterleaved1F1B"),
        Contest("ZB-H1", zb_h1, "ScheduleInterleavedZeroBubble"),
        Contest("ZB-V", zb_v, "ScheduleZBVZeroBubble"),
    )
}


@dataclass(frozen=True)
class Task:
    """A model, a batch, and how many microbatches it is cut into.

    - `cuts(stages)`: the modules at which stages after the first begin; `pieces(stages)`: modules cut by hand there.
    - `loss(outputs, targets)`: that of the whole model.
    """

    model: nn.Module
    tokens: Tensor
    targets: Tensor
    microbatches: int
    cuts: Callable[[int], list[str]]
    pieces: Callable[[int], list[nn.Module]]
    loss: Callable[[Any, Tensor], Tensor] = cross_entropy


def sequence(model: nn.Sequential, blocks: int, tokens: Tensor, targets: Tensor, microbatches: int) -> Task:
    """Return the task of training a `gpt`."""

    def cuts(stages: int) -> list[str]:
        return [str(layer) for layer in starts(blocks, stages)]

    def pieces(stages: int) -> list[nn.Module]:
        return [*parts(model, starts(blocks, stages))]

    return Task(model, tokens, targets, microbatches, cuts, pieces)


def ours(contest: Contest, task: Task, backward: Literal["autograd", "graph"] = "autograd") -> Step:
    """A step of this rank by fpipe: its gradients. `backward` says how stages are differentiated."""
    import fpipe  # here, so that a process that measures one library does not import the other

    how = contest.factory(ranks=dist.get_world_size(), microbatches=task.microbatches)
    batch = (task.tokens,)
    pipe = fpipe.pipeline(
        task.model,
        example=batch,
        targets=task.targets,
        loss=task.loss,
        schedule=how,
        cuts=task.cuts(how.stages),
        backward=backward,
    )
    state, step = pipe.init(task.model), fpipe.value_and_grad(pipe)
    return lambda: step(*state, batch, task.targets)[1]


def incumbents(contest: Contest, task: Task) -> Step:
    """A step of this rank by the incumbent, of stages that were cut by hand: its gradients."""
    from torch.distributed import pipelining

    how = contest.factory(ranks=dist.get_world_size(), microbatches=task.microbatches)
    modules = task.pieces(how.stages)
    held = how.placement.stages_on(dist.get_rank())
    stages = [pipelining.PipelineStage(modules[s], s, how.stages, torch.device("cpu")) for s in held]
    mine = {id(parameter) for s in held for parameter in modules[s].parameters()}
    named = {name: parameter for name, parameter in task.model.named_parameters() if id(parameter) in mine}
    return _theirs(contest, task, stages, named)


def traced(contest: Contest, task: Task) -> Step:
    """The same of stages that the incumbent's own front end made of the model."""
    from torch.distributed import pipelining

    how = contest.factory(ranks=dist.get_world_size(), microbatches=task.microbatches)
    splits = dict.fromkeys(task.cuts(how.stages), pipelining.SplitPoint.BEGINNING)
    first = task.tokens[: len(task.tokens) // task.microbatches]
    pipe = pipelining.pipeline(task.model, mb_args=(first,), split_spec=splits)
    held = how.placement.stages_on(dist.get_rank())
    stages = [pipe.build_stage(s, torch.device("cpu")) for s in held]
    named = {name: parameter for s in held for name, parameter in pipe.get_stage_module(s).named_parameters()}
    return _theirs(contest, task, stages, named)


def _theirs(contest: Contest, task: Task, stages: list[Any], named: dict[str, nn.Parameter]) -> Step:
    """The incumbent's step of this rank's stages, whose parameters these are."""
    from torch.distributed import pipelining

    made: Any = getattr(pipelining, contest.incumbent)
    runner = made(stages[0] if contest.single else stages, task.microbatches, loss_fn=cross_entropy)
    given = (task.tokens,) if any(stage.is_first for stage in stages) else ()
    last = any(stage.is_last for stage in stages)
    wanted: dict[str, Any] = {"target": task.targets, "losses": []} if last else {}

    def step() -> dict[str, Tensor]:
        for parameter in named.values():
            parameter.grad = None
        runner.step(*given, **wanted, return_outputs=False)
        return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}

    return step


def require_equal(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Fail unless both have computed the same gradients, up to rounding."""
    assert mine.keys() == other.keys(), (sorted(mine), sorted(other))
    for name, grad in mine.items():
        torch.testing.assert_close(grad, other[name], rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
