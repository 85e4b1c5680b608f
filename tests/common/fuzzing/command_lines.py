# SPDX-License-Identifier: Apache-2.0
"""Command lines of both packages with other words; every one ends with an exit code and a line that says why."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import fpipe.__main__
import schedules.__main__
from schedules.certification import certify
from schedules.files.csv import write_csv
from tests.common.fuzzing.bounds import REFUSED, ask
from tests.common.fuzzing.documents import Documents
from tests.common.fuzzing.mutations import mutate_bytes, mutate_words

MINE = """
from schedules import B, F, schedule

@schedule()
def good(rank, ranks, microbatches):
    for i in range(microbatches):
        yield F(rank, i)
        yield B(rank, i)

@schedule()
def failing(rank, ranks, microbatches):
    yield F(rank, 0)
    raise KeyError(rank)

def plain():
    return {}

def task():
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return {"model": model, "example": (torch.ones(4, 4),), "loss": torch.mean, "microbatches": 2}

def wrong():
    return {**task(), "nope": 1}

def numbered():
    return {**task(), 3: 1}
"""
LINES = (
    "list",
    "show one_f_one_b --ranks 3 --microbatches 4 --B 2 --comm 0.5",
    "show interleaved_1f1b chunks=2 --ranks 2 --microbatches 4 --svg a.svg --trace b.json --csv c.csv",
    "check zb_v --ranks 2 --microbatches 4 --device",
    "check table.csv",
    "check mine.py:good --ranks 2",
    "simulate one_f_one_b split_backward --ranks 2 --B 2.1 --latency 1 --bytes 8 --bandwidth 4 --jitter .1 --seed 3",
    "simulate gpipe --ranks 3 --microbatches 2 --graph 0-2,1-2 --F 1,2,3 --activation 3 --brief",
    "compare gpipe one_f_one_b mine.py:good --ranks 2 --memory 4",
    "compare interleaved_1f1b chunks=1..3 --ranks 2 --microbatches 4 --lengths 1,2,1,1",
    "search one_f_one_b split_backward --ranks 2 --microbatches 3 --seconds 0.1",
    "audit table.csv --save d.json",
    "audit --layout Et*3|(tt|)*2,m|L --embedding .5",
    "audit one_f_one_b --ranks 2 --microbatches 4",
)
PREPARE = (
    "plan profile.json --ranks 2 --microbatches 4 --seconds 0.1 --memory 1GB --save e.json",
    "plan profile.json --ranks 3 --microbatches 2 --seconds 0.1 --schedules gpipe,zb_h1 --cuts 1",
    "plan mine.py:task --ranks 2 --seconds 0.1 --microbatches 2",
    "doctor mine.py:task --ranks 2 --seconds 0.1 --memory 1GB",
    "prove mine.py:task --ranks 2 --schedule gpipe --microbatches 2 --seed 1",
)
OPTIONS = """--ranks --microbatches --F --B --W --svg --csv --trace --graph --seed --jitter --lengths --memory --bytes
--device --seconds --help --version --layout --comm --schedule --cuts"""
VALUES = """-1 0 1 2 3 nan inf 1e400 1,2 1..3 1..999999999 chunks=0 chunks=2 x=1 gpipe zb_v zb_auto split_backward
recompute mirror repeat times=0 0-1 F0-1 table os.system __main__ = : , --"""
FILES = """mine.py:failing mine.py:plain mine.py:task mine.py:wrong mine.py:numbered mine.py nothing.py:f table.csv
nothing.csv . / .. /dev/null profile.json text.csv"""
WORDS = f"{OPTIONS} {VALUES} {FILES}".split()


class CommandLines:
    """Command lines that are right, and the files that they name."""

    def __init__(self) -> None:
        table = io.StringIO()
        write_csv(schedules.one_f_one_b(2, 3), table)
        self.files = {
            "mine.py": MINE.encode(),
            "table.csv": table.getvalue().encode(),
            "plan.json": certify(schedules.gpipe(2, 2)).text.encode(),
            "profile.json": Documents().originals["profile"][0],
            "text.csv": b"0F0,\xff\xfe",
        }

    def try_one(self, seed: int) -> str:
        """Change the words of a command line, and run it. Return its command and exit code."""
        drawn = Random(seed)
        main, lines = (schedules.__main__.main, LINES) if drawn.random() < 0.85 else (fpipe.__main__.main, PREPARE)
        words = mutate_words(drawn, drawn.choice(lines).split(), WORDS)
        words = [one.replace("\0", "") for one in words if os.path.basename(one) not in ("zero",)]
        with tempfile.TemporaryDirectory() as folder, _inside(folder):
            for name, data in self.files.items():
                Path(name).write_bytes(mutate_bytes(drawn, data) if drawn.random() < 0.05 else data)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = ask(lambda: _run(main, words))
        assert code is not REFUSED, "an error of fpipe left the command"
        assert code in (0, 1, 2), code
        assert code != 2 or err.getvalue(), "ends with 2, and does not say why"
        assert "Traceback" not in err.getvalue(), err.getvalue()
        assert len(err.getvalue()) < 20_000, f"says {len(err.getvalue())} characters"
        return f"{words[0][:9] if words and words[0].isalpha() else '?'}: {code}"


def _run(main: object, words: list[str]) -> object:
    try:
        return main(words)  # type: ignore[operator]
    except SystemExit as error:  # of argparse
        return error.code


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
