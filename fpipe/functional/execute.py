# SPDX-License-Identifier: Apache-2.0
"""Apply a program to stages: those of a model, pure functions, or whatever keeps the contract of a stage.

Idea. Both kinds of stages are bound to the arguments of one step (`BoundStages`): what the executor runs, its inputs,
and how its outcome becomes results. Everything else is the same for both, and for every transport.

Runs in every step of a loop that is built on `execute`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import InputError
from fpipe.functional.bound import Executed, Split, split_columns, split_rows
from fpipe.functional.functions import bind_functions
from fpipe.functional.graph import Stages, connect_stages
from fpipe.functional.transforms import execute_inside, is_inside
from fpipe.network.agreement import Field
from fpipe.network.job import enter_job, resolve_group
from fpipe.network.ranks import Ranks
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.transport import Transport
from fpipe.tensors.arguments import require_seed
from schedules import Program
from schedules.language.membership import explain_misfits

UNSUPPORTED = {
    "U": "updates weights",
    "UNSHARD": "gathers weights",
    "REDUCE_GRAD": "reduces gradients",
    "OFFLOAD": "moves memory",
}
"""The kinds of actions that need more than stages, and what they do."""


class UserTransport(Transport, Protocol):
    """A transport of your own, for one rank of many: `rank` is its number. Its handles have a method `wait()`."""

    rank: int


def execute(
    program: Program,
    stages: Any,
    params: Any,
    buffers: Any,
    inputs: Any,
    targets: Any = None,
    *,
    seed: int | None = None,
    split: Split | None = None,
    slicing: Split | None = None,
    transport: UserTransport | Ranks | None = None,
) -> tuple[Executed, Any]:
    """Apply a program to stages; return the results, and the gradients in the structure of the parameters.

    The gradient is `None` for a parameter without one, or of another rank; dicts by name lack it.

    - `program`: a schedule, lowered for the graph of the stages: `schedules.lower(schedule, stages.graph)`.
    - `stages`: what `fpipe.cut` or `fpipe.connect_stages` returned, or a sequence for `fpipe.connect_stages`.
    - `params`, `buffers`: a sequence with one pytree for each stage; for stages of a model, also one dict by name.
    - `inputs`, `targets`: the whole batch. Its tensors are split along their first dimension, all other leaves are the
      same for every microbatch.
    - `seed`: for stages that draw random numbers, a new one for each step.
    - `split(tree, M)`: returns the M microbatches of inputs and of targets, instead of that rule.
    - `slicing(tree, n)`: returns the n slices of a microbatch, for a schedule that has them. By default its tensors are
      split along their second dimension, and those without one are the same for every slice.
    - `transport`: to run one rank of many, the result of `fpipe.processes`, or your own transport. By default all ranks
      run in this process.

    The loss is the mean of what the last stage returns for each microbatch, or of the first of a pair, whose second is
    `aux`. Gradients are bit for bit those of a loop that adds `(loss / M).backward()`. No argument is modified.

    If the schedule cuts microbatches into slices, all this applies to each slice. A slice passes the carry of a stage
    to the next one (see `fpipe.Stage`); its cotangent comes back from the next slice. Gradients are those of a loop
    that runs the slices of a microbatch forward in order, and backward from the last one to the first.

    Inside `grad`, `vjp` and `jacrev` of torch.func the loss can be differentiated once, with respect to parameters; all
    other results are constants there. Inside `vmap` the program is executed once for each element: parameters, buffers,
    batches, and the seed, as a tensor of integers, may be mapped. Only if all ranks are in this process.

    Raise `InputError` or `GraphError` before anything is sent.

    >>> import torch, fpipe
    >>> from schedules import lower, zb_h1
    >>> def hidden(weight, inputs):
    ...     return torch.tanh(inputs[0] @ weight)
    >>> def error(weight, inputs):
    ...     h, y = inputs
    ...     return ((h @ weight - y) ** 2).mean()
    >>> stages = fpipe.connect_stages([hidden, error])
    >>> program = lower(zb_h1(ranks=2, microbatches=4), stages.graph)
    >>> params, x, y = [torch.eye(3), torch.ones(3, 1)], torch.ones(8, 3), torch.zeros(8, 1)
    >>> out, grads = fpipe.execute(program, stages, params, [(), ()], (x,), y)
    >>> round(out.loss.item(), 3), [list(grad.shape) for grad in grads]
    (5.22, [[3, 3], [3, 1]])
    """
    stages = stages if hasattr(stages, "graph") else connect_stages(stages, targets is not None)
    _require_runnable(program, stages)
    run = partial(_run, program, stages, (split or split_rows, slicing or split_columns), transport)
    given = params, buffers, inputs, targets, seed
    return execute_inside(run, given) if transport is None and is_inside(given) else run(*given)


def _run(
    program: Program,
    stages: Any,
    splits: tuple[Split, Split],
    transport: UserTransport | Ranks | None,
    params: Any,
    buffers: Any,
    inputs: Any,
    targets: Any,
    seed: int | None,
) -> tuple[Executed, Any]:
    """Execute outside of transforms, as `execute` does."""
    require_seed(seed)
    ranks, count = _ranks_of(program, transport), program.schedule.microbatches
    split, slicing = splits
    bind = partial(bind_functions, stages, slicing=slicing) if isinstance(stages, Stages) else stages.bind
    arguments = program, ranks, params, buffers, (inputs, targets), seed, split

    def finish(drive: Callable[[Callable[[int, Transport], Execution]], dict[int, Outcome]]) -> tuple[Executed, Any]:
        with bound.context():
            outcomes = drive(lambda rank, channels: Execution(rank, bound.link(rank), channels, bound.inputs))
        return bound.finish(outcomes)

    if transport is not None and not isinstance(transport, Ranks):
        bound = bind(*arguments, False)
        return finish(lambda execution: {transport.rank: _drive(execution(transport.rank, transport))})
    joined = transport or Ranks(program.schedule.ranks)
    with joined.enter_call("execute"):
        bound = bind(*arguments, bool(joined.processes))
        how = [repr(program.schedule), f"seed {seed}", f"{count} microbatches"]
        joined.agree(lambda: [Field.of("program", how), Field.of("stages", bound.lines())])
        joined.connect(program.channels)
        return finish(lambda execution: joined.run([execution])[0])


def processes(
    ranks: int, group: dist.ProcessGroup | DeviceMesh | None = None, device: str | torch.device = "cpu"
) -> Ranks:
    """Return the transport of `fpipe.execute` between processes of torch.distributed, one for each rank.

    - `ranks`: their number. `group`: their processes, by default all of the job; or one dimension of a mesh.
    - `device`: the device of the tensors; its backend must support point-to-point messages.

    Every process of the job must call it at the same time. Its `close()` releases the connections. Without
    torch.distributed, all ranks run in this process.

    >>> import fpipe
    >>> fpipe.processes(ranks=2).ranks
    (0, 1)
    """
    with enter_job("processes") as job:
        job.require_device(home := torch.device(device), resolve_group(group))
        return job.join(ranks, resolve_group(group), home)


def _drive(execution: Execution) -> Outcome:
    """Run one rank to its end, waiting for each handle that it yields."""
    run = execution.run()
    while True:
        try:
            handle: Any = next(run)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        handle.wait()


def _ranks_of(program: Program, transport: UserTransport | Ranks | None) -> tuple[int, ...]:
    count = program.schedule.ranks
    if transport is None:
        return tuple(range(count))
    ranks = transport.ranks if isinstance(transport, Ranks) else (transport.rank,)
    if not all(0 <= rank < count for rank in ranks):
        raise InputError(
            f"transport: got rank {max(ranks)}, expected one of {count}, the ranks of {program.schedule!r}. Pass a "
            "program for as many ranks as there are."
        )
    return ranks


def _require_runnable(program: Program, stages: Any) -> None:
    if program.graph != stages.graph:
        raise InputError(
            f"program: got one lowered for {program.graph}, expected one for {stages.graph}, that of the stages. "
            "Pass schedules.lower(schedule, stages.graph)."
        )
    schedule = program.schedule
    if schedule.slices > 1 and not isinstance(stages, Stages):
        raise InputError(
            f"program: got {schedule!r} of {schedule.slices} slices, expected whole microbatches for stages that are "
            "cut from a model. Pass the schedule to fpipe.pipeline, or connect stages that are functions."
        )
    with explain_misfits(schedule):
        for rank in range(schedule.ranks):
            for position, action in enumerate(schedule.actions(rank)):
                if action.kind in UNSUPPORTED:
                    raise InputError(
                        f"rank {rank}, position {position}: got {action}, which {UNSUPPORTED[action.kind]}, expected "
                        "compute actions of stages only. Pass the schedule to fpipe.pipeline."
                    )
