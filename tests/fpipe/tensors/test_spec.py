# SPDX-License-Identifier: Apache-2.0
"""What is packed comes out as it went in: shape, strides and bits, whatever the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from tests.common.sizes import few

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def fill(shape, dtype):
    numel = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.arange(numel) % 3 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(torch.arange(numel) + 0.5, -torch.arange(numel) * 0.25).to(dtype).reshape(shape)
    return (torch.arange(numel) % 100).to(dtype).reshape(shape)


@st.composite
def layouts(draw):
    """A tensor of any common dtype that has been permuted, sliced, expanded and squeezed."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = fill(shape, draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        change = draw(st.sampled_from(["permute", "step", "narrow", "expand", "select", "flip"]))
        dims = tensor.dim()
        dim = draw(st.integers(0, dims - 1)) if dims else 0
        if change == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif change == "step" and dims:
            tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
        elif change == "narrow" and dims:
            size = tensor.shape[dim]
            start = draw(st.integers(0, size))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, size - start)))
        elif change == "expand" and dims < 5:
            size = draw(st.integers(0, 3))
            tensor = tensor.unsqueeze(dim)
            tensor = tensor.expand(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
        elif change == "select" and dims and tensor.shape[dim]:
            tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
    return tensor


def require_round_trip(tensor):
    spec = Spec.of(tensor)
    packed = spec.pack(tensor)
    assert packed.dtype is torch.uint8
    assert packed.is_contiguous()
    assert packed.shape == spec.buffer().shape
    received = spec.buffer().copy_(packed)
    out = spec.unpack(received)
    assert Spec.of(out) == spec
    assert same_bits(out, tensor)
    assert Spec.of(spec.like(tensor.contiguous())) == spec
    assert same_bits(spec.like(tensor.clone(memory_format=torch.contiguous_format)), tensor)


@settings(max_examples=few(400))
@given(layouts())
def test_any_layout_survives_packing(tensor):
    before = tensor.clone()
    require_round_trip(tensor)
    assert same_bits(tensor, before)


@given(layouts())
def test_every_element_is_packed_once(tensor):
    """No more bytes than there are elements in memory: what is broadcast travels once."""
    spec = Spec.of(tensor)
    distinct = torch.Size([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]).numel()
    expected = distinct * tensor.element_size() if tensor.numel() else 0
    assert spec.pack(tensor).numel() <= max(expected, 0) or not tensor.numel()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3).transpose(0, 2),
        torch.randn(1, 1, 1),
        torch.randn(3, 1, 2)[:, :, :1],
        torch.randn(4).expand(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(6, 6)[1:5:2, ::3],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8).as_strided((3, 1), (2, 77)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.view_as_complex(torch.randn(3, 2)).conj().imag,
        torch.randn(10).unfold(0, 4, 1),
        torch.randn(2, 7).unfold(1, 3, 2).transpose(0, 1),
        torch.randn(5).as_strided((2, 2, 2), (1, 2, 1)),
    ],
    ids=lambda tensor: f"{list(tensor.shape)}{list(tensor.stride())}",
)
def test_unusual_layouts_survive_packing(tensor):
    require_round_trip(tensor)


def test_dense_memory_is_not_copied():
    for tensor in (torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(4).expand(5, 4)):
        spec = Spec.of(tensor)
        assert spec.pack(tensor).data_ptr() == tensor.data_ptr()
        buffer = spec.buffer()
        assert spec.unpack(buffer).data_ptr() == buffer.data_ptr()
        assert spec.like(tensor) is tensor


def test_a_spec_prints_dtype_and_shape():
    assert str(Spec.of(torch.zeros(2, 3, dtype=torch.bfloat16))) == "bfloat16[2, 3]"
    assert Spec.of(torch.zeros(2, 3)) != Spec.of(torch.zeros(3, 2).t())
    assert hash(Spec.of(torch.zeros(2))) == hash(Spec.of(torch.ones(2)))
