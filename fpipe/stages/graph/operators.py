# SPDX-License-Identifier: Apache-2.0
"""Sets of torch's operators, by which a recorded stage is simplified and cut into phases.

Runs on import; the sets are read when a plan is made, if stages are recorded.
"""

from __future__ import annotations

from fpipe.tensors.layouts import aten

PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution_backward.default,
        aten.embedding_dense_backward.default,
    }
)
VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default})
LIGHT = VIEWS | SUMS | SCALED | {aten.add.Tensor, aten._to_copy.default, aten.clone.default}
"""Operators that are cheap, compared with products."""
SAME = frozenset({aten.detach.default, aten.alias.default})
"""Operators that return their argument."""
LIKE = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})
"""Operators that depend only on the shape and dtype of their argument."""
