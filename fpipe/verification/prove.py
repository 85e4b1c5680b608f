# SPDX-License-Identifier: Apache-2.0
"""Prove a pipeline equal to one device for every input: compare what is computed, not the bits that come out.

`fpipe.verify` runs a step three ways and compares bits, which shows something about one batch. Here the same three run,
and beside every tensor its expression (`fpipe.verification.expressions`): which operators made it, of which inputs, in
which order. Equal expressions are equal bits for all parameters and batches of these shapes.

Runs when `prove` is called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fpipe.collector import postpone_collection
from fpipe.errors import InputError
from fpipe.network.ranks import Ranks
from fpipe.pipelines.argument_checks import updates_in_flight
from fpipe.pipelines.handshake import agree_on_arguments, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.memo import KnownMicrobatch
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import collect_gradients
from fpipe.pipelines.step import training_variant
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.front_ends.parts import as_module
from fpipe.record.model.skeleton import skeleton
from fpipe.runtime.executor import Execution, Outcome
from fpipe.runtime.transport import Transport
from fpipe.streams.train_stream import require_streamable, train_stream
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.placed import require_plain
from fpipe.tensors.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from fpipe.tensors.tree import flatten
from fpipe.training.optimizers import Optimizer
from fpipe.training.train_step import Version, train_step
from fpipe.verification.comparison import Pair, Results, list_pairs
from fpipe.verification.differences import Unproved, find_difference
from fpipe.verification.expressions import Expressions
from fpipe.verification.reference import make_reference_step, reference_stream
from fpipe.verification.verify import EAGER, PIPELINE, REFERENCE, Trial, gather_state, read_state, verify_steps
from schedules.proof.interpreter import prove as prove_program
from schedules.status import showing

NOISE: Final = 2.0**-10
MORE_BATCHES: Final = 2
"""How many batches more than ranks a stream has that is proved: so many are in flight, and weights are late by as many.
"""
LISTED: Final = 4
"""The most results that a line of the page names."""
ASSUMED: Final = (
    "operators depend only on their arguments, on torch's settings, and on the generator's state if they draw",
    "shapes, numbers in the code, and branches are those of this batch",
    "equal parts of the batch count as the same input, and so do equal integer buffers; parameters and other buffers "
    "differ",
    "messages arrive unchanged, and each rank runs the program's actions in order, whatever the order of arrival",
)


@dataclass(frozen=True)
class Proof:
    """The results of a step of a pipeline that are proved, and those that could not be.

    - `reference`, `eager`: the leaves (loss, outputs, gradients, buffers) that are the same expression as in the loop
      on one device over the captured model, and over the user's own module; none there if random numbers are drawn.
    - `unproved`: the other leaves, each with the action and the operator at which its expressions begin to differ. The
      bits may still be equal.
    - `operators`, `expressions`: the number of operators that ran in all three, and of different expressions.
    - `microbatches`: the number in the batch, and in the pipeline's schedule. If these are more, the program is checked
      on formulas of its stages, whose functions are the same.
    - `uncompared`: why your module was not run eagerly, if it was not.
    """

    reference: tuple[str, ...]
    eager: tuple[str, ...]
    unproved: tuple[Unproved, ...]
    operators: int
    expressions: int
    microbatches: tuple[int, int]
    uncompared: str = "it draws random numbers"

    @property
    def is_complete(self) -> bool:
        """True if every leaf is proved."""
        return not self.unproved

    def __str__(self) -> str:
        """Return a page: claims, what could not be proved, and assumptions."""
        lines = [
            f"{len(self.reference)} results of a step equal those of the captured model on one device, for every input",
            f"{len(self.eager)} of them also equal those of your module run eagerly"
            + ("" if self.eager or self.unproved else f" (not compared: {self.uncompared})"),
            f"{self.operators} operators ran, of {self.expressions} expressions, in {self._describe_microbatches()}",
            *self._describe_differences(),
            "assumed:",
            *[f"- {one}" for one in ASSUMED],
        ]
        return "\n".join(lines)

    def _describe_differences(self) -> Iterator[str]:
        """Yield a line for each place and operator at which results begin to differ, with the results."""
        groups = defaultdict[tuple[str, str, str], list[Unproved]](list)
        for one in self.unproved:
            groups[one.against, one.place, one.operator].append(one)
        for (against, *_), found in groups.items():
            shown, more = ", ".join(one.leaf for one in found[:LISTED]), len(found) - LISTED
            yield f"not proved against {against}: {shown}{f' and {more} more' if more > 0 else ''}: {found[0]}"

    def _describe_microbatches(self) -> str:
        ran, scheduled = self.microbatches
        if ran == scheduled:
            return f"{ran} microbatches"
        return f"{ran} microbatches; formulas show the same for all {scheduled} microbatches of the program"


@showing("prove")
def prove(
    pipe: Pipeline,
    model: nn.Module | Sequence[Callable[..., Any]],
    inputs: Any,
    targets: Any = None,
    *,
    seed: int | None = None,
    optimizer: Optimizer | None = None,
) -> Proof:
    """Prove that a step of the pipeline computes what one device does, for every value of parameters and inputs.

    Loss, outputs, gradients and buffers are compared as expressions: the same operators on the same operands, sums in
    the same order, random numbers from the same state of the generator. So it detects biases that two stages have
    swapped, even if both are zero. The step runs with parameters and buffers close to the model's, all different.

    `print(proof)` lists what is proved, what could not be proved, and what is assumed. This takes a few times as long
    as `fpipe.verify`, which compares bits; run both.

    A model on the meta device, of any size, is proved without values: nothing is computed. A batch of a few rows is
    enough, because a step with fewer microbatches has the same stages; the schedule's own program is then checked on
    formulas.

    With an `optimizer`, parameters and its state are compared, too, after each of two training steps
    (`fpipe.train_step`). A schedule that updates in flight needs one: then the losses of a stream
    (`fpipe.train_stream`) are compared, and its parameters, buffers and state at the end, with those of
    `fpipe.reference_stream`. Its batches are variations of the given one. Sequences in slices are compared with the
    loop over slices.

    If ranks are processes, each plays all of them, with the stages of its own record, and nothing is sent but an
    agreement on what was proved; a message arrives as it was sent, by assumption.

    Raise `InputError` for a mesh of processes, for a pipeline on an accelerator or with DTensors, for a model on meta
    that reads values, and for arguments that `verify` rejects.

    >>> import torch, fpipe
    >>> from schedules import zb_h1
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=zb_h1(ranks=2, microbatches=3))
    >>> proof = fpipe.prove(pipe, model, (x,))
    >>> proof.is_complete, proof.eager
    (True, ('loss', 'outputs', 'gradient 0.weight', 'gradient 0.bias', 'gradient 2.weight', 'gradient 2.bias'))
    """
    with call_together(prove, locals()):
        _require_provable(pipe)
        here, module = _play_here(pipe), as_module(model)
        trial = Trial(pipe, module, (inputs, targets), 0, near=None)
        streams = updates_in_flight(pipe.schedule)
        if streams:
            _require_stream(pipe, optimizer)
        else:
            trial.agree(1, seed, True, True)
        if optimizer is not None:
            _require_whole(pipe)
    run = _prove_stream if streams else _prove_here
    proof = run(trial._replace(pipe=here), seed, optimizer)
    with pipe.ranks.enter_call("the proof"):
        agree_on_arguments(pipe, proved=proof.reference, unproved=[str(one) for one in proof.unproved])
    return proof


def _prove_here(trial: Trial, seed: int | None, optimizer: Optimizer | None) -> Proof:
    """Return the proof of a pipeline whose ranks are all in this process."""
    trial, params, buffers, mode = _take_values(trial)
    ledger = Expressions(mode)
    if mode is None:  # make all plans; on fakes, nothing of that is taken for a step
        verify_steps(trial._replace(compare=lambda *given: 0), params, buffers, seed, 1)
    ranks = WatchedRanks(trial.begin()[2], ledger)
    claims = Claims(ledger, ranks)
    with postpone_collection(), ledger, _refusing_questions():  # expressions are no cycles
        ledger.declare(flatten((params, buffers, trial.batch), opaque=True)[0])
        told = trial._replace(pipe=replace(trial.pipe, ranks=ranks), compare=claims.compare, side=ledger.on)
        verify_steps(told, params, buffers, seed, 1)
        if optimizer is not None:
            _compare_updates(told, (params, buffers), optimizer, seed, claims)
    return Proof(
        tuple(claims.proved[REFERENCE]),
        tuple(claims.proved[EAGER]),
        tuple(claims.unproved),
        ledger.operators,
        len(ledger.numbers),
        _prove_rest(trial),
        "it runs whole sequences" if trial.pipe.schedule.slices > 1 else Proof.uncompared,
    )


def _prove_stream(trial: Trial, seed: int | None, optimizer: Optimizer | None) -> Proof:
    """Return the proof of a stream of updates, against a loop on one device with the same delays."""
    assert optimizer is not None, "a stream updates"
    trial, params, buffers, mode = _take_values(trial)
    pipe, state, ledger = trial.pipe, optimizer.init(params), Expressions(mode)
    batches = [_vary(trial.batch, k) for k in range(pipe.schedule.ranks + MORE_BATCHES)]
    list(reference_stream(pipe, optimizer)(params, buffers, state, batches, seed=seed))  # makes all plans
    ranks = WatchedRanks(pipe.training, ledger)
    claims = Claims(ledger, ranks)
    with postpone_collection(), ledger, _refusing_questions():
        ledger.declare(flatten((params, buffers, batches), opaque=True)[0])
        found = []
        watched = train_stream(replace(pipe, ranks=ranks), optimizer)
        for side, run in ((PIPELINE, watched), (REFERENCE, reference_stream(pipe, optimizer))):
            with ledger.on(side):
                stream = run(params, buffers, state, batches, seed=seed)
                found.append(([*stream], stream.end))
        (losses, end), (others, wanted) = found
        pairs: list[Pair] = [(f"loss of batch {t}", *pair) for t, pair in enumerate(zip(losses, others, strict=True))]
        pairs += [(f"buffer {name}", one, wanted.buffers.get(name)) for name, one in end.buffers.items()]
        claims.compare_pairs(pairs, REFERENCE)
        versions = (Version(one.params, one.state) for one in (end, wanted))
        named = [(f"{name} at the end", one, other) for name, one, other in _pair_versions(*versions)]
        claims.compare_pairs(named, REFERENCE)
    ran = len(batches) * pipe.training.microbatches
    proved, count = tuple(claims.proved[REFERENCE]), len(ledger.numbers)
    return Proof(proved, (), tuple(claims.unproved), ledger.operators, count, (ran, ran), "it updates without delay")


def _vary(batch: tuple[Any, Any], k: int) -> tuple[Any, Any]:
    """Return a batch like this one with other values: other floats, and integers in another order."""
    tensors, structure = flatten(batch, opaque=True)
    moved = [one.detach().flatten().roll(k).view_as(one).clone() for one in tensors]
    varied = [one + NOISE * k if one.is_floating_point() else one for one in moved]
    inputs, targets = structure.unflatten(varied)
    return inputs, targets


def _compare_updates(
    trial: Trial, start: tuple[State, State], optimizer: Optimizer, seed: int | None, claims: Claims
) -> None:
    """Compare parameters and state after each of two training steps, the second of which begins with state."""
    pipe, (params, buffers) = trial.pipe, start
    whole, own = gather_state(pipe, trial.module, params, buffers)
    mine, theirs = (Version(one, optimizer.init(one)) for one in (params, whole))
    step, reference = train_step(pipe, optimizer), make_reference_step(pipe, training_variant(False, None))
    for n in (1, 2):
        with trial.side(PIPELINE):
            out, new, state, _ = step(mine.params, buffers, mine.state, *trial.batch, seed=seed)
        with trial.side(REFERENCE):
            plain, grads = reference(theirs.params, own, *trial.batch, seed=seed)
            theirs = Version(*optimizer.update(grads, theirs.state, theirs.params))
        mine, buffers, own = Version(new, state), out.buffers, plain.buffers
        pairs = [(f"{name} after step {n}", one, other) for name, one, other in _pair_versions(mine, theirs)]
        claims.compare_pairs(pairs, REFERENCE)


def _pair_versions(mine: Version, theirs: Version) -> Iterator[Pair]:
    """Yield each parameter, and each tensor of its state, on either side."""
    for name, p in mine.params.items():
        yield f"parameter {name}", p, theirs.params.get(name)
        there = theirs.state.get(name, {})
        for slot, value in mine.state[name].items():
            if isinstance(value, Tensor):
                yield f"state {slot} of {name}", value, there.get(slot)


def _take_values(trial: Trial) -> tuple[Trial, State, State, FakeTensorMode | None]:
    """Return the trial with values, and parameters and buffers; without any, fakes, and their mode."""
    if not any(tensor.is_meta for tensor in (*trial.module.parameters(), *trial.module.buffers())):
        params, buffers = (_tell_apart(state) for state in trial.pipe.init(trial.module))
        return trial, params, buffers, None
    mode, module, batch = _make_stand_ins(trial.module, trial.batch)
    params, buffers = read_state(module)
    for mine, p in zip(params.values(), module.parameters(), strict=True):
        mine.requires_grad_(p.requires_grad)
    batching = trial.pipe.captures.batchings[True]
    few = batching.weight is None and batching.of_batch(*batch).microbatches < batching.microbatches
    total = batching.example.divisor if few and batching.example.divisor > 1 else None  # as in what is recorded
    return trial._replace(module=module, batch=batch, total=total), params, buffers, mode


def _make_stand_ins(module: nn.Module, batch: tuple[Any, Any]) -> tuple[FakeTensorMode, nn.Module, tuple[Any, Any]]:
    """Return a mode, and fakes of it for the tensors of a copy of a module, and of a batch.

    Fake tensors carry their mode with them, so no mode is entered: what code makes itself, such as a seed, is real.
    """
    mode, home = fake_mode(), torch.device("cpu")
    tensors, structure = flatten(batch)
    inputs, targets = structure.unflatten([fake(mode, tensor, home) for tensor in tensors])
    return mode, skeleton(module, lambda tensor: fake(mode, tensor, home)), (inputs, targets)


@contextmanager
def _refusing_questions() -> Iterator[None]:
    """Raise `InputError` for code that asks for values of fakes."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"model: got one on meta that asks for the values of a tensor ({error}), expected one that does not, or "
            "one with values. Prove a smaller model of the same kind, with values."
        ) from error


