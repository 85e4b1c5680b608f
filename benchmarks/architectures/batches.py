# SPDX-License-Identifier: Apache-2.0
"""Batches for any architecture: keyword arguments, by the names in the signature of `forward`.

`candidates` goes from the richest batch to the plainest; the first that the model accepts in an eager run is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sizes import FRAMES, LENGTH, PATCH, ROWS, SAMPLES, SIDE, WIDTH
from torch import Tensor, nn
from visions import towers

Batch = dict[str, Any]


def config_of(config: Any, *names: str, default: int) -> int:
    """Return the first of these fields that the configuration, or one nested in it, has as an integer."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for name in names:
        for place in [config, *inner]:
            found = getattr(place, name, None) if place is not None else None
            if isinstance(found, list | tuple) and found:
                found = found[0]
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return default


def vocabulary(config: Any) -> int:
    """Return the number of ids to draw from; larger ones may be special tokens of the configuration."""
    return min(
        config_of(config, "vocab_size", "text_vocab_size", "src_vocab_size", "decoder_vocab_size", default=64), 96
    )


def ids(config: Any, length: int = LENGTH) -> Tensor:
    return torch.randint(3, max(vocabulary(config), 4), (ROWS, length))


def mask(length: int = LENGTH, padding: int = 2) -> Tensor:
    """Return a mask of ones, with some padding at the end of every second row."""
    found = torch.ones(ROWS, length, dtype=torch.long)
    found[1::2, -min(padding, length // 4) :] = 0
    return found


def pixels(config: Any) -> Tensor:
    side = config_of(config, "image_size", "img_size", "resolution", "input_size", default=SIDE)
    return torch.randn(ROWS, config_of(config, "num_channels", "in_channels", "in_chans", default=3), side, side)


def images(config: Any) -> Tensor:
    """Return images, or videos if the configuration asks for `FRAMES` frames."""
    return video(config) if config_of(config, "num_frames", default=0) == FRAMES else pixels(config)


def video(config: Any) -> Tensor:
    frames = config_of(config, "num_frames", "frames_per_clip", default=FRAMES)
    return pixels(config)[:, None].repeat(1, frames, 1, 1, 1)


def features(config: Any) -> Tensor:
    """Return mel features, time first; or bins first, as in Whisper, if the configuration limits positions."""
    bins = config_of(
        config,
        "feature_projection_input_dim",
        "num_mel_bins",
        "input_feat_per_channel",
        "mel_dim",
        "feature_size",
        "input_dim",
        default=16,
    )
    positions = config_of(config, "max_source_positions", default=0)
    if positions:
        return torch.randn(ROWS, bins, 2 * positions)
    return torch.randn(ROWS, 64, bins)


def series(config: Any, name: str) -> Tensor:
    """Return the past or the future of a time series, of the lengths in the configuration."""
    past = config_of(config, "context_length", default=8)
    past += max(getattr(config, "lags_sequence", None) or [0])
    length = past if name.startswith("past") else config_of(config, "prediction_length", default=4)
    inputs = config_of(config, "num_input_channels", default=0)
    wide = inputs if name.endswith("values") else config_of(config, "num_time_features", default=1)
    found = torch.rand(ROWS, length, wide) if wide else torch.rand(ROWS, length)
    return torch.ones(found.shape) if name.endswith("mask") else found


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "input_ids": ids,
    "attention_mask": lambda config: mask(),
    "token_type_ids": lambda config: torch.zeros(ROWS, LENGTH, dtype=torch.long),
    "mm_token_type_ids": lambda config: torch.zeros(ROWS, LENGTH, dtype=torch.long),
    "decoder_input_ids": ids,
    "pixel_values": images,
    "pixel_values_videos": video,
    "input_features": features,
    "prompt_pixel_values": pixels,
    "prompt_masks": pixels,
    "prompt_depth": lambda config: pixels(config)[:, :1],
    "spatial_shapes": lambda config: torch.full((ROWS, 2), 4),
    "input_values": lambda config: torch.randn(ROWS, SAMPLES),
    "bbox": lambda config: torch.tensor([1, 2, 3, 4]).repeat(ROWS, LENGTH, 1),
    "qformer_input_ids": ids,
    "image_embeds_position_mask": lambda config: torch.arange(LENGTH).repeat(ROWS, 1) < 4,
    "image_attention_mask": lambda config: torch.ones(ROWS, LENGTH, 1, dtype=torch.long),
    "flattened_patches": lambda config: torch.cat(
        [torch.arange(1, 10)[:, None].repeat(ROWS, 1, 2), torch.randn(ROWS, 9, 64)], 2
    ),
    "classes_input_ids": ids,
    "classes_attention_mask": lambda config: mask(),
    "classes_structure": lambda config: torch.ones(ROWS, dtype=torch.long),
    "tasks_input_ids": ids,
    "tasks_attention_mask": lambda config: mask(),
    "task_inputs": lambda config: ids(config, config_of(config, "task_seq_len", default=LENGTH)),
    "state": lambda config: torch.randn(ROWS, config_of(config, "max_state_dim", default=8)),
    "visual_feats": lambda config: torch.randn(ROWS, 3, config_of(config, "visual_feat_dim", default=WIDTH)),
    "visual_pos": lambda config: torch.rand(ROWS, 3, config_of(config, "visual_pos_dim", default=4)),
    "states": lambda config: torch.randn(ROWS, LENGTH, config_of(config, "state_dim", default=8)),
    "actions": lambda config: torch.randn(ROWS, LENGTH, config_of(config, "act_dim", "max_action_dim", default=8)),
    "rewards": lambda config: torch.randn(ROWS, LENGTH, 1),
    "returns_to_go": lambda config: torch.randn(ROWS, LENGTH, 1),
    "timesteps": lambda config: torch.arange(LENGTH).repeat(ROWS, 1),
    "query_embeds": lambda config: torch.randn(ROWS, LENGTH, config_of(config, "hidden_size", default=WIDTH)),
    **{
        name: functools.partial(series, name=name)
        for name in ("past_values", "past_time_features", "future_values", "future_time_features")
    },
}
SHAPES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "pixel_values": (lambda x: x[:, None], lambda x: x[:, None].repeat(1, FRAMES, *[1] * (x.ndim - 1))),
    "input_values": (
        lambda x: x[:, None],
        lambda x: x[:, :1024].unflatten(1, (64, 16)),
        lambda x: x[:, :3840],
    ),
    "input_features": (lambda x: x.transpose(1, 2), lambda x: x[:, None]),
}


