# SPDX-License-Identifier: Apache-2.0
"""Drills: in each, one rank of a training run fails in its own way, and all others report what they were told.

    python -m tests.distributed.drill FOLDER DRILL...
    python -m tests.distributed.drill FOLDER SEED COUNT

A drill is written `act-place-schedule-ranks-rank-position-step-store`: in that step, the rank does the act when it has
come to the place so often. The second form draws drills. Ranks are forks of one process, so a drill takes about a
second.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.network import measurements
from fpipe.tensors.torch_private import process_groups
from schedules import Schedule, gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.common.ranks import fork, read_ends, redirect, run_all, wait
from tests.common.schedules import split_1f1b

WIDTH, MICROBATCHES, ROWS, STEPS = 4, 4, 12, 3
TIMEOUT = 8.0  # seconds, of the process group; a build on a busy machine takes half of it
LIMIT = 60.0  # seconds, after which a rank hangs
NEAR = 20.0  # seconds within which the others learn of what is not silence; a second, but for other work
PAUSE = 3.0  # seconds that the others make a rank wait that is to be interrupted


SCHEDULES = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "split_backward": split_1f1b,
}
ON_A_MESH = "replicated"
"""1F1B on half of the ranks, and a replica on the others."""


class Drill(NamedTuple):
    """Which rank of how many fails, how, where, and when; and where the ranks meet."""

    act: str
    place: str
    schedule: str
    ranks: int
    rank: int
    position: int
    step: int
    store: str = "file"

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Drill:
        act, place, schedule, *numbers, store = text.split("-")
        return cls(act, place, schedule, *map(int, numbers), store)


class PlannedError(Exception):
    """What a rank raises on purpose."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def leave() -> None:
    os._exit(0)


def leave_politely() -> None:
    sys.exit(0)


def fail() -> None:
    raise PlannedError("on purpose")


def run_out() -> None:
    raise MemoryError("on purpose")


def hang() -> None:
    time.sleep(LIMIT)


def press_control_c() -> None:
    """Have a signal sent to this process soon, when it waits for another rank."""
    me = os.getpid()
    Timer(0.3, lambda: os.kill(me, signal.SIGINT)).start()


ACTS = {
    "kill": kill,
    "stop": stop,
    "interrupt": interrupt,
    "leave": leave,
    "exit": leave_politely,
    "raise": fail,
    "memory": run_out,
    "hang": hang,
    "recover": fail,
}
"""What a rank does at a place. After `recover` all ranks go on with new pipelines."""
PLACES = ("action", "stage", "hook", "loss", "join")
STARTING, BUILDING, GROUPING, MEASURING = "start", "build", "group", "clock"
"""Places outside of steps: before the first build, in its capture, before a process group that all create, and among
the messages that compare measurements."""
CALLS = ("less", "evaluate", "outputs", "batch")
"""What a rank does in place of the step of the others."""
SILENT = ("stop", "hang")
IN_GROUPS = ("kill", "stop", "interrupt", "leave", "exit", "raise", "memory", "recover")
"""What a rank does instead of creating a process group."""
PROBLEMS = {
    "kill": ("it died, or left",),
    "leave": ("it died, or left",),
    "less": ("it died, or left",),
    "stop": ("no sign of life from it", "the store does not answer"),
    "hang": ("it is alive",),
    "interrupt": ("KeyboardInterrupt",),
    "control_c": ("KeyboardInterrupt",),
    "exit": ("SystemExit: 0",),
    "raise": ("PlannedError: on purpose",),
    "memory": ("MemoryError: on purpose",),
}
"""How the others may describe what a rank did."""
DIFFERENT = ("evaluate", "outputs", "batch")


class Trap:
    """Acts when it has been stepped on often enough; disarmed at first.

    Models read traps, so what a trap does is where a pipeline does not see that it changes.
    """

    def __init__(self) -> None:
        self.left, self.acts = -1, SimpleQueue()

    def arm(self, act, left) -> None:
        self.left = left
        self.acts.put(act)

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            report_time()
            self.acts.get_nowait()()


TRAPS = {place: Trap() for place in (*PLACES, STARTING, BUILDING, GROUPING, MEASURING)}


def report_time() -> None:
    Path(os.environ["DRILL"], "began").write_text(repr(time.time()))


