# SPDX-License-Identifier: Apache-2.0
"""The date, machine and versions of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import torch


def processor() -> str:
    """Return the name of the processor, or of its architecture if the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def machine() -> str:
    """Return date, processor, cores, system and versions in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{date.today()}, {processor()}, {cores} cores"
    if torch.accelerator.is_available():
        found += f", {torch.cuda.get_device_name() if torch.cuda.is_available() else 'an accelerator'}"
    return f"{found}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
