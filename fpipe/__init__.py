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
from fpipe.model.parts import ModuleGraph, Part
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step
from fpipe.timelines import costs, timeline
from fpipe.verification.comparison import Verification
from fpipe.weights.safetensors import safetensors

__version__ = "0.1.0"

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
    "__version__",
    "costs",
    "evaluate",
    "pipeline",
    "reference",
    "safetensors",
    "timeline",
    "value_and_grad",
    "verify",
]
