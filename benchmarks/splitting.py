# SPDX-License-Identifier: Apache-2.0
"""What it costs to split a backward in two, beside torch.distributed.pipelining in the same run.

    python -m benchmarks.splitting

A stage in the middle of a pipeline, one microbatch, one thread. Per stage:

- (I + W) / B: the processor time of both halves over that of the whole backward, by the same library; medians of many
  rounds in turns, so that other programs on the machine disturb all alike;
- kept: what is alive between the halves, beside parameters and gradients of weights that are done, over the least that
  weight gradients of linear layers can be made of: their inputs, and the gradients of their outputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fpipe
from benchmarks.common.models import Block
from benchmarks.common.rows import figure, most, row
from benchmarks.common.turns import device, seconds, without_collection
from schedules import one_f_one_b

HEADS, MIB = 4, 2**20
WAYS = ("autograd", "graph")


def mean(outputs: Tensor) -> Tensor:
    """The loss."""
    return outputs.mean()


Times = dict[str, list[float]]


def timed(times: list[float], function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, and append its time in microseconds."""
    start = seconds()
    result = function(*args)
    times.append((seconds() - start) * 1e6)
    return result


class Ours:
    """A stage of a pipeline, differentiated in one of our ways."""

    def __init__(self, layers: nn.Sequential, x: Tensor, backward: str) -> None:
        model = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1], device=x.device), layers, nn.Identity())
        how = one_f_one_b(ranks=3, microbatches=1)
        pipe = fpipe.pipeline(model, example=(x,), loss=mean, schedule=how, cuts=["1", "2"], backward=backward)
        params, _ = pipe.init(model)
        self.stage = pipe.stages[1]
        self.arguments = self.stage.leaves(params), (), (x,), 0
        self.parameters = self.arguments[0]
        self.cotangent = torch.randn_like(x)

    def whole(self, times: Times) -> None:
        """A forward, and a whole backward, which is timed."""
        residuals = self.stage.forward(*self.arguments)[2]
        timed(times["B"], self.stage.backward, residuals, (self.cotangent,))

    def halves(self, times: Times) -> list[Tensor]:
        """A forward and both halves, which are timed; what was kept in between."""
        residuals = self.stage.forward(*self.arguments)[2]
        _, deferred = timed(times["I"], self.stage.backward_input, residuals, (self.cotangent,))
        del residuals
        kept = [part for part in parts(deferred) if isinstance(part, Tensor)]
        done = timed(times["W"], self.stage.backward_weight, deferred)
        return [part for part in kept if all(part is not grad for grad in done)]


def parts(deferred: Any) -> list[Any]:
    """What one of our ways keeps between the halves."""
    if isinstance(deferred, list):
        return deferred
    return [*deferred.found, *chain(*[kept for _, kept in deferred.half.tasks])]


class Theirs:
    """The module, with the functions of `torch.distributed.pipelining`."""

    def __init__(self, layers: nn.Sequential, x: Tensor) -> None:
        self.layers, self.x, self.parameters = layers, x.clone().requires_grad_(), list(layers.parameters())
        self.cotangent = torch.randn_like(x)

    def forward(self) -> Tensor:
        """A forward; nothing has a gradient yet."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None
        return self.layers(self.x)

    def whole(self, times: Times) -> None:
        """A forward, and a whole backward, which is timed."""
        timed(times["B"], torch.autograd.backward, self.forward(), self.cotangent)

    def halves(self, times: Times) -> list[Tensor]:
        """A forward and both halves, which are timed; what was kept in between."""
        out = self.forward()
        given = [out], [self.cotangent], [self.x], iter(self.parameters)
        _, groups = timed(times["I"], stage_backward_input, *given)
        del out, given
        incoming = [grad for group in groups for grads in group["grads"] for grad in grads if grad is not None]
        kept = list(saved(node for group in groups for node in group["intermediates"]))
        timed(times["W"], stage_backward_weight, iter(self.parameters), groups)
        return [*kept, *incoming]


def saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """What a graph keeps from these nodes on."""
    queue = list(dict.fromkeys(nodes))
    seen = set(queue)
    for node in queue:
        for name in dir(node):
            value = getattr(node, name, None) if name.startswith("_saved_") else None
            yield from [value.detach()] if isinstance(value, Tensor) else []
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)


def size(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """The bytes of the memory that tensors lie in."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(count for where, count in memory.items() if where not in known)


def least(layers: nn.Sequential, x: Tensor) -> int:
    """The bytes of the inputs of all linear layers, and of the gradients of their outputs."""
    seen: list[Tensor] = []
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    hooks = [linear.register_forward_hook(lambda _, given, out: seen.extend((given[0], out))) for linear in linears]
    layers(x)
    for hook in hooks:
        hook.remove()
    return sum(tensor.nbytes for tensor in seen)


def measure(layers: nn.Sequential, x: Tensor, rounds: int) -> dict[str, tuple[dict[str, float], int]]:
    """For our ways and the incumbent, medians in microseconds, and bytes kept between the halves."""
    sides: dict[str, Ours | Theirs] = {f"{way} stages": Ours(layers, x, way) for way in WAYS}
    sides["incumbent"] = Theirs(layers, x)
    times: dict[str, Times] = {name: {"B": [], "I": [], "W": []} for name in sides}
    kept: dict[str, list[Tensor]] = {}
    for side in sides.values():  # once for nothing
        side.halves({"I": [], "W": []})
    with without_collection():
        for _ in range(rounds):
            for name, side in sides.items():
                side.whole(times[name])
                kept[name] = side.halves(times[name])
    return {
        name: (
            {kind: statistics.median(values) for kind, values in times[name].items()},
            size(kept[name], side.parameters),
        )
        for name, side in sides.items()
    }


STAGES = {
    "4 GPT blocks, width 256, 4 x 128 tokens": (4, lambda: Block(256, HEADS), (4, 128, 256), 41, most(1.02)),
    "16 GPT blocks, width 64, 4 x 32 tokens": (16, lambda: Block(64, HEADS), (4, 32, 64), 101, most(1.1)),
    "Linear(8, 8), 4 rows": (1, lambda: nn.Linear(8, 8), (4, 8), 3001, most(1.3)),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    memory, details = [], []
    for title, (count, make, shape, rounds, reach) in STAGES.items():
        layers = nn.Sequential(*[make() for _ in range(count)]).to(device())
        x = torch.randn(shape, device=device())
        needed, found = least(layers, x), measure(layers, x, rounds)
        *ours, theirs = ((times["I"] + times["W"]) / times["B"] for times, _ in found.values())
        for way, ratio in zip(WAYS, ours, strict=True):
            print(row(f"(I + W) / full backward, {title}, {way} stages", "", ratio, theirs, reach), flush=True)
        *ours, theirs = (kept / needed for _, kept in found.values())
        for way, ratio in zip(WAYS, ours, strict=True):
            what = f"bytes kept between I and W over the minimum, {title}, {way} stages"
            memory.append(row(what, "", ratio, theirs, most(1)))
        for name, (times, kept) in found.items():
            cells = [figure(times[kind]) for kind in ("B", "I", "W")] + [figure(kept / MIB)]
            details.append(f"| {title} | {name} | {' | '.join(cells)} |")
    print(*memory, sep="\n")
    print(
        "\n## Halves of a backward, in microseconds\n\n| stage | | B | I | W | kept, MiB |\n|---|---|---|---|---|---|"
    )
    print(*details, sep="\n")


if __name__ == "__main__":
    main()
