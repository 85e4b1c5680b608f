# SPDX-License-Identifier: Apache-2.0
"""Pieces of gradients, some of them absent, are added in the order of the copies, in new memory or in a message."""

import itertools

import pytest
import torch

from fpipe.meshes.pieces import Pieces
from fpipe.tensors.spec import OptionalSpec, Spec

CPU = torch.device("cpu")
EXAMPLES = (torch.ones(5, 3), torch.ones(4, 4).t(), torch.ones(7), torch.ones(0, 3), torch.tensor(1.0))


def optional(tensor: torch.Tensor) -> OptionalSpec:
    return OptionalSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


SPECS = (*map(Spec.of, EXAMPLES), optional(EXAMPLES[0]))


def exchanged(pieces: Pieces, k: int, *there: bool) -> list[torch.Tensor]:
    """Return piece `k` of each copy, one after the other in one buffer, as a collective delivers them."""
    found = []
    for is_there in there:
        tensors = [torch.randn_like(one) for one in EXAMPLES]
        whole = pieces.pack((*tensors, torch.randn(5, 3) if is_there else None), CPU)
        found.append(torch.split(whole, pieces.sizes)[k])
    return [*torch.cat(found).view(len(found), -1).unbind()]


@pytest.mark.parametrize("there", [*itertools.product([False, True], repeat=3)])
def test_pieces_next_to_each_other_in_memory_can_be_read(there):
    pieces = Pieces(SPECS, 3, by_rows=False)
    for k in range(3):
        *_, last = pieces.add(k, exchanged(pieces, k, *there))
        assert (last is not None) == any(there)


@pytest.mark.parametrize("there", [*itertools.product([False, True], repeat=3)])
def test_a_message_holds_the_same_sums(there):
    pieces = Pieces(SPECS, 3, by_rows=False)
    for k in range(3):
        copies, packing = exchanged(pieces, k, *there), pieces.packings[k]
        expected = pieces.add(k, copies)
        found = packing.read(pieces.add_packed(k, copies, CPU)[: packing.size])
        assert [one is None for one in found] == [one is None for one in expected]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None)


def test_a_shard_may_have_no_bytes_at_all():
    """A message of no bytes for each process: torch puts the second of them at an odd byte."""
    packing = Pieces((Spec.of(torch.ones(1, 3)),), count=2, by_rows=True).packings[1]
    assert packing.size == 0
    arrived = torch.empty(2, 0, dtype=torch.uint8).unbind()
    assert [tensor.shape for buffer in arrived for tensor in packing.read(buffer)] == [(0, 3), (0, 3)]
