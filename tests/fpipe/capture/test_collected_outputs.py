# SPDX-License-Identifier: Apache-2.0
"""What a model's first call leaves behind, and what its hooks collect, are as on one device, wherever the cuts are.

Libraries install hooks and buffers when a model is first called, and gather router logits, attention weights and hidden
states by hooks. Here every model is captured before it was ever called; the plain loop runs on another one, made anew.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.model.snapshot import Walk, contents
from schedules import one_f_one_b
from tests.common.cases import WIDTH, mse, rows_of
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import run, run_reference
from tests.common.sizes import NIGHTLY, few, in_turn

ROWS, WORDS = 4, 31
BACKWARDS = ["autograd", "graph"]


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
    *((name, "autograd") for name in ("Mixtral", "GPT-OSS", "DeepSeek-V3", "Jamba", "NLLB-MoE", "LLaVA", "wav2vec2")),
    *((name, "autograd") for name in ("BERT, attentions", "ViT, hidden states", "SegFormer")),
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
    pipe = fpipe.pipeline(model, example=inputs, loss=own, schedule=how, backward=backward, unsplittable=whole)
    got, want = plain(run(pipe, model, inputs, None)), plain(loop(another, own, inputs, None, 2))
    zeros = {name: torch.zeros_like(grad) for name, grad in got.grads.items()}  # of experts that no token saw
    assert_same(got, want._replace(grads=zeros | want.grads))
    if backward == "autograd":
        assert_same(got, plain(run_reference(pipe, model, inputs, None)))


# --------------------------------------------------------------------------------------------- what a first call leaves

collector: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("collector", default=None)
seen: list[Tensor] = []
table: dict[int, Tensor] = {}


class Block(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Stack(nn.Module):
    """Four blocks."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def collecting(module: nn.Module, args: object, out: Tensor) -> None:
    into = collector.get()
    if into is not None:
        into.append(out)


def shifted(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.5,)


class Gathering(Stack):
    """Installs hooks at its first call that give to whoever gathers; those of inner linears are used at the end."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            for block in self.blocks:
                block.a.register_forward_hook(collecting)
                block.b.register_forward_pre_hook(shifted)
            self.installed = True
        gathered: list[Tensor] = []
        token = collector.set(gathered)
        try:
            x = super().forward(x)
        finally:
            collector.reset(token)
        return x + sum(gathered) / len(gathered)


class Twice(Block):
    """Calls its first linear twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.a(x).sin())


