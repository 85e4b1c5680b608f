# SPDX-License-Identifier: Apache-2.0
"""Checksums see every flipped bit, and pieces that change places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe.audits.checksum import checksum, sum_up
from tests.common.faults import flip

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SIZES = [1, 3, 1000, 1024, 4097, 20_001]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@given(size=st.sampled_from(SIZES), place=st.integers(0, 10**6), bit=st.integers(0, 63), offset=st.integers(0, 3))
def test_every_flipped_bit_gives_another_checksum(dtype, size, place, bit, offset):
    tensor = torch.randn(size + offset).mul(50).to(dtype)[offset:]
    bits = tensor.contiguous().view(torch.uint8) if dtype is not torch.bool else tensor.to(torch.uint8)
    flipped = flip(bits, place, bit).view(dtype) if dtype is not torch.bool else flip(bits, place, 0).to(torch.bool)
    assert checksum(tensor) != checksum(flipped)
    assert checksum(tensor) == checksum(tensor.clone())


@pytest.mark.parametrize("more", range(1, 8))
def test_a_last_word_that_is_not_full_counts(more):
    tensor = torch.zeros(8000 + more, dtype=torch.uint8)
    for place in range(8000 - 1, 8000 + more):
        assert checksum(tensor) != checksum(flip(tensor, place, 3))


@given(st.sampled_from(SIZES), st.integers(0, 2**20))
def test_bits_count_and_strides_do_not(size, seed):
    tensor = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(torch.zeros(size)) != checksum(-torch.zeros(size))
    nan = torch.full((size,), float("nan"))
    assert checksum(nan) == checksum(nan.clone())


@given(st.integers(3, 12), st.integers(1, 7))
def test_pieces_that_change_places_are_seen(power, rows):
    tensor = torch.randn(2**power * 64).view(-1, 2**power)
    rows = min(rows, len(tensor) - 1)
    assert checksum(tensor) != checksum(tensor.roll(rows, 0))
    assert checksum(tensor) != checksum(tensor.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 2 * 1021 * 16, 4 * 1021 * 1019])
def test_signs_that_change_all_at_once_are_seen(dtype, size):
    tensor = torch.randn(size).abs().to(dtype)
    assert checksum(tensor) != checksum(-tensor)
    half = torch.where(torch.arange(size) % 4 == 3, -tensor, tensor)
    assert checksum(tensor) != checksum(half)


def test_sparse_and_conjugate_tensors_have_checksums():
    sparse = torch.sparse_coo_tensor([[1, 5, 1]], torch.ones(3, 7), (9, 7), check_invariants=True)
    assert checksum(sparse) == checksum(sparse.coalesce())
    assert checksum(sparse) != checksum(2 * sparse)
    number = torch.randn(1000, dtype=torch.complex64)
    assert checksum(number.conj()) == checksum(number.conj().resolve_conj()) != checksum(number)


def test_nested_values_have_the_checksums_of_their_tensors():
    one, other = torch.ones(3), torch.zeros(2)
    assert sum_up(((one, None), [other, 3])) == (checksum(one), checksum(other))
    assert sum_up(None) == sum_up(()) == ()
