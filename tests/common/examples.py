# SPDX-License-Identifier: Apache-2.0
"""Load and run the scripts in examples/."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).parents[2] / "examples"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {} --max-restarts {}"


@contextmanager
def load_example(name: str) -> Iterator[ModuleType]:
    """Yield the example as a module, fresh; it sets the number of threads, which is put back."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    try:
        yield module
    finally:
        torch.set_num_threads(threads)


def run_under_torchrun(script: Path, *options: object, ranks: int = 2, restarts: int = 0) -> tuple[int, str, str]:
    """Run a script with one process per rank; return its exit code and what it printed."""
    command = [sys.executable, *shlex.split(TORCHRUN.format(ranks, restarts)), script, *options]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr
