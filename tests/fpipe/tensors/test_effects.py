# SPDX-License-Identifier: Apache-2.0
"""What an operator does besides computing is read off its schema."""

import pytest
import torch

from fpipe.tensors.effects import is_random

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "draws"),
    [
        (aten.native_dropout.default, True),
        (aten.bernoulli_.float, True),
        (aten._scaled_dot_product_efficient_attention.default, True),
        (aten._scaled_dot_product_efficient_attention_backward.default, False),  # tagged as if it drew
        (aten._scaled_dot_product_cudnn_attention_backward.default, False),
        (aten._scaled_dot_product_flash_attention_backward.default, False),
        (aten.mul.Tensor, False),
        (torch.dropout, False),  # a function, whose operators are asked
    ],
)
def test_only_operators_that_draw_are_random(operator, draws):
    assert is_random(operator) is draws
