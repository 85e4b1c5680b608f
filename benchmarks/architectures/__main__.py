# SPDX-License-Identifier: Apache-2.0
"""Every architecture of transformers, as a tiny random model, cut in 2 and 8, and compared with one device bit for bit.

    python benchmarks/architectures                          # all, into docs/models.md: hours
    python benchmarks/architectures --only gpt2 t5 vit       # some, printed
    python benchmarks/architectures --results found.jsonl    # kept; run again to resume where it stopped

First all are tried in the first variant, then in the others. Results are kept, so the page can be written at any time
with --write.

Needs transformers; some architectures also need timm, torchvision, torchaudio, scipy or pillow, and are listed as not
tried without them. Each runs in a separate process, with one thread, a time limit and a memory limit. Results from
another commit are not reused: a page describes one commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import time
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import transformers
from classes import architectures
from table import page
from trial import VARIANTS, Trial, trials

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "models.md"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/architectures", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as in config.model_type")
    parser.add_argument("--capture", default="trace", help="the front end")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=300, help="the limit of an architecture, in CPU seconds")
    parser.add_argument("--gigabytes", type=float, default=8, help="the memory limit of an architecture")
    parser.add_argument("--results", type=Path, default=Path(gettempdir()) / "fpipe_architectures.jsonl")
    parser.add_argument("--write", action="store_true", help="write the page of what is known, and try nothing")
    parser.add_argument("--page", type=Path, help=f"the page to write; by default {PAGE.name}, if all were asked for")
    return parser.parse_args()


def commit() -> str:
    """Return the commit that is tried, with a plus sign if files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = ["git", "status", "--porcelain", "fpipe", "schedules", "benchmarks/architectures"]
    dirty = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return head.stdout.strip() + "+" * bool(dirty)


def known(results: Path, at: str) -> dict[str, Trial]:
    """Return the latest trial of each model type at this commit, finished or not."""
    whole = results.read_text().rpartition("\n")[0] if results.exists() else ""  # another process may be writing
    records = [record for line in whole.splitlines() if (record := json.loads(line))["commit"] == at]
    return {record["kind"]: Trial(**record) for record in records}


def attempt(kind: str, names: Sequence[str], asked: argparse.Namespace, at: str) -> None:
    """Try one architecture in this process, and append a line to the results after each variant."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.filterwarnings("ignore")
    limit = int(asked.gigabytes * (1 << 30))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (int(asked.seconds), int(asked.seconds)))
    torch.set_num_threads(1)
    start = known(asked.results, at).get(kind) or Trial(kind, names[0], at)
    for found in trials(start, names, asked.variants, asked.capture):
        add(asked.results, found)


def add(results: Path, found: Trial) -> None:
    with results.open("a") as file:
        file.write(json.dumps(found.record()) + "\n")


def attempts(todo: Iterable[tuple[str, Sequence[str]]], asked: argparse.Namespace, at: str) -> None:
    """Try all architectures, several at a time, each in its own process."""
    fork, left = multiprocessing.get_context("fork"), list(todo)
    running: dict[BaseProcess, tuple[str, Sequence[str], float]] = {}
    while left or running:
        while left and len(running) < asked.workers:
            kind, names = left.pop(0)
            process = fork.Process(target=attempt, args=(kind, names, asked, at))
            process.start()
            running[process] = kind, names, time.monotonic()
        wait([process.sentinel for process in running], timeout=1)
        for process in list(running):
            if finish(process, running, asked, at):
                print(f"  {len(left) + len(running)} to go", flush=True)


def finish(process: BaseProcess, running: dict[BaseProcess, Any], asked: argparse.Namespace, at: str) -> bool:
    """Reap a process that has ended or hangs, and report the outcome. Return whether there was one to reap."""
    kind, names, began = running[process]
    late = time.monotonic() - began > 10 * asked.seconds  # it hangs; on a busy machine, work takes a while
    if process.is_alive() and not late:
        return False
    if process.is_alive():
        process.kill()
    process.join()
    del running[process]
    found = known(asked.results, at).get(kind) or Trial(kind, names[0], at)
    if not found.finished:
        slow = late or process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = f"more than {asked.seconds:.0f} seconds" if slow else f"the process ended with {process.exitcode}"
        stop(found, why, asked.variants)
        add(asked.results, found)
    said = (found.untried and f"not tried: {found.untried}") or "; ".join(found.wrong.values()) or "bitwise"
    print(f"{kind}: {found.name}: {said}", flush=True)
    return True


def stop(found: Trial, why: str, variants: Sequence[str]) -> None:
    """Record why a trial ended before all variants were tried."""
    found.finished = True
    if not found.parameters:
        found.untried = why
    for name in variants:
        if found.parameters and not VARIANTS[name].dropping:
            found.results.setdefault(name, why)


def is_left(found: Trial, variants: Sequence[str]) -> bool:
    """Return whether an architecture can be tried in more of these variants."""
    missing = [name for name in variants if name not in found.results and not VARIANTS[name].dropping]
    return not found.finished or bool(missing and not found.untried)


def main() -> None:
    asked, at = options(), commit()
    transformers.logging.set_verbosity_error()
    types = architectures()
    wanted = {kind: types[kind] for kind in asked.only or types}
    for variants in () if asked.write else (asked.variants[:1], asked.variants):
        done = known(asked.results, at)
        todo = [(kind, names) for kind, names in wanted.items() if kind not in done or is_left(done[kind], variants)]
        attempts(todo, argparse.Namespace(**{**vars(asked), "variants": variants}), at)
    where = asked.page or (None if asked.only else PAGE)
    if where is not None:
        where.parent.mkdir(exist_ok=True)
        where.write_text(page([found for found in known(asked.results, at).values() if found.finished], at))


if __name__ == "__main__":
    main()
