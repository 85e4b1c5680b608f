# SPDX-License-Identifier: Apache-2.0
"""Functional, JAX-style pipeline parallelism for PyTorch, bit for bit equal to one device."""

from fpipe.collector import postpone_collection

with postpone_collection():
    import fpipe.companion  # noqa: F401 (before anything imports schedules)

    # isort: split
    from fpipe.api import evaluate, pipeline, reference, value_and_grad, verify
    from fpipe.audits.audit import Audit, Rerun
    from fpipe.checkpoints.export import export
    from fpipe.checkpoints.load import Checkpoint, load
    from fpipe.checkpoints.manifest import is_checkpoint
    from fpipe.checkpoints.save import begin_save, save
    from fpipe.checkpoints.signals import catch_signals
    from fpipe.drop_in.pipelined import Pipelined
    from fpipe.errors import (
        CaptureError,
        Cause,
        CorruptionError,
        CutError,
        DeadlockError,
        GraphError,
        InputError,
        MismatchError,
        PipelineError,
        RankError,
        ScheduleError,
        SizeError,
        TransportError,
        VocabularyError,
    )
    from fpipe.functional.bound import Executed
    from fpipe.functional.execute import execute, processes
    from fpipe.functional.graph import Stages, connect_stages
    from fpipe.functional.record import ModelRecord, ModelStages, capture, cut
    from fpipe.functional.stage import Stage, stage
    from fpipe.inference.decoders import StaticDecoder
    from fpipe.inference.generation import generate
    from fpipe.inference.predictions import predict, stream
    from fpipe.inference.sampling import choose_likeliest, sample
    from fpipe.meshes.arguments import Place, Sharded
    from fpipe.pipelines.handshake import require_same
    from fpipe.pipelines.options import Gradients, Microbatching, Recording
    from fpipe.pipelines.pipeline import Pipeline
    from fpipe.pipelines.results import Step
    from fpipe.pipelines.slices import even_costs
    from fpipe.planning.make import plan
    from fpipe.planning.plan import Plan
    from fpipe.planning.profile import Profile
    from fpipe.planning.profiler import profile
    from fpipe.planning.roofline import Roofline
    from fpipe.planning.timelines import MeasuredTimeline, costs, timeline
    from fpipe.record.front_ends.parts import ModuleGraph, Part
    from fpipe.streams.corrections import delays, error_feedback, pipemare, predict_weights
    from fpipe.streams.train_stream import Stream, StreamResult, train_stream
    from fpipe.tensors.names import as_tree, by_name
    from fpipe.training.clipping import clip, clip_value
    from fpipe.training.norms import all_finite, norm
    from fpipe.training.optimizers import Optimizer, optimizer
    from fpipe.training.precision import LossScale, masters
    from fpipe.training.train_step import train_step
    from fpipe.verification.comparison import Verification
    from fpipe.verification.nonfinite import NonFinite, find_nonfinite
    from fpipe.verification.prove import Proof, prove
    from fpipe.verification.reference import reference_stream
    from fpipe.weights.safetensors import safetensors
    from schedules import __version__

__all__ = [
    "Audit",
    "CaptureError",
    "Cause",
    "Checkpoint",
    "CorruptionError",
    "CutError",
    "DeadlockError",
    "Executed",
    "Gradients",
    "GraphError",
    "InputError",
    "LossScale",
    "Microbatching",
    "MismatchError",
    "ModelStages",
    "ModuleGraph",
    "NonFinite",
    "Optimizer",
    "Part",
    "Pipeline",
    "PipelineError",
    "Pipelined",
    "Place",
    "Plan",
    "Profile",
    "Proof",
    "MeasuredTimeline",
    "RankError",
    "Rerun",
    "Recording",
    "ModelRecord",
    "Roofline",
    "ScheduleError",
    "SizeError",
    "Stage",
    "Stages",
    "Step",
    "Stream",
    "StreamResult",
    "TransportError",
    "Sharded",
    "Verification",
    "VocabularyError",
    "__version__",
    "all_finite",
    "as_tree",
    "begin_save",
    "by_name",
    "capture",
    "catch_signals",
    "clip",
    "clip_value",
    "connect_stages",
    "costs",
    "cut",
    "delays",
    "error_feedback",
    "evaluate",
    "even_costs",
    "execute",
    "export",
    "find_nonfinite",
    "is_checkpoint",
    "load",
    "masters",
    "norm",
    "optimizer",
    "pipeline",
    "pipemare",
    "plan",
    "predict",
    "predict_weights",
    "processes",
    "prove",
    "profile",
    "StaticDecoder",
    "choose_likeliest",
    "generate",
    "sample",
    "reference",
    "reference_stream",
    "require_same",
    "safetensors",
    "save",
    "stage",
    "stream",
    "timeline",
    "train_step",
    "train_stream",
    "value_and_grad",
    "verify",
]
