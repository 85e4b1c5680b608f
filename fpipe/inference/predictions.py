# SPDX-License-Identifier: Apache-2.0
"""Compute outputs only: merged on every rank, or microbatch by microbatch where they are computed.

`fpipe.evaluate` returns the loss too, and leaves the outputs on the ranks of the last stage. That is where a metric
wants them. The functions here are for programs that need outputs everywhere, and for outputs that are too large to be
kept until the batch is done.

Invariant: nothing of training changes. The model runs in eval mode, the buffers of its forward are dropped, and torch's
generators are put back.

Runs when `predict` or `stream` is called; the functions that they return run for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fpipe.pipelines.handshake import CommonArguments, agree_on_arguments, agree_to_step, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.merge import join_slices
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import broadcast_results, gather, merge_results, spread_results
from fpipe.pipelines.step import begin_evaluation, hold_plain, run_copies
from fpipe.record.captured import Tensors
from fpipe.record.variant import EVALUATION
from fpipe.tensors.names import accept_trees


def predict(pipe: Pipeline) -> Callable[..., Any]:
    """Return the function that computes the model's outputs in eval mode, merged, on every rank.

    The function takes parameters and buffers as `pipe.init` returns them, the inputs of a whole batch, and a `seed` if
    the model draws random numbers even in eval mode. It returns what the model returns, bit for bit, with microbatches
    merged in their order. A batch may lack inputs that the example has, such as labels: leave them out, or pass `None`.
    Every rank receives all outputs, on a mesh those of all copies of the pipeline if it is passed whole batches. If
    only the rank of the last stage needs them, call `fpipe.evaluate`, which sends nothing.

    Under torch.distributed every rank must call this, and then the function, in the same order. Raise `InputError` for
    arguments that don't fit the pipeline, before anything is sent.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=3))
    >>> y = fpipe.predict(pipe)(*pipe.init(model), (x,))
    >>> y.shape, y.requires_grad
    (torch.Size([6, 1]), False)
    """
    with call_together(predict, locals()):
        agree_on_arguments(pipe)

    @accept_trees("params", "buffers")
    def run(params: State, buffers: State, inputs: Any, *, seed: int | None = None) -> Any:
        with suspend_autocast(EVALUATION) as variant, pipe.ranks.enter_call("a prediction"):
            params, buffers, _ = hold_plain(pipe, params, buffers)
            batch = pipe.batch(variant, inputs, None, pipe.ranks.exchange_text)
            plan, given = agree_to_step(pipe, variant, params, buffers, batch, CommonArguments(seed))
            outcomes = run_copies(pipe, plan, given)
            found = {copy: broadcast_results(plan.parts[copy], pipe.ranks, one) for copy, one in outcomes.items()}
            return merge_results(plan, spread_results(plan, pipe.ranks, found)).outputs

    return run


def stream(pipe: Pipeline, take: Callable[[int, Any], None]) -> Callable[..., Tensor | None]:
    """Return the function that computes outputs in eval mode, and passes on those of each microbatch immediately.

    `take(i, outputs)` is called with the number of a microbatch and the model's outputs for it, on the rank that
    computes them, as soon as they exist: with one rank for the last stage, in the order of the schedule's forwards. On
    a mesh, microbatches are numbered copy by copy. fpipe keeps no reference to the outputs. The function takes the
    arguments of the one that `fpipe.evaluate` returns. It returns the loss, on every rank, if any rank passes targets
    or the model computes its own; otherwise `None`.

    Under torch.distributed every rank must call this, and then the function, in the same order.

    If `take` raises, the rest of the batch still runs, because other ranks wait for it; `take` is not called again, and
    the error is raised at the end. Raise `InputError` for arguments that don't fit the pipeline, before anything is
    sent.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Linear(4, 1), torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=1, microbatches=3))
    >>> seen = []
    >>> _ = fpipe.stream(pipe, lambda i, y: seen.append((i, list(y.shape))))(*pipe.init(model), (x,))
    >>> seen
    [(0, [2, 1]), (1, [2, 1]), (2, [2, 1])]
    """
    with call_together(stream, locals()):
        agree_on_arguments(pipe)

    @accept_trees("params", "buffers")
    def run(
        params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None
    ) -> Tensor | None:
        errors: list[Exception] = []
        with suspend_autocast(EVALUATION) as cast, pipe.ranks.enter_call("a stream of outputs"):
            held = hold_plain(pipe, params, buffers)
            plan, given = begin_evaluation(pipe, cast, held, (inputs, targets), seed)
            known = plan.assembly.captured
            first = 0 if known.loss is None else 1 + len(known.aux)
            losses: dict[int, dict[int, Tensors]] = {copy: {} for copy in given}

            def deliver(copy: int, unit: int, values: Tensors) -> None:
                i = unit // plan.slices
                losses[copy][i] = values[:first]
                if errors:
                    return
                try:
                    outputs = plan.parts[copy].lasts[i].captured.structure.unflatten(list(values[first:]))
                    outputs = outputs if plan.slices == 1 else join_slices(outputs)
                    take(copy * plan.microbatches + i, outputs)
                except Exception as error:
                    errors.append(error)

            delivering = {copy: one._replace(deliver=partial(deliver, copy)) for copy, one in given.items()}
            outcomes = run_copies(pipe, plan, delivering)
            found = {
                copy: {rank: one._replace(results=losses[copy]) for rank, one in by_rank.items()}
                for copy, by_rank in outcomes.items()
            }
            loss = gather(plan.without_outputs, pipe.ranks, found, held.buffers).loss if first else None
        if errors:
            raise errors[0]
        return loss

    return run
