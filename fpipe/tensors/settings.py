# SPDX-License-Identifier: Apache-2.0
"""torch's process-wide settings, which select kernels and default dtypes.

Problem. A forward may change them around some calls, as with `torch.backends.mkldnn.flags`. A module that runs as
Python does so in every step. But recorded torch calls, or a graph of operators, would run without the change.

Idea. At each torch call, compare the settings with those in force when the enclosing module's call began.

Runs when a pipeline is built; `captured_settings` also runs in every step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from fpipe.tensors.torch_private import setting_getter

PRECISIONS: Final = [(kind, what) for kind in ("mkldnn", "cuda") for what in ("matmul", "conv", "rnn")]
KERNEL_SETTINGS: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        "the default dtype": torch.get_default_dtype,
        "deterministic algorithms": setting_getter("deterministic_algorithms"),
        "oneDNN": setting_getter("mkldnn_enabled"),
        "deterministic kernels of oneDNN": setting_getter("mkldnn_deterministic"),
        "NNPACK": setting_getter("nnpack_enabled"),
        "cuDNN": setting_getter("cudnn_enabled"),
        "deterministic kernels of cuDNN": setting_getter("cudnn_deterministic"),
        "the search for kernels of cuDNN": setting_getter("cudnn_benchmark"),
        "reduced precision in sums of float16": setting_getter("cublas_allow_fp16_reduced_precision_reduction"),
        "reduced precision in sums of bfloat16": setting_getter("cublas_allow_bf16_reduced_precision_reduction"),
        **{
            f"the precision of {what} on {kind}": partial(setting_getter("fp32_precision_getter"), kind, what)
            for kind, what in PRECISIONS
        },
    }
)
OPERATOR_SETTINGS: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        "flash attention": setting_getter("flash_sdp_enabled"),
        "memory-efficient attention": setting_getter("mem_efficient_sdp_enabled"),
        "attention in single operators": setting_getter("math_sdp_enabled"),
        "attention of cuDNN": setting_getter("cudnn_sdp_enabled"),
    }
)

OF_KERNELS: Final = tuple(KERNEL_SETTINGS.values())
OF_OPERATORS: Final = tuple(OPERATOR_SETTINGS.values())

VARIABLES: Final = ("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE")
"""Variables of the environment that select kernels."""
SMALLEST: Final = 2.0**-149
"""The smallest positive float32, which is not a normal number."""


class Settings(NamedTuple):
    """The settings that select the `kernels` of operators, and those that select the `operators` of a function."""

    kernels: tuple[Any, ...]
    operators: tuple[Any, ...]


def settings() -> Settings:
    """Return the current settings."""
    return Settings(tuple([get() for get in OF_KERNELS]), tuple([get() for get in OF_OPERATORS]))


def changes_since(before: Settings) -> str:
    """Return the names of the settings that differ from those of `before`; empty if none does.

    >>> import torch
    >>> before = settings()
    >>> torch.use_deterministic_algorithms(True)
    >>> changes_since(before)
    'deterministic algorithms'
    >>> torch.use_deterministic_algorithms(False)
    >>> changes_since(before)
    ''
    """
    now = settings()
    if now == before:
        return ""
    names = (*KERNEL_SETTINGS, *OPERATOR_SETTINGS)
    rows = zip(names, (*before.kernels, *before.operators), (*now.kernels, *now.operators), strict=True)
    return ", ".join([name for name, old, new in rows if old != new])


def describe_settings(device: torch.device) -> list[str]:
    """Return, a line each, what selects the kernels of a device, and with them the last bits of what they compute.

    >>> import torch
    >>> "deterministic algorithms: False" in describe_settings(torch.device("cpu"))
    True
    """
    table = {**KERNEL_SETTINGS, **OPERATOR_SETTINGS, "matmul precision": torch.get_float32_matmul_precision}
    known: dict[str, object] = {name: get() for name, get in table.items()}
    known |= {name: os.environ.get(name, "not set") for name in VARIABLES}
    if device.type == "cpu":
        known["numbers that are not normal"] = "kept" if (torch.tensor([SMALLEST]) + 0).item() else "flushed to zero"
    return [f"{name}: {value}" for name, value in known.items()]


def describe_processor(device: torch.device) -> list[str]:
    """Return a line with the vectors for which a processor's kernels are made; none for another device."""
    return [torch.backends.cpu.get_cpu_capability()] if device.type == "cpu" else []


def captured_settings() -> dict[str, Any]:
    """Return the current settings, by name, that a capture fixes: the default dtype, and choices of operators."""
    return {"the default dtype": torch.get_default_dtype(), **{name: get() for name, get in OPERATOR_SETTINGS.items()}}
