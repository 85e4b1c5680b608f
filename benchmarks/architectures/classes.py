# SPDX-License-Identifier: Apache-2.0
"""The architectures of transformers, and the classes to try for each, preferably one that computes a loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PREFERRED = (
    *(
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "MASKED_LM",
        "CAUSAL_LM",
        "CTC",
    ),
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION"),
    *("AUDIO_CLASSIFICATION", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"),
    *("DEPTH_ESTIMATION", "IMAGE_TO_IMAGE", "MASK_GENERATION", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "MULTIPLE_CHOICE", "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM"),
    "VISUAL_QUESTION_ANSWERING",
)
# Models that generate with several parts and have no forward themselves: the part to try.
PARTS = {
    "bark": "BarkSemanticModel",
    "qwen2_5_omni": "Qwen2_5OmniTalkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeTalkerModel",
}


def architectures() -> dict[str, tuple[str, ...]]:
    """Return the classes to try by model type, in order of preference; types with the same classes appear once.

    Whole models come first, then parts of others (`clip_text_model` after `clip`).
    """
    tables = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in PREFERRED]
    tables += [modeling_auto.MODEL_MAPPING_NAMES]
    tables += [table for name, table in vars(modeling_auto).items() if name.startswith("MODEL_FOR_")]
    found: dict[str, tuple[str, ...]] = {}
    for kind in CONFIG_MAPPING:
        names = [table[kind] for table in tables if isinstance(table, Mapping) and kind in table]
        flat = tuple(dict.fromkeys(n for name in names for n in ([name] if isinstance(name, str) else name)))
        if flat and flat not in found.values():
            found[kind] = flat
    wholes = [kind for kind in found if not _is_part(kind, found)]
    return {kind: (PARTS[kind],) if kind in PARTS else found[kind] for kind in [*wholes, *found]}


def _is_part(kind: str, kinds: Collection[str]) -> bool:
    """Return whether another model type's name is a proper prefix of this one."""
    words = kind.replace("-", "_").split("_")
    return any("_".join(words[:k]) in kinds for k in range(1, len(words)))
