# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks in stages: one call each, however long the sequence, with the bits of eager mode."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fpipe
from fpipe.stages.recorded import Recorded
from schedules import one_f_one_b, zb_h1, zb_v
from tests.common.options import grouped
from tests.common.running import require_eager
from tests.common.sizes import by_night, covering, sampled

WIDTH, STEPS = 6, 9


class First(nn.Module):
    """The output of a recurrent layer, or its state too, next to its input."""

    def __init__(self, layer: nn.Module, time: int = 1) -> None:
        super().__init__()
        self.layer, self.time = layer, time

    def forward(self, x):
        out, state = self.layer(x)
        state = state[0] if isinstance(state, tuple) else state
        return torch.cat([out, x], 2) + state.mean()


class Reused(nn.Module):
    """A layer that is called twice, on an input that is used before and after: the gradients are sums of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = x.tanh()
        once = self.layer(y.relu() + y)[0]
        twice, state = self.layer(self.down(once) * y, self.layer(y)[1])
        return torch.cat([twice * self.layer.weight_hh_l0.sum(), y + state.sum()], 2)


class Last(nn.Module):
    """Only the last state of a layer whose initial state is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.start = nn.RNN(WIDTH, WIDTH, batch_first=True), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x):
        return self.layer(x, self.start.expand(1, len(x), WIDTH).contiguous())[1].sum(0)


class Cells(nn.Module):
    """A loop over the sequence in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        h = x.new_zeros(len(x), WIDTH)
        for one in x.unbind(1):
            h = self.cell(one, h)
        return h


LAYERS = {
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "time first": lambda: First(nn.GRU(WIDTH, WIDTH)),
    "no bias": lambda: First(nn.GRU(WIDTH, WIDTH, bias=False, batch_first=True)),
    "dropout": lambda: nn.Sequential(First(nn.GRU(WIDTH, WIDTH, 3, dropout=0.5, batch_first=True)), nn.Dropout(0.5)),
    "both ways": lambda: First(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)),
    "relu": lambda: First(nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True)),
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "projected": lambda: First(nn.LSTM(WIDTH, WIDTH, 2, proj_size=3, batch_first=True, bidirectional=True)),
    "doubles": lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)).double(),
    "reused": Reused,
    "last state": Last,
    "cells": Cells,
}
WAYS = {
    "autograd": (one_f_one_b, "autograd"),
    "graph": (one_f_one_b, "graph"),
    "halves": (zb_h1, "graph"),
    "V": (zb_v, "graph"),
}


def build(name, way, **options):
    torch.manual_seed(0)
    schedule, backward = WAYS[way]
    layer = LAYERS[name]()
    x = torch.randn(4, STEPS, WIDTH, dtype=next(layer.parameters()).dtype)
    ends = [nn.Linear(WIDTH, WIDTH, dtype=x.dtype), nn.LazyLinear(WIDTH, dtype=x.dtype)]
    model = nn.Sequential(ends[0], layer, ends[1], nn.Tanh())
    model(x)
    made, cuts = (schedule(2, 4), ["1", "2", "3"]) if way == "V" else (schedule(2, 2), ["1"])
    y = torch.randn_like(model(x))
    options = {"schedule": made, "cuts": cuts, "backward": backward, **options}
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse_loss, **grouped(options)), model, x, y


@sampled(1)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@covering(name=[*LAYERS], way=[*WAYS])
def test_recurrent_layers_have_the_bits_of_eager_mode(name, way):
    pipe, model, x, y = build(name, way)
    report = fpipe.verify(pipe, model, (x,), y, seed=3)
    assert bool(report.eager) is (name != "dropout"), "whose draws in eager mode are others"
    if WAYS[way][1] == "graph":
        assert all(type(stage.functions) is Recorded for stage in pipe.stages)


class Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.LazyLinear(WIDTH)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.last(out)


def test_a_packed_sequence_is_exact():
    torch.manual_seed(0)
    model, x = Packed(nn.LSTM(WIDTH, WIDTH, batch_first=True)), torch.randn(4, 4, WIDTH)
    batch, y = (x, torch.tensor([4, 2, 4, 3])), torch.randn(4, 4, WIDTH)
    model(*batch)
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=batch, targets=y, loss=mse_loss, schedule=how, cuts=["last"])
    assert fpipe.verify(pipe, model, batch, y).eager


@by_night
@covering(kind=[nn.LSTM, nn.GRU, nn.RNN], way=["autograd", "graph", "halves"])
def test_the_lengths_of_packed_sequences_come_with_the_batch(kind, way):
    """A batch with other lengths than the example's is captured anew."""
    torch.manual_seed(0)
    schedule, backward = WAYS[way]
    model, x = Packed(kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)), torch.randn(4, STEPS, WIDTH)
    lengths = torch.tensor([9, 2, 9, 3])
    y = torch.randn_like(model(x, lengths))
    pipe = fpipe.pipeline(
        model,
        example=(x, lengths),
        targets=y,
        loss=mse_loss,
        schedule=schedule(2, 2),
        cuts=["last"],
        gradients=fpipe.Gradients(backward=backward),
    )
    for given in (lengths, torch.tensor([1, 7, 6, 8])):
        assert fpipe.verify(pipe, model, (x, given), y).eager


class Padding(nn.Module):
    """Pads what an earlier module packed."""

    def forward(self, data, sizes):
        return pad_packed_sequence(PackedSequence(data, sizes), batch_first=True)[0]


class Apart(nn.Module):
    """Packs sequences in one stage and pads them in another."""

    def __init__(self):
        super().__init__()
        self.first, self.pad, self.last = nn.Linear(4, 4), Padding(), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True)
        return self.last(self.pad(packed.data.tanh(), packed.batch_sizes))


def test_a_stage_that_only_pads_packed_sequences_is_exact():
    """It reads the sizes where no mode sees it, so no graph of operators can show what it does."""
    model, x, lengths = Apart(), torch.randn(4, 5, 4), torch.tensor([5, 2, 5, 3])
    require_eager(model, (x, lengths), cuts=["pad"], backward="graph")
