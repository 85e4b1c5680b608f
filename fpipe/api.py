# SPDX-License-Identifier: Apache-2.0
"""The public functions: `pipeline`, `value_and_grad`, `evaluate`, `reference`, `verify`.

Each checks its arguments and passes them on: `fpipe.pipelines.builder` builds, `fpipe.pipelines.step` runs,
`fpipe.verification` compares.

Invariant: this module may import any other; only `fpipe.drop_in` imports it.

Runs when one of these functions is called, never in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fpipe.audits.audit import Audit
from fpipe.cutting.partition import CutsArgument, parse_cuts
from fpipe.meshes.arguments import Place
from fpipe.network.job import enter_job, resolve_group
from fpipe.network.recording import RecordSpan
from fpipe.pipelines.argument_checks import require_backward, require_buildable
from fpipe.pipelines.batch import find_home
from fpipe.pipelines.builder import Builder, agree_on_place, make_batchings
from fpipe.pipelines.handshake import agree_on_aux, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.merge import Aux, MergeTrees
from fpipe.pipelines.options import Gradients, Microbatching, Recording, accept_fields
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step
from fpipe.pipelines.step import ValueAndGrad, agree_to_train, make_evaluation_step, training_variant
from fpipe.planning.plan import Plan, take_plan
from fpipe.record.front_ends.parts import as_module
from fpipe.record.model.skeleton import require_home
from fpipe.record.objective import Loss
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.names import accept_trees
from fpipe.verification.comparison import Verification
from fpipe.verification.reference import make_reference_step
from fpipe.verification.verify import Trial, verify_steps
from schedules import Schedule
from schedules.status import showing
from schedules.transforms.shorten import find_fewest

__all__ = ["ValueAndGrad", "evaluate", "pipeline", "reference", "value_and_grad", "verify"]


@accept_fields
@showing("pipeline")
def pipeline(
    model: nn.Module | Sequence[Callable[..., Any]],
    *,
    example: tuple[Any, ...] | dict[str, Any],
    loss: Loss | None,
    schedule: Schedule | None = None,
    plan: Plan | None = None,
    targets: Any = None,
    cuts: CutsArgument = None,
    stages: int | None = None,
    microbatching: Microbatching = Microbatching(),
    place: Place = Place(),
    recording: Recording = Recording(),
    gradients: Gradients = Gradients(),
) -> Pipeline:
    """Cut a model into stages and bind them to a schedule. The model runs on fake tensors; nothing is computed.

    - `model`: a module, which is not modified; with the front end `"modules"`, a sequence of modules or functions, or
      an nn.Sequential, each called with what the previous one returned. It may be on the meta device. If
      `parallelize_module` has split it over another dimension of the mesh, its parameters are DTensors in all calls.
    - `example`, `targets`: one whole batch. `example` is a tuple of positional or a dict of keyword arguments;
      `targets` is whatever tree `loss` takes. They provide shapes and dtypes. If the model branches on values of the
      batch alone, such as whether a mask is full, they also select the branch (an example without values selects the
      branch for false and zero). Later batches may have other sizes, take other branches, and have other flags and
      numbers in their non-tensor leaves: the model is captured again for each kind of batch, at its first step. Batches
      with too few rows run with fewer microbatches.
    - `loss(outputs, targets)` returns a scalar for one microbatch, or `(loss, aux)`, where `aux` is any tree of values.
      Without targets it is `loss(outputs)`, for a model that computes its own: `loss=lambda outputs: outputs.loss`.
    - `schedule`: for an asynchronous schedule, see `fpipe.train_stream`. One that cuts sequences into slices needs a
      model with a carry: its forward takes `carry`, which is `None` at the first slice, and returns the pair (outputs,
      carry); or a causal decoder of transformers, which is called with its cache.
    - `plan`: a plan from `fpipe.plan` for this model, instead of `schedule`, `cuts` and `stages`.
    - `cuts`: where new stages begin, in execution order: module names ("blocks.3.norm"; "norm@1" for the second call),
      or indices of the calls that the model itself makes (of the parts, if the model is a sequence). Given classes or
      patterns instead, the model is cut where calls of matching modules begin, balanced by parameter count; in
      "blocks.*" the wildcard matches one name between dots. Without `cuts`, it is cut between any modules, balanced to
      within a tenth, where fewer values cross.
    - `stages`: the number of stages, if `cuts` has no names or indices. Defaults to the schedule's.
    - `microbatching`: how batches are split, merged and weighted (`fpipe.Microbatching`).
    - `place`: where ranks, copies and shards are, and the device (`fpipe.Place`). By default, each process is a rank,
      or this one runs all ranks if torch.distributed is not initialized.
    - `recording`: how the model is recorded, and which modules are never cut (`fpipe.Recording`).
    - `gradients`: how stages are differentiated (`fpipe.Gradients`).

    Every step uses the parameters, the buffers and the batch, with its numbers and flags, that it is passed. The
    pipeline takes a snapshot of everything else now. If the model changes later in a way that matters (an attribute, a
    mode, what is frozen), the next step raises; `pipe.rebuilt(model)` returns the pipeline of the changed model. The
    same goes for a global, a class attribute, a closed-over variable or an attribute of the loss.

    Raise `CaptureError`, `CutError`, `InputError`, `ScheduleError` or `TransportError`, before anything is sent.

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
    with enter_job("pipeline") as job:
        module = as_module(model)
        schedule, cuts = take_plan(plan, schedule, cuts, stages)
        schedule = require_buildable(module, example, loss, schedule)
        require_arguments(pipeline, locals())
        for options in (microbatching, place, recording, gradients):
            options.require()
        where = parse_cuts(cuts, stages, recording.unsplittable, schedule, recording.whole)
        home = find_home(example, targets, place.device)
        require_home(module, home)
        found = agree_on_place(job, place, schedule, home)
        copies, count = found.copies, schedule.microbatches
        over = 1 if microbatching.reduce == "sum" else count * copies.count
        least = find_fewest(schedule) if copies.count == 1 else None
        batchings = make_batchings(example, targets, microbatching, count * copies.pieces, over, least, home)
        batch = batchings[True].split_batch(example, targets)
        ranks = job.join(schedule.ranks, resolve_group(found.group), home, found.members, copies.groups)
    builder = Builder(
        loss, copies.train(schedule), batchings, where, recording, gradients, microbatching, ranks, copies
    )
    return builder.build(module, batch)


