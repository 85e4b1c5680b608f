# SPDX-License-Identifier: Apache-2.0
"""Measure what late gradients cost, and which corrections help, with a small language model.

    python examples/late_weights.py [BATCHES] [SEEDS]

Prints the mean loss of the last third of the batches: with plain steps, with PipeDream on 2, 4 and 8 ranks, with 2BW,
and with each correction. All ranks run in this process. The reference computes the same bits
(`fpipe.reference_stream`); the first line checks that. A plot of all losses goes to `late_weights.svg`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fpipe
from schedules import Schedule, pipedream, pipedream_2bw

WORDS, WIDTH, LAYERS, CONTEXT, ROWS = 32, 48, 8, 4, 64


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state after the layer; both have shape (rows, width)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_model(seed: int) -> nn.Sequential:
    """A model that predicts a word from the last four."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, WIDTH))
    return nn.Sequential(
        first, *[Block() for _ in range(LAYERS)], nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    )


def write_text(length: int = 20_000) -> Tensor:
    """A text in which a word depends on the two before it."""
    source = torch.Generator().manual_seed(1)
    following = torch.softmax(3 * torch.randn(WORDS * WORDS, WORDS, generator=source), -1)
    draws = torch.multinomial(following, length // 64, replacement=True, generator=source).tolist()
    words, used = [0, 1], [0] * len(draws)
    while len(words) < length:
        state = words[-2] * WORDS + words[-1]
        words.append(draws[state][used[state] % len(draws[state])])
        used[state] += 1
    return torch.tensor(words)


def draw_batch(text: Tensor, t: int) -> tuple[tuple[Tensor], Tensor]:
    """Contexts of shape (rows, 4), and the words that follow, of shape (rows,)."""
    at = torch.randint(CONTEXT, len(text) - 1, (ROWS,), generator=torch.Generator().manual_seed(t))
    return (torch.stack([text[at - k - 1] for k in range(CONTEXT)], 1),), text[at]


class Run(NamedTuple):
    """A line of the table: its name, a schedule, and a correction of an optimizer, given the delays."""

    name: str
    schedule: Schedule
    correct: Callable[[fpipe.Optimizer, dict[str, int], int], fpipe.Optimizer] = lambda adam, late, count: adam
    predicts: bool = False


def feed_back(adam: fpipe.Optimizer, late: dict[str, int], count: int) -> fpipe.Optimizer:
    """Error feedback."""
    return fpipe.error_feedback(adam)


def slow_down(adam: fpipe.Optimizer, late: dict[str, int], count: int) -> fpipe.Optimizer:
    """PipeMare's learning rate, for the first half."""
    return fpipe.pipemare(adam, late, lr=2e-3, steps=count // 2)


def look_ahead(adam: fpipe.Optimizer, late: dict[str, int], count: int) -> fpipe.Optimizer:
    """NAdam whose momentum is .99 throughout."""
    return fpipe.optimizer(torch.optim.NAdam, lr=2e-3, betas=(0.99, 0.999), momentum_decay=0.0)


ALONE, TWICE, EIGHT = pipedream(1, 1), pipedream_2bw(4, 4, accumulate=4), pipedream(8, 1)
RUNS = (
    Run("steps", ALONE),
    Run("PipeDream, P = 2", pipedream(2, 1)),
    Run("2BW", TWICE),
    Run("PipeDream, P = 4", pipedream(4, 1)),
    Run("PipeDream, P = 8", EIGHT),
    Run("steps, error feedback", ALONE, feed_back),
    Run("2BW, error feedback", TWICE, feed_back),
    Run("P = 8, error feedback", EIGHT, feed_back),
    Run("P = 8, prediction", EIGHT, predicts=True),
    Run("P = 8, PipeMare", EIGHT, slow_down),
    Run("steps, NAdam .99", ALONE, look_ahead),
    Run("P = 8, NAdam .99", EIGHT, look_ahead),
)


def train(run: Run, text: Tensor, seed: int, count: int, make: Callable[..., Any] = fpipe.train_stream) -> list[float]:
    """Train on `count` batches; return the loss of each."""
    model, batches = build_model(seed), [draw_batch(text, 1000 * seed + t) for t in range(count)]
    inputs, targets = batches[0]
    stages = run.schedule.stages
    cuts = [str(1 + s * LAYERS // stages) for s in range(1, stages)]
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=nn.functional.cross_entropy, schedule=run.schedule, cuts=cuts
    )
    late = fpipe.delays(pipe)
    adam = run.correct(fpipe.optimizer(torch.optim.Adam, lr=2e-3), late, count)
    params, buffers = pipe.init(model)
    ahead = fpipe.predict_weights(late) if run.predicts else None
    stream = make(pipe, adam, ahead)(
        params, buffers, adam.init(params), batches, options=lambda t: {"lr": 2e-3 * min(1, (t + 1) / 40)}
    )
    return [loss.item() for loss in stream]


COLORS = ("#000000", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")


def plot(curves: dict[str, list[float]], window: int, path: str = "late_weights.svg") -> None:
    """Draw the mean of the last losses over batches; corrections are dashed."""
    smooth = {k: [mean(v[max(0, t - window + 1) : t + 1]) for t in range(window, len(v))] for k, v in curves.items()}
    low, high = min(map(min, smooth.values())), max(map(max, smooth.values()))
    lines = ['<rect width="760" height="420" fill="white"/>']
    for n, (name, losses) in enumerate(smooth.items()):
        points = " ".join(
            f"{60 + 460 * t / max(len(losses) - 1, 1):.1f},{20 + 350 * (high - loss) / (high - low):.1f}"
            for t, loss in enumerate(losses)
        )
        color, dash = COLORS[n % len(COLORS)], ' stroke-dasharray="5 3"' * (n >= len(COLORS) - 1)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"{dash}/>')
        lines.append(f'<path d="M540 {26 + 20 * n}h30" stroke="{color}" stroke-width="1.5"{dash}/>')
        lines.append(f'<text x="578" y="{30 + 20 * n}">{name}</text>')
    for k in range(5):
        loss = low + (high - low) * k / 4
        lines.append(f'<text x="52" y="{374 - 350 * k / 4:.0f}" text-anchor="end">{loss:.2f}</text>')
    last = len(next(iter(curves.values())))
    lines += [f'<text x="{x}" y="392">{t}</text>' for x, t in ((56, window), (508, last))]
    lines.append('<text x="290" y="410" text-anchor="middle">batch</text><text x="10" y="14">loss</text>')
    style = 'font-family="sans-serif" font-size="12"'
    picture = "\n".join(lines)
    Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="420" {style}>\n{picture}\n</svg>\n'
    )


def main(count: int = 150, seeds: int = 3, runs: tuple[Run, ...] = RUNS) -> dict[str, list[float]]:
    """Print the table; return the losses of each run, as the mean over seeds."""
    text, curves = write_text(), dict[str, list[float]]()
    same = train(runs[1], text, 0, 12) == train(runs[1], text, 0, 12, fpipe.reference_stream)
    print(f"{runs[1].name} has the losses of a loop with the same delays: {same}")
    for run in runs:
        losses = [train(run, text, seed, count) for seed in range(seeds)]
        curves[run.name] = [mean(column) for column in zip(*losses, strict=True)]
        ends = [mean(islice(one, count - count // 3, None)) for one in losses]
        print(f"{run.name:24} {mean(ends):.4f}  ({min(ends):.4f} to {max(ends):.4f})")
    return curves


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    plot(main(*given), window=20)