class Checkpointing(Gathering):
    """The same with checkpointed blocks."""

    block = Twice

    def __init__(self) -> None:
        super().__init__()
        for name, block in enumerate(self.blocks):
            self.blocks[name] = Checkpointed(block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.a, self.b = block, block.a, block.b

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class MaskedBlock(Block):
    """Registers a buffer at its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(WIDTH).cumsum(0) / WIDTH, persistent=False)
        return super().forward(x * self.mask)


class Masked(Stack):
    block = MaskedBlock


class Helper:
    """Keeps what was computed once."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}


class Rotary(nn.Module):
    """Tables in a helper object, which the first call fills and all later ones share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.helper = nn.ModuleList([Block() for _ in range(4)]), Helper()

    def forward(self, x: Tensor) -> Tensor:
        if not self.helper.kept:
            angle = torch.arange(WIDTH).float()
            angle.mul_(0.25)
            self.helper.kept["tables"] = angle.sin(), angle.cos()
        sin, cos = self.helper.kept["tables"]
        for block in self.blocks:
            x = block(x * cos) + sin
        return x


class Scaled(Block):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Scaling(Stack):
    """Sets plain attributes of its blocks at its first call."""

    block, ready = Scaled, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            for k, block in enumerate(self.blocks):
                block.scale = 1 + k / 4
            self.ready = True
        return super().forward(x)


class Listing(Stack):
    """Hooks keep features in a list of the model's, which every forward empties."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.features.append(out)

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        x = super().forward(x)
        return x + self.features[0] * self.features[2]


class Global(Stack):
    """A hook keeps features, and a block a table, in containers of this file's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].a.register_forward_hook(lambda module, args, out: seen.append(out))

    def forward(self, x: Tensor) -> Tensor:
        seen.clear()
        if WIDTH not in table:
            table[WIDTH] = torch.arange(WIDTH) / WIDTH
        return super().forward(x * table[WIDTH]) + seen[0]


FIRST = (Gathering, Checkpointing, Masked, Rotary, Scaling, Listing, Global)
AT, INSIDE = ("blocks.1", "blocks.2", "blocks.3"), ("blocks.0.b", "blocks.1.b", "blocks.2.b")


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Those that the first call left in attributes, features and tables."""
    held = [one for part in module.modules() for one in (*vars(part).values(), *part._buffers.values())]
    return [one for one in (*held, *seen, *table.values(), *getattr(module, "features", ())) if isinstance(one, Tensor)]


@pytest.mark.parametrize(("case", "cuts"), in_turn(product(FIRST, BACKWARDS), [(), AT, INSIDE]), ids=str)
def test_objects_that_the_first_call_leaves_exist_in_every_later_call(case, cuts):
    kind, backward = case
    if kind is Checkpointing and cuts == INSIDE:
        pytest.skip("no cut may be in a checkpoint")
    seen.clear()
    table.clear()
    (inputs, targets), (model, another) = rows_of()(6), (kind(), kind())
    another.load_state_dict(model.state_dict())
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=list(cuts), backward=backward
    )
    assert not [one for one in tensors_of(model) if isinstance(one, FakeTensor)]
    want = loop(another, mse, inputs, targets, 3)
    for _ in range(2):
        got = run(pipe, model, inputs, targets)
        assert_same(got, want._replace(buffers=got.buffers))
    assert_same(got, run_reference(pipe, model, inputs, targets))
    assert not [one for one in tensors_of(model) if isinstance(one, FakeTensor)]


def test_no_fake_tensor_stays_in_the_copy_that_stages_run():
    class Noting(Listing):
        def forward(self, x: Tensor) -> Tensor:
            self.note = x, [x.sin()]
            return super().forward(x)

    inputs, targets = rows_of()(4)
    pipe = fpipe.pipeline(Noting(), example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(1, 2))
    frame = pipe.training.assembly.captured.fuse.__self__.tape.frames[0]
    walk = Walk()
    walk.follow([frame.invocation.function])
    held = [part for one in walk.containers.values() for part in contents(one)]
    assert not [
        one for part in held for one in (part if isinstance(part, tuple) else [part]) if type(one) is FakeTensor
    ]


class Shared:
    """Is what it is in a copy, too."""

    def __init__(self) -> None:
        self.note: Tensor | None = None

    def __deepcopy__(self, memo: object) -> Shared:
        return self