def value_and_grad(
    pipe: Pipeline,
    outputs: bool = False,
    record: RecordSpan | None = None,
    sums: torch.dtype | None = None,
    aux: bool | MergeTrees = True,
    audit: Audit | None = None,
) -> ValueAndGrad:
    """Return the function that computes the loss and gradients of one step.

    The function takes parameters and buffers as `pipe.init` returns them, a whole batch, and, if the model draws random
    numbers, a seed, which should be new for each step. It returns a `Step` and a dict of gradients: one for each
    parameter of this process whose `.grad` a plain backward would set. It modifies no argument.

    Under torch.distributed every rank must call this, and then the function, in the same order and with the same seed.
    If ranks differ in these, in batch sizes or in torch's settings, or if one rank refuses its arguments, every rank
    raises `TransportError` before anything is computed. So does any step after one that failed midway.

    The batch may have other sizes than the example, on every rank in the same step; the first step of each kind
    captures the model again, before anything is sent. A rank that reads no inputs, or no targets, may pass `None` for
    them if their shapes are those of the example, or else tensors on the meta device that carry the shapes:
    `x.to("meta")`.

    A step takes three more arguments:

    - `onto`: gradients that an earlier step returned, which this one adds to, in place, and returns. So K steps of M
      microbatches compute the same bits as one plain loop over K * M. They are donated: don't use them again.
    - `total`: what the loss is averaged over, if more than this step: the number of microbatches of all accumulated
      steps and replicas, or with `weight`, their weight. With `reduce="sum"`, the sum is divided by it.
    - `scale`: the cotangent of the loss, a number, for gradients that would underflow. The loss is not scaled.

    `sums` is the dtype in which gradients are added over microbatches, such as `torch.float32` for parameters in
    bfloat16. Gradients have this dtype if it is more precise than the parameter's, which is the default.

    With `outputs`, `Step.outputs` holds the model's outputs. `record` is called with a `Span`, in seconds of
    `time.perf_counter`, for every compute action of this process and every transfer that it waited for; on an
    accelerator after the step, with the device's times. `fpipe.timeline` merges those of all ranks.

    A loss may return `(loss, aux)`, where `aux` is any tree: counts, accuracies, statistics. It does not change other
    bits. `Step.aux` is the tree with the values of all microbatches, detached: its tensors and numbers stacked along a
    new first dimension of size M, or the result of `aux(parts)` for the sequence of all trees. It is on every rank; a
    rank that passes `aux=False` gets `None`.

    `audit`, an `fpipe.Audit`, runs drawn actions of each step again where this process would wait, and compares the
    bits. A difference raises `CorruptionError` here, and `RankError` on all other ranks. It changes no bit of the rest,
    and ranks may pass different ones.

    Raise `InputError`, naming the leaf, for arguments that don't fit the pipeline, before anything is sent.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Linear(4, 1)
    >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
    >>> pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=torch.nn.functional.mse_loss,
    ...                       schedule=gpipe(ranks=1, microbatches=3))
    >>> params, buffers = pipe.init(model)
    >>> step, grads = fpipe.value_and_grad(pipe, outputs=True)(params, buffers, (x,), y)
    >>> step.loss.shape, step.outputs.shape, {name: list(grad.shape) for name, grad in grads.items()}
    (torch.Size([]), torch.Size([6, 1]), {'weight': [1, 4], 'bias': [1]})
    >>> def loss(y, target):
    ...     return torch.nn.functional.mse_loss(y, target), {"rows": len(y), "bias": (y - target).mean()}
    >>> pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=gpipe(ranks=1, microbatches=3))
    >>> step, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    >>> step.aux["rows"], step.aux["bias"].shape
    (tensor([2, 2, 2]), torch.Size([3]))
    """
    with call_together(value_and_grad, locals()):
        return agree_to_train(pipe, outputs, sums, record, aux, audit)