def _prove_rest(trial: Trial) -> tuple[int, int]:
    """Return how many microbatches the batch has, and how many the schedule; if more, prove its program on formulas."""
    pipe, schedule, ran = trial.pipe, trial.pipe.schedule, trial.begin()[2].microbatches
    if ran < schedule.microbatches:
        prove_program(schedule, pipe.training.assembly.graph)
    return ran, schedule.microbatches


class WatchedRanks(Ranks):
    """All ranks of a plan in this process, whose actions a ledger learns; `outcomes` are those of the last run.

    A rank runs until it waits: between two waits, what computes is that rank's.
    """

    def __init__(self, plan: StepPlan, ledger: Expressions) -> None:
        super().__init__(plan.placement.ranks)
        self.plan, self.ledger = plan, ledger
        self.outcomes: list[dict[int, Outcome]] = []

    def follow(
        self, copies: Sequence[Callable[[int, Transport], Execution]]
    ) -> Generator[None, None, list[dict[int, Outcome]]]:
        """Do what `Ranks.follow` does; see there."""
        told = [partial(self._watch, k if len(copies) > 1 else None, one) for k, one in enumerate(copies)]
        self.outcomes = yield from super().follow(told)
        return self.outcomes

    def shared(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the gradients that several processes would return, as each would: the name, and the name with where.

        In this process they are one result, so nobody else looks at each. Those of shards are put together.
        """
        shards, held = self.plan.copies.shards, defaultdict[tuple[str, str], list[Tensor]](list)
        for copy, outcomes in zip(self.plan.parts, self.outcomes, strict=True):
            for rank, outcome in outcomes.items():
                where = f" on rank {rank}" + f" of replica {copy // shards}" * (self.plan.copies.count > 1)
                found = collect_gradients(replace(self.plan.parts[copy], ranks=(rank,)), {rank: outcome})
                for name, grad in found.items():
                    held[name, f"gradient {name}{where}"].append(grad)
        holders = Counter(name for name, _ in held)
        for (name, leaf), pieces in held.items():
            if holders[name] > 1:
                yield name, leaf, pieces[0] if shards == 1 else torch.cat(pieces)

    def _watch(
        self, copy: int | None, start: Callable[[int, Transport], Execution], rank: int, transport: Transport
    ) -> Execution:
        execution = start(rank, transport)
        where = f"copy {copy}, rank {rank}" * (copy is not None) or f"rank {rank}"
        vars(execution)["run"] = partial(self._run, execution.run(), RunningRank(where, execution))
        return execution

    def _run(self, running: Generator[Any, None, Outcome], rank: RunningRank) -> Generator[Any, None, Outcome]:
        """Run an execution, and be the one that computes until its next wait."""
        while True:
            self.ledger.running = rank
            try:
                handle = next(running)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            finally:
                self.ledger.running = None
            yield handle


class RunningRank(NamedTuple):
    """An execution of a program, and its rank; as text, also the action that it is at."""

    rank: str
    execution: Execution

    def __str__(self) -> str:
        at = self.execution.at
        return self.rank if at is None else f"{self.rank}, position {at.position}, {at.action}"


class Claims:
    """The leaves that were compared: those that are proved, by what they were compared with, and the others."""

    def __init__(self, ledger: Expressions, ranks: WatchedRanks) -> None:
        self.ledger, self.ranks = ledger, ranks
        self.proved: dict[str, list[str]] = {REFERENCE: [], EAGER: []}
        self.unproved: list[Unproved] = []

    def compare(self, got: Results, expected: Results, against: str, tolerance: float = 0) -> int:
        """Compare results by their expressions, and gradients that several processes would have, for each of them."""
        shared = self.ranks.shared() if against == REFERENCE else ()
        held = [(leaf, one, expected.grads.get(name)) for name, leaf, one in shared]
        return self.compare_pairs([*list_pairs(got, expected), *held], against)

    def compare_pairs(self, pairs: Iterable[Pair], against: str) -> int:
        """Compare pairs of tensors by their expressions; return how many leaves are proved."""
        for leaf, mine, theirs in pairs:
            if mine is None or theirs is None:
                self.unproved.append(Unproved(leaf, against, "", "", "one side has nothing"))
            elif (a := self.ledger.value(mine)) == (b := self.ledger.value(theirs)):
                self.proved[against].append(leaf)
            else:
                self.unproved.append(find_difference(self.ledger, leaf, against, a, b))
        return len(self.proved[against])


def _tell_apart(state: State) -> State:
    """Return tensors close to these, no two of which are equal; integers stay as they are."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in state.items():
        moved = tensor.detach().clone()
        if moved.is_floating_point() or moved.is_complex():
            moved += NOISE * torch.rand(moved.shape, generator=generator, dtype=torch.float64).to(moved.dtype)
        found[name] = moved.requires_grad_(tensor.requires_grad)
    return found


def _play_here(pipe: Pipeline) -> Pipeline:
    """Return the pipeline with all of its ranks in this process, and stages of this process's own record."""
    if not pipe.ranks.processes:
        return pipe
    if pipe.copies.count > 1:
        raise InputError(
            f"pipe: got one on {pipe.copies.count} processes for each rank, expected one: a process is passed its own "
            "rows and shards. Build it again without torch.distributed: one process plays the whole mesh."
        )
    ranks, known = Ranks(pipe.schedule.ranks), pipe.memo.microbatches
    recorded = {
        kind: replace(one, assemblies={}) if isinstance(one, KnownMicrobatch) else one for kind, one in known.items()
    }
    captures = replace(pipe.captures, memo=replace(pipe.memo, batches={}, microbatches=recorded))
    planner = replace(pipe.planner, captures=captures, ranks=ranks.ranks)
    return Pipeline(planner, ranks, pipe.rebuild, pipe.plan_ahead)


def _require_provable(pipe: Pipeline) -> None:
    """Raise `InputError` unless the pipeline computes on the CPU, on plain tensors."""
    if pipe.device.type != "cpu":
        raise InputError(
            f"pipe: got one on {pipe.device}, expected one on the CPU: inputs are known by their bytes. Build it again "
            "with fpipe.Place(device='cpu'), and a model and an example there."
        )
    require_plain("prove", pipe.training.placed, "Build the pipeline of the model before it was split.")


def _require_stream(pipe: Pipeline, optimizer: Optimizer | None) -> None:
    """Raise `InputError` unless the pipeline can train on a stream, with an optimizer."""
    require_streamable(pipe)
    if optimizer is None:
        raise InputError(
            f"optimizer: got none for {pipe.schedule!r}, which updates weights while microbatches are in flight, "
            "expected one: a stream is proved with its updates. Pass fpipe.optimizer(torch.optim.SGD, lr=0.1)."
        )


def _require_whole(pipe: Pipeline) -> None:
    """Raise `InputError` if parameters are sharded: updates of a shard are other calls than those of the whole."""
    if pipe.copies.shards > 1:
        raise InputError(
            f"optimizer: got one for parameters in {pipe.copies.shards} shards, expected whole ones: a kernel may "
            "round the last elements of a shard otherwise. Leave out the optimizer; gradients are proved."
        )