def candidates(model: nn.Module) -> Iterator[Batch]:
    """Yield batches the model may accept, the richest first."""
    config, names = model.config, list(inspect.signature(model.forward).parameters)
    yield from towers(model, names)
    plain = {name: ARGUMENTS[name](config) for name in names if name in ARGUMENTS}
    if "prompt_masks" in plain:  # the model stacks an image and its prompt
        side = model.config.image_size[-1]
        plain |= {name: value[..., :side, :side] for name, value in plain.items() if name in PROMPTED}
    if "past_values" in plain and "past_observed_mask" in names:
        plain["past_observed_mask"] = torch.ones_like(plain["past_values"])
    if "attention_mask" in plain and "input_ids" not in plain:
        heard = plain.get("input_values", plain.get("input_features"))
        plain["attention_mask"] = mask() if heard is None else mask(max(heard.shape[1:3]), SAMPLES // 8)
    if "spatial_shapes" in plain:  # images come as rows of patches
        plain["pixel_values"] = pixels(config).unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)[:, :, :4, :4]
        plain["pixel_values"] = plain["pixel_values"].permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2).contiguous()
        plain["pixel_attention_mask"] = torch.ones(ROWS, 16, dtype=torch.long)
    if "inputs_embeds" in names and not plain.keys() - {"attention_mask"}:
        plain["inputs_embeds"] = torch.randn(ROWS, LENGTH, config_of(config, "hidden_size", default=WIDTH))
    fixed = {"use_cache": False} if "use_cache" in names else {}
    fixed |= {"return_dict": True} if "return_dict" in names else {}
    if "pixel_values" in plain and "input_ids" in plain:
        yield from ({**batch, **fixed} for batch in with_images(model, plain, names))
    tails = [*labels(model, plain, names), {}]
    for kept in _subsets(plain, model):
        for tail in tails:
            yield {**kept, **fixed, **tail}
    for batch in fallbacks(config, plain, names):
        yield batch | fixed


def fallbacks(config: Any, plain: Batch, names: list[str]) -> Iterator[Batch]:
    """Yield batches that few models need: encoder states, camera images, one row per microbatch."""
    if "encoder_hidden_states" in names:
        wide = config_of(config, "encoder_hidden_size", "cross_attention_dim", "hidden_size", default=WIDTH)
        yield plain | {"encoder_hidden_states": torch.randn(ROWS, LENGTH, wide)}
    if "state" in plain and "pixel_attention_mask" in names:
        yield plain | cameras(config, plain)
    yield {name: value[:2] for name, value in plain.items()}


