# SPDX-License-Identifier: Apache-2.0
"""Outputs that libraries collect by hooks, hidden states and router logits, are those of one device, wherever cut.

Libraries install hooks when a model is first called, and gather router logits, attention weights and hidden
states by hooks. Here every model is captured before it was ever called; the plain loop runs on another one, made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import BACKWARDS
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference
from tests.common.sizes import NIGHTLY, in_turn, sampled

ROWS, WORDS = 4, 31


def ids(rows: int, length: int = 6) -> Tensor:
    return torch.randint(2, 29, (rows, length))


def text(rows: int) -> dict[str, Tensor]:
    words = ids(rows)
    return {"input_ids": words, "labels": words}


def translation(rows: int) -> dict[str, Tensor]:
    return {"input_ids": ids(rows), "decoder_input_ids": ids(rows), "labels": ids(rows)}


def sentences(rows: int) -> dict[str, Tensor]:
    return {"input_ids": ids(rows), "labels": torch.randint(2, (rows,))}


def images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8), "labels": torch.randint(5, (rows,))}


def waves(rows: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, 64), "labels": torch.randint(3, (rows,))}


def scenes(side: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {
        "pixel_values": torch.randn(rows, 3, side, side),
        "labels": torch.randint(3, (rows, side, side)),
    }


def captions(rows: int) -> dict[str, Tensor]:
    words = ids(rows, 8)
    words[:, 1:5] = 30
    return {"input_ids": words, "pixel_values": torch.randn(rows, 3, 8, 8), "labels": words}


def masks(rows: int) -> dict[str, Tensor]:
    return {"input_ids": ids(rows), "pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.rand(rows, 16, 16)}


def experts(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A mixture of experts whose routers' logits make an auxiliary loss."""
    usual = {
        **{"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2},
        **{"use_cache": False, "output_router_logits": True, "router_aux_loss_coef": 0.5},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1},
    }

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**usual, **changes})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def of(name: str, kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model for `kind` with three small layers."""
    usual = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**usual, **quiet, **changes})
        return getattr(transformers, f"{name}For{kind}")(config)

    return make


def audio(name: str) -> Callable[[], nn.Module]:
    """A classifier of weighted sums of layers."""
    return of(
        name, "SequenceClassification", conv_dim=(8, 8), conv_kernel=(4, 3), conv_stride=(2, 2), vocab_size=12,
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
        apply_spec_augment=False, use_weighted_layer_sum=True, classifier_proj_size=8, num_labels=3,
        hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip


def llava() -> nn.Module:
    small = {"intermediate_size": 24, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_attention_heads=2, image_size=8, patch_size=4, projection_dim=8, **small
    )
    language = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        **small,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=language, image_token_id=30, use_cache=False)
    return transformers.LlavaForConditionalGeneration(config)


def nllb() -> nn.Module:
    config = transformers.NllbMoeConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=4, encoder_sparse_step=1,
        decoder_sparse_step=1, max_position_embeddings=32, use_cache=False, output_router_logits=True,
        router_aux_loss_coef=0.5, expert_capacity=64, second_expert_policy="all", moe_token_dropout=0.0,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return transformers.NllbMoeForConditionalGeneration(config)


def clipseg() -> nn.Module:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.CLIPSegConfig(
        text_config={**small, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 1},
        vision_config={**small, "image_size": 16, "patch_size": 4},
        projection_dim=8, extract_layers=[0, 1, 2], reduce_dim=8, decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )  # fmt: skip
    return transformers.CLIPSegForImageSegmentation(config)


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=4, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8], num_attention_heads=[1, 1, 2, 2],
        sr_ratios=[2, 1, 1, 1], mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=8, num_labels=3, drop_path_rate=0.0,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


FOUR = {"num_experts": 4}
LOCAL = {"num_local_experts": 4}
LATENT = {
    **{"n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{
        "num_key_value_heads": 4,
        "v_head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
BERT = {"vocab_size": WORDS, "max_position_embeddings": 16}
VIT = {"image_size": 8, "patch_size": 4, "num_labels": 5}
DPT = {
    **{
        "image_size": 16,
        "patch_size": 4,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
    },
    **{
        "fusion_hidden_size": 8,
        "num_labels": 3,
        "reassemble_factors": [4, 2, 1, 0.5],
        "is_hybrid": False,
        "drop_path_rate": 0.0,
    },
}
EAGER = {"output_attentions": True, "attn_implementation": "eager"}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "Mixtral": (experts("Mixtral", **LOCAL), text),
    "Qwen2-MoE": (experts("Qwen2Moe", **FOUR, moe_intermediate_size=16, shared_expert_intermediate_size=16), text),
    "Qwen3-MoE": (experts("Qwen3Moe", **FOUR, moe_intermediate_size=16, head_dim=8), text),
    "OLMoE": (experts("Olmoe", **FOUR), text),
    "GPT-OSS": (experts("GptOss", **LOCAL, head_dim=8), text),
    "DeepSeek-V2": (experts("DeepseekV2", **LATENT, moe_intermediate_size=16), text),
    "DeepSeek-V3": (experts("DeepseekV3", **LATENT, moe_intermediate_size=16), text),
    "Jamba": (experts("Jamba", **FOUR, mamba_d_state=4, mamba_d_conv=2, mamba_expand=1, mamba_dt_rank=4,
                      attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                      use_mamba_kernels=False), text),
    "Granite-MoE": (experts("GraniteMoe", **LOCAL), text),
    "MiniMax": (experts("MiniMax", **LOCAL, head_dim=8, block_size=4), text),
    "NLLB-MoE": (nllb, translation),
    "BERT, hidden states": (of("Bert", "SequenceClassification", **BERT, output_hidden_states=True), sentences),
    "BERT, attentions": (of("Bert", "SequenceClassification", **BERT, **EAGER), sentences),
    "ViT, hidden states": (of("ViT", "ImageClassification", **VIT, output_hidden_states=True), images),
    "ViT, attentions": (of("ViT", "ImageClassification", **VIT, **EAGER), images),
    "wav2vec2": (audio("Wav2Vec2"), waves),
    "HuBERT": (audio("Hubert"), waves),
    "WavLM": (audio("WavLM"), waves),
    "LLaVA": (llava, captions),
    "CLIPSeg": (clipseg, masks),
    "DPT": (of("DPT", "SemanticSegmentation", **DPT), scenes(16)),
    "SegFormer": (segformer, scenes(32)),
}  # fmt: skip
DAILY = {
    *((name, "autograd") for name in ("GPT-OSS", "Jamba", "NLLB-MoE", "LLaVA", "BERT, attentions", "SegFormer")),
    *((name, "graph") for name in ("Mixtral", "wav2vec2")),
}
UNSPLITTABLE = {"NLLB-MoE": ["NllbMoeExperts"]}


def own(outputs: Any) -> Tensor:
    return outputs.loss


def quiet(model: nn.Module) -> nn.Module:
    """Without dropout, which no two runs have in common."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def called(model: nn.Module, names: list[str]) -> list[type]:
    return [type(module) for module in model.modules() if type(module).__name__ in names]


def plain(result: Result) -> Result:
    """Without outputs, which libraries return in classes of their own; the loss is computed from them."""
    return result._replace(outputs=None)


@sampled(3)
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")  # in the plain loop, too
@pytest.mark.parametrize(("name", "backward"), in_turn(MODELS, BACKWARDS))
def test_outputs_that_libraries_collect_are_those_of_one_device(name, backward):
    if not NIGHTLY and (name, backward) not in DAILY:
        pytest.skip("every night")
    make, batch = MODELS[name]
    model, another, inputs = quiet(make()), quiet(make()), batch(ROWS)
    another.load_state_dict(model.state_dict())
    how = one_f_one_b(ranks=3, microbatches=2)
    whole = called(model, UNSPLITTABLE.get(name, []))
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        loss=own,
        schedule=how,
        gradients=fpipe.Gradients(backward=backward),
        recording=fpipe.Recording(unsplittable=whole),
    )
    got, want = plain(run(pipe, model, inputs, None)), plain(loop(another, own, inputs, None, 2))
    zeros = {name: torch.zeros_like(grad) for name, grad in got.grads.items()}  # of experts that no token saw
    assert_same(got, want._replace(grads=zeros | want.grads))
    if backward == "autograd":
        assert_same(got, plain(run_reference(pipe, model, inputs, None)))