class Trapped(nn.Module):
    """A linear layer with a trap in its forward, and one in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        step_on(BUILDING)
        step_on("stage")
        y = torch.tanh(self.inner(x))
        if y.requires_grad:
            y.register_hook(lambda grad: step_on("hook"))
        return y


def step_on(place: str) -> None:
    TRAPS[place].step()


def loss(outputs, targets):
    step_on("loss")
    return (outputs - targets).square().mean()


def join(parts):
    step_on("join")
    return torch.cat(list(parts))


def make_schedule(drill: Drill) -> Schedule:
    if drill.schedule == ON_A_MESH:
        return one_f_one_b(ranks=drill.ranks // 2, microbatches=MICROBATCHES)
    return SCHEDULES[drill.schedule](ranks=drill.ranks, microbatches=MICROBATCHES)


def build(drill: Drill):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    how, place = make_schedule(drill), fpipe.Place()
    if drill.schedule == ON_A_MESH:
        place = fpipe.Place(mesh=init_device_mesh("cpu", (2, how.ranks), mesh_dim_names=("dp", "pp")), dp="dp")
    model = nn.Sequential(*[Trapped() for _ in range(how.stages)])
    x, y = torch.randn(2, ROWS, WIDTH)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=loss,
        schedule=how,
        cuts=[str(s) for s in range(1, how.stages)],
        microbatching=fpipe.Microbatching(output_dims=join),
        recording=fpipe.Recording(whole=[*map(str, range(how.stages)), "loss"]),
        place=place,
    )
    return pipe, model, x, y


def build_at_last(drill: Drill):
    """Build; after a build that failed on purpose, again. A rank that was ahead hears of it in its next call."""
    if (drill.act, drill.place) != ("recover", GROUPING):
        return build(drill)
    try:
        fpipe.require_same(build(drill)[0])
        raise AssertionError("nothing happened")
    except (fpipe.RankError, PlannedError):
        disarm()
        return build(drill)


def take_part(drill: Drill, rank: int) -> None:
    """Train, and fail if it is this rank's turn."""
    if drill.place in (STARTING, BUILDING, GROUPING):
        arm(drill, rank)
    dist.new_group = watched_creation
    step_on(STARTING)
    pipe, model, x, y = build_at_last(drill)
    state, groups = pipe.init(model), len(process_groups())
    if drill.place == MEASURING:
        arm(drill, rank)
        measurements.perf_counter = watched_clock
        fpipe.timeline(pipe, [])
    train = fpipe.value_and_grad(pipe, outputs=True, record=lambda span: step_on("action"))
    losses = []
    try:
        for step in range(STEPS):
            if step == drill.step and not arm(drill, rank):
                report_time()
                return differ(drill.act, pipe, state, x, y)
            losses.append(train(*state, (x,), y)[0].loss)
    except (fpipe.RankError, PlannedError):
        if drill.act != "recover":
            raise
        disarm()
        again, model, x, y = build(drill)
        assert len(process_groups()) == groups, "groups of the lost pipeline are left"
        loss = fpipe.value_and_grad(again)(*again.init(model), (x,), y)[0].loss
        assert not losses or torch.equal(loss, losses[0])
        assert not any(one.data_ptr() == 0 for one in model.parameters())


def watched_creation(*arguments, **options) -> dist.ProcessGroup | None:
    """Return a new group."""
    step_on(GROUPING)
    return distributed_c10d.new_group(*arguments, **options)


def watched_clock() -> float:
    """Return the time between two messages of measurements."""
    step_on(MEASURING)
    return time.perf_counter()


def arm(drill: Drill, rank: int) -> bool:
    """Set the trap of a drill; return whether this rank makes the same call as the others."""
    if drill.act == "control_c" and rank != drill.rank:
        TRAPS["action"].arm(lambda: time.sleep(PAUSE), 1)
    if rank != drill.rank or drill.act in CALLS:
        return rank != drill.rank
    if drill.act == "control_c":
        report_time()
        press_control_c()
        return True
    TRAPS[drill.place].arm(ACTS[drill.act], drill.position)
    return True


def disarm() -> None:
    for trap in TRAPS.values():
        trap.left = -1


def differ(act, pipe, state, x, y) -> None:
    """Do something else than the other ranks."""
    if act == "evaluate":
        fpipe.evaluate(pipe)(*state, (x,), y)
    if act == "outputs":
        fpipe.value_and_grad(pipe)(*state, (x,), y)
    if act == "batch":
        fpipe.value_and_grad(pipe, outputs=True)(*state, (x[:-1],), y[:-1])


