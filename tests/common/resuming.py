# SPDX-License-Identifier: Apache-2.0
"""Training runs that can be saved and resumed anywhere, and the plain loop that is never interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fpipe
from schedules import Schedule, dualpipe, gpipe, one_f_one_b, zb_h1, zb_v
from tests.common.cases import WIDTH, cross_entropy, mse, rows_of, words
from tests.common.comparison import require_part, require_same_slots
from tests.common.loops import piece
from tests.common.zoo import GPT

MICROBATCHES, ROWS = 8, 16


def blocks(*extra: Callable[[], nn.Module]) -> nn.Module:
    """Eight blocks with BatchNorm, and one frozen weight."""
    made = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *[one() for one in extra], nn.Tanh()] for _ in range(8)]
    model = nn.Sequential(*[nn.Sequential(*layers) for layers in made])
    model[2][0].weight.requires_grad_(False)
    return model


class Subject(NamedTuple):
    """A model to train: how to build it, its batches and its loss; `random` if it draws random numbers."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Tensor]
    random: bool = False


SUBJECTS = {
    "normalised": Subject(blocks, rows_of(), mse),
    "tied": Subject(GPT, words, cross_entropy),
    "dropping": Subject(lambda: blocks(lambda: nn.Dropout(0.2)), rows_of(), mse, random=True),
}

LAYOUTS: dict[str, Schedule] = {
    "1f1b on four": one_f_one_b(ranks=4, microbatches=MICROBATCHES),
    "zb_v on two": zb_v(ranks=2, microbatches=MICROBATCHES),
    "zb_h1 on two": zb_h1(ranks=2, microbatches=MICROBATCHES),
    "one": gpipe(ranks=1, microbatches=MICROBATCHES),
    "1f1b on eight": one_f_one_b(ranks=8, microbatches=MICROBATCHES),
    "dualpipe on two": dualpipe(ranks=2, microbatches=MICROBATCHES),
}

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "plain": (torch.optim.SGD, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Run(NamedTuple):
    """A training run between two steps: what `fpipe.save` takes."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def model_of(name: str) -> nn.Module:
    """The model, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return SUBJECTS[name].build()


def batch_of(name: str, step: int) -> tuple[Any, Any]:
    """The batch of a step, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + step)
        return SUBJECTS[name].batch(ROWS)


@lru_cache
def pipeline(name: str, layout: str, group: Any = None) -> fpipe.Pipeline:
    """A pipeline of a subject; built once in a process."""
    inputs, targets = batch_of(name, 0)
    loss, how = SUBJECTS[name].loss, LAYOUTS[layout]
    return fpipe.pipeline(
        model_of(name), example=inputs, targets=targets, loss=loss, schedule=how, place=fpipe.Place(group=group)
    )


@lru_cache
def step_of(pipe: fpipe.Pipeline) -> Any:
    """The step of a pipeline; made once in a process."""
    return fpipe.value_and_grad(pipe)


@lru_cache
def optimizer_of(name: str) -> Any:
    """An optimizer; made once in a process."""
    cls, options = OPTIMIZERS[name]
    return fpipe.optimizer(cls, **options)


@dataclass(frozen=True)
class Trainer:
    """A subject on a layout, with an optimizer; `group` has its processes, if there are several."""

    subject: str
    layout: str
    optimizer: str = "adamw"
    group: Any = None

    @property
    def pipe(self) -> fpipe.Pipeline:
        """The pipeline."""
        return pipeline(self.subject, self.layout, self.group)

    def start(self) -> Run:
        """Return a run before its first step."""
        params, buffers = self.pipe.init(model_of(self.subject))
        return Run(params, buffers, optimizer_of(self.optimizer).init(params))

    def train(self, run: Run, steps: Iterable[int]) -> Run:
        """Run these steps; the run that is passed is not modified."""
        step, (_, update) = step_of(self.pipe), optimizer_of(self.optimizer)
        for i in steps:
            out, grads = step(run.params, run.buffers, *batch_of(self.subject, i), seed=i)
            params, state = update(grads, run.state, run.params)
            run = Run(params, out.buffers, state)
        return run

    def save(self, path: Any, run: Run, step: int, **more: Any) -> None:
        """Save a run."""
        fpipe.save(self.pipe, path, **run._asdict(), step=step, **more)

    def resume(self, path: Any) -> tuple[Run, int]:
        """Return a run as it was saved, and its step."""
        found = fpipe.load(self.pipe, path)
        assert found.state is not None, "it was saved"
        return Run(found.params, found.buffers, found.state), found.step


def plain_loop(name: str, optimizer: str, steps: int) -> Run:
    """One device, one optimizer, no interruption, and nothing of fpipe's."""
    subject, model = SUBJECTS[name], model_of(name)
    cls, options = OPTIMIZERS[optimizer]
    made = cls([*model.parameters()], **options)
    for i in range(steps):
        inputs, targets = batch_of(name, i)
        for k in range(MICROBATCHES):
            part, wanted = piece(inputs, k, MICROBATCHES), piece(targets, k, MICROBATCHES)
            (subject.loss(model(*part), wanted) / MICROBATCHES).backward()
        made.step()
        made.zero_grad()
    params = dict(model.named_parameters())
    return Run(params, dict(model.named_buffers()), {n: dict(made.state[p]) for n, p in params.items()})


def undisturbed(name: str, optimizer: str, steps: int, group: Any = None) -> Run:
    """The run that is never saved: the plain loop, or, if the model draws random numbers, one rank."""
    if SUBJECTS[name].random:
        alone = Trainer(name, "one", optimizer, group)
        return alone.train(alone.start(), range(steps))
    return plain_loop(name, optimizer, steps)


def require_same_run(got: Run, want: Run) -> None:
    """Raise unless everything that `got` holds is, bit for bit, that of `want`."""
    require_part(got[:2], want[:2])
    require_same_slots({name: got.state.get(name, {}) for name in got.params}, want.state)
