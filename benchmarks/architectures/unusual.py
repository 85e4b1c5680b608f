# SPDX-License-Identifier: Apache-2.0
"""Batches for text and audio models that accept none of the usual ones: other shapes, or arguments that must match."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from batches import Batch, candidates, config_of, features, ids, mask
from sizes import LENGTH, ROWS, WIDTH
from torch import Tensor, nn

BLOCKS = 8


def unusual(model: nn.Module) -> Iterator[Batch]:
    """Yield batches chosen by distinctive names in the signature or the configuration, the richest first."""
    config, usual = model.config, next(candidates(model), {})
    fixed = {name: value for name, value in usual.items() if not isinstance(value, Tensor)}
    known = {config.model_type, *inspect.signature(model.forward).parameters}
    known |= {name for name in TELLING if hasattr(config, name)}
    for name, made in UNUSUAL.items():
        for batch in _batches(made, config, usual) if name in known else ():
            yield {**fixed, **batch}
            if "labels" in batch:
                yield {key: value for key, value in {**fixed, **batch}.items() if key != "labels"}


def _batches(made: Callable[[Any, Batch], Iterator[Batch]], config: Any, usual: Batch) -> list[Batch]:
    """Return all batches, or none for a model that only shares the name."""
    try:
        return list(made(config, usual))
    except (AttributeError, KeyError):
        return []


def masked_features(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield features with their own mask, bins last or first."""
    bins, frames = config_of(config, "input_size", default=0), 4 * config_of(config, "n_window", default=0)
    heard = features(config)
    heard = heard.transpose(1, 2) if config_of(config, "max_source_positions", default=0) else heard
    heard = torch.randn(ROWS, frames or heard.shape[1], bins or heard.shape[2])
    rest = {**plain, "input_features_mask": mask(heard.shape[1])}
    for one in (heard, heard.transpose(1, 2).contiguous()):
        yield {**rest, "input_features": one}


def folded_features(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield features with as many bins as the projection after two convolutions expects."""
    yield {**plain, "input_features": torch.randn(ROWS, LENGTH, config.subsampling_conv_channels[0])}


def mel(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield mel frames, and a mask that is true at padding."""
    yield {
        "audio_mel": torch.randn(ROWS, LENGTH, config_of(config, "input_feat_size", default=WIDTH)),
        "audio_mel_mask": mask() == 0,
    }


def heard_twice(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield a waveform and its features, one frame per hop."""
    hop = getattr(config, "encoder_hop_length", config.hop_length)
    bins = config.semantic_model_config.feature_projection_input_dim
    yield {
        "input_values": torch.randn(ROWS, 1, BLOCKS * hop),
        "input_features": torch.randn(ROWS, BLOCKS, bins),
    }


def whole_hops(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield a waveform of a whole number of hops."""
    yield {"input_values": torch.randn(ROWS, 1, BLOCKS * config.hop_length)}


def latents(config: Any, plain: Batch) -> Iterator[Batch]:
    yield {"latents": torch.randn(ROWS, config.hidden_size, BLOCKS)}


def codec_states(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield inputs of a codec's decoder, then of its encoder."""
    yield {"hidden_states": torch.randn(ROWS, config.hidden_size, BLOCKS)}
    yield {"hidden_states": torch.randn(ROWS, config.channels, BLOCKS * config.hop_length)}


def streamed(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield as many audio frames as the text has positions for."""
    frames = LENGTH * config.audio_length_per_tok
    bins = config_of(config, "num_mel_bins", default=WIDTH)
    yield {**plain, "input_features": torch.randn(ROWS, bins, frames)}


def codebooks(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield a row of codes per codebook, stacked along the batch as music decoders take them."""
    books = config_of(config, "num_codebooks", default=1)
    if books > 1:
        codes = torch.cat([ids(config) for _ in range(books)])
        text = {name: value for name, value in plain.items() if name in ("input_ids", "attention_mask")}
        labels = codes.unflatten(0, (ROWS, books)).transpose(1, 2).contiguous()
        yield {**text, "decoder_input_ids": codes, "labels": labels}


def text_and_codes(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield one text token and one token of each codebook per position."""
    yield {**plain, "input_ids": torch.stack([ids(config) for _ in range(1 + config.num_codebooks)], 2)}


def speech(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield the duration of each letter (0 for padding), and the spectrogram, pitch and energy."""
    durations = 2 * plain["attention_mask"]
    frames = torch.arange(2 * LENGTH)[None, :, None]
    spectrogram = torch.randn(ROWS, 2 * LENGTH, config_of(config, "num_mel_bins", default=WIDTH))
    yield {
        **plain,
        "spectrogram_labels": spectrogram.masked_fill(frames >= durations.sum(1)[:, None, None], -100.0),
        "duration_labels": durations,
        "pitch_labels": torch.randn(ROWS, LENGTH, 1),
        "energy_labels": torch.randn(ROWS, LENGTH, 1),
    }


def drafts(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield a block of noise, and hidden states of the target model for the text so far."""
    yield {
        "attention_mask": mask(LENGTH + config.block_size),
        "noise_embeds": torch.randn(ROWS, config.block_size, config.hidden_size),
        "context_hidden_states": torch.randn(ROWS, LENGTH, config.hidden_size * len(config.target_layer_ids)),
    }


def questions(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield the ends of the questions, their types, and their numbers of options."""
    yield {
        **plain,
        "marks": torch.tensor([LENGTH // 4, LENGTH // 2, LENGTH]).repeat(ROWS, 1),
        "num_options": torch.full((ROWS, 3), 2),
        "question_type_ids": torch.arange(3).repeat(ROWS, 1),
    }


def spoken(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield speech codes, and the hidden states of the spoken text."""
    yield {"input_ids": ids(config), "thinker_reply_part": torch.randn(ROWS, LENGTH, config.embedding_size)}


def embedded(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield embeddings instead of text."""
    yield {"inputs_embeds": torch.randn(ROWS, LENGTH, config.hidden_size), "attention_mask": mask()}


def shared_states(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield the keys and values of the target model by kind of layer."""
    text = config.get_text_config()
    kinds = {kind: text.layer_types.index(kind) for kind in dict.fromkeys(text.layer_types)}
    sizes = {kind: text.per_layer_config[kind] for kind in kinds}
    yield {
        "inputs_embeds": torch.randn(ROWS, LENGTH, 2 * config.backbone_hidden_size),
        "shared_kv_states": {
            kind: tuple(torch.randn(ROWS, size.num_key_value_heads, LENGTH, size.head_dim) for _ in range(2))
            for kind, size in sizes.items()
        },
    }


def conditioned(config: Any, plain: Batch) -> Iterator[Batch]:
    """Yield text, and its delay relative to the audio."""
    yield {**plain, "t_cond": torch.randn(ROWS, 1, config.hidden_size)}


TELLING = ("codebook_vocab_size", "subsampling_conv_channels")
UNUSUAL: dict[str, Callable[[Any, Batch], Iterator[Batch]]] = {
    "output_latents": heard_twice,
    "input_features_mask": masked_features,
    "subsampling_conv_channels": folded_features,
    "audio_mel": mel,
    "audio_codes": whole_hops,
    "latents": latents,
    "padding_cache": codec_states,
    "num_delay_tokens": streamed,
    "decoder_attention_mask": codebooks,
    "codebook_vocab_size": text_and_codes,
    "duration_labels": speech,
    "noise_embeds": drafts,
    "question_type_ids": questions,
    "shared_kv_states": shared_states,
    "qwen3_omni_moe_talker_text": embedded,
    "thinker_reply_part": spoken,
    "voxtral_realtime_text": conditioned,
}
