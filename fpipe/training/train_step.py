# SPDX-License-Identifier: Apache-2.0
"""A step that also updates: each stage as soon as its gradient is complete, while other ranks still compute.

Problem. Clipping needs the norm of all gradients, so nothing may be updated before the last stage has its gradient, and
ranks that have finished wait.

Idea. Update at once, as if nothing were clipped, and look at the norm afterwards ("post-validation", arXiv 2401.10241,
section 4). It rarely exceeds the limit. If it does, or isn't finite, the update is undone and done again with clipped
gradients. Undoing is exact, since an update modifies nothing that it is passed: the parameters and the state of before
are still there.

Invariant: parameters and state are, bit for bit, those of `value_and_grad`, then `clip`, then `update`. All ranks
compare the same norm with the same limit, so all of them undo their updates, or none does.

Memory. Parameters and state are held twice until the caller drops the old ones, as after any update that isn't donated.
Only with `donate=True`, and so without `max_norm`, there is one set.

Runs when `train_step` is called; the function that it returns runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.audits.audit import Audit
from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import describe_value, digest
from fpipe.network.recording import RecordSpan
from fpipe.pipelines.argument_checks import require_backward
from fpipe.pipelines.earlier_sums import join_sums
from fpipe.pipelines.handshake import CommonArguments, agree_on_aux, agree_on_plan, call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.merge import MergeTrees
from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step, sum_terms
from fpipe.pipelines.step import (
    begin_step,
    finish_step,
    hold_for_backward,
    make_auditor,
    optional_sums,
    restore_step,
    run_copies,
)
from fpipe.pipelines.step_plan import StepPlan
from fpipe.record.captured import Tensors
from fpipe.record.variant import Variant
from fpipe.runtime.executor import Outcome
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import require_plain, wrap_state
from fpipe.tensors.torch_private import is_dtensor
from fpipe.training.clipping import require_bound, scale_to_norm
from fpipe.training.norms import compute_total
from fpipe.training.optimizers import Optimizer, OptimizerState, copy_slots, require_fitting

TrainStep: TypeAlias = Callable[..., tuple[Step, State, OptimizerState, Tensor | None]]
"""Runs one step; returns its `Step`, the new parameters and state, and the norm if there is a limit."""


def train_step(
    pipe: Pipeline,
    optimizer: Optimizer,
    max_norm: float | None = None,
    outputs: bool = False,
    record: RecordSpan | None = None,
    aux: bool | MergeTrees = True,
    audit: Audit | None = None,
) -> TrainStep:
    """Return the function that runs one step and updates every stage as soon as its gradient is complete.

    It takes parameters, buffers and the optimizer's state; a batch, and `seed`, `onto` and `total`, as the function
    that `value_and_grad` returns; and options of the update by name, such as `lr`. It returns a `Step`, the new
    parameters, the new state, and the norm of all gradients before clipping, which is `None` without `max_norm`. They
    are, bit for bit, those of `value_and_grad`, then `clip`, then `optimizer.update`.

    - `optimizer`: a pair `(init, update)`, as returned by `fpipe.optimizer`. The update of a parameter must depend only
      on its own gradient and state, and all ranks must pass the same pair: they compare classes, options and groups,
      and the closures of your own functions.
    - `max_norm`: as in `fpipe.clip`. Stages are updated before the norm is known. If it turns out to exceed the limit,
      or isn't finite, all ranks do their updates again, with clipped gradients.
    - `outputs`, `record`, `aux`, `audit`: as in `value_and_grad`; the spans include those of updates, and updates are
      not audited.

    Ranks that finish early update while the others still compute. So a step is shorter if the rank that finishes last
    has less to update than another; `print(schedules.update_weights(pipe.schedule))` draws where the updates go. The
    old parameters and state are kept until the norm is known, so memory holds two sets of both.

    Under torch.distributed every rank must call this, and then the function, in the same order and with the same
    options. Raise what `value_and_grad` raises; and `InputError`, before anything is sent, for state or options that
    the update rejects, or if it updates in place (`donate=True`) and there is a `max_norm`, because it could not be
    undone. An audit does not take updates in place either, because it runs actions again with the old parameters.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(2, 2))
    >>> params, buffers = pipe.init(model)
    >>> adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    >>> step, state = fpipe.train_step(pipe, adam, max_norm=1.0), adam.init(params)
    >>> for i in range(3):
    ...     out, params, state, norm = step(params, buffers, state, (torch.ones(2, 2),), lr=0.1 / (i + 1))
    >>> out.loss.shape, norm.shape, list(state["1.bias"])
    (torch.Size([]), torch.Size([]), ['step', 'exp_avg', 'exp_avg_sq'])
    """
    with call_together(train_step, locals()):
        require_backward(pipe.schedule)
        require_plain("train_step", pipe.training.placed, "Call value_and_grad, clip and optimizer.update.")
        limit = None if max_norm is None else require_bound("max_norm", max_norm)
        auditor = make_auditor(pipe, audit, record)
        variant = Variant(training=True, loss=True, outputs=outputs)
        wanted = agree_on_aux(pipe, aux, outputs=outputs, max_norm=limit, optimizer=optimizer._asdict())
        with suspend_autocast(variant):
            agree_on_plan(pipe, variant).updating.names_by_update  # noqa: B018 - what can fail fails here
    fixed = describe_value({"max_norm": limit, "optimizer": optimizer._asdict()})
    known = str(digest(fixed))

    @accept_trees("params", "buffers", "onto", restore=restore_step)
    def step(
        params: State,
        buffers: State,
        state: OptimizerState,
        inputs: Any,
        targets: Any = None,
        *,
        seed: int | None = None,
        onto: State | None = None,
        total: float | None = None,
        **options: Any,
    ) -> tuple[Step, State, OptimizerState, Tensor | None]:
        with suspend_autocast(variant) as cast, pipe.ranks.enter_call("a training step"):
            old = Version(params, state)
            update = Updater(optimizer, old, options)
            update.require_fit(pipe, find_reader(limit, audit))
            given_now = describe_value(options)
            agreed = Field("update", digest([known, *given_now]), lambda: [*fixed, *given_now])
            call = CommonArguments(seed, total=total, onto=onto is not None, update=agreed)
            held = hold_for_backward(pipe, variant, params, buffers, onto)
            plan, given = begin_step(pipe, cast, held, (inputs, targets), call)
            optional = optional_sums(plan, given)
            if len(given) == 1:  # else every copy would update the same parameters
                ((copy, own),), plan = given.items(), plan.updating
                given = {copy: own._replace(update=update.within(pipe, plan, {} if onto is None else onto, optional))}
            outcomes = run_copies(pipe, plan, given, record, auditor)
            out, grads = finish_step(pipe, plan, held, outcomes, optional, wanted, auditor)
            new = update.after(outcomes, grads)
            del outcomes
            norm = None if limit is None else compute_total(pipe, grads, 2.0)
            if norm is not None and limit is not None and needs_clipping(norm, limit):
                new = old  # the updates that are undone need not be in memory with those that replace them
                new = old.replaced(update(scale_to_norm(grads, limit, norm)))
        return out._replace(aux=wanted.finish(out.aux)), *new, norm

    return step


class Version(NamedTuple):
    """Parameters, and the optimizer's state for them, by name."""

    params: State
    state: OptimizerState

    def replaced(self, *others: Version) -> Version:
        """Return this version with what `others` have in place of its own, in the same order."""
        params, state = dict(self.params), dict(self.state)
        for other in others:
            params.update(other.params)
            state.update(other.state)
        return Version(params, state)


