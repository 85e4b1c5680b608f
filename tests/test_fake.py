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
    """Of what a function returns, and of its gradients for cotangents that are laid out in rows, and that are not."""
    out = function(*tensors)
    turned = torch.empty_like(out).mT.contiguous().mT if out.dim() > 1 else torch.ones_like(out)
    for cotangent in (torch.empty_like(out).contiguous(), turned):
        for x in (out, *torch.autograd.grad(out, tensors, cotangent, retain_graph=True)):
            yield [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def normalised(x, scale, shift):
    return torch.batch_norm(x, scale, shift, None, None, True, 0.1, 1e-5, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, *state: torch.layer_norm(x, (8,), *state),
        lambda x, *state: normalised(x.transpose(1, 2), *state),
        lambda x, *state: normalised(x.unflatten(1, (2, 3)).movedim(3, 1), *state),
        lambda x, *state: normalised(x[:, None].movedim(3, 1).transpose(2, 3), *state),
        lambda x, *state: torch.log_softmax(x + state[0] + state[1], -1),
        lambda x, *state: torch.softmax(x + state[0] + state[1], -1),
        lambda x, *state: torch.nn.functional.mse_loss(x.mT + (state[0] + state[1])[:, None], torch.ones(2, 8, 6)),
    ],
)
def test_results_are_laid_out_as_real_ones_are(function):
    tensors = [torch.randn(shape, requires_grad=True) for shape in [(2, 6, 8), (8,), (8,)]]
    mode = fake_mode()
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), requires_grad=True) for t in tensors]
        got = list(strides(function, fakes))
    assert got == list(strides(function, tensors))
