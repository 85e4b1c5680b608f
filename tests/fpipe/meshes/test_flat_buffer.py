# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie side by side in a buffer, are sent in portions and added come out as if added in order."""

import itertools
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings

from fpipe.meshes.flat_buffer import FlatBuffer
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import same_bits
from tests.common.gradients import stacks

CPU = torch.device("cpu")


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
        for spec, total, terms in zip(specs, totals, zip(*copies, strict=True), strict=True):
            there = [term for term in terms if term is not None]
            assert (total is None) == (not there)
            if total is not None:
                assert same_bits(total, reduce(add, there))
                assert total.stride() == spec.stride


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
