# SPDX-License-Identifier: Apache-2.0
"""One rank of examples/resume.py, as torchrun starts it, that dies where its case says.

    comeback_worker.py FOLDER NUMBER

`FOLDER`/case.json has the launches of a case, of which this is number `NUMBER`; the checkpoints are in `FOLDER`/run.
Each rank adds what happens to `FOLDER`/events.jsonl. Before it trains, the first rank may damage the newest checkpoint.
"""

from __future__ import annotations

import _io
import json
import mmap
import os
import posix
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import fpipe
from schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.common.damage import damage_newest, newest_step
from tests.common.examples import load_example

SCHEDULES = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}

PHASES = ("start", "build", "load", "step", "update", "save", "end")
"""What a rank does, in this order; it steps, updates and saves again and again. A phase lasts until the next begins."""
WIDEST = max(map(len, PHASES))


class Death(NamedTuple):
    """A rank is killed when it has entered a phase for the `entry`th time and then done so much, in a unit."""

    rank: int
    phase: str
    entry: int
    unit: str
    amount: int


class Start(NamedTuple):
    """One start of the ranks: how they train and save, how the newest checkpoint is damaged before, and who dies."""

    schedule: str
    in_background: bool
    damage: str
    seed: int
    death: Death | None

    @classmethod
    def of(cls, *fields: Any) -> Start:
        """Return the start that JSON has."""
        start = cls(*fields)
        return start._replace(death=start.death and Death(*start.death))


class Log:
    """The file to which all ranks of a case add what happens; whole lines, so that it survives any kill."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.fields = fields
        self.file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, event: str, **fields: Any) -> None:
        os.write(self.file, f"{json.dumps({'event': event, **self.fields, **fields})}\n".encode())


class Phases:
    """Counts how often this rank has entered each phase of its run, and springs the trap when it is time."""

    def __init__(self) -> None:
        self.now, self.entered = mmap.mmap(-1, WIDEST), Counter[str]()
        self.death: Death | None = None
        self.spring: Callable[[], object] = bool

    @property
    def name(self) -> str:
        """The phase that this rank, or the one whose fork this is, is in."""
        return self.now[:].rstrip(b"\0").decode()

    def enter(self, phase: str) -> None:
        self.now[:] = phase.encode().ljust(WIDEST, b"\0")
        self.entered[phase] += 1
        if self.death and (phase, self.entered[phase]) == (self.death.phase, self.death.entry):
            self.spring()

    def noting(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which enters a phase first."""

        def call(*arguments: Any, **options: Any) -> Any:
            self.enter(phase)
            return function(*arguments, **options)

        return call