class Updater(NamedTuple):
    """The updates of one step: called with the gradients of any parameters, it returns the new version of these."""

    optimizer: Optimizer
    old: Version
    options: Mapping[str, Any]

    def __call__(self, grads: State) -> Version:
        """Return the new version of the parameters that have a gradient here."""
        if not grads:
            return Version({}, {})
        params, state = self.old
        mine = {name: params[name] for name in grads}
        return Version(*self.optimizer.update(grads, {name: state[name] for name in grads}, mine, **self.options))

    def within(self, pipe: Pipeline, plan: StepPlan, onto: State, optional: Collection[str]) -> Callable[..., Version]:
        """Return the update that every `U` of the program runs: of its stage, from the gradients of its rank."""
        (part,) = plan.parts.values()

        def update(s: int, i: int, grads: Mapping[int, Any], shared: Mapping[tuple[int, int], Tensors]) -> Version:
            names = part.names_by_update.get((s, i), ())
            terms = sum_terms(part, [(grads, shared)], names)
            if plan.copies.count == 1:
                found = join_sums(onto, terms, optional)
            else:
                reduced = wrap_state(join_sums({}, terms, optional), pipe.holdings.placed_gradients)
                found = {
                    **onto,
                    **{name: onto[name] + grad if name in onto else grad for name, grad in reduced.items()},
                }
            return self({name: found[name] for name in names if name in found})

        return update

    def after(self, copies: Mapping[int, Mapping[int, Outcome]], grads: State) -> Version:
        """Return the version after the program: updated by each `U`, and then where no `U` has updated."""
        outcomes = [outcome for copy in copies.values() for outcome in copy.values()]
        versions = [version for outcome in outcomes for version in outcome.updates.values()]
        within = {name for version in versions for name in version.params}
        rest = self({name: grad for name, grad in grads.items() if name not in within})
        return self.old.replaced(*versions, rest)

    def require_fit(self, pipe: Pipeline, kept: str | None) -> None:
        """Raise `InputError` unless the update takes this state and these options, and leaves the old ones if need be.

        `kept` says why they must be left as they are, if they must.

        It is tried on copies of the smallest trainable parameter, since an error within the step would come too late.
        """
        params, state = self.old
        require_fitting({}, state, params)
        trainable = [name for name in params if name in pipe.training.assembly.captured.trainable]
        if not trainable:
            return
        name = min(trainable, key=lambda one: params[one].numel())
        p, nothing = params[name].detach().clone(), torch.zeros_like(params[name], requires_grad=False)
        held = {name: copy_slots(state[name])}, {name: p}
        try:
            new, _ = self.optimizer.update({name: nothing}, *held, **self.options)
        except InputError:
            found = self._try_sparse({name: nothing}, *held)
            if found is None:
                raise
            new = found
        if kept is not None and new[name] is p:
            raise InputError(
                f"optimizer: got one that updates in place, expected one that does not modify its arguments: {kept}. "
                "Leave out donate=True, or that."
            )

    def _try_sparse(self, grads: State, state: OptimizerState, params: State) -> State | None:
        """Return the parameters after an update by sparse gradients; `None` if the optimizer refuses them, too."""
        with suppress(InputError):
            sparse = {name: grad if is_dtensor(grad) else grad.to_sparse() for name, grad in grads.items()}
            return self.optimizer.update(sparse, state, params, **self.options)[0]
        return None


def find_reader(limit: float | None, audit: Audit | None) -> str | None:
    """Return what still reads the old parameters after an update, if anything does."""
    if audit is not None:
        return "an audit runs actions again with the old parameters"
    return None if limit is None else f"a step whose norm exceeds max_norm={limit} is undone"


def needs_clipping(norm: Tensor, limit: float) -> bool:
    """Return whether `torch.nn.utils.clip_grads_with_norm_` changes gradients of this norm.

    >>> needs_clipping(torch.tensor(1.0), 1.0), needs_clipping(torch.tensor(0.5), 1.0)
    (True, False)
    >>> needs_clipping(torch.tensor(torch.nan), 1.0)
    True
    """
    return not bool(limit / (norm + 1e-6) >= 1.0)
