# SPDX-License-Identifier: Apache-2.0
"""Turn a language model into a decoder: a module that keeps the attention's keys and values in its buffers.

Problem. A model that generates token by token must remember the keys and values of earlier tokens. Models of Hugging
Face keep them in a cache object that the caller passes from call to call. A growing cache has new shapes at every
token, and an object that crosses stages would have to be sent.

Idea. A cache of fixed size is a set of tensors that the model changes in place: just what buffers are. As a buffer, the
cache of a layer lives on the rank of that layer and never crosses a cut; a stage remains a pure function from buffers
to new buffers; and one capture serves all tokens, because a token's position is a tensor, not a shape.

A decoder for other models is a module like this one: `make(model, sequences, length)` returns a module that has `model`
as its attribute `model`, and registers its cache as buffers. Its forward takes

- `ids`: int64 [sequences, T], the next T tokens; `start`: int64 [], how many are in the cache already;
- `mask`, if prompts are padded: bool [sequences, length], true for what is not padding;

and returns the logits of the last token, [sequences, vocabulary].

The pipeline of a decoder is cut at the same modules as that of its model, whose captured module it wraps under the name
`model`. So a parameter's name in the decoder is its name in the model after the prefix `model.`, and every rank already
holds the parameters that it needs.

Invariant: a decoder reads no parameter by another path than the model does, so it can be cut where the model is.

Runs when a new kind of prompt is captured, and in every token, where modules run as Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.cutting.partition import Cuts, Marked
from fpipe.errors import InputError
from fpipe.pipelines.batch import Batching
from fpipe.pipelines.captures import Captures
from fpipe.pipelines.memo import Memo
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.planner import Planner
from fpipe.record.front_ends.registry import find_capture
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.fake import fake_mode
from fpipe.tensors.torch_private import FakeTensor
from schedules import Schedule

MakeDecoder: TypeAlias = Callable[[nn.Module, int, int], nn.Module]
"""Makes the decoder of a model, for a number of sequences and a number of tokens."""


class StaticDecoder(nn.Module):
    """A decoder of a causal language model from Hugging Face's transformers, with a `StaticCache` in its buffers.

    - `model`: the model; its forward takes `past_key_values`.
    - `sequences`, `length`: the size of the cache: sequences that are decoded together, and tokens of each.

    Raise `InputError` for a model without a config, or one whose cache is not of keys and values of all tokens, such as
    that of a recurrent layer.
    """

    def __init__(self, model: nn.Module, sequences: int, length: int) -> None:
        super().__init__()
        require_arguments(StaticDecoder.__init__, locals())
        self.model, self.length = model, length
        layers, config = _make_cache(model, length).layers, _text_config(model)
        first = next(p for p in model.parameters() if p.is_floating_point())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for k in range(len(layers)):
            for name in ("keys", "values"):
                room = torch.zeros(sequences, heads, length, size, dtype=first.dtype, device=first.device)
                self.register_buffer(f"{name}_{k}", room, persistent=False)

    def forward(self, ids: Tensor, start: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits [sequences, vocabulary] after the tokens `ids`, which begin at position `start`."""
        cache = _make_cache(self.model, self.length)
        for k, layer in enumerate(cache.layers):
            _fill(layer, getattr(self, f"keys_{k}"), getattr(self, f"values_{k}"), start)
        positions = None if mask is None else _positions(ids, start, mask)
        model: Any = self.model
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits
        return logits[:, -1]


def _positions(ids: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Return the positions of these tokens, counted without padding; 0 for padding."""
    every = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return every.index_select(1, start + torch.arange(ids.shape[1], device=ids.device))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"model: got {type(model).__name__}, which has no config of Hugging Face's transformers, expected a causal "
            "language model from there. For another model, pass decoder=make, a function (model, sequences, length) "
            "that returns a module with the cache in its buffers; fpipe.StaticDecoder is an example."
        )
    return config.get_text_config(decoder=True)


def _make_cache(model: nn.Module, length: int) -> Any:
    """Return an empty static cache; raise `InputError` if it would not be of keys and values of all tokens."""
    from transformers.cache_utils import StaticCache, StaticLayer

    cache = StaticCache(config=_text_config(model), max_cache_len=length)
    for k, layer in enumerate(cache.layers):
        if type(layer) is not StaticLayer:
            raise InputError(
                f"{type(model).__name__}, layer {k}: got a cache of {type(layer).__name__}, expected StaticLayer: keys "
                "and values of all tokens, in tensors of a fixed size. Pass your own decoder, decoder=make."
            )
    return cache


def _fill(layer: Any, keys: Tensor, values: Tensor, start: Tensor) -> None:
    """Put tensors into a layer of a static cache, as if it had seen `start` tokens."""
    layer.keys, layer.values, layer.cumulative_length = keys, values, start.clone()
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.batch_size, layer.num_heads = keys.shape[:2]
    layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
    layer.is_initialized = True


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
    captures = Captures(
        model=decoder,
        loss=known.loss,
        batchings={True: batching, False: batching},
        front_end=find_capture("trace", whole),
        cuts=Cuts(Marked(tuple(marks))),
        backward=False,
        hooks={},
        watching=known.watching,
        memo=Memo(max(2, known.memo.most)),
        ranks_of=known.ranks_of,
    )
    held = tuple(frozenset(map(_prefixed, stage.buffers)) for stage in pipe.stages)
    planner = Planner(how, captures, 0, pipe.ranks.ranks, frozenset(), pipe.planner.backend, extra=held)
    return Pipeline(planner, pipe.ranks, pipe.rebuild, pipe.plan_ahead)


def _mode_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the mode that a model's fake tensors belong to."""
    found = [p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)]
    return found[0] if found else fake_mode()


def _prefixed(path: str) -> str:
    return f"{PREFIX}{path}" if path else PREFIX.rstrip(".")
