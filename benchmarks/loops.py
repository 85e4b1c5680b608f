# SPDX-License-Identifier: Apache-2.0
"""The share of a training step outside forward and backward, and how many sets of gradients are held at most.

    python -m benchmarks.loops

A GPT of 6.5 million parameters under 1F1B on 2 ranks over Gloo, batches of 16 sequences. A step computes loss and
gradients, clips them by their norm over all ranks, and updates parameters by fused AdamW, with `donate=True`. Times are
CPU times of a rank, since ranks may share cores: what the clipping takes besides, such as waiting for the other rank,
would be waited for in the next step as well. The update is that of `torch.optim.AdamW`; its share is the same in a
plain loop, which the row of torch shows: an instance of it that is kept, on one rank's parameters.

Sets of gradients are counted in one process, by the bytes of living tensors that have the shape of a parameter and are
none, over the bytes of all parameters: after every action of a step, and after each part of the loop.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import most, row
from schedules import Schedule, one_f_one_b

BLOCKS, WIDTH, HEADS, WORDS, LENGTH, ROWS, MICROBATCHES = 8, 256, 8, 256, 64, 16, 8
WARM_UP, ROUNDS, RANKS = 2, rounds(8), 2


def build(how: Schedule) -> tuple[fpipe.Pipeline, Any, tuple[Tensor, Tensor]]:
    """Return the pipeline, its model and a batch."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))
    pipe = fpipe.pipeline(model, example=(tokens,), targets=targets, loss=cross_entropy, schedule=how)
    return pipe, model, (tokens, targets)


def measured() -> dict[str, float]:
    """Return this rank's median CPU seconds of each part of a training step, and of a plain update."""
    pipe, model, (tokens, targets) = build(one_f_one_b(RANKS, MICROBATCHES))
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.AdamW, donate=True, fused=True)
    state, step = init(params), fpipe.value_and_grad(pipe)
    copies = {name: p.detach().clone() for name, p in params.items()}
    plain = torch.optim.AdamW(copies.values(), fused=True)
    times: dict[str, list[float]] = {"step": [], "norm": [], "clip": [], "update": [], "plain update": []}

    def timed(name: str, act: Callable[..., Any], *given: Any, **named: Any) -> Any:
        dist.barrier()
        start = time.process_time()
        found = act(*given, **named)
        times[name].append(time.process_time() - start)
        return found

    for _ in range(WARM_UP + ROUNDS):
        _, grads = timed("step", step, params, buffers, (tokens,), targets)
        timed("norm", fpipe.norm, pipe, grads)
        grads, _ = timed("clip", fpipe.clip, pipe, grads, 1.0, donate=True)
        for name, p in copies.items():
            p.grad = grads[name].clone()
        timed("plain update", plain.step)
        params, state = timed("update", update, grads, state, params)
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}


def gradient_sets() -> dict[str, float]:
    """Return the most sets of gradients that are held after an action of a step, and after each part of the loop."""
    pipe, model, (tokens, targets) = build(one_f_one_b(RANKS, MICROBATCHES))
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.SGD, donate=True)
    held: dict[str, list[float]] = {"an action of a step": [], "a step": [], "the clipping": [], "the update": []}
    others = [*params.values(), *model.parameters()]

    def note(name: str) -> None:
        held[name].append(_count_sets(params, others))

    state, step = init(params), fpipe.value_and_grad(pipe, record=lambda _: note("an action of a step"))
    for _ in range(3):
        _, grads = step(params, buffers, (tokens,), targets)
        note("a step")
        grads, _ = fpipe.clip(pipe, grads, 1.0, donate=True)
        note("the clipping")
        params, state = update(grads, state, params)
        del grads
        note("the update")
    return {name: max(found) for name, found in held.items()}


def _count_sets(params: Mapping[str, Tensor], others: Sequence[Tensor]) -> float:
    """Return the bytes of living tensors with the shapes of parameters, over those of all; `others` do not count."""
    shapes, known = {p.shape for p in params.values()}, {_place(one) for one in others}
    living = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter) and one.shape in shapes]
    sizes = {_place(one): one.untyped_storage().nbytes() for one in living if one.device.type == "cpu"}
    whole = sum(p.untyped_storage().nbytes() for p in params.values())
    return sum(size for place, size in sizes.items() if place not in known) / whole


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def rank() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks.report(measured())
    dist.destroy_process_group()


def main() -> None:
    found = ranks.maxima(ranks.start("benchmarks.loops", RANKS))
    whole = found["step"] + found["clip"] + found["update"]
    lines = [
        ("forward and backward of a GPT of 6.5 million parameters, 2 ranks", found["step"], None),
        ("its norm", found["norm"], None),
        ("its norm and clipping in place", found["clip"], None),
        ("its update by AdamW in place; an instance that is kept", found["update"], found["plain update"]),
    ]
    for what, ours, theirs in lines:
        print(row(what, "ms", 1e3 * ours, None if theirs is None else 1e3 * theirs), flush=True)
    share = 100 * (found["clip"] + found["update"] - found["plain update"]) / whole
    print(row("share of a training step outside forward, backward and AdamW itself", "%", share, None, most(3)))
    print(row("the same with AdamW", "%", 100 * (found["clip"] + found["update"]) / whole, None, most(3)))
    for what, count in gradient_sets().items():
        print(row(f"sets of gradients held after {what}, at most", "1", count, None, most(1.01)), flush=True)


if __name__ == "__main__":
    rank() if ranks.inside() else main()