def evaluate(
    pipe: Pipeline, record: RecordSpan | None = None, outputs: bool = True, aux: bool | MergeTrees = True
) -> Callable[..., Step]:
    """Return the function that computes outputs, and with targets the loss, in eval mode; it keeps no graph.

    It takes the same arguments as the function that `value_and_grad` returns. A model that computes its own loss always
    returns one. Outputs are merged in microbatch order and are returned on the rank of the last stage. Under
    torch.distributed every rank must call this, and then the function, in the same order, and at least one of them must
    pass the targets if there are any. `record` and `aux` are as in `value_and_grad`. Raise `InputError` as that
    function does.

    With `outputs=False` it returns only the loss, and needs memory for the outputs of one microbatch, as a plain loop
    does; otherwise all of them are kept, and a merged copy.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Linear(4, 1), torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=1, microbatches=3))
    >>> step = fpipe.evaluate(pipe)(*pipe.init(model), (x,))
    >>> bool(torch.isclose(step.loss, model(x).mean())), step.outputs.shape
    (True, torch.Size([6, 1]))
    >>> fpipe.evaluate(pipe, outputs=False)(*pipe.init(model), (x,)).outputs is None
    True
    """
    with call_together(evaluate, locals()):
        wanted = agree_on_aux(pipe, aux, outputs=outputs)
    return make_evaluation_step(pipe, record, outputs, wanted)


def reference(
    pipe: Pipeline, outputs: bool = False, sums: torch.dtype | None = None, aux: bool | MergeTrees = True
) -> ValueAndGrad:
    """Return what `value_and_grad` returns, on one device: a plain microbatch loop over the captured, uncut model.

    A parameter tied by `"sum"` has one copy for each stage that uses it; their gradients are added.

    On any rank, the function takes the whole batch and all parameters and buffers of the model:
    `dict(model.named_parameters())` and `dict(model.named_buffers())`. Raise `InputError` for other arguments.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=3))
    >>> state = pipe.init(model)
    >>> out, grads = fpipe.value_and_grad(pipe)(*state, (x,))
    >>> same, theirs = fpipe.reference(pipe)(*state, (x,))
    >>> bool(out.loss == same.loss), all(torch.equal(grads[name], theirs[name]) for name in theirs)
    (True, True)
    """
    require_arguments(reference, locals())
    require_backward(pipe.schedule)
    return make_reference_step(pipe, training_variant(outputs, sums), Aux.of(aux))


@accept_trees("params", "buffers")
@showing("verify")
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
    unsplit: float | None = None,
) -> Verification:
    """Run steps three ways and compare loss, outputs (if they are a tree), gradients and buffers bit for bit.

    The three are the pipeline, the reference, and `model` itself in a plain eager loop. They start from `params` and
    `buffers`, this process's share of the training state, or from the model's own. The model's tensors and Python state
    are restored afterwards.

    `steps` is the number of steps of plain gradient descent, with seeds `seed`, `seed + 1` and so on: more than one
    detects models that change their behavior after some calls, which a capture can't. With a `tolerance`, a leaf may
    differ by that fraction of its largest magnitude: for compiled stages, and for accelerators with nondeterministic
    kernels.

    These loops split the batch as the pipeline does. With `unsplit`, such as 1e-5, each step also runs the module once
    on the whole batch, in one piece, and compares the loss, the gradients, and the outputs that are concatenated: each
    may differ by that fraction of the largest magnitude among its kind. This detects leaves that `batch_dims` splits
    wrongly, and losses and layers that compute something else on microbatches: sums, BatchNorm, means over unequal
    numbers of tokens without a `weight`. Raise `InputError` if the model draws random numbers.

    Under torch.distributed, every rank must call this, with the whole model and batch, and compares what it holds.
    Raise `MismatchError` naming the first leaf that differs, or that is nan on both sides, which shows nothing. Each
    step takes two more steps, on one device.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), torch.randn(6, 4)
    >>> pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(ranks=2, microbatches=3))
    >>> fpipe.verify(pipe, model, (x,), unsplit=1e-5)  # a loss, the outputs and four gradients
    Verification(reference=6, eager=6)
    """
    with call_together(verify, locals()):
        trial = Trial(pipe, as_module(model), (inputs, targets), tolerance, unsplit)
        trial.agree(steps, seed, params is not None, buffers is not None)
    return verify_steps(trial, params, buffers, seed, steps)
