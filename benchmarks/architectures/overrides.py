# SPDX-License-Identifier: Apache-2.0
"""Corrections where names alone are wrong: per model type, fields of its configuration (nested ones as a dict)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbones import ALL, DETECTING, EFFICIENT, HALVING, RESNET, SMALL_SAM, STRIPS, THREE, TIMM
from sizes import BINS, EXPERTS, FRAMES, GROUPS, HEAD, HEADS, INNER, LAYERS, LENGTH, PATCH, SIDE, WIDTH, WORDS

SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
IMAGE = {"image_token_index": 100}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary sections for time, height and width, which sum to half of a head's rotated dimensions.
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [HEAD // 4, HEAD // 8, HEAD // 8]}}
HALF = {"rope_parameters": ROPE | {"mrope_section": [HEAD // 8, HEAD // 16, HEAD // 16], "partial_rotary_factor": 0.5}}
SOUNDS = {"num_filters": 4, "downsampling_ratios": [2, 2, 4, 5], "depths": [1, 1, 1, 1, 1]}
CODEC = {"encoder_hidden_size": 8, "decoder_hidden_size": WIDTH, "hidden_size": WIDTH}
CODEC |= {"downsampling_ratios": [8, 5, 4, 2], "upsampling_ratios": [8, 5, 4, 2]}
HEARD = {"encoder_hidden_size": 8, "quantization_dim": 2 * WIDTH}
FIVE = {"downsampling_ratios": [8, 5, 4, 2, 3], "upsampling_ratios": [8, 5, 4, 2, 3]}
SLIDING = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 16, "kv_lora_rank": 16}
SLIDING |= {"head_dim": HEAD, "qk_nope_head_dim": HEAD // 2, "v_head_dim": HEAD}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "align": {"text_config": {"hidden_size": 320}, "projection_dim": 320},
    "align_vision_model": EFFICIENT,
    "audio-spectrogram-transformer": {"max_length": 64},
    "autoformer": SERIES | {"label_length": 2, "moving_average": 3},
    "bit": {"num_groups": 4},
    "blip-2": IMAGE,
    "blt": {"encoder_hash_byte_group_vocab": 128},
    "blt_local_decoder": {"hidden_size_global": WIDTH},
    "blt_local_encoder": {"hidden_size_global": WIDTH},
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGAZ": 101}},
    "chmv2": {
        "backbone_config": {
            "out_indices": [1, 2, 3, 4],
            "num_hidden_layers": LAYERS,
            "reshape_hidden_states": True,
            "return_class_token": True,
        },
        "post_process_channels": [16, 32, 64, 128],
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "conditional_detr": ALL,
    "d_fine": {"num_queries": 16, "num_denoising": 4, "eval_idx": -1},
    "dab-detr": ALL,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": THREE,
    "depth_anything": {"backbone_config": {"reshape_hidden_states": False}},
    "depth_pro": {"patch_size": 32, "image_size": 128, "intermediate_hook_ids": [3, 1]}
    | {f"{part}_model_config": {"image_size": 32} for part in ("image", "patch", "fov")},
    "detr": ALL,
    "diffusion_gemma": {"canvas_length": 16},
    "diffusion_gemma_text": {
        "num_experts": EXPERTS,
        "top_k_experts": 2,
        "moe_intermediate_size": INNER,
        "global_head_dim": HEAD,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_text": {
        "layer_types": ["sliding_attention", "indexed_attention"] * 2,
        **{f"swa_{name}": value for name, value in SLIDING.items()},
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "adapter_in_dim": WIDTH,
        "adapter_out_dim": WIDTH,
    },
    "dpt": {"backbone_out_indices": [0, 1, 2, 3]},
    "edgetam": {"prompt_encoder_config": {"patch_size": 16}},
    "edgetam_video": SMALL_SAM,
    "edgetam_vision_model": {
        "backbone_config": TIMM | {"model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}},
        "backbone_channel_list": [64, 48, 32, 24],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    "efficientnet": EFFICIENT,
    "emu3": {"vocabulary_map": {"<|extra_200|>": 101, "<image>": 100}},
    "encodec": {"codebook_dim": WIDTH},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": ROPE | {"mrope_section": [HEAD // 8, HEAD // 8, HEAD // 4]},
        "moe_num_experts": 4,
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "fast_vlm": {"vision_config": TIMM | {"do_pooling": True, "global_pool": "avg", "hidden_size": 64}},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": BINS, "upsample_initial_channel": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "gemma3n": {"vision_soft_tokens_per_image": 4},
    "gemma3n_text": {"num_hidden_layers": 15, "num_kv_shared_layers": 5, "intermediate_size": INNER},
    "gemma3n_vision": {"architecture": "test_convnext", "hidden_size": 64},
    "gemma4_unified_assistant": {
        "text_config": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    },
    "glm4v_moe_text": HALF,
    "glm4v_text": HALF,
    "glm_image_text": HALF,
    "glm_ocr_text": HALF,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": IMAGE
    | {"downsample_rate": "1/2", "deepstack_layer_map": [[1, 0], [3, 1]], "spatial_target_layers": [2, 3]},
    "hgnet_v2": {"stem_channels": [3, 8, 8]},
    "higgs_audio_v2_tokenizer": {"acoustic_model_config": CODEC | {"encoder_hidden_size": 4} | FIVE},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": HEAD},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": HEAD},
    "hunyuan_vl_text": {"rope_parameters": ROPE | {"xdrope_section": [HEAD // 8] * 4}, "head_dim": HEAD},
    "informer": SERIES,
    "instructblip": IMAGE,
    "instructblipvideo": {"video_token_index": 100},
    "kosmos-2": {"latent_query_num": 4},
    "kyutai_speech_to_text": {"codec_config": {"num_filters": 8}},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 22, "shape_size": 20},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lilt": {"hidden_size": 192, "num_attention_heads": 6},
    "longcat_flash": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mamba2": {"num_heads": 8, "head_dim": HEAD, "n_groups": 2},
    "mimi": {"upsample_groups": 16},
    "mimi_decoder": {"upsample_groups": 16, "num_filters": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "ministral": {"head_dim": HEAD},
    "mobilevit": {"hidden_sizes": [32, 64, 80]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "musicgen": {"audio_encoder": {"num_filters": 8}},
    "musicgen_melody": {"audio_encoder": {"num_filters": 8}},
    "nemo_speechlm": {"text_config": {"num_key_value_heads": GROUPS}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "neucodec": HEARD,
    "omdet-turbo": THREE
    | {
        "apply_layernorm_after_vision_backbone": False,
        "encoder_in_channels": [32, 64, 128],
        "vision_features_channels": [WIDTH // 2] * 3,
        "encoder_hidden_dim": WIDTH // 2,
        "decoder_hidden_dim": WIDTH // 2,
        "text_projection_in_dim": WIDTH,
        "text_projection_out_dim": WIDTH,
        "class_embed_dim": WIDTH,
    },
    "oneformer": {"strides": [4, 8, 16, 32]},
    "owlv2": {"text_config": {"max_position_embeddings": LENGTH}},
    "owlvit": {"text_config": {"max_position_embeddings": LENGTH}},
    "paddleocr_vl_text": SECTIONS,
    "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "perceiver": {"d_latents": WIDTH, "num_self_attends_per_block": 2, "num_latents": 8},
    "perception_lm": {
        "vision_config": TIMM
        | {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": WIDTH,
                "img_size": [56, 56],
                "depth": 2,
                "num_heads": HEADS,
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [4, 4],
            },
        },
        "image_size": 56,
    },
    "pi0": {"chunk_size": LENGTH, "dit_config": {"num_key_value_heads": 1}},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 64}},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 16},
    "pp_doclayout_v2": {
        "backbone_config": {"out_features": ["stage2", "stage3", "stage4"]},
        "class_thresholds": [0.5, 0.5],
        "class_order": [0, 1],
        "reading_order_config": {"max_2d_position_embeddings": 1024},
    },
    "pp_doclayout_v3": {
        "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "x4_feat_dim": 16,
    },
    "pp_ocrv5_mobile_rec": {
        "backbone_config": {
            "block_configs": [
                [[3, 16, 32, 1, False]],
                [[3, 32, 32, 1, False]],
                [[3, 32, 64, [2, 1], False]],
                [[3, 64, 64, [1, 2], False]],
                [[5, 64, 128, [2, 1], True]],
            ]
        }
    },
    "pp_ocrv5_server_det": DETECTING,
    "pp_ocrv5_server_rec": {"backbone_config": STRIPS},
    "pp_ocrv6_medium_det": DETECTING | {"backbone_config": HALVING},
    "pp_ocrv6_small_det": {"backbone_config": HALVING, "layer_list_out_channels": [32, 48, 64, 96]},
    "prompt_depth_anything": {"backbone_config": {"reshape_hidden_states": False}},
    "qwen2_5_omni_talker": SECTIONS,
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "qwen3_omni_moe_text": SECTIONS,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": INNER},
    "qwen3_vl_moe_text": SECTIONS,
    "qwen3_vl_text": SECTIONS,
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [32, WIDTH - 32],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "attention_head_size": HEAD,
    },
    "sam": {"vision_config": {"num_pos_feats": WIDTH // 2}},
    "sam2": SMALL_SAM,
    "sam2_video": SMALL_SAM,
    "sam3_video": {"detector_config": {"image_size": SIDE}, "tracker_config": {"image_size": SIDE}},
    "sam_hq": {"vision_config": {"num_pos_feats": WIDTH // 2}, "mask_decoder_config": {"vit_dim": WIDTH}},
    "sapiens2": {
        "num_hidden_layers": LAYERS,
        "num_key_value_heads_per_layer": [4, 2, 2, 4],
        "out_indices": [LAYERS],
        "head_config": {"model_type": "sapiens2_head", "upsample_out_channels": [16, 16], "conv_out_channels": [16]},
    },
    "seggpt": {"image_size": [2 * SIDE, SIDE]},
    "shieldgemma2": {"mm_tokens_per_image": 16, "yes_token_index": 90, "no_token_index": 91},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "table-transformer": ALL,
    "time_series_transformer": SERIES,
    "timm_backbone": {"backbone": "test_convnext"},
    "timm_wrapper": {"architecture": "test_convnext"},
    "tipsv2_dpt": {
        "backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    },
    "tvp": {
        "num_frames": FRAMES,
        "max_img_size": SIDE,
        "visual_prompt_size": PATCH,
        "frame_num": FRAMES,
        "backbone_config": RESNET | {"out_features": ["stage4"]},
    },
    "uvdoc": {"backbone_config": {"out_features": [f"stage{k}" for k in range(1, 7)]}},
    "vibevoice_acoustic_tokenizer": SOUNDS,
    "vibevoice_acoustic_tokenizer_decoder": SOUNDS,
    "vibevoice_acoustic_tokenizer_encoder": SOUNDS,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 800},
    "videomae": {"num_frames": FRAMES},
    "vilt": {"max_position_embeddings": LENGTH},
    "vitmatte": {
        "convstream_hidden_sizes": [8, 16, 32],
        "fusion_hidden_sizes": [64, 32, 16, 16],
        "backbone_config": {"num_channels": 4, "patch_size": 16, "out_features": ["stage4"]},
    },
    "vivit": {"num_frames": FRAMES, "tubelet_size": [FRAMES, PATCH, PATCH]},
    "wav2vec2-bert": {"vocab_size": WORDS},
    "wav2vec2-conformer": {"vocab_size": WORDS},
    "xclip": {"vision_config": {"num_frames": FRAMES}},
    "xcodec": {"acoustic_model_config": CODEC},
    "xcodec2": HEARD,
    "xlstm": {"num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zoedepth": {
        "bottleneck_features": WIDTH,
        "backbone_config": {
            "num_hidden_layers": 4,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
            "out_indices": None,
            "reshape_hidden_states": False,
        },
    },
}
