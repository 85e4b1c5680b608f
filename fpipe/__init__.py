# SPDX-License-Identifier: Apache-2.0
"""Functional, JAX-style pipeline parallelism for PyTorch, bit for bit equal to one device."""

from fpipe.api import evaluate, pipeline, reference, value_and_grad, verify
from fpipe.errors import (
    CaptureError,
    CutError,
    DeadlockError,
    GraphError,
    InputError,
    MismatchError,
    PipelineError,
    ScheduleError,
    SizeError,
    TransportError,
    VocabularyError,
)
from fpipe.materialisation.checkpoint import safetensors
from fpipe.parts import ModuleGraph, Part
from fpipe.pipe import Pipeline
from fpipe.step import Step
from fpipe.timelines import costs, timeline
from fpipe.verification import Verification

__all__ = [
    "CaptureError",
    "CutError",
    "DeadlockError",
    "GraphError",
    "InputError",
    "MismatchError",
    "ModuleGraph",
    "Part",
    "Pipeline",
    "PipelineError",
    "ScheduleError",
    "SizeError",
    "Step",
    "TransportError",
    "Verification",
    "VocabularyError",
    "costs",
    "evaluate",
    "pipeline",
    "reference",
    "safetensors",
    "timeline",
    "value_and_grad",
    "verify",
]
