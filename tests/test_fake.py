# SPDX-License-Identifier: Apache-2.0
"""What fake tensors say is what real ones are, where torch's own would refuse."""

import pytest
import torch

from fpipe.capture.fake import fake_mode


def described(a, b, offsets):
    """A grouped product and its gradients: shape, strides, dtype and device of each."""
    product = torch.nn.functional.grouped_mm(a, b, offs=offsets)
    grads = torch.autograd.grad(product, [a, b], torch.empty_like(product))
    return [(x.shape, x.stride(), x.dtype, x.device) for x in (product, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_products_of_any_dtype(dtype, turned):
    a = torch.randn(6, 16, dtype=dtype, requires_grad=True)
    b = torch.randn(3, *((24, 16) if turned else (16, 24)), dtype=dtype).transpose(1, 2 if turned else 1)
    arguments = a, b.requires_grad_(), torch.tensor([2, 3, 6], dtype=torch.int32)
    mode = fake_mode()
    assert described(*map(mode.from_tensor, arguments)) == described(*arguments)


def strides(function, tensors):
    """Of what a function returns, and of its gradients for a cotangent that is laid out in rows."""
    out = function(*tensors)
    return [x.stride() for x in (out, *torch.autograd.grad(out, tensors, torch.empty_like(out).contiguous()))]


def normalised(x, scale, shift):
    return torch.batch_norm(x, scale, shift, None, None, True, 0.1, 1e-5, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, *state: torch.layer_norm(x, (8,), *state).transpose(1, 2),
        lambda x, *state: normalised(x.transpose(1, 2), *state),
        lambda x, *state: normalised(x.unflatten(1, (2, 3)).movedim(3, 1), *state),
    ],
)
def test_norms_of_what_is_not_laid_out_in_rows(function):
    tensors = [torch.randn(shape, requires_grad=True) for shape in [(2, 6, 8), (8,), (8,)]]
    assert strides(function, [*map(fake_mode().from_tensor, tensors)]) == strides(function, tensors)