class Failing(nn.Module):
    """Leaves something wherever it can, and fails."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.shared.note = h
        seen.append(h)
        collector.set([h])
        return h if h.sum() > 0 else -h


def test_a_capture_that_fails_leaves_nothing_behind():
    seen.clear()
    shared = Shared()
    inputs, targets = rows_of()(4)
    with pytest.raises(fpipe.CaptureError):
        fpipe.pipeline(
            nn.Sequential(Failing(shared)), example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(1, 2)
        )
    assert shared.note is None
    assert not seen
    assert collector.get() is None


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_list_that_the_loss_fills_holds_what_steps_computed(backward):
    history: list[Tensor] = []
    calls: list[str] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = mse(outputs, targets)
        history.append(value.detach())
        calls.append("loss")
        return value

    inputs, targets = rows_of()(4)
    pipe = fpipe.pipeline(
        Stack(), example=inputs, targets=targets, loss=loss, schedule=one_f_one_b(2, 2), cuts=["blocks.2"],
        backward=backward,
    )  # fmt: skip
    assert not history
    assert not calls
    run(pipe, Stack(), inputs, targets)
    assert not [one for one in history if isinstance(one, FakeTensor)]
    assert len(history) == (2 if backward == "autograd" else 0)


# ------------------------------------------------------------------------------------- hooks that hold parts of a model


class Closing(Stack):
    """Hooks that close over the model, over a list of its own, or have a part of it as a default."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.pooled: dict[str, Tensor] = {}
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))
        features = self.features

        def keep(module: nn.Module, args: object, out: Tensor) -> None:
            self.features.append(out)
            self.seen += 1

        def kept(module: nn.Module, args: object, out: Tensor, pooled: dict[str, Tensor] = self.pooled) -> Tensor:
            pooled["mean"] = out.mean() * self.scale
            return out + len(features)

        self.blocks[0].register_forward_hook(keep)
        self.blocks[2].register_forward_hook(partial(kept))

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        return super().forward(x) + self.features[0] * self.pooled["mean"]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("cuts", [(), AT, INSIDE], ids=["uncut", "at blocks", "inside"])
def test_hooks_that_hold_parts_of_the_model_hold_those_of_the_copy(cuts, backward):
    (inputs, targets), (model, another) = rows_of()(6), (Closing(), Closing())
    another.load_state_dict(model.state_dict())
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=3)
    pipe = fpipe.pipeline(
        model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=list(cuts), backward=backward
    )
    got = run(pipe, model, inputs, targets)
    assert not model.features
    assert not model.seen.any()
    # deepcopy, which the loop uses, leaves hooks with the original: so that one is called, and its tensors are compared
    another.zero_grad()
    for x, y in zip(inputs[0].chunk(3), targets.chunk(3), strict=True):
        (mse(another(x), y) / 3).backward()
    want = {name: p.grad for name, p in another.named_parameters()}
    assert_same(got, got._replace(grads=want, buffers=dict(another.named_buffers())))


class Counted(Block):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


counted = nn.Sequential(Counted(), Block())


