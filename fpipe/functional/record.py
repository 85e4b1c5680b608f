# SPDX-License-Identifier: Apache-2.0
"""A model's record, and the stages that it is cut into, as values.

Idea. These are the parts that `fpipe.pipeline` is made of: a capture, a choice of cuts, and the plan of a step. A
`ModelRecord` is what one microbatch computes, so nothing in it depends on a schedule. Losses are averaged by whoever
executes: the record's own loss is not divided, and its backward is passed a cotangent.

Runs when a model is captured or cut, and when a batch of a new kind comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fpipe.cutting.partition import Cuts, CutsArgument, Evenly, Marked, parse_places
from fpipe.errors import CutError, InputError
from fpipe.functional.bound import BoundStages, Executed, Split, mean_of, split_rows
from fpipe.functional.stage import Stage
from fpipe.network.ranks import wait_for_turn
from fpipe.pipelines.argument_checks import require_buildable
from fpipe.pipelines.batch import Batching, Signature
from fpipe.pipelines.builder import Model, make_batchings, make_captures
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.description import describe
from fpipe.pipelines.footprint import measure_sizes
from fpipe.pipelines.inputs import scatter, start_backward
from fpipe.pipelines.memo import Memo
from fpipe.pipelines.modes import active_casts, suspend_autocast
from fpipe.pipelines.options import Gradients, Microbatching, Recording, accept_fields
from fpipe.pipelines.planner import Planner
from fpipe.pipelines.resolver import Resolver, own_text
from fpipe.pipelines.results import collect_gradients
from fpipe.pipelines.slices import find_slicing
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Captured, Constant, Source, Value
from fpipe.record.fakes.eager_types import hide_fakes
from fpipe.record.front_ends.parts import as_module
from fpipe.record.model.state import require_own_buffers
from fpipe.record.objective import Loss
from fpipe.record.trace.comparison import compare_captures
from fpipe.record.variant import EVALUATION, Variant
from fpipe.runtime.executor import Outcome
from fpipe.stages import stage as stages
from fpipe.stages.assembly import Assembly
from fpipe.stages.backends import Backend, backend_of
from fpipe.stages.prologue import Feed
from fpipe.tensors import random
from fpipe.tensors.arguments import is_differentiated, require_arguments, require_primal
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import flatten_all, same_bits
from fpipe.weights.loading import ValueSource, load_values
from fpipe.weights.state import Form
from schedules import Graph, Program, Schedule, forward_only, gpipe, zb_h1
from schedules.status import showing


@dataclass(frozen=True, eq=False)
class ModelRecord:
    """A recording of what a model and its loss compute for one microbatch, made by `fpipe.capture`.

    `fpipe.cut` cuts it into stages. `print` lists its modules, what it holds, and what runs as Python. Two records are
    equal if they make the same torch calls with the same values, in the same order, for the same microbatch.
    """

    captures: Captures
    backend: Backend | None
    microbatching: Microbatching

    @property
    def captured(self) -> Captured:
        """The torch calls in order, with what each reads and makes."""
        batching, example = self._example
        return self.captures.of(_variant(self.captures.loss is not None), batching.split(example)[0]).captured

    @property
    def graph(self) -> Graph:
        """The graph of the uncut model: one stage."""
        return cut(self).graph

    @property
    def _example(self) -> tuple[Batching, Signature]:
        batching = self.captures.batchings[_variant(self.captures.loss is not None).loss]
        return batching, batching.example

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelRecord):
            return NotImplemented
        pair, mine, theirs = (self.captured, other.captured), self._example[1], other._example[1]
        made = [{name: (source, Spec.of(one.fakes[name])) for name, source in _named(one)} for one in pair]
        same = (self.backend, self.microbatching, mine) == (other.backend, other.microbatching, theirs)
        return same and made[0] == made[1] and not compare_captures(*pair)

    def __hash__(self) -> int:
        return hash(tuple([(unit.path, unit.does, unit.reads, unit.makes) for unit in self.captured.units]))

    def __repr__(self) -> str:
        batching, example = self._example
        leaves = [f"{leaf.name}: {specs[0]}" for leaf, specs in zip(batching.leaves, example.leaves, strict=True)]
        loss = self.captures.loss
        named = [] if loss is None else [f"loss={getattr(loss, '__qualname__', type(loss).__name__)}"]
        return f"capture({', '.join([type(self.captures.model).__name__, *leaves, *named])})"

    def __str__(self) -> str:
        return f"ModelRecord of {type(self.captures.model).__name__}: {str(cut(self)).partition(', ')[2]}"


@accept_fields
@showing("capture")
def capture(
    model: Model,
    *,
    example: tuple[Any, ...] | dict[str, Any],
    targets: Any = None,
    loss: Loss | None = None,
    microbatching: Microbatching = Microbatching(),
    recording: Recording = Recording(),
    gradients: Gradients = Gradients(),
) -> ModelRecord:
    """Record what a model and its loss compute for one microbatch.

    - `model`, `loss`, `recording`, `gradients`: as for `fpipe.pipeline`.
    - `example`, `targets`: one microbatch; it provides shapes and dtypes. Other shapes are recorded when they first
      appear.
    - `microbatching`: how `fpipe.execute` splits a batch, by its `batch_dims`.

    Without a loss, the record is of an evaluation. Raise `CaptureError` or `InputError`.

    >>> import torch, fpipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x, y = torch.ones(2, 4), torch.ones(2, 1)
    >>> record = fpipe.capture(model, example=(x,), targets=y, loss=torch.nn.functional.mse_loss)
    >>> [unit.path for unit in record.captured.units]
    ['0', '1', '2', 'loss', '']
    """
    require_arguments(capture, locals())
    for options in (microbatching, recording, gradients):
        options.require()
    module, training = as_module(model), loss is not None
    whole = require_buildable(module, example, loss, gpipe(1, 1) if training else forward_only(1, 1))
    cuts = parse_places(None, recording.unsplittable, 1, recording.whole)
    batchings = make_batchings(example, targets, microbatching, 1, 1)
    batch = batchings[training].split_batch(example, targets if training else None)
    with torch.inference_mode(False), suspend_autocast(_variant(training)) as variant, wait_for_turn():
        slicing = find_slicing(module, batchings[True], whole, microbatching, recording)
        captures = make_captures(module, loss, batchings, cuts, recording, training, slicing)
        answers = Resolver(captures, variant, batch, own_text, example=True).resolve()
        captures = captures.with_example(answers) if training else captures
        made = ModelRecord(captures, backend_of(gradients.backward), microbatching)
        require_own_buffers(module, made.captured)
    return made


def cut(record: ModelRecord, at: CutsArgument = None, *, stages: int = 1) -> ModelStages:
    """Cut a record into stages, each a set of pure functions.

    - `at`: like `cuts` of `fpipe.pipeline`: names, or classes and patterns. `stages`: their number, if `at` has no
      names.

    Raise `CutError`.

    >>> import torch, fpipe
    >>> from schedules import lower, one_f_one_b
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x, y = torch.ones(6, 4), torch.ones(6, 1)
    >>> record = fpipe.capture(model, example=(x[:2],), targets=y[:2], loss=torch.nn.functional.mse_loss)
    >>> stages = fpipe.cut(record, at="2")
    >>> params, buffers = stages.init(model)
    >>> program = lower(one_f_one_b(ranks=2, microbatches=3), stages.graph)
    >>> out, grads = fpipe.execute(program, stages, params, buffers, (x,), y)
    >>> bool(out.loss.isclose(torch.nn.functional.mse_loss(model(x), y))), [list(grad) for grad in grads]
    (True, [['0.weight', '0.bias'], ['2.weight', '2.bias']])

    Each stage is a pure function that can be called alone:

    >>> h, _, residuals = stages[0].forward(params[0], buffers[0], (x[:2],), 0)
    >>> (dx,), grads = stages[1].backward(stages[1].forward(params[1], buffers[1], (y[:2], h), 0)[2], torch.tensor(1.0))
    >>> list(h.shape), list(dx.shape), list(grads)
    ([2, 8], [2, 8], ['2.weight', '2.bias'])
    """
    if not isinstance(record, ModelRecord):
        raise InputError(f"record: got {type(record).__name__}, expected the result of fpipe.capture. Pass it.")
    captures, known = record.captures, record.captures.cuts
    cuts = parse_places(at, known.unsplittable, stages, known.whole)
    if stages != 1 and not isinstance(cuts.where, Evenly):
        raise CutError("at, stages: got both, expected one of them. Remove stages: the names determine their number.")
    with torch.inference_mode(False), suspend_autocast(_variant(captures.loss is not None)):
        first = replace(captures, cuts=cuts, memo=captures.memo.without_stages())
        marked = Cuts(Marked(first.marks()), known.unsplittable, known.whole)
        made = ModelStages(replace(record, captures=replace(first, cuts=marked)))
        made.assembly  # noqa: B018  # whatever can't be cut there is refused now
    return made


def _named(captured: Captured) -> Iterator[tuple[Value, Source]]:
    """Yield the values that no unit makes, but constants."""
    yield from ((value, one) for value, one in captured.sources.items() if not isinstance(one, Constant))


def _variant(training: bool) -> Variant:
    return Variant(training=True, loss=True, outputs=False, scaled=True) if training else EVALUATION


@dataclass(frozen=True, eq=False)
class ModelStages(Sequence[Stage]):
    """The stages of a model, cut by `fpipe.cut`: pure functions, and the graph between them.

    Stage `s` takes `params[s]` and `buffers[s]`, dicts by the model's own names, and tensors: the leaves of the batch
    that it reads, targets after inputs, then the values from earlier stages. It returns its result, if it computes the
    loss, and the values for later stages: a tensor, or a tuple of several. Two are equal if their records and their
    cuts are.
    """

    record: ModelRecord
    memos: dict[tuple[Program, tuple[int, ...]], Memo] = field(default_factory=dict)

    @property
    def captures(self) -> Captures:
        """The captures, cut where these stages are cut."""
        return self.record.captures

    @cached_property
    def assembly(self) -> Assembly:
        """The stages for a microbatch like the example."""
        return self._plan(zb_h1(self._count, 1), _variant(self.trains)).assembly

    @property
    def _count(self) -> int:
        return self.captures.cuts.stages

    @property
    def graph(self) -> Graph:
        """The stage graph, for `schedules.lower`."""
        return self.assembly.graph

    def init(self, source: ValueSource) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the parameters and the buffers of each stage, copied from a model or a state dict.

        A tied parameter is in the dict of each stage that uses it, the same tensor. Raise `InputError`, naming the
        leaf, if one has no value or another shape or dtype.
        """
        assembly = self.assembly
        held = [name for stage in assembly.stages for name in (*stage.parameters, *stage.buffers, *stage.unused)]
        values = load_values(self.captures.model, dict.fromkeys(held), {}, source)
        params, buffers = assembly.parameters, assembly.buffers
        return self._spread(values, params), self._spread(values, buffers)

    def _spread(self, values: Mapping[str, Tensor], known: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return the values of each stage, by name."""
        names = [(*one.parameters, *one.buffers, *one.unused) for one in self.assembly.stages]
        return [{name: values[name] for name in own if name in known and name in values} for own in names]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, s: Any) -> Any:
        return view(self.assembly.stages[s], self.assembly)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelStages):
            return NotImplemented
        return self.captures.cuts == other.captures.cuts and self.record == other.record

    def __hash__(self) -> int:
        return hash((self.captures.cuts, self.record))

    def __repr__(self) -> str:
        where: Any = self.captures.cuts.where
        places = [str(next((one for one in marks if not one.end), marks[0])) for marks in where.marks]
        return f"cut({self.record!r}, at=[{', '.join(places)}])"

    def __str__(self) -> str:
        leaf_name, how = self.captures.batchings[True].leaf_name, zb_h1(self._count, 1)
        assembly = self._plan(how, replace(_variant(self.trains), scaled=False)).assembly
        with wait_for_turn(), hide_fakes():
            sizes = measure_sizes(assembly, how.placement)
        return describe(assembly, self.captures.model, how, sizes, leaf_name, channels=())

    @property
    def trains(self) -> bool:
        """True if there is a loss, and so a backward."""
        return self.captures.loss is not None

    def _plan(self, schedule: Schedule, variant: Variant) -> StepPlan:
        """Return the plan of a microbatch like the example, all of whose stages are here."""
        ranks = tuple(range(schedule.ranks))
        planner = Planner(schedule, self.captures, 0, ranks, backend=self.record.backend)
        return planner.plan(replace(variant, casts=active_casts()))

    def bind(
        self,
        program: Program,
        ranks: Sequence[int],
        params: Any,
        buffers: Any,
        batch: tuple[Any, Any],
        seed: int | None,
        split: Split,
        packed: bool,
    ) -> BoundStages:
        """Return these stages bound to the arguments of one step; see `fpipe.execute`."""
        schedule, (inputs, targets) = program.schedule, batch
        count, trains = schedule.microbatches, schedule.backward
        if split is not split_rows:
            raise InputError(
                "split: got a function, expected none for stages of a model. Pass microbatching to capture."
            )
        if is_differentiated():
            leaves = [leaf for leaf in flatten_all((params, buffers, batch))[0] if isinstance(leaf, Tensor)]
            require_primal("arguments", dict(enumerate(leaves)))
        batchings = make_batchings(inputs, targets, self.record.microbatching, count, 1)
        memo = self.memos.setdefault((program, tuple(ranks)), self.captures.memo.without_stages())
        captures = replace(self.captures.with_batchings(batchings), memo=memo)
        with suspend_autocast(_variant(trains)) as variant, wait_for_turn():
            given = captures.batchings[trains].split_batch(inputs, targets if trains else None)
            known = Resolver(captures, variant, given, own_text).resolve()
            planner = Planner(schedule, captures, 0, tuple(ranks), backend=self.record.backend)
            plan = replace(planner.plan(variant, known.signature), program=program)
            plan.watch.require_unchanged()
            held = (
                Form("params", plan.params, {}).unwrap(merge_by_name("params", params, plan.params)),
                Form("buffers", plan.buffers, {}).unwrap(merge_by_name("buffers", buffers, plan.buffers)),
            )
            starts = start_backward([plan.local_stages] * count, 1 / count) if trains else {}
            given_inputs = scatter(plan, *held, known, seed)._replace(starts=starts)

        def finish(outcomes: Mapping[int, Outcome]) -> tuple[Executed, Any]:
            state = dict(held[1])
            for outcome in outcomes.values():
                for s, one in outcome.buffers[0].items():
                    state.update(zip(plan.assembly.stages[s].buffers, one, strict=True))
            results = {i: values for outcome in outcomes.values() for i, values in outcome.results.items()}
            rows = [results[i] for i in sorted(results)]
            new = self._like(buffers, state)
            if not trains:
                structure = plan.assembly.captured.structure
                return Executed(None, (), tuple([structure.unflatten(list(row)) for row in rows]), new), None
            loss = mean_of([row[0] for row in rows], count) if rows else None
            trees = [cut.captured.aux_structure for cut in plan.assemblies]
            aux = [tree.unflatten(list(row[1:])) for tree, row in zip(trees, rows, strict=False)]
            return Executed(loss, tuple(aux), (), new), self._like(params, collect_gradients(plan, outcomes))

        return BoundStages(
            given_inputs,
            plan.programs.__getitem__,
            partial(_run_in, plan, variant),
            finish,
            lambda: [str(stage) for stage in plan.assembly.stages],
        )

    def _like(self, given: Any, values: Mapping[str, Tensor]) -> Any:
        """Return values in the form in which parameters or buffers were given: one dict, or one for each stage."""
        if isinstance(given, Mapping):
            return {name: values[name] for name in given if name in values}
        return [{name: values[name] for name in one or {} if name in values} for one in given]


def merge_by_name(what: str, given: Any, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return parameters or buffers by name; raise `InputError` if stages have different values under one name."""
    if not isinstance(given, Mapping | Sequence):
        raise InputError(
            f"{what}: got {type(given).__name__}, expected one dict by name, or a sequence with a dict for each stage. "
            "Pass what init returned, updated."
        )
    found = dict[str, Tensor]()
    for s, one in enumerate([given] if isinstance(given, Mapping) else given):
        for name, value in (one or {}).items():
            known = found.setdefault(name, value)
            if known is not value and not same_bits(known, value):
                raise InputError(
                    f"{what}[{s}], {name!r}: got another value than an earlier stage's, expected the same: several "
                    "stages share the tensor. Update it once, and pass it to each."
                )
    return {name: found[name] for name in wanted if name in found}


@contextmanager
def _run_in(plan: StepPlan, variant: Variant) -> Iterator[None]:
    """The context of a step: one thread at a time, without autocast, and with the user's generators restored."""
    with wait_for_turn(), suspend_autocast(variant), random.preserve_generators(plan.generators), plan.context():
        yield


def view(one: stages.ModelStage, assembly: Assembly) -> Stage:
    """Return a stage of a model as pure functions on dicts by name."""

    def enter(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Any:
        count, state = len(one.batch), tuple([buffers[name] for name in one.buffers])
        expected = count + sum(len(crossing.specs) for crossing in one.gets)
        if len(inputs) != expected:
            raise InputError(
                f"stage {one.index}: got {len(inputs)} inputs, expected {expected}: {count} of the batch, then the "
                f"values from earlier stages. Pass a tuple of them. {one}"
            )
        own = Feed(one.prologue, [tuple(inputs[:count])], state)(0)
        return one.leaves(params), state, (*own, *inputs[count:])

    def forward(params: Any, buffers: Any, inputs: Any, key: int) -> tuple[Any, Any, Any]:
        with wait_for_turn(), random.preserve_generators(assembly.devices):
            weights, before, given = enter(params, buffers, inputs)
            outputs, state, residuals = one.forward(weights, before, given, key)
        new = {**buffers, **dict(zip(one.buffers, state, strict=True))}
        return outputs[0] if len(outputs) == 1 else outputs, new, residuals

    def backward(residuals: Any, cotangents: Any) -> tuple[tuple[Any, ...], Any]:
        outgoing, grads = one.backward(residuals, as_tuple(cotangents))
        return outgoing, named(grads)

    def backward_input(residuals: Any, cotangents: Any) -> tuple[tuple[Any, ...], Any]:
        return one.backward_input(residuals, as_tuple(cotangents))

    def backward_weight(deferred: Any) -> Any:
        return named(one.backward_weight(deferred))

    def named(grads: Any) -> dict[str, Tensor]:
        pairs = zip(one.grads, one.complete(grads), strict=True)
        return {name: grad for name, grad in pairs if grad is not None}

    return Stage(forward, backward, backward_input, backward_weight, str(one.index))


def as_tuple(cotangents: Any) -> tuple[Any, ...]:
    """Return cotangents as a tuple; a tensor stands for a tuple of one."""
    return cotangents if isinstance(cotangents, tuple) else (cotangents,)
