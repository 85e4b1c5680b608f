# SPDX-License-Identifier: Apache-2.0
"""Gradients of several processes, drawn."""

import torch
from hypothesis import strategies as st

from fpipe.tensors.spec import OptionalSpec, Spec


@st.composite
def stacks(draw):
    """Specs of tensors, some of them optional and some transposed, and copies of such tensors for some processes."""
    count = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in shapes]
    optional = [draw(st.booleans()) for _ in shapes]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    layouts = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    layouts = [one.transpose(0, -1) if draw(st.booleans()) else one for one in layouts]
    specs = [(OptionalSpec if o else Spec).of(one) for o, one in zip(optional, layouts, strict=True)]
    copies = [
        tuple(
            None
            if isinstance(spec, OptionalSpec) and draw(st.booleans())
            else spec.empty().copy_(torch.randn(spec.shape, generator=generator))
            for spec in specs
        )
        for _ in range(count)
    ]
    return tuple(specs), copies
