# SPDX-License-Identifier: Apache-2.0
"""Make the pipeline of a decoder from the pipeline of its model, cut at the same modules.

The decoder wraps the model that the pipeline captured, which has no tensors of its own, under the name `model`. So a
parameter's name in the decoder is its name in the model after the prefix `model.`, and every rank already holds the
parameters that it needs.

Runs when a kind of prompt first comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn

from fpipe.cutting.partition import Cuts, Marked
from fpipe.errors import InputError
from fpipe.inference.decoders import MakeDecoder
from fpipe.pipelines.batch import Batching
from fpipe.pipelines.capture_cache import CaptureCache
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.planner import Planner
from fpipe.record.front_ends.registry import find_capture
from fpipe.tensors.fake import fake_mode
from fpipe.tensors.torch_private import FakeTensor
from schedules import Schedule

PREFIX: Final = "model."


def build_decoding(pipe: Pipeline, make: MakeDecoder, how: Schedule, inputs: Sequence[Tensor], length: int) -> Pipeline:
    """Return the pipeline of the decoder of a model.

    - `inputs`: an example of the decoder's inputs for all sequences.
    - `length`: how many tokens the cache holds.
    """
    known = pipe.captures
    rows = len(inputs[0]) // how.microbatches
    with _mode_of(known.model), torch.device(pipe.device):
        decoder = make(known.model, rows, length).eval()
    if getattr(decoder, "model", None) is not known.model:
        raise InputError(
            f"decoder: got {type(decoder).__name__} without the model as its attribute 'model', expected one with it. "
            "Set self.model = model, so that parameters keep their names."
        )
    batching = Batching.of(tuple(inputs), None, ((0, None, 0)[: len(inputs)], None), how.microbatches)
    marks = [tuple(mark._replace(path=_prefixed(mark.path)) for mark in stage) for stage in known.marks()]
    whole = tuple(map(_prefixed, known.cuts.names(known.model, None)[0]))
    captures = CaptureCache(
        model=decoder,
        loss=known.loss,
        batchings={True: batching, False: batching},
        front_end=find_capture("trace", whole),
        cuts=Cuts(Marked(tuple(marks))),
        backward=False,
        hooks={},
        watching=known.watching,
    )
    held = tuple(frozenset(map(_prefixed, stage.buffers)) for stage in pipe.stages)
    most, backend = max(2, pipe.planner.most), pipe.planner.backend
    planner = Planner(how, captures, 0, pipe.ranks.ranks, frozenset(), backend, extra=held, most=most)
    return Pipeline(planner, pipe.ranks, pipe.rebuild, pipe.plan_ahead)


def _mode_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the mode that a model's fake tensors belong to."""
    found = [p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)]
    return found[0] if found else fake_mode()


def _prefixed(path: str) -> str:
    return f"{PREFIX}{path}" if path else PREFIX.rstrip(".")
