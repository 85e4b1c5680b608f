# SPDX-License-Identifier: Apache-2.0
"""The handlers of compute actions: one per kind, all with the same arguments.

A handler takes the payload that arrived for its action, calls the stage, stores the state that later actions need in
the running `Execution`, and returns the tensors that leave the stage. The one action that uses stored state removes it.
A stage's first gradients become its sum; later ones are added to it.

Runs in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType

from fpipe.runtime.contract import StageLike
from fpipe.runtime.executor import ActionHandler, Execution
from fpipe.runtime.transport import Payload
from schedules.language.actions import Action


def _forward(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    s, i = run.unit
    inputs, buffers = run.inputs, run.buffers[i]
    arguments = inputs.batch(s, i) + arrived
    outputs, buffers[s], residuals = stage.forward(inputs.params[i][s], buffers[s], arguments, inputs.keys[i])
    if residuals is not None:
        run.residuals[s, i] = residuals
    if stage.results:
        run.deliver(i, outputs[: len(stage.results)])
    return outputs


def _checkpointed_forward(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    s, i = run.unit
    inputs, buffers = run.inputs, run.buffers[i]
    run.checkpoints[s, i] = buffers[s], arrived
    outputs, buffers[s] = stage.evaluate(inputs.params[i][s], buffers[s], inputs.batch(s, i) + arrived, inputs.keys[i])
    if stage.results:
        run.deliver(i, outputs[: len(stage.results)])
    return outputs


def _recompute(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Rerun the forward for its residuals; its outputs and buffers are those of the first run, and are dropped."""
    s, i = run.unit
    inputs = run.inputs
    buffers, arrived = run.checkpoints.pop((s, i))
    if i in inputs.skips:
        return ()
    _, _, residuals = stage.forward(inputs.params[i][s], buffers, inputs.batch(s, i) + arrived, inputs.keys[i])
    if residuals is not None:
        run.residuals[s, i] = residuals
    return ()


def _backward(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    s, i = unit = run.unit
    if i in run.inputs.skips:
        return _skip(run, action, stage)
    cotangents = run.inputs.starts.get(unit, ()) + arrived
    outgoing, run.grads[s] = stage.backward(run.residuals.pop(unit, None), cotangents, run.grads[s])
    return outgoing


def _skip(run: Execution, action: Action, stage: StageLike) -> Payload:
    """Free what the forward kept, and return cotangents that will not be used."""
    run.residuals.pop(run.unit, None)
    return stage.zero_cotangents()


def _backward_input(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    unit = run.unit
    if unit[1] in run.inputs.skips:
        return _skip(run, action, stage)
    cotangents = run.inputs.starts.get(unit, ()) + arrived
    outgoing, run.deferred[unit] = stage.backward_input(run.residuals.pop(unit, None), cotangents)
    return outgoing


def _backward_weight(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    s, i = run.unit
    if i not in run.inputs.skips:
        run.grads[s] = stage.backward_weight(run.deferred.pop((s, i)), run.grads[s])
    return ()


def _offload(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Move what the forward kept off the device."""
    run.residuals[run.unit] = stage.offload(run.residuals.get(run.unit))
    return ()


def _reload(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Post the move back; whatever uses what the forward kept waits for it."""
    run.posted[action] = stage.reload(action, run.residuals.pop(run.unit))
    return ()


def _take_reloaded(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Store what the forward kept, which is back."""
    (run.residuals[run.unit],) = arrived
    return ()


def _add_replicas(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Sum over all replicas, whose parts of the gradient come in the order of routes."""
    size = max(1, len(stage.totals))
    parts = [arrived[first : first + size] for first in range(0, len(arrived), size)]
    run.grads[action.stage] = reduce(stage.add, parts) if parts else ()
    return ()


def _update(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Keep the new version of the weights; the gradients, complete by now, stay, in case it has to be undone."""
    _, s, i, _, _ = action
    run.updates[s] = run.inputs.update(s, i, run.grads, run.shared)
    return ()


def _unshard(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Post the gathering of the stage's weights; the next reader waits for it."""
    run.posted[action] = run.inputs.group.unshard(action.stage, action.microbatch)
    return ()


def _enter_weights(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Put the gathered weights that arrived into the parameters of the stage."""
    run.inputs.group.enter(action.stage, arrived)
    return ()


def _reshard(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    run.inputs.group.reshard(action.stage)
    return ()


def _reduce(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Post the first phase of the reduction of the stage's complete gradients, which leave the execution."""
    complete, run.grads[action.stage] = stage.complete(run.grads[action.stage]), ()
    return _post_phase(run, action, 0, complete)


def reduce_further(phase: int) -> ActionHandler:
    """Return the handler that posts a later phase of a reduction, with what the phase before it gave."""
    return lambda run, action, stage, arrived: _post_phase(run, action, phase, arrived)


def _post_phase(run: Execution, action: Action, phase: int, values: Payload) -> Payload:
    run.posted[action] = run.inputs.group.reduce(action.stage, action.microbatch, phase, values)
    return ()


def _take_reduced(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Store the reduced gradients of the stage; called before whatever uses them, or at the end."""
    run.grads[action.stage] = run.inputs.group.reduced(action.stage, arrived)
    return ()


def _send_shared(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Return the gradients that a `SEND_G` sends: to the other replica, or to a stage with the same parameters."""
    _, s, _, peer, _ = action
    assert peer is not None, "a transfer has a peer stage"
    return stage.gradients_for(peer, run.grads[s])


def _take_shared(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Store the gradients that a `RECV_G` received; called before the `U` that uses them, or at the end."""
    assert action.peer is not None, "a transfer has a peer stage"
    run.shared[action.peer, action.stage] = arrived
    return ()


def keep_arrivals(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Return the payload that arrived, to be kept until the second action of a fused pair uses it."""
    return arrived


def do_nothing(run: Execution, action: Action, stage: StageLike, arrived: Payload) -> Payload:
    """Compute nothing: the instruction has transfers only."""
    return ()


HANDLERS: Mapping[str, ActionHandler] = MappingProxyType(
    {
        "F": _forward,
        "B": _backward,
        "I": _backward_input,
        "W": _backward_weight,
        "C": _checkpointed_forward,
        "R": _recompute,
        "OVERLAP_F": _forward,
        "OFFLOAD": _offload,
        "RELOAD": _reload,
        "G": _add_replicas,
        "U": _update,
        "UNSHARD": _unshard,
        "RESHARD": _reshard,
        "REDUCE_GRAD": _reduce,
        "SEND_G": _send_shared,
        "RECV_G": _take_shared,
    }
)
TAKERS: Mapping[str, ActionHandler] = MappingProxyType(
    {"RELOAD": _take_reloaded, "UNSHARD": _enter_weights, "REDUCE_GRAD": _take_reduced}
)
"""What takes the results of actions that post something, before whatever uses them, or at the end."""
