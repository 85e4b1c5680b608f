# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut into pieces, exchanged and added come out as if they had been added in order."""

from functools import reduce
from operator import add

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from fpipe.meshes.pieces import Pieces, row_range, take_rows
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from tests.common.gradients import stacks

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(stacks())
def test_pieces_are_sums_in_the_order_of_processes(stack):
    specs, copies = stack
    pieces = Pieces(specs, len(copies))
    sent = [pieces.pack(one, CPU) for one in copies]
    shared = [pieces.pack_one(k, pieces.add(k, [row[k] for row in sent]), CPU) for k in range(len(copies))]
    for spec, total, terms in zip(specs, pieces.join(shared), zip(*copies, strict=True), strict=True):
        there = [term for term in terms if term is not None]
        assert (total is None) == (not there)
        if total is not None:
            assert same_bits(total, reduce(add, there))
            assert total.stride() == spec.stride


@given(st.integers(0, 20), st.integers(1, 6))
def test_rows_are_cut_as_dtensors_cut_them(rows, count):
    whole = torch.arange(float(rows))
    theirs, _ = Shard(0)._split_tensor(whole, count, with_padding=False)
    assert [take_rows(whole, count, k).tolist() for k in range(count)] == [one.tolist() for one in theirs]
    assert row_range(rows, count, count - 1)[1] == rows


def test_a_shard_may_have_no_bytes_at_all():
    """A message of no bytes for each process: torch puts the second of them at an odd byte."""
    packing = Pieces((Spec.of(torch.ones(1, 3)),), count=2).packings[1]
    assert packing.size == 0
    arrived = torch.empty(2, 0, dtype=torch.uint8).unbind()
    assert [tensor.shape for buffer in arrived for tensor in packing.read(buffer)] == [(0, 3), (0, 3)]
