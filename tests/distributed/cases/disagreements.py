# SPDX-License-Identifier: Apache-2.0
"""Ranks that build different pipelines: all of them raise an error that names the difference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import fpipe
from schedules import B, F, one_f_one_b, schedule
from tests.common.layers import linears
from tests.common.running import build
from tests.common.schedules import SCHEDULES
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import raises
from tests.distributed.cases.registry import case

ALL_TANH = replace(ZOO["mlp"], build=lambda: linears(nn.Tanh, nn.Tanh, nn.Tanh))


@case
def another_number_of_ranks(rank, size):
    words = (f"{size} processes", f"schedule's {size + 1} ranks", f"Start {size + 1}", f"ranks={size}")
    with raises(fpipe.TransportError, *words):
        fpipe.pipeline(
            nn.Sequential(*[nn.Linear(4, 4) for _ in range(size + 1)]),
            example=(torch.randn(4, 4),),
            loss=torch.mean,
            schedule=one_f_one_b(ranks=size + 1, microbatches=2),
        )


@case
def other_microbatches_on_one_rank(rank, size):
    how = one_f_one_b(ranks=size, microbatches=2 if rank == 1 else 4)
    with raises(fpipe.TransportError, f"rank {rank}", "- schedule: got on", "microbatches=2", "microbatches=4"):
        build(ZOO["mlp"], how, 8)


@case
def other_cuts_on_one_rank(rank, size):
    cuts = ("1", "3", "6")[: size - 1] if rank else ("2", "4", "6")[: size - 1]
    with raises(fpipe.TransportError, "- cuts: got on rank 0: before units", "; on rank"):
        build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8, cuts)


@case
def another_tie_on_one_rank(rank, size):
    with raises(fpipe.TransportError, "- tied: got on rank 0: summed: ", "; on rank", ": nothing"):
        build(ZOO["tied_sequence"], one_f_one_b(ranks=size, microbatches=4), 8, tied="exact" if rank else "sum")


@case
def another_model_on_one_rank(rank, size):
    """Other operators, or other frozen parameters, between values of the same shapes."""
    for other, words in ((ALL_TANH, ("- model: got on rank 0", "tanh", "relu")), (ZOO["frozen_below"], ("frozen",))):
        with raises(fpipe.TransportError, *words):
            build(ZOO["mlp"] if rank else other, one_f_one_b(ranks=size, microbatches=4), 8, tuple("246")[1 - size :])


@case
def another_schedule_on_one_rank(rank, size):
    kind = "gpipe" if rank else "one_f_one_b"
    with raises(fpipe.TransportError, "- schedule: got on rank 0: one_f_one_b", " gpipe("):
        build(ZOO["mlp"], SCHEDULES[kind](ranks=size, microbatches=4), 8)


def backwards(count):
    return reversed(range(count))


def in_order(order):
    """Return a user's schedule whose name and arguments do not tell its body."""

    @schedule()
    def mine(rank, ranks, microbatches):
        for i in order(microbatches):
            yield F(rank, i)
        for i in order(microbatches):
            yield B(rank, i)

    return mine


@case
def another_body_of_a_schedule(rank, size):
    how = in_order(range if rank else backwards)(size, 4)
    words = ("- program: got on rank 0: rank 0: 0F3 0F2", "rank 0: 0F0 0F1")
    with raises(fpipe.TransportError, *words) as raised:
        build(ZOO["mlp"], how, 8)
    assert "- schedule" not in raised.text
    assert len(raised.text) < 800


def counting(factor):
    return lambda inputs, targets: len(targets) * factor


def cutting(first):
    return lambda leaf, microbatches: list(leaf.chunk(microbatches)) if first else list(leaf.split(2))


@case
def other_functions_on_one_rank(rank, size):
    """Functions are compared by their bodies and the contents of their cells, not by names or addresses."""
    one = ZOO["mlp"]
    model, inputs, targets = one.make(8)
    common = {"example": inputs, "targets": targets, "cuts": one.at(size), "loss": one.loss}
    common["schedule"] = one_f_one_b(ranks=size, microbatches=4)
    for options, words in (
        ({"weight": counting(1 + (rank == 1))}, ("- weight: got on", "cell factor: 1", "on rank 1: cell factor: 2")),
        ({"batch_dims": cutting(rank == 1)}, ("- batch_dims: got on", "on rank 1: cell first: True")),
        ({"batch_dims": cutting(True) if rank else 0}, ("- batch: got on rank 0",)),
        ({"loss": one.loss if rank else lambda x, y: one.loss(y, x)}, ("- loss: got on rank 0",)),
    ):
        with raises(fpipe.TransportError, *words):
            fpipe.pipeline(model, **(common | options))
    fpipe.pipeline(model, **(common | {"weight": counting(3), "batch_dims": cutting(True)}))


class Shifted(nn.Sequential):
    """Adds a tensor that is neither parameter nor buffer."""

    def __init__(self, by):
        super().__init__(*[nn.Linear(6, 6) for _ in range(4)])
        self.by = torch.full((6,), by)

    def forward(self, x):
        return super().forward(x) + self.by


@case
def other_tensor_attributes(rank, size):
    def built(by):
        torch.manual_seed(0)
        x = torch.randn(4, 6)
        how = one_f_one_b(ranks=size, microbatches=2)
        return fpipe.pipeline(Shifted(by), example=(x,), loss=torch.sum, schedule=how)

    with raises(
        fpipe.TransportError, "- tensors that are neither parameters nor buffers: got on rank 0", "[6] of values"
    ):
        built(float(rank == 0))
    built(1.0)