def cameras(config: Any, plain: Batch) -> Batch:
    """Return images of a robot's cameras, and a text that starts with their image tokens."""
    seen = torch.full((ROWS, FRAMES * (SIDE // PATCH) ** 2), config.vlm_config.image_token_id)
    words = torch.cat([seen, plain["input_ids"]], 1)
    batch = {"input_ids": words, "attention_mask": mask(words.shape[1]), "pixel_values": video(config)}
    return batch | {"pixel_attention_mask": torch.ones(ROWS, FRAMES, dtype=torch.bool)}


def _subsets(plain: Batch, model: nn.Module) -> Iterator[Batch]:
    """Yield all arguments; then without those that often conflict with the main one; then in other shapes."""
    main = getattr(model, "main_input_name", "input_ids")
    yield plain
    for without in LEFT_OUT:
        yield {name: value for name, value in plain.items() if name not in without}
    for name in SHAPES.keys() & plain.keys():
        for change in SHAPES[name]:
            other = {**plain, name: change(plain[name])}
            yield other
            yield {key: value for key, value in other.items() if key != "attention_mask"}
    mains = [main] if isinstance(main, str) else main
    if set(mains) <= plain.keys():
        yield {name: plain[name] for name in mains}


PROMPTED = ("pixel_values", "prompt_pixel_values", "prompt_masks")
LEFT_OUT = (
    ("input_features",),
    ("input_values",),
    ("pixel_values_videos",),
    ("pixel_values_videos", "attention_mask"),
    ("pixel_values_videos", "attention_mask", "decoder_input_ids"),
    ("pixel_values", "pixel_values_videos"),
    ("pixel_values", "pixel_values_videos", "input_features", "input_values"),
    ("token_type_ids", "mm_token_type_ids", "attention_mask"),
)


def with_images(model: nn.Module, plain: Batch, names: list[str]) -> Iterator[Batch]:
    """Yield text after as many image tokens as the model makes from an image, if its configuration names that token."""
    config = model.config
    token = next((getattr(config, n) for n in ("image_token_id", "image_token_index") if hasattr(config, n)), None)
    if token is None or not hasattr(model, "get_image_features"):
        return
    try:
        with torch.no_grad():
            made = model.get_image_features(pixel_values=plain["pixel_values"])
    except Exception:  # it needs more than pixels; without images, the text model remains
        return
    tokens = _rows(made, config_of(config.get_text_config(), "hidden_size", "d_model", default=WIDTH)) // ROWS
    words = torch.cat([torch.full((ROWS, tokens), token), plain["input_ids"]], 1)
    batch = {"input_ids": words, "attention_mask": mask(words.shape[1]), "pixel_values": plain["pixel_values"]}
    batch |= {"labels": words} if "labels" in names else {}
    yield batch
    if "token_type_ids" in names:
        yield batch | {"token_type_ids": (words == token).long()}


def _rows(made: Any, width: int) -> int:
    """Return the number of vectors of this width in the images' features."""
    made = getattr(made, "pooler_output", made)
    parts = made if isinstance(made, list | tuple) else [made]
    return sum(part.numel() for part in parts if isinstance(part, Tensor)) // width


def labels(model: nn.Module, plain: Batch, names: list[str]) -> Iterator[Batch]:
    """Yield labels that fit the purpose of the class, judged by its name."""
    if "start_positions" in names:
        yield {"start_positions": torch.randint(LENGTH, (ROWS,)), "end_positions": torch.randint(LENGTH, (ROWS,))}
    if "labels" not in names:
        return
    words, classes = vocabulary(model.config), getattr(model.config, "num_labels", 2) or 2
    if "decoder_input_ids" in names or "LM" in type(model).__name__ or "ConditionalGeneration" in type(model).__name__:
        yield {
            "labels": plain["input_ids"].clone() if "input_ids" in plain else torch.randint(3, words, (ROWS, LENGTH))
        }
        return
    if "CTC" in type(model).__name__:
        yield {"labels": torch.randint(3, words, (ROWS, 3))}
    elif "Segmentation" in type(model).__name__:
        yield {"labels": torch.randint(classes, (ROWS, *plain["pixel_values"].shape[-2:]))}
    elif "Token" in type(model).__name__:
        yield {"labels": torch.randint(classes, (ROWS, LENGTH))}
    elif "Classification" in type(model).__name__:
        yield {"labels": torch.randint(classes, (ROWS,))}
