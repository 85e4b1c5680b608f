# SPDX-License-Identifier: Apache-2.0
"""Every architecture of transformers, as a tiny random model, cut in 2 and 4, and compared with one device bit for bit.

    python benchmarks/architectures                          # all, into docs/models.md: an hour or two
    python benchmarks/architectures --only gpt2 t5 vit       # some, printed
    python benchmarks/architectures --results found.jsonl    # kept; run again, it goes on where it stopped

Needs transformers; some architectures need timm, torchvision, torchaudio, scipy or pillow too, and are listed as not
tried without them. Each runs in a process of its own, with one thread, a time limit and a memory limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
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
from trial import SCHEDULES, Trial, trial

SECONDS, GIGABYTES = 300, 8
PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/architectures", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as in config.model_type")
    parser.add_argument("--capture", default="trace", help="the front end")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--results", type=Path, default=Path(gettempdir()) / "fpipe_architectures.jsonl")
    parser.add_argument("--page", type=Path, help=f"the page to write; by default {PAGE.name}, if all were asked for")
    return parser.parse_args()


def known(results: Path) -> dict[str, Trial]:
    """The trials of an earlier run, by model type."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {found.kind: found for found in (Trial(**json.loads(line)) for line in lines)}


def attempt(kind: str, names: Sequence[str], asked: argparse.Namespace) -> None:
    """Try one, in this process, and add a line to the results."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    torch.set_num_threads(1)
    add(asked.results, trial(kind, names, asked.schedules, asked.capture))


def add(results: Path, found: Trial) -> None:
    with results.open("a") as file:
        file.write(json.dumps(found.record()) + "\n")


def attempts(todo: Iterable[tuple[str, Sequence[str]]], asked: argparse.Namespace) -> None:
    """Try all, some at a time."""
    fork, left = multiprocessing.get_context("fork"), list(todo)
    running: dict[BaseProcess, tuple[str, Sequence[str], float]] = {}
    while left or running:
        while left and len(running) < asked.workers:
            kind, names = left.pop(0)
            process = fork.Process(target=attempt, args=(kind, names, asked))
            process.start()
            running[process] = kind, names, time.monotonic()
        wait([process.sentinel for process in running], timeout=1)
        for process in list(running):
            finish(process, running, asked)


def finish(process: BaseProcess, running: dict[BaseProcess, Any], asked: argparse.Namespace) -> None:
    """Let go of a process that has ended or taken too long, and say how it went."""
    kind, names, began = running[process]
    late = time.monotonic() - began > SECONDS
    if process.is_alive() and not late:
        return
    if process.is_alive():
        process.kill()
    process.join()
    del running[process]
    if process.exitcode:
        why = f"more than {SECONDS} seconds" if late else f"the process ended with {process.exitcode}"
        add(asked.results, Trial(kind, names[0], untried=why))
    found = known(asked.results)[kind]
    said = (found.untried and f"not tried: {found.untried}") or "; ".join(found.wrong.values()) or "bitwise"
    print(f"{kind}: {found.name}: {said}", flush=True)


def main() -> None:
    asked = options()
    transformers.logging.set_verbosity_error()
    types = architectures()
    wanted = {kind: types[kind] for kind in asked.only or types}
    done = {} if asked.only else known(asked.results)
    attempts([(kind, names) for kind, names in wanted.items() if kind not in done], asked)
    where = asked.page or (None if asked.only else PAGE)
    if where is not None:
        where.parent.mkdir(exist_ok=True)
        where.write_text(page(list(known(asked.results).values())))


if __name__ == "__main__":
    main()
