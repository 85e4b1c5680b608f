# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut into pieces, exchanged and added come out as if they had been added in order."""

from functools import reduce
from operator import add

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from fpipe.meshes.pieces import Pieces, row_range, take_rows
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import same_bits

CPU = torch.device("cpu")


@st.composite
def stacks(draw):
    """Specs of tensors, some of them optional and some transposed, and copies of such tensors for some processes."""
    count = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in shapes]
    optional = [draw(st.booleans()) for _ in shapes]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    layouts = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    layouts = [one.transpose(0, -1) if draw(st.booleans()) else one for one in layouts]
    specs = [(OptionalSpec if o else Spec).of(one) for o, one in zip(optional, layouts, strict=True)]
    copies = [
        tuple(
            None
            if isinstance(spec, OptionalSpec) and draw(st.booleans())
            else spec.empty().copy_(torch.randn(spec.shape, generator=generator))
            for spec in specs
        )
        for _ in range(count)
    ]
    return tuple(specs), copies


@settings(max_examples=60)
@given(stacks(), st.booleans())
def test_pieces_are_sums_in_the_order_of_processes(stack, by_rows):
    specs, copies = stack
    pieces = Pieces(specs, len(copies), by_rows)
    sent = [torch.split(pieces.pack(one, CPU), pieces.sizes) for one in copies]
    shared = [pieces.pack_one(k, pieces.add(k, [row[k] for row in sent]), CPU) for k in range(len(copies))]
    straight = [pieces.add_packed(k, [row[k] for row in sent], CPU) for k in range(len(copies))]
    for joined in (pieces.join(shared), pieces.join(straight)):
        for spec, total, terms in zip(specs, joined, zip(*copies, strict=True), strict=True):
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
