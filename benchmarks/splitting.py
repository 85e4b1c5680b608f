# SPDX-License-Identifier: Apache-2.0
"""The cost of splitting a backward in two, compared with torch.distributed.pipelining in the same run.

    python -m benchmarks.splitting

A stage in the middle of a pipeline, one microbatch, one thread. Per stage:

- (I + W) / B: the CPU time of both halves over that of the full backward, in the same library; medians of many
  interleaved rounds, so that other programs on the machine disturb all equally;
- kept: the memory alive between the halves, excluding parameters and finished weight gradients, over the minimum that
  weight gradients of linear layers require: their inputs, and the gradients of their outputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fpipe
from benchmarks.common.models import Block
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import figure, most, row
from benchmarks.common.turns import device, seconds, without_collection
from schedules import one_f_one_b

HEADS, MIB = 4, 2**20


def mean(outputs: Tensor) -> Tensor:
    """Return the loss."""
    return outputs.mean()


Times = dict[str, list[float]]


def timed(times: list[float], function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, append its time in microseconds, and return its result."""
    start = seconds()
    result = function(*args)
    times.append((seconds() - start) * 1e6)
    return result


class Ours:
    """A stage of a pipeline, recorded as a graph."""

    def __init__(self, layers: nn.Sequential, x: Tensor) -> None:
        model = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1], device=x.device), layers, nn.Identity())
        how = one_f_one_b(ranks=3, microbatches=1)
        pipe = fpipe.pipeline(
            model, example=(x,), loss=mean, schedule=how, cuts=["1", "2"], gradients=fpipe.Gradients(backward="graph")
        )
        params, _ = pipe.init(model)
        self.stage = pipe.stages[1]
        self.arguments = self.stage.leaves(params), (), (x,), 0
        self.parameters = self.arguments[0]
        self.cotangent = torch.randn_like(x)

    def whole(self, times: Times) -> None:
        """Run a forward, and time a full backward."""
        residuals = self.stage.forward(*self.arguments)[2]
        timed(times["B"], self.stage.backward, residuals, (self.cotangent,))

    def halves(self, times: Times) -> list[Tensor]:
        """Run a forward, time both halves, and return what was kept in between."""
        residuals = self.stage.forward(*self.arguments)[2]
        _, deferred = timed(times["I"], self.stage.backward_input, residuals, (self.cotangent,))
        del residuals
        kept = [*deferred]
        done = timed(times["W"], self.stage.backward_weight, deferred)
        return [part for part in kept if all(part is not grad for grad in done)]


class Theirs:
    """The module, with the functions of `torch.distributed.pipelining`."""

    def __init__(self, layers: nn.Sequential, x: Tensor) -> None:
        self.layers, self.x, self.parameters = layers, x.clone().requires_grad_(), list(layers.parameters())
        self.cotangent = torch.randn_like(x)

    def forward(self) -> Tensor:
        """Clear all gradients and run a forward."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None
        return self.layers(self.x)

    def whole(self, times: Times) -> None:
        """Run a forward, and time a full backward."""
        timed(times["B"], torch.autograd.backward, self.forward(), self.cotangent)

    def halves(self, times: Times) -> list[Tensor]:
        """Run a forward, time both halves, and return what was kept in between."""
        out = self.forward()
        given = [out], [self.cotangent], [self.x], iter(self.parameters)
        _, groups = timed(times["I"], stage_backward_input, *given)
        del out, given
        incoming = [grad for group in groups for grads in group["grads"] for grad in grads if grad is not None]
        kept = list(saved(node for group in groups for node in group["intermediates"]))
        timed(times["W"], stage_backward_weight, iter(self.parameters), groups)
        return [*kept, *incoming]


def saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors saved by an autograd graph, starting at these nodes."""
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
    """Return the bytes of the storages of tensors, excluding those shared with `without`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(count for where, count in memory.items() if where not in known)


def least(layers: nn.Sequential, x: Tensor) -> int:
    """Return the bytes of the inputs of all linear layers, and of the gradients of their outputs."""
    seen: list[Tensor] = []
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    hooks = [linear.register_forward_hook(lambda _, given, out: seen.extend((given[0], out))) for linear in linears]
    layers(x)
    for hook in hooks:
        hook.remove()
    return sum(tensor.nbytes for tensor in seen)


def measure(layers: nn.Sequential, x: Tensor, repeats: int) -> dict[str, tuple[dict[str, float], int]]:
    """Return medians in microseconds and bytes kept between the halves, for us and the incumbent."""
    sides: dict[str, Ours | Theirs] = {"graph stages": Ours(layers, x), "incumbent": Theirs(layers, x)}
    times: dict[str, Times] = {name: {"B": [], "I": [], "W": []} for name in sides}
    kept: dict[str, list[Tensor]] = {}
    for side in sides.values():  # warm up
        side.halves({"I": [], "W": []})
    with without_collection():
        for _ in range(repeats):
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
    "4 GPT blocks, width 256, 4 x 128 tokens": (4, lambda: Block(256, HEADS), (4, 128, 256), rounds(21), most(1.02)),
    "16 GPT blocks, width 64, 4 x 32 tokens": (16, lambda: Block(64, HEADS), (4, 32, 64), rounds(51), most(1.1)),
    "Linear(8, 8), 4 rows": (1, lambda: nn.Linear(8, 8), (4, 8), rounds(3001), most(1.3)),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    memory, details = [], []
    for title, (count, make, shape, repeats, reach) in STAGES.items():
        layers = nn.Sequential(*[make() for _ in range(count)]).to(device())
        x = torch.randn(shape, device=device())
        needed, found = least(layers, x), measure(layers, x, repeats)
        ours, theirs = ((times["I"] + times["W"]) / times["B"] for times, _ in found.values())
        print(row(f"(I + W) / full backward, {title}", "", ours, theirs, reach), flush=True)
        ours, theirs = (kept / needed for _, kept in found.values())
        memory.append(row(f"bytes kept between I and W over the minimum, {title}", "", ours, theirs, most(1)))
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
