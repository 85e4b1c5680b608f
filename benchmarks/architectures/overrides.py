# SPDX-License-Identifier: Apache-2.0
"""What names alone get wrong: per model type, fields of its configuration (nested ones as a dict)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
ALL = {"backbone_config": RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]}}
THREE = {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}}
SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary angles of time, height and width, which add up to half of what is rotated of a head of 16.
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}
HALF = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
QUARTER = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "autoformer": SERIES | {"label_length": 2, "moving_average": 3},
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "audio-spectrogram-transformer": {"max_length": 64},
    "bit": {"num_groups": 4},
    "conditional_detr": ALL,
    "dab-detr": ALL,
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGAZ": 101}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3]},
    "d_fine": {"num_queries": 16, "num_denoising": 4, "eval_idx": -1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": THREE,
    "detr": ALL,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "encodec": {"upsampling_ratios": [2, 2], "codebook_dim": 64},
    "ernie4_5_vl_moe_text": SECTIONS | {"moe_num_experts": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3n_text": {"num_hidden_layers": 15, "num_kv_shared_layers": 5},
    "glm4v_moe_text": HALF,
    "glm4v_text": HALF,
    "glm_image_text": HALF,
    "glm_ocr_text": HALF,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE},
    "hunyuan_v1_moe": {"rope_parameters": ROPE},
    "hunyuan_vl_text": {"rope_parameters": ROPE | {"xdrope_section": [2, 2, 2, 2]}},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 11, "shape_size": 10, "hidden_size": 64},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mimi": {"upsample_groups": 16, "num_quantizers": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "mobilevit": {"hidden_sizes": [32, 64, 80]},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": SECTIONS,
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "qwen3_omni_moe_text": SECTIONS,
    "qwen3_vl_moe_text": SECTIONS,
    "qwen3_vl_text": SECTIONS,
    "table-transformer": ALL,
    "xlstm": {"num_heads": 2},
}
