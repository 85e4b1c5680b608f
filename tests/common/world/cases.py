# SPDX-License-Identifier: Apache-2.0
"""The training script of a case, as a user writes it, and its run in a simulated world in which faults strike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
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
from fpipe.tensors.placed import local_part
from tests.common.comparison import Result
from tests.common.options import grouped
from tests.common.world.device import Device
from tests.common.world.drawing import OPTIMIZERS, RAISED, TIMEOUT, Case, Fault
from tests.common.world.fibers import Process, World
from tests.common.world.network import Network
from tests.common.world.patches import inhabit
from tests.common.world.sharing import Shelf

# ---------------------- The training script of a case, as a user writes it: every rank runs it, and so does one device


def take_parts(tree: Any) -> Any:
    """Return a tree of tensors with what this process holds of each DTensor."""
    return optree.tree_map(local_part, tree, none_is_leaf=True)


@dataclass
class Script:
    """A training loop.

    - `results`: what each step of each rank returned; `looked`: what was computed after it.
    - `states`: parameters, buffers and optimizer state of one device after each step.
    - `final`: the same at the end, of each rank that came so far. `saved`: the last step that was saved.
    """

    case: Case
    path: Path
    shelf: Shelf
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    looked: dict[tuple[int, int], tuple[str, Result]] = field(default_factory=dict)
    states: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    final: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    saved: int = 0
    devices: dict[int, Device] = field(default_factory=dict)
    unsure: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))
    read: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))

    def note(self, rank: int, keep: Callable[[], None]) -> None:
        """Keep a result: at once, or on a device once it was read, and a later call knows of no failure."""
        if rank in self.devices:
            self.unsure[rank].append(keep)
        else:
            keep()

    def confirm(self, rank: int) -> None:
        """Keep what was read before a call that has just returned."""
        while self.read[rank]:
            self.read[rank].pop()()

    def forget(self, rank: int) -> None:
        """Forget what nobody has confirmed."""
        self.unsure.pop(rank, None)
        self.read.pop(rank, None)

    def wait(self, rank: int) -> None:
        """Read what was computed so far, as a user does with a loss."""
        if rank in self.devices:
            self.devices[rank].synchronize()
            self.read[rank] += self.unsure.pop(rank, [])

    def build(self) -> tuple[Any, Any, Any]:
        """Return the model, its batch, and its pipeline."""
        setup = self.case.setup
        model, batch, loss = self.make() if self.case.is_apart else self.shelf.keep("model", self.make)
        how: dict[str, Any] = {"schedule": setup.schedule, "backward": setup.backward}
        if setup.copies > 1:
            how |= {"mesh": {"pp": setup.schedule.ranks, "copies": setup.copies}}
            how |= {"shard" if setup.is_sharded else "dp": "copies"}
        return model, batch, fpipe.pipeline(model, example=batch[0], targets=batch[1], loss=loss, **grouped(how))

    def make(self) -> tuple[Any, tuple[Any, Any], Any]:
        """Return the model, the batch and the loss, always the same."""
        setup = self.case.setup
        found = setup.find()
        model, inputs, targets = found.make(setup.rows)
        if setup.dtype != torch.float32:
            model = model.to(setup.dtype)
            inputs, targets = optree.tree_map(self._cast, (inputs, targets), none_is_leaf=True)
        return model, (inputs, targets), found.loss

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.case.setup.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def train(self, rank: int, ready: Callable[[], None], between: Callable[[int], bool]) -> None:
        """Build, resume if there is a checkpoint, and train; `between` says whether to go on after a step."""
        model, batch, pipe = self.build()
        (init, update), step = self.optimizer(), self.function(pipe, fpipe.train_stream, fpipe.value_and_grad)
        ready()
        saved = [path for path in (self.path / "0", self.path / "1") if fpipe.is_checkpoint(path)]
        if saved:
            params, buffers, state, first, _ = fpipe.load(pipe, saved)
        else:
            params, buffers = pipe.init(model)
            state, first = init(params), 0
        with self.devices[rank].used() if rank in self.devices else nullcontext():
            self.loop(rank, pipe, (step, update), batch, (params, buffers, state, first), between)

    def function(self, pipe: Any, stream: Callable[..., Any], step: Callable[..., Any]) -> Any:
        """Return what a step calls, made by one of these functions."""
        return stream(pipe, self.optimizer()) if self.case.batches else step(pipe, outputs=self.case.setup.outputs)

    def optimizer(self) -> Any:
        """Return the functions of the optimizer."""
        made, options = OPTIMIZERS[self.case.setup.optimizer]
        return fpipe.optimizer(made, **options)

    def loop(self, rank: int, pipe: Any, how: Any, batch: Any, start: Any, between: Callable[[int], bool]) -> None:
        """Train from where a run is."""
        case, (step, update), finish = self.case, how, list[Callable[[], None]]()
        params, buffers, state, first = start
        for i in range(first, case.steps):
            if case.batches:
                stream, grads = step(params, buffers, state, [batch] * case.batches, seed=i), {}
                losses = [*stream]
                params, buffers, state = stream.end
                result = Result(torch.stack(losses), None, {}, buffers)
            else:
                out, grads = step(params, buffers, *batch, seed=i)
                result = Result(out.loss, out.outputs, take_parts(dict(grads)), out.buffers)
                buffers = out.buffers
            self.confirm(rank)
            self.note(rank, partial(self.results.__setitem__, (rank, i), result))
            if self.case.reads:
                self.wait(rank)
            if case.setup.clips:
                grads, _ = fpipe.clip(pipe, grads, 0.1)
            if not case.batches:
                params, state = update(grads, state, params)
            self.look(rank, i, pipe, params, buffers, batch)
            if not between(i):
                return
            if rank < 0:
                self.states[i] = params, buffers, state
            elif case.saves:
                self.save(i, pipe, finish, {"params": params, "buffers": buffers, "state": state})
        while finish:
            finish.pop()()
        if rank in self.devices:
            self.wait(rank)
            fpipe.require_same(pipe)
            self.confirm(rank)
            pipe.close()
        self.final[rank] = take_parts((params, buffers, state))

    def look(self, rank: int, i: int, pipe: Any, params: Any, buffers: Any, batch: Any) -> None:
        """Compute what a user wants to know after a step."""
        if rank < 0 or self.case.looks == "evaluation":
            got = fpipe.evaluate(pipe)(params, buffers, *batch, seed=i)
            looked: tuple[str, Result] = "evaluation", Result(got.loss, got.outputs, {}, {})
        elif self.case.looks == "prediction":
            got = fpipe.predict(pipe)(params, buffers, batch[0], seed=i)
            looked = "prediction", Result(None, got, {}, {})
        else:
            return
        self.confirm(rank)
        self.note(rank, partial(self.looked.__setitem__, (rank, i), looked))

    def save(self, i: int, pipe: Any, finish: list[Callable[[], None]], held: dict[str, Any]) -> None:
        """Save the run after a step, in the way of the case."""
        path = self.path / str(i % 2 if self.case.saves == "turns" else 0)
        while finish:
            finish.pop()()
        begun = fpipe.begin_save(pipe, path, **held, step=i + 1)
        finish.append(partial(self.finish, begun, i + 1))
        if self.case.saves != "begin":
            finish.pop()()

    def finish(self, begun: Callable[[], None], step: int) -> None:
        """Finish to save."""
        begun()
        self.saved = max(self.saved, step)

    def run_alone(self) -> None:
        """Train on one device, as rank -1."""
        model, batch, pipe = self.build()
        (init, update), step = self.optimizer(), self.function(pipe, fpipe.reference_stream, fpipe.reference)
        params, buffers = pipe.init(model)
        self.loop(-1, pipe, (step, update), batch, (params, buffers, init(params), 0), lambda i: True)


# ------------------------------------------------ Run the script of a case in a simulated world, and let faults strike

PROMPT = 8.0  # simulated seconds within which ranks that are alive learn of what is not silent


NAP = TIMEOUT / 4


class InjectedError(ValueError):
    """The fault of a case."""


class Finding(AssertionError):  # noqa: N818 - what the simulation looks for
    """A case did not end as promised."""


class Verdict(NamedTuple):
    """How a case ended, and what it took: `exact`, or the kinds of the faults, or that the model was refused."""

    ended: str
    runs: int
    switches: int
    seconds: float


@dataclass
class Strike:
    """A fault, how many of its steps have passed, and when and where it struck."""

    fault: Fault
    count: int = 0
    time: float | None = None
    place: str = ""

    def is_due(self) -> bool:
        """Count a step; return whether the fault strikes at it."""
        self.count += 1
        return self.count == self.fault.count + 1


class Trial:
    """One run of a script in a world, and the faults in it."""

    def __init__(self, script: Script, random: Random, faults: tuple[Fault, ...]) -> None:
        self.script, self.case, self.random = script, script.case, random
        self.strikes = [Strike(fault) for fault in faults]
        self.world = World(random)
        processes = self.case.setup.processes
        limit = timedelta(seconds=TIMEOUT)
        self.network = Network(self.world, processes, limit, self.case.is_kept, self.delay, self.case.manners)
        self.world.on_step = self.on_step
        self.armed = [False] * processes
        kinds = {fault.kind for fault in faults if not fault.builds} | {"die" for fault in faults if fault.builds}
        self.rebuilds = self.case.rebuilds and len(faults) == 1 and kinds <= {"raise", "fail"}
        self.survived, self.again = dict[int, BaseException](), list[BaseException | None]()
        self.ended: dict[int, float] = {}

    @property
    def struck(self) -> list[Strike]:
        """The faults that have struck and that others notice."""
        return [one for one in self.strikes if one.time is not None and one.fault.kind != "nap"]

    def delay(self, ends: tuple[int, int], tag: Any) -> float | None:
        """Return how long a message takes; lose those that a fault names."""
        for one in self.strikes:
            if one.fault.kind == "lose" and one.fault.builds != all(self.armed) and one.is_due():
                self.strike(one, f"message of {ends[0]} to {ends[1]}")
                return None
        return self.random.expovariate(1) * self.case.delay

    def strike(self, one: Strike, place: str) -> None:
        """Note that a fault strikes now."""
        one.time, one.place = self.world.now, place

    def on_step(self, process: Process, what: str) -> None:
        """Let computing take time, and let faults strike if it is time for them."""
        if what == "compute":
            self.world.sleep(self.random.random() * self.case.delay)
        for one in self.strikes:
            fault = one.fault
            if (
                one.time is not None
                or fault.kind in ("lose", "leave")
                or fault.rank != process.rank
                or fault.what not in ("any", what)
            ):
                continue
            if fault.builds == self.armed[process.rank] or (fault.kind in RAISED and not self.world.is_main):
                continue
            if one.is_due():
                self.strike(one, process.place)
                self.afflict(process, fault.kind)

    def afflict(self, process: Process, kind: str) -> None:
        """Let a fault happen to the process that runs."""
        world = self.world
        if kind in ("die", "disk"):
            world.kill(process)
        elif kind in ("stop", "nap"):
            process.is_stopped = True
            pause = NAP if kind == "nap" else 6 * TIMEOUT
            world.at(world.now + pause, partial(setattr, process, "is_stopped", False))
        else:
            raise {
                "raise": InjectedError("injected"),
                "fail": torch.distributed.DistBackendError("NCCL error: Failed to CUDA calloc"),
                "interrupt": KeyboardInterrupt(),
                "exit": SystemExit(0),
            }[kind]

    def between(self, rank: int, i: int) -> bool:
        """Return whether a rank's script goes on after a step."""
        for one in self.strikes:
            if one.fault.kind == "leave" and one.fault.rank == rank and one.fault.count % self.case.steps == i:
                self.strike(one, "between calls")
                return False
        return True

    def run(self) -> list[BaseException | None]:
        """Run it; return how each rank's script ended."""

        def main(rank: int) -> None:
            if self.case.manners is not None:
                self.script.devices[rank] = self.network.devices[self.world.process]
            try:
                self.script.train(rank, lambda: self.arm(rank), partial(self.between, rank))
            except (fpipe.RankError, InjectedError, torch.distributed.DistBackendError) as error:
                if not self.rebuilds:
                    raise
                self.survived[rank] = error.with_traceback(None)
            finally:
                self.ended[rank] = self.world.now
            if rank in self.survived:
                self.script.forget(rank)
                self.script.train(rank, lambda: None, lambda i: True)

        with inhabit(self.network):
            mains = [
                self.world.start(process, "script", partial(main, process.rank)) for process in self.world.processes
            ]
            self.world.run(mains)
        self.again = [fiber.error for fiber in mains]
        return [self.survived.get(rank, error) for rank, error in enumerate(self.again)]

    def arm(self, rank: int) -> None:
        """Note that a rank has built its pipeline."""
        self.armed[rank] = True
