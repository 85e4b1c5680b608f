# SPDX-License-Identifier: Apache-2.0
"""Train on a stream of batches without a flush between them: asynchronous schedules.

Idea. A step drains the pipeline, so that all microbatches see the same weights. A stream does not: batches follow each
other, each stage updates as soon as a batch's gradient is complete, and microbatches in flight go on with the weights
they began with (PipeDream, SOSP 2019; PipeDream-2BW, arXiv 2006.09503). Gradients are late by as many updates as the
schedule says, and `fpipe.reference_stream` is late by as many on one device.

Invariant: losses, parameters, buffers and optimizer state are, bit for bit, those of `fpipe.reference_stream`.

Runs when `train_stream` is called; the function that it returns runs once per stream.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.errors import InputError
from fpipe.meshes.exchange import CopyLinks
from fpipe.meshes.pieces import take_rows
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value
from fpipe.pipelines.argument_checks import updates_in_flight
from fpipe.pipelines.batch import SplitBatch
from fpipe.pipelines.earlier_sums import find_optional
from fpipe.pipelines.handshake import CommonArguments, agree_on_arguments, agree_on_plan, agree_to_step, call_together
from fpipe.pipelines.inputs import State, Weights, feed_stages, make_keys
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.planner import require_ascending
from fpipe.pipelines.resolver import Resolver, own_text
from fpipe.pipelines.results import merge_results
from fpipe.pipelines.step import hold_for_backward, training_variant
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.record.variant import Variant
from fpipe.runtime.transport import Transport
from fpipe.streams.batches import BatchQueue, BegunBatch
from fpipe.streams.corrections import LookAhead
from fpipe.streams.execution import EndlessExecution
from fpipe.streams.lanes import Lane, Ring
from fpipe.streams.relay import LossRelay
from fpipe.streams.updates import OptionsOf, StageUpdates, clip_updates
from fpipe.streams.versions import Versions, find_program, find_shared
from fpipe.tensors import random
from fpipe.tensors.arguments import describe_argument, require_seed
from fpipe.tensors.placed import require_plain
from fpipe.training.optimizers import Optimizer, OptimizerState
from fpipe.training.train_step import Updater, Version
from schedules.endless import EndlessProgram, lengthen


class StreamResult(NamedTuple):
    """The end of a stream: the newest parameters, the buffers, and the optimizer's state, of this process."""

    params: State
    buffers: State
    state: OptimizerState


