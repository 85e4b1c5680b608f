# SPDX-License-Identifier: Apache-2.0
"""The public functions: `pipeline`, `value_and_grad`, `evaluate`, `reference`, `verify`.

Invariant: this module may import any other; no other imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fpipe.autodiff.backends import Backward, Way, way
from fpipe.batching.batch import Batch, Batching
from fpipe.batching.memory import require_apart
from fpipe.batching.weights import Weight
from fpipe.capture.modules import as_module
from fpipe.capture.registry import find_front_end
from fpipe.cutting.calls import Selector
from fpipe.cutting.partition import Asked, Cuts, asked
from fpipe.ir.captured import FrontEnd
from fpipe.ir.objective import Loss
from fpipe.ir.variant import EVALUATION, TRAINING, Variant
from fpipe.model.copying import require_own_buffers
from fpipe.model.gradient_hooks import collect_gradient_hooks, require_exact_hooks
from fpipe.model.snapshot import restore_model
from fpipe.model.stateless import skeleton
from fpipe.pipelines.ambient import lifted, require_gradients
from fpipe.pipelines.answers import Answering
from fpipe.pipelines.arguments import require_arguments, require_backward, require_trained
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.consensus import connect, enter, meet
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.step import State, Step, gather, gradients, joined, keys
from fpipe.runtime.launch import launched
from fpipe.runtime.recording import Record
from fpipe.runtime.turns import turn
from fpipe.stages.ties import Tied, summed
from fpipe.tensors import random
from fpipe.tensors.fake import fake, fake_mode
from fpipe.verification.comparison import Computed, Verification, eagerly, require_equal, require_numbers
from fpipe.verification.one_device import one_device, orders
from fpipe.verification.trial import descended, gathered, held, placed
from fpipe.watching.origin import Origin
from fpipe.watching.watch import Watching
from fpipe.weights.state import require_flags, require_state
from schedules import Schedule


class ValueAndGrad(Protocol):
    """The type of the functions that `value_and_grad` and `reference` return."""

    def __call__(
        self, params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None
    ) -> tuple[Step, State]:
        """Run one step; return its loss, outputs and new buffers, and the gradients by parameter name."""


def pipeline(
    model: nn.Module | Sequence[Callable[..., Any]],
    *,
    example: tuple[Any, ...] | dict[str, Any],
    loss: Loss,
    schedule: Schedule,
    targets: Any = None,
    cuts: Asked = None,
    stages: int | None = None,
    unsplittable: Selector | Iterable[Selector] = (),
    capture: str | FrontEnd = "trace",
    backward: Backward = "autograd",
    tied: Tied = "exact",
    batch_dims: Any = 0,
    output_dims: Any = 0,
    weight: Weight | None = None,
    group: dist.ProcessGroup | None = None,
) -> Pipeline:
    """Cut a model into stages and bind them to a schedule. Everything is checked; nothing runs.

    - `model`: a module, which is not modified; with `capture="modules"`, a sequence of modules or functions, or an
      nn.Sequential, each called with what the previous one returned. It may be on the meta device.
    - `example`, `targets`: one whole batch. `example` is a tuple of positional or a dict of keyword arguments;
      `targets` is whatever tree `loss` takes. They provide shapes and dtypes, and answer what the model asks about
      values that depend on the batch alone (whether a mask is full, say; an example without values answers no and
      zero). Later batches may have other sizes, other answers, and other flags and numbers in their non-tensor leaves;
      the model is captured again for each kind of batch, at its first step.
    - `batch_dims`: how tensors are split into microbatches: a dimension (the last microbatch may be smaller), `None` to
      give every microbatch the whole tensor, or a function `f(tensor, M)` that returns M tensors. Either one for all
      tensors, or a tree that is a prefix of `(example, targets)`, such as `((0, None), 0)`.
    - `output_dims`: how the outputs of microbatches are joined: a dimension (tensors without one are stacked), `None`
      to take the first microbatch's, or a function of the sequence of them. Either one for all, or a tree that is a
      prefix of the outputs.
    - `loss(outputs, targets)` returns a scalar for one microbatch. Without targets it is `loss(outputs)`, for a model
      that computes its own loss, as in `loss=lambda outputs: outputs.loss`. The loss of a step is the sum over
      microbatches of loss / M.
    - `weight(inputs, targets)`: the weight of a microbatch, such as its number of tokens. The loss of a step is then
      the sum of loss * (weight / total), so a mean per token is exact however the batch is split. Auxiliary losses that
      the model adds in its forward are scaled the same way.
    - `schedule`: an asynchronous or sliced schedule can be checked and simulated, but not run yet.
    - `cuts`: where new stages begin, in execution order: module names ("blocks.3.norm"; "norm@1" for the second call),
      or indices of the calls that the model itself makes (of the parts, if the model is a sequence). Given classes or
      patterns instead, the model is cut where calls of matching modules begin, balanced by parameter count; in
      "blocks.*" the wildcard matches one name between dots. Without `cuts`, it is cut between any modules, balanced to
      within a tenth, where fewer values cross.
    - `stages`: the number of stages, if `cuts` has no names or indices. Defaults to the schedule's.
    - `unsplittable`: names, classes or patterns of modules inside whose calls no stage may begin. With the default
      front end, their control flow may depend on data as long as shapes do not; so may the loss's, named "loss".
    - `backward`: how stages are differentiated. `"autograd"`: by autograd, for every microbatch. `"graph"`: recorded
      once, then run operator by operator: the same bits with less Python. `"inductor"`, or another backend of
      `torch.compile`, by name or as a callable: recorded and compiled, which is close but not bit for bit. A recording
      always repeats what was recorded. A stage that can't be recorded is left to autograd (`print(pipe)` says why).
    - `tied`: how the gradients of a parameter used by several stages are combined. `"exact"`: through cotangents sent
      in every microbatch, bit for bit as on one device. `"sum"`: the stages' own gradients are added once, at the end
      of the step. Or a dict from parameter name (any of its names) to one of these; parameters not in it are exact.
    - `group`: if torch.distributed is initialised, the processes that are the ranks, one each; defaults to all. Every
      process of the job must then build its pipeline at the same time, and all groups must have the same size. If
      torch.distributed is not initialised, all ranks run in this process.

    Every step uses the parameters, the buffers, and the batch, with its numbers and flags, that it is passed. Of
    everything else the pipeline takes a snapshot now. If the model changes later in a way that matters (an attribute, a
    mode, what is frozen), the next step raises; `pipe.rebuilt(model)` returns the pipeline of the changed model. The
    same goes for a global, a closed-over variable or an attribute of the loss, unless the code that reads it runs as
    Python in every step and so sees the change: `fpipe.watching.watch` says when.

    Raises `CaptureError`, `CutError`, `InputError`, `ScheduleError` or `TransportError`, always before anything is
    sent.

    >>> import torch, fpipe
    >>> from schedules import one_f_one_b
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
    >>> pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=torch.nn.functional.mse_loss,
    ...                       schedule=one_f_one_b(ranks=2, microbatches=3), cuts=["2"])
    >>> params, buffers = pipe.init(model)
    >>> step, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    >>> bool(torch.isclose(step.loss, torch.nn.functional.mse_loss(model(x), y))), list(grads)
    (True, ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    module = as_module(model)
    require_arguments(module, example, loss, schedule)
    where = asked(cuts, stages, unsplittable, schedule)
    batchings = {
        True: Batching.of(example, targets, batch_dims, schedule.microbatches, weight),
        False: Batching.of(example, None, _of_inputs(batch_dims), schedule.microbatches),
    }
    whole, how = batchings[True].cut(example, targets), way(backward)
    ranks = launched(schedule.ranks, group, batchings[True].home)

    made = WeakValueDictionary[int, Tensor]()

    def built(module: nn.Module, example: Batch) -> Pipeline:
        seen_by = find_front_end(capture, where.whole(module, loss))
        captures = _captures(module, loss, batchings, seen_by, where, schedule, how)
        captures = captures.exemplified(Answering(captures, TRAINING, example, ranks.tell, example=True).answered())
        kept = example if captures.batchings[True].example.answers else example.without_values()

        def rebuild(model: nn.Module | Sequence[Callable[..., Any]]) -> Pipeline:
            with torch.inference_mode(False), lifted(TRAINING), ranks.guarded("pipe.rebuilt"):
                module = as_module(model)
                require_arguments(module, (), loss, schedule)
                return built(module, kept)

        pipe = Pipeline(schedule, captures, output_dims, ranks, rebuild, summed(tied, module), how, made)
        require_exact_hooks(captures.hooks, pipe.summed)
        connect(pipe, TRAINING)
        require_own_buffers(module, pipe.training.assembly.captured)
        require_trained(pipe.training.assembly, schedule)
        return pipe

    with torch.inference_mode(False), lifted(TRAINING), ranks.guarded("pipeline"):
        meet(ranks, schedule, batchings[True])
        return built(module, whole)


def value_and_grad(pipe: Pipeline, outputs: bool = False, record: Record | None = None) -> ValueAndGrad:
    """Return the function that computes the loss and gradients of one step.

    It takes parameters and buffers as `pipe.init` returns them, a whole batch, and, if the model draws random numbers,
    a seed, which should be new for each step. It returns a `Step` and a dict of gradients: one for each parameter of
    this process whose `.grad` a plain backward would set. No argument is modified.

    Under torch.distributed every rank must call this, and then the function, in the same order and with the same seed.
    If ranks differ in these, in batch sizes or in torch's settings, or if one rank refuses its arguments, every rank
    raises `TransportError` before anything is computed. So does any step after one that failed midway.

    The batch may have other sizes than the example, on every rank in the same step; the first step of each kind
    captures the model again, before anything is sent. A rank that reads no inputs, or no targets, may pass `None` for
    them if their shapes are those of the example, or else tensors on the meta device that carry the shapes:
    `x.to("meta")`.

    With `outputs`, `Step.outputs` holds the model's outputs. `record` is called with a `Span`, in seconds of
    `time.perf_counter`, for every compute action of this process and every transfer that it waited for; on an
    accelerator after the step, with the device's times. `fpipe.timeline` merges the spans of all ranks into one
    timeline.
    """
    require_backward(pipe.schedule)
    variant = Variant(training=True, loss=True, outputs=outputs)
    with lifted(variant), pipe.ranks.guarded("value_and_grad"):
        connect(pipe, variant)

    def step(
        params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None
    ) -> tuple[Step, State]:
        with lifted(variant) as what, pipe.ranks.guarded("a step"):
            require_gradients()
            require_state("params", params, pipe.training.params)
            require_state("buffers", buffers, pipe.training.buffers)
            require_flags(params, pipe.training.assembly.captured.trainable, pipe.made)
            batch = pipe.batch(what, inputs, targets, pipe.ranks.tell)
            plan, given = enter(pipe, what, params, buffers, batch, seed)
            outcomes = pipe.run(plan, given, record)
            grads = gradients(plan, outcomes)
            return gather(plan, pipe.ranks, outcomes, buffers), {name: grads[name] for name in params if name in grads}

    return step


def evaluate(pipe: Pipeline, record: Record | None = None) -> Callable[..., Step]:
    """Return the function that computes outputs, and with targets the loss, in eval mode; it keeps no graph.

    It takes the same arguments as the function that `value_and_grad` returns. A model that computes its own loss always
    returns one. Outputs are joined in microbatch order and are returned on the rank of the last stage. Under
    torch.distributed every rank must call the function in the same order, and at least one of them must pass the
    targets if there are any. `record` is as in `value_and_grad`.
    """

    def step(params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None) -> Step:
        with lifted(EVALUATION) as what, pipe.ranks.guarded("an evaluation"):
            require_state("params", params, pipe.training.params)
            require_state("buffers", buffers, pipe.training.buffers)
            loss = pipe.computes_loss or pipe.ranks.any(targets is not None)
            variant = replace(what, loss=loss)
            batch = pipe.batch(variant, inputs, targets, pipe.ranks.tell)
            plan, given = enter(pipe, variant, params, buffers, batch, seed)
            outcomes = pipe.run(plan, given, record)
            return gather(plan, pipe.ranks, outcomes, buffers)

    return step


def reference(pipe: Pipeline, outputs: bool = False) -> ValueAndGrad:
    """Return the same function on one device: a plain microbatch loop over the captured, uncut model.

    A parameter tied by `"sum"` has one copy for each stage that uses it; their gradients are added.

    On whichever rank it is called, it takes the whole batch and all parameters and buffers of the model:
    `dict(model.named_parameters())` and `dict(model.named_buffers())`.
    """
    require_backward(pipe.schedule)
    variant = Variant(training=True, loss=True, outputs=outputs)
    known = pipe.plan(variant).assembly

    def step(
        params: State, buffers: State, inputs: Any, targets: Any = None, *, seed: int | None = None
    ) -> tuple[Step, State]:
        require_state("params", params, known.parameters)
        require_state("buffers", buffers, known.buffers)
        require_gradients()
        with lifted(variant) as what:
            batch = pipe.batch(what, inputs, targets)
            plan = pipe.plan(what, batch.signature)
            plan.watch.require_unchanged()
            require_apart(batch.memories, plan.written)
            parts = batch.take({leaf for cut in plan.assemblies for leaf in cut.whole.batch})
            with turn(), random.preserve_generators(plan.generators):
                results, state, grads = one_device(plan, params, buffers, parts, keys(plan, seed))
        new = {**buffers, **dict(zip(plan.assembly.whole.buffers, state, strict=True))}
        return Step(*joined(plan, results), new), {name: grads[name] for name in params if name in grads}

    return step


def verify(
    pipe: Pipeline,
    model: nn.Module | Sequence[Callable[..., Any]],
    inputs: Any,
    targets: Any = None,
    *,
    params: State | None = None,
    buffers: State | None = None,
    seed: int | None = None,
    steps: int = 1,
    tolerance: float = 0,
) -> Verification:
    """Run steps three ways and compare loss, outputs (if they are a tree), gradients and buffers bit for bit.

    The three are the pipeline, the reference, and `model` itself in a plain eager loop. They start from `params` and
    `buffers`, this process's share of the training state, or from the model's own. The model's tensors and Python state
    are restored afterwards.

    `steps` is the number of steps of plain gradient descent, seeded from `seed` on: more than one finds models that
    change what they do after some calls, which a capture can't see. With a `tolerance`, a leaf may differ by that
    fraction of its largest magnitude: for compiled stages, and for accelerators with nondeterministic kernels.

    Under torch.distributed every rank calls it, with the whole model and batch, and compares what it holds. Raises
    `MismatchError` naming the first leaf that differs, or that is nan on both sides and so proves nothing. Each step
    costs two more on one device.
    """
    module = as_module(model)
    share = _share(pipe, module, params, buffers)
    whole = gathered(pipe, module, *share) if (params, buffers) != (None, None) else held(module)
    found = Verification(0, 0)
    with restore_model(module):
        for i in range(steps):
            with placed(module, *whole):
                now = None if seed is None else seed + i
                compared, share, whole = _verified(pipe, module, share, whole, (inputs, targets), now, tolerance)
            found = Verification(found.reference + compared.reference, found.eager + compared.eager)
    return found


def _share(pipe: Pipeline, module: nn.Module, params: State | None, buffers: State | None) -> tuple[State, State]:
    """Return the parameters and buffers that this process starts from."""
    if params is None or buffers is None:
        own = pipe.init(module)
        return own[0] if params is None else params, own[1] if buffers is None else buffers
    return params, buffers


def _verified(
    pipe: Pipeline,
    module: nn.Module,
    share: tuple[State, State],
    whole: tuple[State, State],
    given: tuple[Any, Any],
    seed: int | None,
    tolerance: float,
) -> tuple[Verification, tuple[State, State], tuple[State, State]]:
    """Verify one step; return what was equal, and the state after it: this process's share, and the whole."""
    params, outputs = share[0], not pipe.training.assembly.captured.structure.opaque
    step, grads = value_and_grad(pipe, outputs)(*share, *given, seed=seed)
    got = Computed(step.loss, step.outputs, grads, step.buffers)
    step, every = reference(pipe, outputs)(*whole, *given, seed=seed)
    wanted = Computed(step.loss, step.outputs, every, step.buffers).held(params)
    compared = require_equal(got, wanted, "the reference", tolerance)
    after = (descended(params, grads), dict(got.buffers)), (descended(whole[0], every), step.buffers)
    with lifted(Variant(training=True, loss=True, outputs=outputs)) as variant:
        batch = pipe.batch(variant, *given)
        plan = pipe.plan(variant, batch.signature)
    if plan.devices:
        require_numbers(got)
        return Verification(compared, 0), *after
    stated = orders(plan)
    kept = [name for name in params if len(stated.get(name, ())) < 2]
    alone = {name: by_stage[0] for name, by_stage in stated.items() if name in kept}
    objective = pipe.captures.objective(variant, batch.batching.split(batch.signature)[0])
    with lifted(variant), random.preserve_generators(plan.generators):
        before = random.states(plan.generators)
        eager = eagerly(module, objective, batch.take(), alone, plan.joining).held(kept)
        drawn = not all(map(torch.equal, before, random.states(plan.generators)))
    count = 0 if drawn else require_equal(got.held(kept), eager, "the model run eagerly", tolerance)
    require_numbers(got)
    return Verification(compared, count), *after


def _captures(
    module: nn.Module,
    loss: Loss,
    batchings: Mapping[bool, Batching],
    seen_by: FrontEnd,
    cuts: Cuts,
    schedule: Schedule,
    how: Way | None,
) -> Captures:
    """Return the captures of a model, none of them made yet. They hold none of the user's tensors."""
    mode = fake_mode()
    model = skeleton(module, lambda tensor: fake(mode, tensor, batchings[True].home))
    watching = Watching(Origin.of(module), loss, how is not None)
    return Captures(model, loss, batchings, seen_by, cuts, schedule.backward, collect_gradient_hooks(module), watching)


def _of_inputs(batch_dims: Any) -> Any:
    """Return `batch_dims` without the part for targets."""
    return (batch_dims[0], None) if isinstance(batch_dims, tuple) else batch_dims
