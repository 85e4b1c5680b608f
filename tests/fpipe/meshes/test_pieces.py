# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut into pieces, exchanged and added come out as if they had been added in order."""

import itertools
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from fpipe.meshes.pieces import FlatBuffer, Pieces, row_range, take_rows
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import same_bits
from tests.common.meshes import stacks

CPU = torch.device("cpu")


def require_sums_in_order(specs, totals, copies):
    """Fail unless these are the sums over copies, in their order and in the strides of the specs."""
    for spec, total, terms in zip(specs, totals, zip(*copies, strict=True), strict=True):
        there = [term for term in terms if term is not None]
        assert (total is None) == (not there)
        if total is not None:
            assert same_bits(total, reduce(add, there))
            assert total.stride() == spec.stride


@settings(max_examples=60)
@given(stacks())
def test_pieces_are_sums_in_the_order_of_processes(stack):
    specs, copies = stack
    pieces = Pieces(specs, len(copies))
    sent = [pieces.pack(one, CPU) for one in copies]
    shared = [pieces.pack_one(k, pieces.add(k, [row[k] for row in sent]), CPU) for k in range(len(copies))]
    require_sums_in_order(specs, pieces.join(shared), copies)


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


def sums(flat, copies):
    """Return what each process has once every slice was added by one of them and sent to all."""
    buffers = [flat.pack(one, CPU) for one in copies]
    own = [[tuple(map(torch.clone, part)) for part in flat.parts(buffer)] for buffer in buffers]
    for k, buffer in enumerate(buffers):
        flat.add(k, buffer, [flat.parts(buffer)[k] if j == k else sent[k] for j, sent in enumerate(own)])
    portions = [flat.parts(buffer)[k][0].clone() for k, buffer in enumerate(buffers)]
    for buffer, k in itertools.product(buffers, range(flat.count)):
        flat.parts(buffer)[k][0].copy_(portions[k])
    return [flat.unpack(buffer) for buffer in buffers]


@settings(max_examples=60)
@given(stacks())
def test_every_process_has_the_sums_in_the_order_of_processes(stack):
    specs, copies = stack
    for totals in sums(FlatBuffer(specs, len(copies)), copies):
        require_sums_in_order(specs, totals, copies)


@pytest.mark.parametrize("there", [*itertools.product([False, True], repeat=3)])
def test_a_gradient_that_some_processes_lack_is_the_sum_of_the_others(there):
    whole = torch.arange(15.0).view(5, 3)
    specs = (Spec.of(torch.ones(7)), OptionalSpec.of(whole), Spec.of(torch.ones(0, 3)), Spec.of(torch.tensor(1.0)))
    copies = [(torch.ones(7), whole if held else None, torch.ones(0, 3), torch.tensor(2.0)) for held in there]
    for first, optional, empty, last in sums(FlatBuffer(specs, 3), copies):
        assert first.tolist() == [3.0] * 7
        assert empty.shape == (0, 3)
        assert last.item() == 6.0
        assert torch.equal(optional, sum(there) * whole) if any(there) else optional is None


@given(stacks())
def test_slices_cover_the_buffer_once_and_differ_by_at_most_one_boundary(stack):
    specs, copies = stack
    flat = FlatBuffer(specs, len(copies))
    sizes = [len(data) for data, _ in flat.parts(torch.empty(flat.packing.size, dtype=torch.uint8))]
    assert sum(sizes) == flat.packing.offsets[-1]
    assert max(sizes) * len(sizes) < flat.packing.offsets[-1] + 16 * len(sizes)