class Stream:
    """An iterator over the losses of a stream, one per batch, on every rank; each is computed when you take it.

    After the last one, `end` has the parameters, buffers and state.
    """

    def __init__(self, losses: Generator[Tensor, None, StreamResult], stop: Callable[[], None]) -> None:
        self._losses, self._stop = losses, stop
        self._end: StreamResult | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Return the stream."""
        return self

    def __next__(self) -> Tensor:
        """Return the loss of the next batch, once its updates are made or, for some stages, about to be."""
        try:
            return next(self._losses)
        except StopIteration as stop:
            self._end = self._end or stop.value
            raise

    @property
    def end(self) -> StreamResult:
        """The parameters, buffers and state after the last update; raise `InputError` before it."""
        if self._end is None:
            raise InputError(
                "stream.end: got a stream with microbatches in flight, expected one that has ended. Take all its "
                "losses, or call finish()."
            )
        return self._end

    def close(self) -> None:
        """Leave the stream; microbatches in flight are lost. If ranks are processes, the pipeline can't be used
        afterwards."""
        self._losses.close()

    def finish(self) -> StreamResult:
        """Take only the batches that are needed, drain the pipeline, and return the parameters, buffers and state.

        Call it on every rank, after the same loss. It finishes the batches in flight, and takes more batches until all
        ranks end with the same one.
        """
        self._stop()
        for _ in self:
            pass
        return self.end


def train_stream(
    pipe: Pipeline, optimizer: Optimizer, look_ahead: LookAhead | None = None, max_norm: float | None = None
) -> Callable[..., Stream]:
    """Return the function that trains on a stream of batches under a schedule that updates weights in flight.

    It takes parameters, buffers and the optimizer's state; an iterable of batches, each a pair of inputs and targets
    like the example; and by name:

    - `seed`: for models that draw random numbers; batch t gets `seed + t`.
    - `options`: returns the options of update number t, such as `lambda t: {"lr": 0.1 / (t + 1)}`.

    It returns a `Stream`: iterate over it to get the loss of each batch, on every rank; afterwards, `stream.end` has
    the parameters, buffers and state. To stop early, call `stream.finish()` on every rank, after the same loss.

    Each update applies one batch: `pipedream(ranks, microbatches=1)` updates after each microbatch,
    `pipedream_2bw(ranks, m, accumulate=m)` after m of them. The schedule sets the version of the weights that each
    microbatch uses; these versions are kept in memory. The optimizer's state is kept once. Parameters that several
    stages share have one version for all of them: the oldest that one of the stages has at its forward.

    `look_ahead(new, old)` returns the weights that forwards use after an update, given those after and before it, as
    `fpipe.predict_weights` does. By default forwards use the weights themselves.

    The optimizer's update of a parameter must depend only on its own gradient and state, and update nothing in place.
    With `max_norm`, the gradients of each update are clipped by their norm. The gradients of several stages never exist
    at the same time, so that takes a pipeline of one stage.

    Under torch.distributed every rank must call this, and then the function, with the same number of batches, and take
    the same losses. All batches must be like the example. Until the stream has ended, the pipeline's other functions
    raise. Raise `InputError` for a schedule without updates, and for what `value_and_grad` refuses.

    >>> import torch, fpipe
    >>> from schedules import pipedream
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
    >>> mse = torch.nn.functional.mse_loss
    >>> pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, schedule=pipedream(ranks=2, microbatches=1))
    >>> params, buffers = pipe.init(model)
    >>> sgd = fpipe.optimizer(torch.optim.SGD, lr=0.1)
    >>> stream = fpipe.train_stream(pipe, sgd)(params, buffers, sgd.init(params), [((x,), y)] * 5)
    >>> losses = list(stream)
    >>> len(losses), sorted(stream.end.params) == sorted(params)
    (5, True)
    """
    with call_together(train_stream, locals()):
        require_streamable(pipe)
        variant = training_variant(False, None)
        agree_on_arguments(pipe, optimizer=optimizer._asdict(), look_ahead=look_ahead, max_norm=max_norm)
        optimizer = clip_updates(pipe, optimizer, max_norm)
        with suspend_autocast(variant):
            plan = agree_on_plan(pipe, variant)
        program = find_program(pipe.schedule, plan)
        for stage in plan.assembly.stages:
            require_ascending(stage, program.program.schedule)
        pipe.ranks.connect(program.program.channels)
        ring = Ring.of(program)
        return StreamFunction(pipe, optimizer, look_ahead, variant, program, ring)


@dataclass(frozen=True, eq=False)
class StreamFunction:
    """The function that `train_stream` returns."""

    pipe: Pipeline
    optimizer: Optimizer
    look_ahead: LookAhead | None
    variant: Variant
    program: EndlessProgram
    ring: Ring

    def __call__(
        self,
        params: State,
        buffers: State,
        state: OptimizerState,
        batches: Iterable[tuple[Any, Any]],
        *,
        seed: int | None = None,
        options: OptionsOf | None = None,
    ) -> Stream:
        """Return the stream of these batches; nothing runs until its first loss is asked for."""
        require_seed(seed)
        run = StreamRun(self, Version(params, state), buffers, iter(batches), seed, options or (lambda number: {}))
        return Stream(run.losses(), run.stop)


class StreamRun:
    """One run of a stream.

    - `old`: the parameters and the state that it begins with. `taken`: how many losses have been taken.
    """

    def __init__(
        self,
        function: StreamFunction,
        old: Version,
        buffers: State,
        batches: Iterator[Any],
        seed: int | None,
        options: OptionsOf,
    ) -> None:
        self.function, self.pipe, self.variant = function, function.pipe, function.variant
        self.old, self.buffers, self.seed, self.options = old, buffers, seed, options
        self.arrivals = BatchQueue(batches, self._split)
        self.lanes: list[Lane] = []
        self.all_updates: list[StageUpdates] = []
        self.taken = 0
        self.plan: StepPlan = self.pipe.training
        self.cast = self.variant
        self.example: SplitBatch | None = None

    def stop(self) -> None:
        """Take no more batches than all ranks need to end with the same one."""
        begun = max([lane.begun for lane in self.lanes], default=0)
        self.arrivals.limit = max(self.taken + max(self.function.program.reach), begun)

    def losses(self) -> Generator[Tensor, None, StreamResult]:
        """Yield the loss of every batch; return what the stream leaves."""
        ranks = self.pipe.ranks
        with ranks.enter_call("a stream of updates"):
            self.arrivals.fetch(0)
            if self.arrivals.total == 0:
                raise InputError(
                    "batches: got none, expected at least one. Pass batches, the same number on every rank."
                )
            with self._settle() as cast:
                self._begin(cast)
            ranks.stream = "a stream of updates"
            try:
                yield from self._follow()
            except GeneratorExit:  # other ranks are told this one
                raise GeneratorExit(
                    "it left its stream with microbatches in flight; call finish() on every rank"
                ) from None
            finally:
                ranks.stream = None
            count = self.arrivals.total
            ranks.agree(lambda: [Field.of("batches", [f"{count} batches"])], "the end of the stream")
            return self._end()

    @contextmanager
    def _settle(self) -> Iterator[Variant]:
        """Return the context in which a stream runs, and none of the caller's code."""
        with (
            suspend_autocast(self.variant) as cast,
            random.preserve_generators(self.plan.generators),
            self.plan.context(),
        ):
            yield cast

    def _begin(self, cast: Variant) -> None:
        """Agree with all ranks on the stream, by its first batch."""
        pipe, function, self.cast = self.pipe, self.function, cast
        held = hold_for_backward(pipe, cast, self.old.params, self.buffers)
        update = Updater(function.optimizer, self.old, self.options(0))
        update.require_fit(pipe, "microbatches in flight still use the weights before an update")
        inputs, targets = self.arrivals.raw[0]
        self.example = pipe.batch(cast, inputs, targets, pipe.ranks.exchange_text)
        given = describe_value(dict(self.options(0)))
        call = CommonArguments(self.seed, update=Field.of("update", given))
        self.plan, _ = agree_to_step(pipe, cast, held.params, held.buffers, self.example, call)
        pipe.ranks.settle()
        self.held = held
        links = pipe.copies.link() if pipe.copies.count > 1 else {}
        for copy, part in self.plan.parts.items():
            self._add_copy(part, links.get(copy))
        self.arrivals.users = frozenset((lane.plan.copy, lane.rank) for lane in self.lanes)

    def _add_copy(self, plan: StepPlan, links: CopyLinks | None) -> None:
        """Add the lanes of one copy of the pipeline; its plan has its microbatches."""
        function, ring, lanes = self.function, self.function.ring, list[Lane]()
        program, params, state = function.program, *self._shares(plan.copy)

        def microbatch(s: int, slot: int) -> int:
            """Return the number, in the whole stream, of the microbatch in a slot of the rank that holds a stage."""
            (lane,) = (lane for lane in lanes if lane.rank == plan.placement.home(s, slot))
            return lane.batch_in[slot] * ring.each + slot % ring.each

        rule = lengthen(program.schedule, program.known).version
        cuts = [plan.assemblies[slot % ring.each] for slot in range(ring.slots)]
        versions = Versions(plan, params, cuts, microbatch, rule, find_shared(plan.assembly), program.shared_version)
        optional = find_optional(plan, begun=False)
        updates = StageUpdates(
            plan,
            function.optimizer,
            versions,
            state,
            self.options,
            function.look_ahead,
            optional,
            self.pipe.holdings.placed_gradients,
        )
        group = None if links is None else Weights(plan, params).exchange(links)
        if group is not None and plan.copies.shards > 1:
            group.shards, group.put, group.remove = ShardsOf(versions), versions.enter, lambda s: None
        ranks = self.pipe.ranks.ranks
        lanes += [Lane(rank, plan, program, ring, self.arrivals, updates, group) for rank in ranks]
        self.lanes += lanes
        self.all_updates.append(updates)

    def _shares(self, copy: int) -> tuple[State, OptimizerState]:
        """Return the parameters and the state that a copy updates: in a process that plays all, its rows of each."""
        copies, (params, state) = self.pipe.copies, self.old
        if copies.shards == 1 or not copies.is_local:
            return self.held.params if copies.shards == 1 else params, state
        shards, k = copies.shards, copies.shard_of(copy)

        def take(name: str, slot: Any) -> Any:
            like = isinstance(slot, Tensor) and slot.shape == params[name].shape
            return take_rows(slot, shards, k) if like else slot

        rows = {name: {key: take(name, slot) for key, slot in slots.items()} for name, slots in state.items()}
        return self.pipe.holdings.locals(params, copy), rows

    def _split(self, number: int, batch: tuple[Any, Any]) -> dict[int, BegunBatch]:
        """Return what a batch becomes, for each copy of the pipeline; raise `InputError` if it is unlike the first."""
        split = self.pipe.captures.batchings[True].split_batch(*batch)
        split.require_no_gradients()
        assert self.example is not None, "the first batch has come"
        if replace(split.signature, answers=()) != replace(self.example.signature, answers=()):
            raise InputError(
                f"batches[{number}]: {self.pipe.captures.batchings[True].difference(split.signature)}, expected a "
                "batch like the first one: ranks of a stream do not agree before each batch. Pad it, or leave it out."
            )
        try:
            Resolver(self.pipe.captures, self.cast, split, own_text).require_answers(self.example.signature)
        except InputError as error:
            raise InputError(
                f"batches[{number}], {error}. Leave it out: a stream runs one record of the model."
            ) from None
        self.plan.watch.require_unchanged()
        seed, found = None if self.seed is None else self.seed + number, dict[int, BegunBatch]()
        for copy, part in self.plan.parts.items():
            rows, skips = feed_stages(part, self.held.buffers, split)
            if skips:
                raise InputError(
                    f"batches[{number}]: got microbatches {list(skips)} of weight 0, expected a positive one for each: "
                    "their backward is skipped, and in a stream other ranks would not know. Leave out such rows."
                )
            found[copy] = BegunBatch(rows, make_keys(part, seed))
        return found

    def _follow(self) -> Generator[Tensor, None, None]:
        """Run all windows; yield the loss of every batch."""
        ranks, by_place = self.pipe.ranks, {(lane.plan.copy, lane.rank): lane for lane in self.lanes}

        def execute(copy: int, rank: int, transport: Transport) -> EndlessExecution:
            return by_place[copy, rank].execute(transport, self.held.buffers)

        running, relay = ranks.follow([partial(execute, copy) for copy in self.plan.parts]), self._relay()
        while True:
            self.arrivals.fetch(max(max(lane.ahead, lane.at + 1) for lane in self.lanes))
            with self._settle():
                relay.compare(self.arrivals.count, self.arrivals.total)
                try:
                    next(running)
                except StopIteration as stop:
                    self.outcomes, *_ = stop.value
                    relay.finish()
                    return
                found = self._collect(relay)
            for loss in found:
                self.taken += 1
                yield loss

    def _relay(self) -> LossRelay:
        last, copies = self.plan.assembly.stages[-1], self.pipe.copies
        home, depth = self.plan.placement.home(last.index, 0), 2 * self.function.ring.batches
        (links,) = [None] if copies.is_local else copies.link().values()
        return LossRelay(self.pipe.ranks, last.results[0], home, depth, links)

    def _collect(self, relay: LossRelay) -> list[Tensor]:
        """Return the losses that are known by now and have not been returned yet, at the end of a window."""
        count, total = self.arrivals.count, self.arrivals.total
        mine = [lane for lane in self.lanes if lane.rank == relay.home]
        if not mine:
            return [relay.receive(count, total, self.pipe.device)]
        found = list[Tensor]()
        while all(lane.has_loss(self.taken + len(found)) for lane in mine):
            number = self.taken + len(found)
            results = {
                lane.plan.copy * self.plan.microbatches + i: own
                for lane in mine
                for i, own in lane.losses.pop(number).items()
            }
            loss = merge_results(self.plan.without_outputs, results).loss
            assert loss is not None, "a training step has a loss"
            found.append(relay.send(loss, count, total) if self.pipe.ranks.processes else loss)
        return found

    def _end(self) -> StreamResult:
        new = dict(self.held.buffers)
        for outcome in self.outcomes.values():
            for s, state in outcome.buffers[0].items():
                new.update(zip(self.plan.assembly.stages[s].buffers, state, strict=True))
        names, first = list(self.old.params), self.all_updates[: self.pipe.copies.shards]
        if len(first) == 1 or not self.pipe.copies.is_local:
            (own, *_) = first
            params = {name: own.versions.params[name] for name in names}
            return StreamResult(params, new, {name: own.state[name] for name in self.old.state})
        join = self.pipe.holdings.join
        params = join({k: {name: own.versions.params[name] for name in names} for k, own in enumerate(first)})
        state = {name: dict(slots) for name, slots in first[0].state.items()}
        for name, slots in state.items():
            for key in [key for key, slot in slots.items() if _is_row(slot, first[0].versions.params[name])]:
                slots[key] = join({k: {name: own.state[name][key]} for k, own in enumerate(first)})[name]
        return StreamResult(params, new, state)


