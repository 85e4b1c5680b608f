# SPDX-License-Identifier: Apache-2.0
"""Kill the ranks of examples/resume.py again and again: torchrun starts them again, and nothing is lost.

    python tests/distributed/comeback.py FOLDER SEED COUNT [KILLS]

Each of the cases `SEED`, `SEED` + 1, ... is one training run. torchrun starts it several times, with other numbers of
ranks, and at most `KILLS` times a rank is killed: in a drawn phase, before a drawn call or operation on a file, or by
the clock. Each start draws its schedule, and some damage the newest checkpoint. In the end, everything that was saved
is bit for bit what a run saves that nobody disturbed.

Ranks are processes that torchrun makes by its option `--start-method forkserver`. The server has imported all that a
run needs, so a start takes tenths of a second.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.damage import KINDS, find_whole, read_marker
from tests.common.examples import load_example
from tests.distributed import comeback_worker
from tests.distributed.comeback_worker import SCHEDULES, Death, Start

KILLS, EVERY = 12, 2
OPTIONS = "--standalone --nproc-per-node {} --max-restarts {} --start-method forkserver --run-path --redirects 3"
MOST = {
    "start": {"calls": 5000, "clock": 100_000},
    "build": {"calls": 300_000, "clock": 500_000},
    "load": {"calls": 10_000, "clock": 50_000},
    "step": {"calls": 3000, "clock": 40_000},
    "update": {"calls": 1500, "clock": 15_000},
    "save": {"calls": 10_000, "clock": 50_000, "files": 22},
    "end": {"calls": 50, "clock": 2000},
}
"""About how many calls, microseconds, and operations on files each phase takes. A death may come after its phase."""
AGAIN = {"step": 4, "update": 4, "save": 3}
"""How often a rank enters a phase at most before it dies there; the others, it enters once."""


class Launch(NamedTuple):
    """One command of torchrun: how many ranks, and each start of them."""

    ranks: int
    starts: list[Start]


class Case(NamedTuple):
    """One training run: how long it is, to how many places it saves in turn, and how it is launched."""

    steps: int
    every: int
    places: int
    launches: list[Launch]


def draw(seed: int, kills: int) -> Case:
    """Draw a case; the last start of its last launch lives."""
    drawn = random.Random(seed)
    places, launches, left = drawn.choice([1, 2, count_steps(kills)]), list[Launch](), kills
    while left:
        ranks, some = drawn.choice([1, 2, 2, 3, 3, 4]), min(left, drawn.randint(1, 6))
        left -= some
        phases = [draw_phase(drawn) for _ in range(some)]
        if not left and drawn.random() < 0.3:
            phases[-1] = "end"
        launches.append(Launch(ranks, [draw_start(drawn, ranks, phase) for phase in phases]))
    last = draw_start(drawn, launches[-1].ranks, "start")
    launches[-1].starts.append(last._replace(death=None))
    return Case(count_steps(kills), EVERY, places, launches)


def draw_phase(drawn: random.Random) -> str:
    """Draw a phase that does not end the run; every other time, a save."""
    return "save" if drawn.random() < 0.4 else drawn.choice([phase for phase in MOST if phase != "end"])


def draw_start(drawn: random.Random, ranks: int, phase: str) -> Start:
    """Draw a schedule, damage, and a death in this phase."""
    unit = drawn.choice([*MOST[phase], *["files"] * (phase == "save")])
    amount, entry = drawn.randint(1, MOST[phase][unit]), drawn.randint(1, AGAIN.get(phase, 1))
    damage, in_background = drawn.choice([*KINDS, "", "", ""]), drawn.random() < 0.3
    death = Death(drawn.randrange(ranks), phase, entry, unit, amount)
    return Start(drawn.choice([*SCHEDULES]), in_background, damage, drawn.getrandbits(30), death)


def launch(folder: Path, number: int, one: Launch) -> bool:
    """Run torchrun; return whether all ranks of the last start have ended well."""
    options = shlex.split(OPTIONS.format(one.ranks, len(one.starts) - 1))
    script = [comeback_worker.__file__, str(folder), str(number)]
    try:
        torchrun.main([*options, "--log-dir", f"{folder}/log-{number}", *script])
    except ChildFailedError:
        return False
    return True


def run(seed: int, kills: int, folder: Path) -> dict[str, Any]:
    """Run a case; return how its launches have ended, and all that has happened."""
    case = draw(seed, kills)
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps(case))
    ended = [launch(folder, number, one) for number, one in enumerate(case.launches)]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {"seed": seed, "ended": ended, "events": events}


def count_steps(kills: int) -> int:
    """Return for how many steps a run trains that is killed so often: some more than it takes until then."""
    return 4 + 2 * kills


def judge(found: dict[str, Any], folder: Path, undisturbed: Path) -> str:
    """Return what is wrong with how a case has ended, or nothing."""
    if not found["ended"][-1]:
        return "the last launch did not end"
    for number, ended in enumerate(found["ended"]):
        events = [one for one in found["events"] if one["launch"] == number]
        starts, deaths = len({one["restart"] for one in events}), sum(one["event"] == "death" for one in events)
        if starts != deaths + ended:
            return f"launch {number}: {starts} starts for {deaths} deaths"
    for one in found["events"]:
        if one["event"] == "begin" and one["step"] != one["expected"]:
            return f"launch {one['launch']}, start {one['restart']}: began at step {one['step']}, not {one['expected']}"
    try:
        return compare(saved(folder), saved(undisturbed))
    except fpipe.InputError as error:
        return str(error)


def saved(folder: Path) -> dict[str, Any]:
    """Return the step of the newest checkpoint of a run, and every tensor by name."""
    whole = find_whole(folder)
    place = whole[max(whole)]
    return {"step": max(whole), **fpipe.safetensors(place / f"save-{read_marker(place)['save']}")}


def compare(got: dict[str, Any], want: dict[str, Any]) -> str:
    """Return which tensors differ, or nothing."""
    if got["step"] != want["step"] or got.keys() != want.keys():
        return f"the end is step {got['step']} with {len(got)} tensors, not {want['step']} with {len(want)}"
    different = [name for name in want if name != "step" and not same_bits(got[name], want[name])]
    return f"other bits: {different[:5]}" if different else ""


def train_undisturbed(steps: int, folder: Path) -> None:
    """Run the example in this process, with a checkpoint at its end."""
    with load_example("resume") as resume:
        resume.main(["--path", f"{folder}/run", "--steps", str(steps), "--every", str(steps)])


def count(events: list[dict[str, Any]]) -> Counter[str]:
    """Return how many ranks died, and when; how often checkpoints were damaged, and ranks or schedules changed."""
    deaths = [one for one in events if one["event"] == "death"]
    starts = [one for one in events if one["event"] == "start"]
    pairs = [*pairwise(starts)]
    found = Counter(f"killed in {one['phase']}" for one in deaths)
    found["killed"] = len(deaths)
    found["killed while saving"] = sum(one["phase"] == "save" or one["unit"] == "files" for one in deaths)
    found["killed by the clock"] = sum(one["unit"] == "clock" for one in deaths)
    found["damaged"] = sum(one["event"] == "damage" for one in events)
    found["restarts by torchrun"] = sum(one["restart"] > 0 for one in starts)
    found["launches"] = len({one["launch"] for one in starts})
    found["other ranks"] = sum(a["ranks"] != b["ranks"] for a, b in pairs)
    found["other schedule"] = sum(a["schedule"] != b["schedule"] for a, b in pairs)
    return found


def main(folder: str, seed: str, cases: str, kills: str = str(KILLS)) -> None:
    """Run cases, and write their outcomes to `FOLDER`/outcomes.json."""
    logging.disable()  # torchrun's, of every death; ranks have logs of their own
    home, most = Path(folder), int(kills)
    undisturbed = home / "undisturbed"
    train_undisturbed(count_steps(most), undisturbed)
    os.environ["PYTHONPATH"] = f"{sys.path[0]}:{os.environ.get('PYTHONPATH', '')}"  # of the server, and so of all ranks
    multiprocessing.set_forkserver_preload([name for name in sys.modules if name != "__main__"])
    outcomes, total = [], Counter[str]()
    for case in range(int(seed), int(seed) + int(cases)):
        began = time.monotonic()
        found = run(case, most, home / str(case))
        wrong, seen = judge(found, home / str(case), undisturbed), count(found["events"])
        outcomes.append({**found, "wrong": wrong})
        total += seen
        took = time.monotonic() - began
        print(f"{case}: {seen['killed']} killed, {took:.1f} s: {wrong or 'equal'}", flush=True)
        (home / "outcomes.json").write_text(json.dumps(outcomes))
    equal = sum(not one["wrong"] for one in outcomes)
    print(f"{equal} of {cases} equal", *(f"{name}: {number}" for name, number in sorted(total.items())), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
