# SPDX-License-Identifier: Apache-2.0
"""Load the scripts in examples/."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).parents[2] / "examples"


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
