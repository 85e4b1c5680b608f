# SPDX-License-Identifier: Apache-2.0
"""Training loops of fpipe, and their comparison with plain loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import Schedule
from tests.common.training import LARGE, LIMIT, MODELS, STEPS, History, rate


def train(name: str, how: Schedule, donate: bool = False, group: dist.ProcessGroup | None = None) -> History:
    """Train a model as a pipeline: this process's share."""
    pipe = pipeline_of(name, how, group)
    params, buffers = pipe.init(MODELS[name].make()[0])
    history = History([], [], params, buffers, {name: {} for name in params})
    train_on(pipe, name, history, range(STEPS), donate)
    return history


def train_in_parts(
    name: str, parts: Sequence[tuple[Schedule, dist.ProcessGroup | None]], path: Path, saves: bool = True
) -> History:
    """Train as `train` does, but on one schedule after the other; each goes on from what the one before has saved.

    Where several pipelines train the same, one of them `saves`.
    """
    history, step = History([], [], {}, {}, {}), 0
    for k, (how, group) in enumerate(parts):
        pipe, end = pipeline_of(name, how, group), STEPS * (k + 1) // len(parts)
        if k == 0:
            params, buffers = pipe.init(MODELS[name].make()[0])
            state = {name: {} for name in params}
        else:
            params, buffers, state, step, _ = fpipe.load(pipe, path)
        if dist.is_initialized():
            dist.barrier()  # the save of one pipeline removes what another may still be reading
        history.params, history.buffers, history.state = params, buffers, state
        train_on(pipe, name, history, range(step, end))
        if saves or group is None:
            fpipe.save(pipe, path, params=history.params, buffers=history.buffers, state=history.state, step=end)
        if dist.is_initialized():
            dist.barrier()
    return history


def pipeline_of(name: str, how: Schedule, group: dist.ProcessGroup | None = None) -> fpipe.Pipeline:
    """Return the pipeline of a model."""
    one = MODELS[name]
    model, [(inputs, targets), *_] = one.make()
    return fpipe.pipeline(model, example=inputs, targets=targets, loss=one.loss, schedule=how, group=group)


def train_on(pipe: fpipe.Pipeline, name: str, history: History, steps: Iterable[int], donate: bool = False) -> None:
    """Run these steps from where `history` ends, and add what they compute to it."""
    one = MODELS[name]
    batches, groups = one.make()[1], {one.group: {"weight_decay": 0.0}}
    _, update = fpipe.optimizer(torch.optim.AdamW, groups=groups, names=pipe.names, donate=donate)
    step, params, buffers, state = fpipe.value_and_grad(pipe), history.params, history.buffers, history.state
    for i in steps:
        out, grads = step(params, buffers, *batches[i], seed=i)
        buffers = out.buffers
        grads, norm = fpipe.clip(pipe, grads, LIMIT, donate=donate)
        params, state = update(grads, state, params, lr=rate(i))
        history.losses.append(out.loss)
        history.norms.append(norm)
    history.params, history.buffers, history.state = params, buffers, state


def train_scaled(how: Schedule, group: dist.ProcessGroup | None = None) -> History:
    """Train a GPT under autocast to float16 with a scale that all ranks share."""
    one = MODELS["gpt"]
    model, batches = one.make()
    pipe = fpipe.pipeline(model, example=batches[0][0], targets=batches[0][1], loss=one.loss, schedule=how, group=group)
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    state, step, loss_scale = init(params), fpipe.value_and_grad(pipe), fpipe.LossScale(LARGE, interval=3)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        with torch.autocast("cpu", torch.float16):
            out, grads = step(params, buffers, inputs, targets, scale=loss_scale.scale)
        finite = fpipe.all_finite(pipe, grads)
        if finite:
            grads, _ = fpipe.clip(pipe, loss_scale.unscale(grads), LIMIT)
            params, state = update(grads, state, params)
        loss_scale = loss_scale.next(finite)
        history.losses.append(out.loss)
        history.norms.append(torch.tensor(loss_scale.scale))
    history.params, history.state = params, state
    return history


def train_low(how: Schedule, group: dist.ProcessGroup | None = None) -> History:
    """Train a GPT in bfloat16 with master copies in float32."""
    one = MODELS["gpt"]
    model, batches = one.make()
    model = model.to(torch.bfloat16)
    pipe = fpipe.pipeline(model, example=batches[0][0], targets=batches[0][1], loss=one.loss, schedule=how, group=group)
    params, buffers = pipe.init(model)
    init, update = fpipe.masters(fpipe.optimizer(torch.optim.AdamW, lr=1e-3))
    state, step = init(params), fpipe.value_and_grad(pipe)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        out, grads = step(params, buffers, inputs, targets)
        grads, norm = fpipe.clip(pipe, grads, LIMIT)
        params, state = update(grads, state, params)
        history.losses.append(out.loss)
        history.norms.append(norm)
    history.params, history.state = params, state
    return history


def require_same_history(got: History, want: History) -> None:
    """Raise unless a process's share of a run has the bits of the whole run."""
    for step, (mine, theirs) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert same_bits(mine, theirs), f"loss of step {step}: {mine} and {theirs}"
    for step, (mine, theirs) in enumerate(zip(got.norms, want.norms, strict=True)):
        assert same_bits(mine, theirs), f"norm of step {step}: {mine} and {theirs}"
    for what, mine, theirs in (("params", got.params, want.params), ("buffers", got.buffers, want.buffers)):
        for name, value in mine.items():
            assert same_bits(value.detach(), theirs[name]), f"{what} {name}"
    for name, slots in got.state.items():
        assert slots.keys() == want.state[name].keys()
        for slot, value in slots.items():
            assert same_bits(value, want.state[name][slot]), f"state {name} {slot}"
