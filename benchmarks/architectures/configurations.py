# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations for any architecture of transformers.

Problem. There are several hundred, and each has its own names for widths, depths and vocabularies.

Idea. Names say what a number is: anything ending in `hidden_size`, `d_model`, `embed_dim`, ... is a width, and all
widths become the same small number, in every nested configuration, so they fit each other. One small table,
`OVERRIDES`, corrects what this gets wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from overrides import OVERRIDES
from sizes import BINS, EXPERTS, GROUPS, HEAD, HEADS, INNER, LAYERS, PATCH, POSITIONS, SIDE, SOUNDS, WIDTH, WORDS
from transformers import PreTrainedConfig

# The largest value of a number by its name: the first pattern found in the name applies.
LIMITS: tuple[tuple[str, int], ...] = (
    (r"token_id$|token_index$|_idx$|_period$|_offset$|vision_feature_layer|^feature_layer|window_pattern", 0),
    (r"(key_value|kv)_(attention_)?heads$|linear_num_key_heads$|key_value_groups$", GROUPS),
    (r"(^|_)(num|n)_(\w+_)?heads$|^attention_heads$|_attention_heads$|^n_head$|_heads$", HEADS),
    (r"vocab_size(_per_layer_input)?$|^codebook_size$|^num_embeddings$|^num_tokens$|^num_embeds$", WORDS),
    (r"layers$|^n_layer$|^depth$|^num_blocks$|_depth$", LAYERS),
    (r"head_dim$|^d_kv$|^d_head$|^kv_channels$|head_size$|_rope_dim$|^dim_head$", HEAD),
    (r"lora_rank$|_rank$|bottleneck\w*$", 16),
    (r"intermediate_(size|dim)$|ffn_dim$|^d_ff$|mlp_dim$|ffn_hidden_size$|feedforward(_dim)?$|^n_inner$", INNER),
    (r"ffn_size$|linear_units$|mlp_hidden_size$|feed_forward_size$|feed_forward_hidden_size$|^d_inner$", INNER),
    (r"hidden_(size|dim|channels)$|_width$|d_model$|n_embd$|emb(ed)?(ding)?_(dim|size)$|^dim$", WIDTH),
    (r"project(ion|or)_(dim|size)$|project_dim$", WIDTH),
    (r"proj_(size|dim)$|output_(dim|size)$|(out|encoder|decoder|mask|feature|latent|query|conv)_dim$", WIDTH),
    (r"_channels$(?<!num_channels)(?<!in_channels)|feature_size$|filters$|pooler_output_size$", WIDTH),
    (r"max_source_position", SOUNDS),
    (r"max_(target_|2d_|speech_|text_)?position(_embedding)?s?|n_positions$|max_position", POSITIONS),
    (r"(routed|local|num|n)_experts$|expert_num$", EXPERTS),
    (r"experts_per_tok(en)?$|^(moe_)?top_?k$|^topk_group$|^n_group$|moe_k$", 2),
    (r"image_size$|^img_size$|^resolution$|crop_size$", SIDE),
    (r"patch_size$", PATCH),
    (r"num_queries$|num_query_tokens$|num_latents$|num_detection_tokens$|train_num_points$|num_denoising$", BINS),
    (r"mel_bins$|num_bins$|input_feat_size$|^mel_dim$", BINS),
    (r"^sliding_window(_size)?$|attention_window|^index_topk$|attn_chunk_length$", BINS),
    (r"state_size$|d_state$", BINS),
    (r"^num_conv_pos_embeddings$", BINS),
    (r"conv_pos_embedding_groups$", 2),
    (r"mamba_n_heads$|mamba_num_heads$", HEADS),
    (r"_chunk_size$(?<!forward)", BINS),
    (r"^rotary_dim$", HEAD // 2),
    (r"^context_size$", LAYERS),
)  # fmt: skip
RATIOS = r"hidden_sizes|embed_dims|channels|conv_dim|dims$|filters|_sizes$(?<!kernel_sizes)(?<!patch_sizes)"
SWITCHED_OFF = ("use_cache", "use_mamba_kernels", "use_pretrained_backbone", "apply_spec_augment")
DROPS = r"dropout|drop_path|pdrop|drop_rate|dropout_rate|drop_prob|^hidden_dropout"


class _Small:
    """The way to make a configuration small, and the token ids in it."""

    def __init__(self, way: Way) -> None:
        self.way, self.tokens = way, Tokens()


class Tokens:
    """Small token ids, one per name, to replace large ones."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"pad": 0, "bos": 1, "eos": 2}

    def __call__(self, name: str, value: int) -> int:
        """Return the id for this name, or `value` if it is small enough."""
        if value < WORDS:
            return value
        key = re.sub(r"_token_(id|index)$|_index$|_id$", "", name)
        return self.ids.setdefault(key, WORDS - len(self.ids))


INPUTS = r"image_size|img_size|resolution|crop_size|patch_size|window|mel_bins"
STAGES = r"channels|_sizes$|filters|embed_dims|hidden_dim$|_dims$|stem|backbone"
NOTHING = r"^$"
SHAPES = r"layers$|^n_layer$|^depth$|vocab_size|position|experts|lora_rank|num_blocks$"


class Way(NamedTuple):
    """A way to make a configuration small: change only numbers whose names match `only` and do not match `never`.

    `grouped`: use fewer key and value heads than heads, if the configuration has a field for that.
    """

    only: str = ""
    never: str = "^$"
    grouped: bool = True

    def takes(self, name: str) -> bool:
        """Return whether a number with this name may differ from its default."""
        return bool(re.search(self.only, name)) and not re.search(self.never, name)


# The smallest first; in some architectures, widths or image sizes cannot be chosen freely.
WAYS = (
    Way(),
    Way(grouped=False),
    Way(never=INPUTS, grouped=False),
    Way(never=f"{INPUTS}|{STAGES}", grouped=False),
    Way(only=SHAPES, grouped=False),
    Way(only=NOTHING, grouped=False),
)


def tiny(kind: type, dropout: float = 0.0, way: Way = WAYS[0]) -> Any:
    """Return a small configuration of class `kind`, with all dropout probabilities set to `dropout`."""
    return _tiny(kind, kind(), dropout, _Small(way), OVERRIDES.get(kind.model_type, {}))


def _tiny(kind: type, base: Any, dropout: float, small: _Small, overrides: Mapping[str, Any]) -> Any:
    values = dict(_values(base, dropout, small))
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(base, name, None)
        if isinstance(inner, PreTrainedConfig) and "model_type" not in overrides.get(name, {}):
            own = OVERRIDES.get(inner.model_type, {}) | overrides.get(name, {})
            values[name] = _tiny(type(inner), inner, dropout, small, own)
    return kind(**values | {name: value for name, value in overrides.items() if not _nested(kind, name, value)})


def _nested(kind: type, name: str, value: Any) -> bool:
    """Return whether an override sets single fields of a nested configuration."""
    return name in getattr(kind, "sub_configs", {}) and "model_type" not in value


def _values(base: Any, dropout: float, small: _Small) -> Iterator[tuple[str, Any]]:
    """Yield every field to change from its default, with its new value."""
    returned = getattr(base, "out_indices", None) or [0]  # a backbone that returns the outputs of its layers
    if len(returned) > 1:
        yield "out_indices", list(returned)
    for field in dataclasses.fields(base):
        if field.name == "num_hidden_layers" and max(returned) > LAYERS:
            continue
        old = _stored(base, field.name)
        if not isinstance(old, PreTrainedConfig):
            new = _smaller(field.name, old, dropout, small)
            if new != old:
                yield field.name, new
    heads = _stored(base, "num_attention_heads"), _stored(base, "num_key_value_heads")
    if heads[1] and _stored(base, "kv_lora_rank"):
        yield "num_key_value_heads", HEADS  # keys and values of each head are computed from one latent
    elif heads[1] and heads[0] == heads[1]:
        yield "num_key_value_heads", GROUPS if small.way.grouped else HEADS


def _stored(base: Any, name: str) -> Any:
    """Return a field as stored; some vary across layers, and reading those as attributes raises."""
    try:
        return object.__getattribute__(base, name)
    except AttributeError:
        return None


def _smaller(name: str, value: Any, dropout: float, small: _Small) -> Any:
    if isinstance(value, bool) or value is None:
        return False if name in SWITCHED_OFF else value
    if isinstance(value, int | float) and re.search("layerdrop|mask_(time|feature)_prob", name):
        return 0.0
    if isinstance(value, int | float) and re.search(DROPS, name):
        return float(dropout)
    if isinstance(value, int):
        return _small_number(name, value, small)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        return type(value)(_small_numbers(name, value, small))
    if name == "rope_parameters" and isinstance(value, dict):
        return _small_rotation(value)
    return value


def _small_rotation(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for heads of size `HEAD`; sections, if any, sum to half of the rotated dimensions."""
    if all(isinstance(value, dict) for value in rope.values()):
        return {name: _small_rotation(value) for name, value in rope.items()}
    if "mrope_section" in rope:
        half = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        first = half - 2 * (half // 4)
        rope = {**rope, "mrope_section": [first, half // 4, half // 4]}
    return {**rope, "rope_theta": rope.get("rope_theta") or 10000.0}


def _small_number(name: str, value: int, small: _Small) -> int:
    if re.search(r"_token_(id|index)$|token_id$|_index$", name):
        return small.tokens(name, value)
    limit = next((limit for pattern, limit in LIMITS if re.search(pattern, name)), 0)
    return min(value, limit) if limit and small.way.takes(name) else value


def _small_numbers(name: str, values: list[int] | tuple[int, ...], small: _Small) -> list[int]:
    if re.search(r"token_ids?$", name):
        return [small.tokens(f"{name}{k}", value) for k, value in enumerate(values)]
    if not small.way.takes(name) and not re.search("depths", name):
        return list(values)
    if re.search(r"_per_layer$", name):
        return list(values)[:LAYERS]
    if re.search(r"depths|num_layers|layer_repeats|^layers$", name):
        return [min(value, 2) for value in values]
    if re.search(r"decoder_in_channels$", name):
        return [WIDTH for _ in values]
    if re.search(r"heads", name):
        return [max(1, value // min(values)) for value in values]
    if re.search(r"image_size|img_size", name):
        return [SIDE for _ in values]
    if re.search(r"patch_size", name):
        return [min(value, PATCH) for value in values]
    if re.search(RATIOS, name) and max(values) > WIDTH:
        return [max(8, value // 8) for value in values]
    return list(values)
