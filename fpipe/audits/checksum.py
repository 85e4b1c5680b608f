# SPDX-License-Identifier: Apache-2.0
"""Checksums of the bits of tensors, as fast as memory is read.

Idea. The words of a tensor are laid out in rows, and the rows are added up, modulo 2**64; the sums of the columns are
hashed. The rows have a prime number of words: whoever swaps two pieces of a tensor, of some power of two bytes, moves
their words to other columns. The last row is never full, so there are columns with an odd number of words: a sum keeps
of the first bits of its words only whether they are even, and so tells if the signs of all of them change.

Invariant: a change within one word of 8 bytes always gives other sums, and so does any one flipped bit.

Runs for each drawn action of a step that is audited.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fpipe.tensors.tree import list_tensors

WORD: Final = 8
WIDTHS: Final = (1021, 1019, 1013, 1009)
HASHED: Final = 4096  # bytes, up to which Python's own hash is faster than calls of torch

Checksums: TypeAlias = tuple[int, ...]


def sum_up(value: Any) -> Checksums:
    """Return the checksum of each tensor in nested tuples and lists."""
    return tuple([checksum(one) for one in list_tensors(value)])


def checksum(tensor: Tensor) -> int:
    """Return a number that depends on the bits of a tensor's elements, whatever its strides.

    >>> ones = torch.ones(5000)
    >>> checksum(ones) == checksum(torch.ones(2, 5000)[1]), checksum(ones) == checksum(torch.nextafter(ones, 2 * ones))
    (True, False)
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        dense = tensor.coalesce()
        return hash((checksum(dense.indices()), checksum(dense.values())))
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if (data.storage_offset() * data.element_size()) % WORD:
        data = data.clone()
    data = data.view(torch.uint8)
    if data.numel() <= HASHED:
        return hash(data.numpy(force=True).tobytes())
    count = data.numel() // WORD
    words, tail = data[: WORD * count].view(torch.int64), data[WORD * count :]
    width = next(one for one in WIDTHS if count % one)
    rows = count // width
    columns = words[: rows * width].view(rows, width).sum(0)
    rest = words[rows * width :]
    columns[: len(rest)] += rest
    return hash((columns.numpy(force=True).tobytes(), bytes(tail.tolist())))
