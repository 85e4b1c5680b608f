# SPDX-License-Identifier: Apache-2.0
"""Small backbones for vision models, and settings that must match them."""

from __future__ import annotations

RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
ALL = {"backbone_config": RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]}}
THREE = {"backbone_config": RESNET | {"out_features": ["stage2", "stage3", "stage4"]}}
EFFICIENT = {
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "hidden_dim": 1280,
    "image_size": 64,
    "in_channels": [32, 16, 24, 40, 80, 112, 192],
    "out_channels": [16, 24, 40, 80, 112, 192, 320],
}
# Stages that halve the height of a text line more often than its width.
STRIPS = {
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "stage_downsample": [True] * 4,
    "stem_strides": [2, 1, 1, 1, 1],
    "stage_downsample_strides": [[2, 1], [1, 2], [2, 1], [2, 1]],
}
# Convolutions along columns, rows and both, of three sizes; each as kernel, stride and padding.
BANDS = {"long": 7, "mid": 5, "short": 3}
DETECTING = {
    "backbone_config": {"out_features": STRIPS["out_features"]},
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    | {f"vertical_long_to_small_conv_{name}ratio": [[k, 1], [1, 1], [k // 2, 0]] for name, k in BANDS.items()}
    | {f"horizontal_small_to_long_conv_{name}ratio": [[1, k], [1, 1], [0, k // 2]] for name, k in BANDS.items()}
    | {f"symmetric_conv_long_{name}ratio": [[k, k], [1, 1], [k // 2, k // 2]] for name, k in BANDS.items()},
}
HALVING = {
    "out_features": STRIPS["out_features"],
    "block_configs": [
        [[3, 96, 32, 1, True]],
        [[3, 32, 48, 2, False]],
        [[3, 48, 64, 2, False]],
        [[3, 64, 96, 2, False]],
    ],
}
# A small timm model; its last feature map has 64 channels.
TIMM = {"model_type": "timm_wrapper", "architecture": "test_convnext", "num_classes": 2}
SMALL_SAM = {
    "vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "prompt_encoder_config": {"patch_size": 16},
}
