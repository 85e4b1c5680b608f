# SPDX-License-Identifier: Apache-2.0
"""The same model under the same schedule in both libraries: functions that run one step, forward and backward.

Both start with fresh gradients in every step and report the loss on the rank that computes it; neither assembles
outputs. A step returns its gradients, and nothing else of it stays alive. `torch.distributed.pipelining` has no ZB-H1
by that name; its `ScheduleInterleavedZeroBubble` with one stage per rank is the paper's ZB-1P, the same order except
for the position of the weight halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.models import cross_entropy, parts, starts
from schedules import Schedule, interleaved_1f1b, one_f_one_b, zb_h1, zb_v

Step = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Contest:
    """A schedule: our factory and torch's class; `single` is true if that class takes one stage, not a list."""

    name: str
    factory: Callable[..., Schedule]
    incumbent: str
    single: bool = False

    @property
    def title(self) -> str:
        """The title, with the names in both libraries."""
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
    """A model, a batch, and its number of microbatches.

    - `cuts(stages)`: the modules at which stages after the first begin; `pieces(stages)`: the stages cut there by hand.
    - `loss(outputs, targets)`: the loss of the whole model.
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


def ours(contest: Contest, task: Task) -> Step:
    """Return this rank's step in fpipe, which returns gradients."""
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
    )
    state, step = pipe.init(task.model), fpipe.value_and_grad(pipe)
    return lambda: step(*state, batch, task.targets)[1]


def incumbents(contest: Contest, task: Task) -> Step:
    """Return this rank's step in torch with stages cut by hand, which returns gradients."""
    from torch.distributed import pipelining

    how = contest.factory(ranks=dist.get_world_size(), microbatches=task.microbatches)
    modules = task.pieces(how.stages)
    held = how.placement.stages_on(dist.get_rank())
    stages = [pipelining.PipelineStage(modules[s], s, how.stages, task.tokens.device) for s in held]
    mine = {id(parameter) for s in held for parameter in modules[s].parameters()}
    named = {name: parameter for name, parameter in task.model.named_parameters() if id(parameter) in mine}
    return _theirs(contest, task, stages, named)


def traced(contest: Contest, task: Task) -> Step:
    """Return the same with stages made by torch's own front end."""
    from torch.distributed import pipelining

    how = contest.factory(ranks=dist.get_world_size(), microbatches=task.microbatches)
    splits = dict.fromkeys(task.cuts(how.stages), pipelining.SplitPoint.BEGINNING)
    first = task.tokens[: len(task.tokens) // task.microbatches]
    pipe = pipelining.pipeline(task.model, mb_args=(first,), split_spec=splits)
    held = how.placement.stages_on(dist.get_rank())
    stages = [pipe.build_stage(s, task.tokens.device) for s in held]
    named = {name: parameter for s in held for name, parameter in pipe.get_stage_module(s).named_parameters()}
    return _theirs(contest, task, stages, named)


def _theirs(contest: Contest, task: Task, stages: list[Any], named: dict[str, nn.Parameter]) -> Step:
    """Return torch's step with these stages of this rank, and their parameters by name."""
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
    """Raise `AssertionError` unless both have computed the same gradients, up to rounding."""
    assert mine.keys() == other.keys(), (sorted(mine), sorted(other))
    for name, grad in mine.items():
        torch.testing.assert_close(grad, other[name], rtol=1e-3, atol=1e-5, msg=partial("{}: {}".format, name))
