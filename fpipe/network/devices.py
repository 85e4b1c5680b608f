# SPDX-License-Identifier: Apache-2.0
"""Which device a process of a job computes on, and that its group can reach it.

Problem. What is forgotten when a job is launched on accelerators shows late, as a hang or as an error of NCCL that
names no argument: a process that has not selected its device, two processes on one device, a group that cannot move
its tensors.

Idea. All of that can be read before any group is created, and every process then hears what is wrong, with its repair.

Runs when a pipeline is built, or a model is profiled, over several processes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import TransportError
from fpipe.tensors.torch_private import device_types

MadeThere = TypeVar("MadeThere")


def require_reachable(device: torch.device, kinds: Sequence[torch.device], backend: str) -> None:
    """Raise `TransportError` unless a group's backend moves tensors on the device; `kinds` are those that it moves."""
    if device.type not in {kind.type for kind in kinds}:
        moved = " and ".join(sorted(kind.type for kind in kinds)) or "none"
        raise TransportError(
            f"group: got the backend {backend!r}, which moves tensors on {moved}, expected one for {device}, where the "
            "pipeline is. Move the model and the example, or initialize torch.distributed with another backend: "
            '"nccl" for GPUs, "gloo" for CPUs, "cpu:gloo,cuda:nccl" for both.'
        )
    if backend in ("mpi", "fake"):
        raise TransportError(
            f'group: got the backend {backend!r}, expected one whose transfers can be posted ahead and aborted: "nccl" '
            'for GPUs, "gloo" for CPUs. Initialize torch.distributed with one of them.'
        )


def require_selected(device: torch.device, current: int | None, bound: torch.device | None) -> None:
    """Raise `TransportError` if the process has selected another device than the pipeline's.

    `current` is the number of its current device, `None` on a CPU; `bound` the device that its group is bound to.
    """
    if current is not None and device.index != current:
        hint = " init_process_group(device_id=...) does not select it." if bound == device else ""
        raise TransportError(
            f"device: got a pipeline on {device}, while the current device of this process is {device.type}:{current}, "
            f"expected the same: kernels and groups without an explicit device use the current one.{hint} Call "
            f"torch.{device.type}.set_device({device.index}) before init_process_group."
        )
    if bound is not None and bound.type == device.type and bound != device:
        raise TransportError(
            f"device: got a pipeline on {device}, while init_process_group was given device_id={bound}, expected the "
            "same. Pass the device of the model and the example."
        )


def require_distinct(device: torch.device, gather: Callable[[Tensor], Sequence[Tensor]], own: str) -> None:
    """Raise `TransportError` if two processes of the job compute on one device; `own` identifies this process's.

    `gather` returns the tensors that all processes pass.
    """
    digest = blake2b(own.encode(), digest_size=8).digest()
    rows = [row.item() for row in gather(torch.tensor(int.from_bytes(digest, signed=True)))]
    for k, row in enumerate(rows):
        if row in rows[:k]:
            raise TransportError(
                f"device: got processes {rows.index(row)} and {k} of the job on one device ({own}, on this process), "
                f"expected one for each. Call torch.{device.type}.set_device(int(os.environ['LOCAL_RANK'])) first, and "
                "look at CUDA_VISIBLE_DEVICES. To share a device on purpose, give each process a different NCCL_HOSTID."
            )


def identify(device: torch.device) -> str:
    """Return what tells a device from those of other processes and machines, as NCCL does: its machine and itself."""
    machine = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    if device.type != "cuda":
        return f"{machine} {device}"
    return f"{machine} {torch.cuda.get_device_properties(device).uuid}"


def current_index(device: torch.device) -> int | None:
    """Return the number of the current device of this process, if it is of the same kind."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None or kind.type != device.type else torch.accelerator.current_device_index()


def run_on(device: torch.device, make: Callable[[], MadeThere]) -> MadeThere:
    """Return what `make` returns in a new thread, whose current device is this one."""
    if current_index(device) is not None:
        torch.accelerator.set_device_index(device)
    return make()


def require_device(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raise `TransportError` unless the group reaches the device, and this process has selected it."""
    require_reachable(device, device_types(group), dist.get_backend(group))
    if device.type != "cpu":
        world = dist.group.WORLD
        require_selected(device, current_index(device), None if world is None else world.bound_device_id)
