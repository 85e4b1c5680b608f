# SPDX-License-Identifier: Apache-2.0
"""The zoo: every small model as a case, by name."""

from __future__ import annotations

import torch
from torch import nn

from fpipe.tensors.torch_private import VERSION
from tests.common.cases import PARTS, WIDTH, Case, cross_entropy, mse, rows_of, words
from tests.common.layers import Merge, Middle, Split, linears
from tests.common.models import (
    GPT,
    Chained,
    Constants,
    Contexts,
    Fourier,
    InPlace,
    Later,
    OwnLoss,
    Recurrent,
    Several,
    Skips,
    Strides,
    Twice,
    UNet,
    Unused,
    all_frozen,
    dropping,
    frozen_below,
    mixed_precision,
    normalised,
    one_weight,
    own_loss_batch,
    several_batch,
    several_loss,
    strides_batch,
    tied_sequence,
)

ZOO: dict[str, Case] = {
    "mlp": Case(lambda: linears(nn.ReLU, nn.Tanh, nn.GELU), rows_of(), mse, ("1", "3", "6"), PARTS),
    "gpt": Case(GPT, words, cross_entropy, ("blocks.1", "blocks.2", "head")),
    "tied_sequence": Case(tied_sequence, words, cross_entropy, ("1", "2", "3"), PARTS),
    "chained": Case(Chained, rows_of(), mse, ("b", "c", "d")),
    "one_weight": Case(one_weight, rows_of(), mse, ("2", "4", "6"), PARTS),
    "skips": Case(Skips, rows_of(), mse, ("b", "c", "d")),
    "unet": Case(
        UNet, lambda rows: ((torch.randn(rows, 1, 4, 4),), torch.randn(rows, 1, 4, 4)), mse, ("deep", "up", "last")
    ),
    "normalised": Case(normalised, rows_of(), mse, ("1", "3", "5"), PARTS),
    "later": Case(Later, words, cross_entropy, ("a", "pick", "again")),
    "dicts": Case(lambda: nn.Sequential(Split(), Middle(), Middle(), Merge()), rows_of(), mse, ("1", "2", "3"), PARTS),
    "frozen_below": Case(frozen_below, rows_of(), mse, ("2", "4", "6"), PARTS),
    "all_frozen": Case(all_frozen, rows_of(), mse, ("2", "4", "6"), PARTS),
    "unused": Case(Unused, rows_of(), lambda outputs, targets: mse(outputs[0], targets), ("b", "c", "d")),
    "several": Case(Several, several_batch, several_loss, ("right", "both", "last")),
    "own_loss": Case(OwnLoss, own_loss_batch, lambda outputs: outputs["loss"], ("b", "c", "d")),
    "in_place": Case(InPlace, rows_of(), mse, ("b", "c", "d")),
    "strides": Case(Strides, strides_batch, mse, ("scaled", "b", "c")),
    "twice": Case(Twice, rows_of(), mse, ("a", "b", "c")),
    "contexts": Case(Contexts, rows_of(), mse, ("b", "c", "d"), ("trace", "export")),
    "fourier": Case(Fourier, rows_of(), mse, ("b", "c", "d")),
    "constants": Case(Constants, rows_of(), mse, ("squash", "act", "d")),
    "recurrent": Case(Recurrent, words, cross_entropy, ("gru", "lstm", "head")),
    "mixed_precision": Case(
        mixed_precision,
        lambda rows: ((torch.randn(rows, WIDTH, dtype=torch.float64),), torch.randn(rows, WIDTH)),
        mse,
        ("1", "2", "3"),
        PARTS,
    ),
    "dropping": Case(dropping, rows_of(), mse, ("2", "4", "5"), PARTS, random=True),
    "gpt_dropout": Case(lambda: GPT(dropout=0.25), words, cross_entropy, ("blocks.1", "blocks.2", "head"), random=True),
}


EXPORTS_LESS = VERSION < (2, 13)
"""True if torch.export traces neither recurrent layers nor buffers that a strict trace changes."""


def captured_by(*fronts: str) -> list[tuple[str, str]]:
    """The cases of the zoo that these front ends can capture, with each of them."""
    lost = {("recurrent", "export"), ("recurrent", "dynamo")} if EXPORTS_LESS else set()
    known = [(name, front) for name, case in ZOO.items() for front in case.fronts if front in fronts]
    return [case for case in known if case not in lost]