class Tripwire:
    """A profiler that kills this process before the call, or the operation on a file, of some number."""

    def __init__(self, death: Death, kill: Callable[[FrameType, str], None]) -> None:
        self.left, self.kill = death.amount, kill
        self.counts = on_file if death.unit == "files" else on_call

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if self.counts(event, what):
            self.left -= 1
            if self.left == 0:
                self.kill(frame, what.__name__ if event == "c_call" else "")

    def set(self) -> None:
        """Watch this thread, and those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)


FILE_CALLS = {"open", "write", "fsync", "close", "replace", "rename", "mkdir", "rmdir", "unlink"}
"""C functions that make, fill, move or remove a file or a folder."""


def on_call(event: str, what: Any) -> bool:
    return event in ("call", "c_call")


def on_file(event: str, what: Any) -> bool:
    if event != "c_call" or what.__name__ not in FILE_CALLS:
        return False
    return what.__self__ in (_io, posix) or isinstance(
        what.__self__, _io.FileIO | _io.BufferedWriter | _io.TextIOWrapper
    )


def describe(frame: FrameType | None, call: str) -> dict[str, Any]:
    """Return the innermost function of fpipe or the example, with what it calls, and the action that runs."""
    where, action = "", ""
    while frame:
        code = frame.f_code
        if not where and ("/fpipe/" in code.co_filename or code.co_filename.endswith("resume.py")):
            where = f"{Path(code.co_filename).stem}.{code.co_name}"
        if not action and code.co_filename.endswith("runtime/executor.py"):
            action = str(frame.f_locals.get("action") or "")
        frame = frame.f_back
    return {"where": where, "call": call, "action": action}


class Clock:
    """Another process, which kills this one so many microseconds after it was told to, unless it is told to stop.

    It knows this one by a descriptor, so it can't hit another that has its number by then.
    """

    def __init__(self, log: Log, phases: Phases, microseconds: int) -> None:
        me, (told, self.told) = os.pidfd_open(os.getpid()), os.pipe()
        if not os.fork():
            os.close(self.told)
            if os.read(told, 1) and not select.select([me, told], [], [], microseconds / 1e6)[0]:
                signal.pidfd_send_signal(me, signal.SIGKILL)
                log.add("death", phase=phases.name, unit="clock")
            os._exit(0)
        os.close(told)

    def tell(self) -> None:
        """Start the clock, or stop it."""
        os.write(self.told, b"!")


@contextmanager
def arm(log: Log, death: Death | None) -> Iterator[Phases]:
    """Return the context with the phases of this rank; it dies in one of them if the death is its own."""
    phases = Phases()

    def kill(frame: FrameType, call: str) -> None:
        sys.setprofile(None)
        log.add("death", phase=phases.name, unit=death.unit, **describe(frame, call))
        os.kill(os.getpid(), signal.SIGKILL)

    if not death or death.rank != int(os.environ["RANK"]):
        yield phases
        return
    phases.death = death
    if death.unit == "clock":
        clock = Clock(log, phases, death.amount)
        phases.spring = clock.tell
        yield phases
        clock.tell()  # torchrun waits for ever for one that dies after it has told it that it is done
    else:
        phases.spring = Tripwire(death, kill).set
        yield phases
        sys.setprofile(None)


def watch(resume: ModuleType, phases: Phases, log: Log, newest: int | None) -> None:
    """Have the example enter phases, and the first rank log at which step it begins beside the one at which it must."""

    def begin(*arguments: Any) -> Any:
        phases.enter("load")
        found = begin_here(*arguments)
        if newest is not None:
            log.add("begin", step=found.step, expected=newest)
        return found

    begin_here, resume.begin = resume.begin, begin
    watched = {
        "pipeline": phases.noting("build", fpipe.pipeline),
        "value_and_grad": lambda pipe: phases.noting("step", fpipe.value_and_grad(pipe)),
        "clip": phases.noting("update", fpipe.clip),
        "save": phases.noting("save", fpipe.save),
        "begin_save": phases.noting("save", fpipe.begin_save),
    }
    resume.fpipe = SimpleNamespace(**{**vars(fpipe), **watched})


def save_in_background(resume: ModuleType, phases: Phases) -> None:
    """Have the example begin to save where it saves, and finish after the next step."""
    begun: list[Callable[[], None]] = []

    def finish() -> None:
        while begun:
            phases.enter("save")
            begun.pop()()

    def clip(*arguments: Any) -> Any:
        finish()
        return clip_here(*arguments)

    def save(*arguments: Any, **options: Any) -> None:
        begun.append(resume.fpipe.begin_save(*arguments, **options))

    def train(*arguments: Any) -> None:
        train_here(*arguments)
        finish()

    clip_here, train_here = resume.fpipe.clip, resume.train
    resume.fpipe.save, resume.fpipe.clip, resume.train = save, clip, train


def take_turns(resume: ModuleType, every: int, places: int) -> None:
    """Have the example save to so many places in turn, each time over what is there."""

    def save(pipe: fpipe.Pipeline, place: Path, **options: Any) -> None:
        save_here(pipe, place.with_name(f"step-{options['step'] // every % places:06}"), **options)

    save_here, resume.fpipe.save = resume.fpipe.save, save


def note_end(resume: ModuleType, phases: Phases) -> None:
    """Have the example enter its last phase when it has trained."""

    def train(*arguments: Any) -> None:
        train_here(*arguments)
        phases.enter("end")

    train_here, resume.train = resume.train, train


def main(folder: Path, number: int) -> None:
    """Be one rank of one launch."""
    steps, every, places, launches = json.loads((folder / "case.json").read_text())
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _, starts = launches[number]
    start = Start.of(*starts[restart])
    log = Log(folder, launch=number, restart=restart, rank=rank)
    newest = None
    if rank == 0:  # torchrun may end it when another rank dies, but not in between
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        log.add("start", ranks=int(os.environ["WORLD_SIZE"]), schedule=start.schedule)
        if damaged := damage_newest(folder, start.damage, start.seed):
            log.add("damage", kind=start.damage, what=damaged)
        newest = newest_step(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with load_example("resume") as resume, arm(log, start.death) as phases:
        watch(resume, phases, log, newest)
        if start.in_background:
            save_in_background(resume, phases)
        take_turns(resume, every, places)
        note_end(resume, phases)
        resume.one_f_one_b = SCHEDULES[start.schedule]
        phases.enter("start")
        resume.main(["--path", f"{folder}/run", "--steps", str(steps), "--every", str(every)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
