# SPDX-License-Identifier: Apache-2.0
"""The cases of the simulation, with real processes over Gloo: real deaths, real files, a real clock.

    python tests/distributed/drawn_runs.py FOLDER SEED COUNT

Each of the cases `SEED`, `SEED` + 1, ... is what `python -m tests.simulation --seed N` draws: a model, a pipeline, a
training loop, and what goes wrong. Ranks are forks of one process. Faults strike at the actions and files that were
drawn; those at other steps of a rank strike by the clock. A lost message is left out: TCP loses none.

A run ends bit for bit as on one device; or ranks that are left name a rank at which a fault struck.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from fpipe.checkpoints import manifest
from fpipe.pipelines.builder import Builder
from fpipe.runtime import executor
from tests.common.ranks import fork, read_ends, redirect, run_all, wait
from tests.common.world.cases import Finding, InjectedError, Script
from tests.common.world.drawing import Case, Fault, draw, draw_layout
from tests.common.world.sharing import Shelf
from tests.common.world.verdicts import damage, require_final, require_results, run_alone

TIMEOUT = 8.0  # seconds, of the process group
NAP = TIMEOUT / 4
LIMIT = 90.0  # seconds, after which a rank hangs
TICK = 0.002  # seconds between the steps at which a fault strikes by the clock
DEADLY = ("die", "disk", "stop")
OWN = {"raise": "InjectedError", "interrupt": "KeyboardInterrupt", "exit": "TransportError"}
"""What the rank raises that a fault strikes."""
NAMED = {"raise": "InjectedError", "exit": "SystemExit"}
"""What the others say of it, if it can only strike in a call."""


class Trap:
    """Strikes once, with one fault of a rank, when it has been stepped on often enough."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder, self.left = fault, folder, fault.count + 1
        self.armed = fault.builds

    @property
    def place(self) -> str:
        """The kind of steps that count; others are counted by the clock."""
        if self.fault.kind == "disk":
            return "fsync"
        if self.fault.what == "capture":
            return "capture"
        return "compute" if self.fault.what == "compute" and not self.fault.builds else "clock"

    def arm(self) -> None:
        """Begin to count."""
        self.armed = True
        if self.place == "clock":
            clock = Timer(self.left * TICK, self.ring)
            clock.daemon = True
            clock.start()

    def ring(self) -> None:
        """Strike by the clock, unless the run has ended."""
        if self.armed:
            self.strike()

    def step(self, place: str) -> None:
        """Count a step of this kind."""
        if self.armed and place == self.place:
            self.left -= 1
            if self.left == 0:
                self.strike()

    def strike(self) -> None:
        """Do what the fault does, and note that it has."""
        kind = self.fault.kind
        (self.folder / f"struck-{self.fault.rank}").write_text(json.dumps([kind, self.fault.builds, time.time()]))
        if kind in ("die", "disk"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "nap":
            nap()
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        if kind == "exit":
            sys.exit(0)
        if kind == "raise":
            raise InjectedError("injected")


def nap() -> None:
    """Stop this process for a while."""
    me = os.getpid()
    if not os.fork():
        os.closerange(3, 1000)  # the connections of this rank are not its child's
        time.sleep(NAP)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def watch(trap: Trap) -> None:
    """Let actions, captures and files of this process count."""
    init, captures = executor.Execution.__init__, Builder._captures

    def observed(run: Any, rank: int, program: Any, *others: Any) -> None:
        rows = tuple(row._replace(handler=partial(counted, row.handler)) for row in program.instructions)
        init(run, rank, program._replace(instructions=rows), *others)

    def counted(handler: Any, *arguments: Any) -> Any:
        trap.step("compute")
        return handler(*arguments)

    def captured(builder: Any, module: Any) -> Any:
        trap.step("capture")
        return captures(builder, module)

    def fsync(number: int) -> None:
        trap.step("fsync")
        os.fsync(number)

    executor.Execution.__init__ = observed
    Builder._captures = captured
    manifest.os = SimpleNamespace(**{**vars(os), "fsync": fsync})


def be_rank(case: Case, fault: Fault | None, rank: int, folder: Path, home: Path) -> None:
    """Be one rank of a run: train, and say how that ended, and whether all that was computed is right."""
    redirect(folder / f"log-{rank}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=case.setup.processes,
        timeout=timedelta(seconds=TIMEOUT),
    )
    trap = Trap(fault or Fault("none", False, rank, "none", 0), folder)
    watch(trap)
    script, end = Script(case, home, Shelf()), {"kind": "", "said": "", "cause": None}

    def go_on(i: int) -> bool:
        if fault is None or fault.kind != "leave" or fault.count % case.steps != i:
            return True
        trap.strike()
        return False

    try:
        if trap.armed:
            trap.arm()
        script.train(rank, lambda: None if trap.armed else trap.arm(), go_on)
    except BaseException as error:
        traceback.print_exc()
        end |= {"kind": type(error).__name__, "said": str(error), "cause": getattr(error, "cause", None)}
    end |= {
        "time": time.time(),
        "final": rank in script.final,
        "first": min((i for _, i in script.results), default=-1),
    }
    trap.armed = False
    if dist.is_initialized():
        dist.destroy_process_group()
    (folder / f"end-{rank}.json").write_text(json.dumps({**end, "saved": script.saved, "wrong": compare(script)}))
    sys.stdout.flush()
    os._exit(1 if end["kind"] else 0)


def compare(script: Script) -> str:
    """Return what a rank has computed wrong, or nothing."""
    alone, setup = run_alone(script.case, Shelf()), script.case.setup
    if isinstance(alone, str):
        return ""
    me = SimpleNamespace(processes=1, copies=setup.copies, is_sharded=setup.is_sharded)
    ended, one = script.final, SimpleNamespace(setup=me, steps=script.case.steps)
    try:
        require_results(script, alone)
        if ended:
            require_final(cast("Script", SimpleNamespace(case=one, final=ended)), alone)
    except Finding as finding:
        return str(finding)
    return ""


def run(case: Case, faults: tuple[Fault, ...], folder: Path, home: Path) -> dict[str, Any]:
    """Run a case once; return the exit codes of all ranks, what they said, and which faults struck."""
    folder.mkdir()
    by_rank = {fault.rank: fault for fault in faults if fault.kind != "lose"}
    rank, children = fork(case.setup.processes)
    if rank is not None:
        try:
            be_rank(case, by_rank.get(rank), rank, folder, home)
        finally:
            os._exit(1)
    stopped = [r for r, fault in by_rank.items() if fault.kind == "stop"]
    codes, is_hung = wait(children, LIMIT, silent=stopped, is_stuck=is_stopped)
    said = read_ends(folder, case.setup.processes)
    struck = {r: json.loads((folder / f"struck-{r}").read_text()) for r in by_rank if (folder / f"struck-{r}").exists()}
    return {"codes": codes, "said": said, "struck": struck, "hung": is_hung}


def is_stopped(process: int) -> bool:
    """Return whether a process was stopped."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def judge(case: Case, found: dict[str, Any]) -> str:
    """Return what is wrong with how a run ended, or nothing."""
    if found["hung"]:
        return "it hangs"
    for rank, said in enumerate(found["said"]):
        kind = found["struck"].get(rank, [""])[0]
        wrong = judge_rank(said, found["codes"][rank], kind, found["struck"])
        if wrong:
            return f"rank {rank}: {wrong}: {said}"
    return ""


def judge_rank(said: dict[str, Any], code: int, kind: str, struck: dict[int, Any]) -> str:
    """Return what is wrong with how a rank ended that a fault of this kind struck, if any did."""
    if not said:
        return (
            ""
            if kind in DEADLY and code == -signal.SIGKILL
            else f"it ended with code {code}, and left no failure record"
        )
    if said["wrong"]:
        return "it computed something wrong"
    if said["final"] or kind == "leave":
        return "" if code == 0 else f"it ended with code {code}"
    if code != 1 or not struck:
        return f"it ended with code {code} after {struck}"
    if kind in OWN and said["kind"] == OWN[kind]:
        return ""
    refused = said["kind"] == "TransportError" and any(f"- rank {rank}: " in said["said"] for rank in struck)
    if said["kind"] != "RankError" or said["cause"][0] not in struck:
        return "" if refused else "it names no rank at which a fault struck"
    kind = struck[said["cause"][0]][0]
    return "" if said["cause"][2].startswith(NAMED.get(kind, "")) else f"it does not say that the fault was {kind}"


def run_case(seed: int, folder: Path) -> dict[str, Any]:
    """Run a case: once for each lot of faults, and then undisturbed, until a run comes to its end."""
    case = draw(seed)
    drawn, layout, least, struck, wrong = random.Random(seed + 1), case, 0, list[str](), ""
    home = folder / "saved"
    home.mkdir(parents=True)
    for k, faults in enumerate([*case.runs, ()]):
        found = run(layout, faults, folder / str(k), home)
        struck += [kind for kind, *_ in found["struck"].values()]
        if is_refused(found):
            if layout.schedule == case.schedule:
                return {"seed": seed, "wrong": "", "struck": struck, "ended": "refused", "runs": k + 1}
            found = run(case, faults, folder / f"{k}-again", home)  # this model can't be cut in so many stages
        wrong = judge(case, found)
        first = min((said["first"] for said in found["said"] if said and said["first"] >= 0), default=least)
        if first < least:
            wrong = wrong or f"run {k} began at step {first}, expected {least}, which was saved"
        least = max(least, *(said.get("saved", 0) for said in found["said"] if said), 0)
        if wrong or not any(found["codes"]):
            break
        if case.damages and least:
            least = damage(home, drawn)
        layout = replace(case, setup=replace(case.setup, schedule=draw_layout(drawn, case.schedule)))
    return {"seed": seed, "wrong": wrong, "struck": struck, "ended": "exact" if not wrong else "", "runs": k + 1}


def is_refused(found: dict[str, Any]) -> bool:
    """Return whether fpipe refused the model or its layout, on some rank."""
    words = ("CutError", "CaptureError")
    return any(
        said and (said["kind"] in words or any(f": {one}: " in said["said"] for one in words)) for said in found["said"]
    )


def main(folder: str, seed: str, cases: str) -> None:
    """Run cases, and write their outcomes to `FOLDER`/outcomes.json."""
    logging.getLogger("fpipe").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    gc.freeze()
    seeds = range(int(seed), int(seed) + int(cases))
    run_all(Path(folder), seeds, lambda _, one: run_case(one, Path(folder, str(one))))


if __name__ == "__main__":
    main(*sys.argv[1:])