def by_name(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return out * counted[0].calls


def test_a_hook_that_uses_the_model_by_the_name_of_a_global_is_refused():
    handle = counted[1].register_forward_hook(by_name)
    inputs, targets = rows_of()(4)
    with pytest.raises(fpipe.CaptureError, match=r"by_name: got the global 'counted', which is a part of the model"):
        fpipe.pipeline(counted, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(1, 2))
    handle.remove()


class Holder:
    """Holds the model, which does not hold it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def scale(self, out: Tensor) -> Tensor:
        return out * self.model[0].calls


class CountedAnew(Counted):
    """Assigns its count."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, x)


@pytest.mark.parametrize("counted", [Counted, CountedAnew])
def test_a_hook_that_reads_a_changing_buffer_of_the_original_is_refused(counted):
    model = nn.Sequential(counted(), Block())
    holder = Holder(model)

    def scaled(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return holder.scale(out)

    model[1].register_forward_hook(scaled)
    inputs, targets = rows_of()(4)
    with pytest.raises(fpipe.CaptureError, match=r"buffer 0\.calls: got a use of it from outside the model"):
        fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(1, 2))


# ----------------------------------------------------------------------------------------------------- what errors say


class Ragged(Block):
    """What it returns has as many rows as data say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unique()


class Deciding(Stack):
    """Asks for a value in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def deciding(outputs: Tensor, targets: Tensor) -> Tensor:
    value = mse(outputs, targets)
    return value if value > 1 else value * 2


@pytest.mark.parametrize(
    ("model", "options", "words", "never"),
    [
        (nn.Sequential(Block(), Deciding()), {}, "name the module in unsplittable", "of its own"),
        (Deciding(), {}, "put that part into a module of its own, and name this in unsplittable", "name the module"),
        (nn.Sequential(Block(), Ragged()), {"unsplittable": Ragged}, "shapes that depend on data out of", "name the"),
        (Stack(), {"loss": deciding}, "pass unsplittable=['loss'], and it runs as it is", "name the module"),
    ],
    ids=["a module", "the model itself", "a module that is named already", "the loss"],
)
def test_an_error_names_a_repair_that_works(model, options, words, never):
    inputs, targets = rows_of()(4)
    options = {"loss": mse, **options}
    with pytest.raises(fpipe.CaptureError) as caught:
        fpipe.pipeline(model, example=inputs, targets=targets, schedule=one_f_one_b(1, 2), **options)
    assert words in str(caught.value)
    assert never not in str(caught.value)


def test_errors_do_not_mention_hooks_of_libraries():
    """What cannot be run as a whole is named, and the hook if it is the reason."""
    model = Gathering()
    model.blocks[1].register_full_backward_hook(lambda module, incoming, outgoing: None)
    inputs, targets = rows_of()(4)
    with pytest.raises(fpipe.CutError, match=r"inside 'blocks\.1' \(Block\): the backward hook .*<lambda>"):
        fpipe.pipeline(
            model, example=inputs, targets=targets, loss=mse, schedule=one_f_one_b(2, 2), cuts=["blocks.1.b"]
        )


# ----------------------------------------------------------------------------------------------------------- at random

PLACES = [f"blocks.{k}{inner}" for k in range(4) for inner in ("", ".a", ".b")]


def collect(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
    root.collected.append(out * weight)


def collect_first(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor]) -> None:
    root.collected.append(args[0] * weight)


def scale(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out * weight


def mix(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out + weight * (root.collected[-1] if root.collected else root.shift)


def shift(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + weight * root.shift,)


class Hooked(Stack):
    """Hooks of all kinds, from the start or from the first call on; what they collect is added up at the end."""

    def __init__(self, hooks: list[tuple[str, Any, float]], lazy: bool, checkpoints: bool) -> None:
        super().__init__()
        self.hooks, self.installed, self.checkpoints = hooks, False, checkpoints
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.collected: list[Tensor] = []
        if not lazy:
            self.install()

    def install(self) -> None:
        for name, hook, weight in self.hooks:
            module = self.get_submodule(name)
            before = hook in (collect_first, shift)
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            register(partial(hook, self, weight))
        self.installed = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.install()
        self.collected = []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return sum((one * (k + 1) for k, one in enumerate(self.collected)), x + self.shift)


def test_a_hook_finds_what_modules_of_other_stages_put_into_a_list():
    """The list holds the very tensor that the module gets, so nothing shows that the hook has read it."""

    def keep(root: Hooked, weight: float, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        root.collected.append(out)

    torch.manual_seed(0)
    model, (inputs, targets) = Hooked([("blocks.0", keep, 1), ("blocks.1", mix, 0.5)], False, False), rows_of()(4)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=["blocks.1"])
    fpipe.verify(pipe, model, inputs, targets)


CUTS = (*AT, *INSIDE, "blocks.3.b")
KINDS = [collect, collect_first, scale, mix, shift]
HOOK = st.tuples(st.sampled_from(PLACES), st.sampled_from(KINDS), st.sampled_from([0.5, 1, 1.5]))


@settings(max_examples=few(12))
@given(
    st.lists(HOOK, max_size=6),
    st.sets(st.sampled_from(CUTS), max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(BACKWARDS if NIGHTLY else ["autograd"]),
)
def test_hooks_of_all_kinds_are_part_of_the_forward_or_refused(hooks, cuts, lazy, checkpoints, backward):
    def make() -> Hooked:
        torch.manual_seed(0)
        return Hooked(hooks, lazy, checkpoints)

    (inputs, targets), model, another = rows_of()(4), make(), make()
    how = one_f_one_b(ranks=len(cuts) + 1, microbatches=2)
    where = sorted(cuts, key=lambda name: (name[:8], name))
    try:
        pipe = fpipe.pipeline(
            model, example=inputs, targets=targets, loss=mse, schedule=how, cuts=where, backward=backward
        )
    except (fpipe.CutError, fpipe.CaptureError):
        assert checkpoints
        return
    got = run(pipe, model, inputs, targets)
    values = []
    for x, y in zip(inputs[0].chunk(2), targets.chunk(2), strict=True):
        values.append(mse(another(x), y) / 2)
        values[-1].backward()
    assert torch.equal(got.loss, values[0].detach() + values[1].detach())
    assert_same(got, got._replace(grads={name: p.grad for name, p in another.named_parameters() if p.grad is not None}))
    assert not model.collected