def _is_row(slot: object, param: Tensor) -> bool:
    return isinstance(slot, Tensor) and slot.shape == param.shape


class ShardsOf(Mapping[int, Tensors]):
    """The shards of the newest version of each stage, as a gathering asks for them."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions

    def __getitem__(self, s: int) -> Tensors:
        return self.versions.shard(s)

    def __iter__(self) -> Iterator[int]:
        return iter(self.versions.made)

    def __len__(self) -> int:
        return len(self.versions.made)


def require_streamable(pipe: Pipeline) -> None:
    """Raise `InputError` unless the pipeline can train on a stream."""
    if not updates_in_flight(pipe.schedule):
        raise InputError(
            f"schedule: got {describe_argument(pipe.schedule)}, without updates, expected one that updates weights "
            "while microbatches are in flight, as pipedream(ranks, microbatches=1). Or call fpipe.train_step."
        )
    if pipe.copies.shards > 1 and (shared := find_shared(pipe.training.assembly)):
        raise InputError(
            f"mesh: got {pipe.copies.shards} shards, and {next(iter(shared))!r}, which several stages share, expected "
            "one of them. Build the pipeline with dp in place of shard, or cut the model so that one stage has all "
            "uses of the parameter."
        )
    if pipe.copies.own_rows and pipe.copies.count > 1 and pipe.captures.batchings[True].weight is not None:
        raise InputError(
            "weight: got a function, and rows='own', expected one of them: the weight of a batch is known only to all "
            "copies together. Build the pipeline with fpipe.Place(rows='whole')."
        )
    require_plain("train_stream", pipe.training.placed, "Call value_and_grad, clip and optimizer.update.")
    lengthen(pipe.schedule, 2)
