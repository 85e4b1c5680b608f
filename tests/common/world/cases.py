# SPDX-License-Identifier: Apache-2.0
"""Run a case: the same training loop on one device and in a simulated world, and again after a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fpipe
from tests.common.comparison import Result
from tests.common.random_models import case_of
from tests.common.world.drawing import OPTIMIZERS, TIMEOUT, Case
from tests.common.world.fibers import Process, World
from tests.common.world.network import Network
from tests.common.world.patches import inhabit
from tests.common.world.sharing import Shelf

PROMPT = 8.0  # simulated seconds within which ranks that are alive learn of what is not silent


class InjectedError(ValueError):
    """The fault of a case."""


class Finding(AssertionError):  # noqa: N818 - what the simulation looks for
    """A case did not end as promised."""


@dataclass
class Script:
    """The training loop of a case, as a user writes it; every rank runs it, and so does one device.

    - `results`: what each step of each rank returned. `states`: its parameters, buffers and optimizer state after it.
    - `final`: the same at the end, of each rank that came so far. `saved`: the last step that was saved.
    """

    case: Case
    path: Path
    shelf: Shelf
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    states: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    final: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    saved: int = 0

    def build(self) -> tuple[Any, Any, Any]:
        """Return the model, its batch, and its pipeline."""
        model, batch, loss = self.shelf.keep("model", self.make) if not self.case.is_apart else self.make()
        how = {"schedule": self.case.schedule, "backward": self.case.setup.backward}
        return model, batch, fpipe.pipeline(model, example=batch[0], targets=batch[1], loss=loss, **how)

    def make(self) -> tuple[Any, tuple[Any, Any], Any]:
        """Return the model, the batch and the loss, always the same."""
        setup = self.case.setup
        found = case_of(setup.model)
        model, inputs, targets = found.make(2 * setup.schedule.microbatches)
        if setup.dtype != torch.float32:
            model = model.to(setup.dtype)
            inputs, targets = optree.tree_map(self._cast, (inputs, targets), none_is_leaf=True)
        return model, (inputs, targets), found.loss

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.case.setup.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def train(self, rank: int, ready: Callable[[], None], between: Callable[[int], bool]) -> None:
        """Build, resume if there is a checkpoint, and train; `between` says whether to go on after a step."""
        model, batch, pipe = self.build()
        init, update = self.optimizer()
        step = fpipe.value_and_grad(pipe, outputs=self.case.setup.outputs)
        ready()
        if fpipe.is_checkpoint(self.path):
            params, buffers, state, first, _ = fpipe.load(pipe, self.path)
        else:
            params, buffers = pipe.init(model)
            state, first = init(params), 0
        self.loop(rank, pipe, partial(step, inputs=batch[0], targets=batch[1]), (params, buffers, state, first), update, between)

    def optimizer(self) -> Any:
        """Return the optimizer's functions."""
        made, options = OPTIMIZERS[self.case.setup.optimizer]
        return fpipe.optimizer(made, **options)

    def loop(self, rank: int, pipe: Any, step: Any, start: Any, update: Any, between: Callable[[int], bool]) -> None:
        """Train from where a run is."""
        case, (params, buffers, state, first) = self.case, start
        for i in range(first, case.steps):
            out, grads = step(params, buffers, seed=i)
            self.results[rank, i] = Result(out.loss, out.outputs, dict(grads), out.buffers)
            buffers = out.buffers
            if case.setup.clips:
                grads, _ = fpipe.clip(pipe, grads, 0.1)
            params, state = update(grads, state, params)
            if not between(i):
                return
            if rank < 0:
                self.states[i] = params, buffers, state
            elif case.saves:
                fpipe.save(pipe, self.path, params=params, buffers=buffers, state=state, step=i + 1)
                self.saved = max(self.saved, i + 1)
        self.final[rank] = params, buffers, state

    def run_alone(self) -> None:
        """Train on one device, as rank -1."""
        model, batch, pipe = self.build()
        init, update = self.optimizer()
        params, buffers = pipe.init(model)
        step = partial(fpipe.reference(pipe, outputs=self.case.setup.outputs), inputs=batch[0], targets=batch[1])
        self.loop(-1, pipe, step, (params, buffers, init(params), 0), update, lambda i: True)


class Verdict(NamedTuple):
    """How a case ended, and what it took: `exact`, or the name of an error, or that the model was refused."""

    ended: str
    restarted: bool
    switches: int
    seconds: float


class Trial:
    """One run of a script in a world, with or without the fault of its case."""

    def __init__(self, script: Script, random: Random, has_fault: bool) -> None:
        self.script, self.case, self.random = script, script.case, random
        self.fault = script.case.fault if has_fault else None
        self.world = World(random)
        ranks = self.case.schedule.ranks
        limit = timedelta(seconds=TIMEOUT)
        self.network = Network(self.world, ranks, limit, self.case.is_kept, self.delay)
        self.world.on_step = self.on_step
        self.counts = [0] * ranks
        self.armed, self.messages = [False] * ranks, 0
        self.struck: float | None = None
        self.place = ""
        self.ended: dict[int, float] = {}

    def delay(self, ends: tuple[int, int], tag: Any) -> float | None:
        """Return how long a message takes; lose the one that the fault names."""
        if self.fault and self.fault.kind == "lose" and all(self.armed):
            self.messages += 1
            if self.messages == self.fault.count + 1:
                self.strike(f"message of {ends[0]} to {ends[1]}")
                return None
        return self.random.expovariate(1) * self.case.delay

    def strike(self, place: str) -> None:
        """Note that the fault strikes now."""
        self.struck, self.place = self.world.now, place

    def on_step(self, process: Process, what: str) -> None:
        """Let computing take time, and let the fault strike if it is time for it."""
        if what == "compute":
            self.world.sleep(self.random.random() * self.case.delay)
        fault = self.fault
        if fault is None or process.rank != fault.rank or not self.armed[process.rank] or self.struck is not None:
            return
        if fault.kind in ("none", "lose", "leave") or fault.what not in ("any", what):
            return
        self.counts[process.rank] += 1
        if self.counts[process.rank] == fault.count + 1:
            self.strike(process.place)
            self.afflict(process, fault.kind)

    def afflict(self, process: Process, kind: str) -> None:
        """Let a fault happen to the process that runs."""
        world = self.world
        if kind in ("die", "disk"):
            world.kill(process)
        elif kind in ("stop", "nap"):
            process.is_stopped = True
            pause = TIMEOUT / 4 if kind == "nap" else 6 * TIMEOUT
            world.at(world.now + pause, partial(setattr, process, "is_stopped", False))
        else:
            raise {"raise": InjectedError("injected"), "interrupt": KeyboardInterrupt(), "exit": SystemExit(0)}[kind]

    def between(self, rank: int, i: int) -> bool:
        """Return whether a rank's script goes on after a step."""
        fault = self.fault
        if fault is None or fault.kind != "leave" or fault.rank != rank or fault.count % self.case.steps != i:
            return True
        self.strike("between calls")
        return False

    def run(self) -> list[BaseException | None]:
        """Run it; return how each rank's script ended."""

        def main(rank: int) -> None:
            try:
                self.script.train(rank, lambda: self.arm(rank), partial(self.between, rank))
            finally:
                self.ended[rank] = self.world.now

        with inhabit(self.network):
            mains = [
                self.world.start(process, "script", partial(main, process.rank)) for process in self.world.processes
            ]
            self.world.run(mains)
        return [fiber.error for fiber in mains]

    def arm(self, rank: int) -> None:
        """Let the fault strike from now on."""
        self.armed[rank] = True
