# SPDX-License-Identifier: Apache-2.0
"""A stream of batches on one device, late by as many updates as the pipeline: what `train_stream` must equal.

The loop runs the captured, uncut model. Every parameter has a history; each microbatch uses of it the version that its
stage's forward uses in the pipeline, as the checker counts (`schedules.list_versions`). Gradients go to the newest.

Runs when `reference_stream` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fpipe.errors import InputError
from fpipe.network.ranks import wait_for_turn
from fpipe.pipelines.earlier_sums import find_optional, join_sums
from fpipe.pipelines.inputs import State, make_keys
from fpipe.pipelines.memory import require_apart
from fpipe.pipelines.modes import require_gradients, suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import merge_results
from fpipe.pipelines.step import training_variant
from fpipe.record.variant import Variant
from fpipe.stages.kinds import require_alike_uncut
from fpipe.streams.corrections import LookAhead
from fpipe.streams.train_stream import Stream, StreamResult, require_streamable
from fpipe.streams.updates import OptionsOf, clip_updates
from fpipe.streams.versions import list_parameter_versions
from fpipe.tensors import random
from fpipe.tensors.arguments import require_arguments, require_seed
from fpipe.training.optimizers import Optimizer, OptimizerState
from fpipe.verification.reference import find_orders, require_whole_batches, run_on_one_device
from fpipe.weights.state import Form
from schedules.endless import lengthen


def reference_stream(
    pipe: Pipeline, optimizer: Optimizer, look_ahead: LookAhead | None = None, max_norm: float | None = None
) -> Callable[..., Stream]:
    """Return what `train_stream` returns, on one device: a plain loop over the captured, uncut model, with the same
    delays.

    On any rank, the function takes all parameters and buffers of the model and the whole batches, which it reads before
    it begins. Raise `InputError` for other arguments.

    >>> import torch, fpipe
    >>> from schedules import pipedream
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.ones(4, 2)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=pipedream(ranks=2, microbatches=1))
    >>> params, buffers = pipe.init(model)
    >>> sgd, batches = fpipe.optimizer(torch.optim.SGD, lr=0.1), [((x,), None)] * 5
    >>> stream = fpipe.train_stream(pipe, sgd)(params, buffers, sgd.init(params), batches)
    >>> same = fpipe.reference_stream(pipe, sgd)(params, buffers, sgd.init(params), batches)
    >>> list(stream) == list(same)
    True
    >>> all(torch.equal(p, same.end.params[name]) for name, p in stream.end.params.items())
    True
    """
    require_arguments(reference_stream, locals())
    require_streamable(pipe)
    require_whole_batches(pipe)
    optimizer = clip_updates(pipe, optimizer, max_norm)

    def run(
        params: State,
        buffers: State,
        state: OptimizerState,
        batches: Iterable[tuple[Any, Any]],
        *,
        seed: int | None = None,
        options: OptionsOf | None = None,
    ) -> Stream:
        require_seed(seed)
        require_gradients()
        loop = DelayedLoop(pipe, optimizer, look_ahead, options or (lambda number: {}), seed)
        return Stream(loop.losses(params, buffers, state, list(batches)), lambda: None)

    return run


class DelayedLoop:
    """The loop of one stream, under a schedule for all its batches.

    `past` has every version of each parameter, as forwards use it.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: Optimizer,
        look_ahead: LookAhead | None,
        options: OptionsOf,
        seed: int | None,
    ) -> None:
        self.pipe, self.optimizer, self.look_ahead, self.options, self.seed = pipe, optimizer, look_ahead, options, seed
        self.past: dict[str, list[Tensor]] = {}
        self.schedule = pipe.schedule

    def losses(
        self, params: State, buffers: State, state: OptimizerState, batches: list[tuple[Any, Any]]
    ) -> Generator[Tensor, None, StreamResult]:
        """Yield the loss of every batch; return the parameters, buffers and state after the last."""
        if not batches:
            raise InputError("batches: got none, expected at least one. Pass batches, the same number on every rank.")
        pipe, known = self.pipe, self.pipe.training.assembly
        held = Form("params", known.parameters, known.placed).unwrap(params)
        own = Form("buffers", known.buffers, known.placed).unwrap(buffers)
        self.past = {name: [tensor] for name, tensor in held.items()}
        self.schedule = lengthen(pipe.schedule, len(batches))
        versions = list_parameter_versions(known, self.schedule)
        newest = state
        for t, batch in enumerate(batches):
            with suspend_autocast(training_variant(False, None)) as variant:
                loss, grads, own = self._step(variant, t, batch, own, versions)
                new, newest = self.optimizer.update(grads, newest, held, **self.options(t))
            ahead = {**new} if self.look_ahead is None else {**new, **self.look_ahead(new, held)}
            held = new
            for name in self.past:
                self.past[name].append(ahead[name])
            yield loss
        return StreamResult({name: held[name] for name in params}, own, newest)

    def _step(
        self, variant: Variant, t: int, given: tuple[Any, Any], buffers: State, versions: Mapping[str, Sequence[int]]
    ) -> tuple[Tensor, State, State]:
        """Return the loss of a batch, its gradients, and the new buffers."""
        inputs, targets = given
        batch = self.pipe.batch(variant, inputs, targets)
        with wait_for_turn():
            plan = self.pipe.plan(variant, batch.signature)
            require_alike_uncut(plan.assemblies)
            plan.watch.require_unchanged()
            require_apart(batch.memories, plan.modified_leaves)
            parts = batch.take({leaf for cut in plan.assemblies for leaf in cut.whole.batch})
            count, past = plan.microbatches, self.past
            rows = [
                {name: past[name][versions[name][t * count + i % count] if name in versions else -1] for name in past}
                for i in range(len(plan.lasts))
            ]
            keys = make_keys(plan, None if self.seed is None else self.seed + t)
            with random.preserve_generators(plan.generators):
                orders = find_orders(plan, self.schedule, t)
                results, new, made = run_on_one_device(plan, rows, buffers, parts, keys, orders=orders)
        loss = merge_results(plan.without_outputs, results).loss
        assert loss is not None, "a training step has a loss"
        return loss, join_sums({}, made, find_optional(plan, begun=False)), new
