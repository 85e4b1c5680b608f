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