def be_rank(drill: Drill, rank: int, folder: Path) -> None:
    """Be one rank; write down how it ended."""
    redirect(folder / f"log-{rank}")
    os.environ["DRILL"] = str(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store" if drill.store == "file" else f"tcp://127.0.0.1:{drill.store}",
        rank=rank,
        world_size=drill.ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    (folder / f"joined-{rank}").touch()
    while len([*folder.glob("joined-*")]) < drill.ranks:  # none may fail while others still connect
        time.sleep(0.001)
    try:
        take_part(drill, rank)
    except BaseException as error:
        cause, notes = getattr(error, "cause", None), getattr(error, "__notes__", [])
        said = {"kind": type(error).__name__, "said": str(error), "time": time.time(), "cause": cause, "notes": notes}
        (folder / f"end-{rank}.json").write_text(json.dumps(said))
        traceback.print_exc()
        raise


def run(drill: Drill, folder: Path) -> dict:
    """Run a drill; return the exit codes of all ranks, and what they said."""
    folder.mkdir()
    rank, children = fork(drill.ranks)
    if rank is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, shells ignore it
        try:
            be_rank(drill, rank, folder)
        except SystemExit as exit:
            os._exit(exit.code if isinstance(exit.code, int) else 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    codes, _ = wait(children, LIMIT, silent=[drill.rank] if drill.act in SILENT else [])
    said, began = read_ends(folder, drill.ranks), folder / "began"
    return {"codes": codes, "said": said, "began": float(began.read_text()) if began.exists() else 0.0}


def judge(drill: Drill, found: dict) -> str:
    """Return what is wrong with the outcome of a drill, or nothing."""
    if not found["began"]:
        return "nothing happened"
    if drill.act == "recover":
        return f"codes {found['codes']}" if any(found["codes"]) else ""
    code = found["codes"][drill.rank]
    if (code == 0) != (drill.act in ("leave", "less")):
        return f"the failing rank ended with code {code}"
    if drill.act == "control_c" and found["said"][drill.rank]["time"] - found["began"] > PAUSE:
        return "the wait was not interrupted"
    for rank in range(drill.ranks):
        said = found["said"][rank]
        wrong = "" if rank == drill.rank else judge_rank(drill, said, found["codes"][rank], found["began"])
        if wrong:
            return f"rank {rank}: {wrong}: {said}"
    return ""


def judge_rank(drill: Drill, said: dict, code: int, began: float) -> str:
    """Return what is wrong with what a rank says that did not fail itself."""
    if code != 1:
        return f"it ended with code {code}"
    if drill.place == BUILDING and drill.act in ("raise", "memory"):
        good = said["kind"] == "TransportError" and f"- rank {drill.rank}: " in said["said"]
        return "" if good and "on purpose" in said["said"] else "it does not say what another rank refused"
    if drill.act in DIFFERENT:
        good = said["kind"] == "TransportError" and "got ranks that differ" in said["said"]
        return "" if good else "it does not say how ranks differ"
    if said["kind"] != "RankError" or said["cause"][0] != drill.rank:
        return "it does not name the first failure"
    if not any(problem in said["cause"][2] for problem in PROBLEMS[drill.act]):
        return "it does not say how the rank failed"
    late = said["time"] - began - (TIMEOUT if drill.act in SILENT else 0)
    return "" if late <= NEAR or drill.act == "less" else f"it says so after {late:.1f} s"


def draw(seed: int, count: int) -> Iterator[Drill]:
    """Draw drills: acts, places, schedules, ranks and positions."""
    drawn = random.Random(seed)
    for _ in range(count):
        act, ranks = drawn.choice([*ACTS, *CALLS, "control_c"]), drawn.choice([2, 4])
        name = drawn.choice([*SCHEDULES, *[ON_A_MESH] * (ranks == 4 and act != "recover")])
        how = make_schedule(Drill(act, "", name, ranks, 0, 0, 0))
        place = drawn.choice([*PLACES, *[GROUPING] * (act in IN_GROUPS)]) if act in ACTS else "action"
        last = how.placement.home(how.stages - 1, 0)
        rank = last if place in ("loss", "join") else drawn.randrange(ranks)
        kinds = {"action": "FBIW", "stage": "F", "hook": "BI"}.get(place, "")
        most = sum(action.kind in kinds for action in how.actions(rank % how.ranks)) if kinds else 1
        most = MICROBATCHES if place == "loss" else 3 if place == GROUPING else most
        position = drawn.randint(1, most) if act in ACTS else 1
        store = "file" if drawn.random() < 0.5 else "tcp"
        yield Drill(act, place, name, ranks, rank, position, drawn.randrange(STEPS), store)


def delays(outcomes: list[dict]) -> dict[str, list[float]]:
    """Return the seconds until the last rank learned of a failure, sorted, by what it was."""
    found: dict[str, list[float]] = {"silent": [], "busy": [], "at once": []}
    for one in outcomes:
        drill = Drill.parse(one["drill"])
        times = [said["time"] for rank, said in enumerate(one["said"]) if said and rank != drill.rank]
        if times and drill.act not in CALLS:
            kind = "silent" if drill.act in SILENT else "busy" if drill.act == "control_c" else "at once"
            found[kind].append(max(times) - one["began"])
    return {kind: sorted(times) for kind, times in found.items()}


def find_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_placed(folder: Path, k: int, drill: Drill) -> dict:
    """Run a drill; return its outcome."""
    placed = drill._replace(store=str(find_port())) if drill.store == "tcp" else drill
    found = run(placed, folder / str(k))
    return {"drill": str(drill), "wrong": judge(drill, found), **found}


def main(folder: str, *texts: str) -> None:
    """Run drills, and write their outcomes to `FOLDER`/outcomes.json."""
    drills = [*draw(*map(int, texts))] if texts[0].isdecimal() else [*map(Drill.parse, texts)]
    build(Drill("kill", "action", "one_f_one_b", 2, 0, 1, 0))  # imports what a build imports
    gc.freeze()
    run_all(Path(folder), drills, partial(run_placed, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
