# SPDX-License-Identifier: Apache-2.0
"""A phase as a function: the bits of the operators that were recorded, whatever torch is asked for instead."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.stages.graph.codegen import generate_adding, generate_function
from fpipe.stages.graph.joint import Tape
from fpipe.stages.graph.phases import Phase
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import same_bits
from tests.common.sizes import few, sampled

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)
NUMBERS = st.one_of(st.integers(-(2**62), 2**62), st.integers(-40, 40), st.floats(width=64))


def phase_of(computed, *examples, kept=True, layouts=()):
    """What `computed` does with tensors like the examples, which come in a list, if they were kept."""
    mode, recorder = fake_mode(), Tape()
    fakes = tuple([fake(mode, one, one.device) for one in examples])
    taken = recorder.take(fakes)
    with mode, recorder:
        gives = tuple([tuple(map(recorder.node_of, group)) for group in computed(*fakes)])
    nodes = tuple(node for node in recorder.nodes if node.is_call)
    return Phase(nodes, ([*taken] if kept else taken,), gives, layouts)


def some(kind, *shape):
    """Tensors of a kind, with what is odd about numbers."""
    if not kind.is_floating_point:
        return torch.randint(-99, 99, shape).to(kind)
    made = torch.randn(shape, dtype=torch.float64)
    made.view(-1)[:5] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-42])
    return made.to(kind)


@sampled(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=few(20))
@given(number=NUMBERS)
def test_numbers_beside_tensors_are_exact(kind, number):
    """A number beside a tensor: kernels for short floats read it unrounded, others as they read tensors."""

    def computed(*tensors):
        return (tuple([operation(x, number) for x in tensors for operation in OPERATIONS]),)

    torch.manual_seed(0)
    x = some(kind, 3, 4)
    tensors = (x, x.t(), x[:1].expand(3, 4), x[1, 1])
    for got, want in zip(generate_function(phase_of(computed, *tensors))([*tensors]), *computed(*tensors), strict=True):
        assert same_bits(got, want)
        assert got.stride() == want.stride()


def test_residuals_are_freed_and_results_have_their_layouts():
    x = torch.randn(3, 4)
    spec = Spec.of(torch.empty(4, 3).t())
    kept = [x]
    ((got,), (total,)) = generate_function(phase_of(lambda y: ((y * 2,), (y.sum(0),)), x, layouts=(spec,)))(kept)
    assert not kept
    assert got.stride() == spec.stride
    assert same_bits(got, x * 2)
    assert same_bits(total, x.sum(0))


def test_gradients_are_added_to_sums_in_place():
    x = torch.randn(3, 4)
    run = generate_adding(phase_of(lambda y: ((y.sum(0), y.sum(1)),), x, kept=False))
    first = run((x,))
    sums = tuple(one.clone() for one in first)
    assert run((x,), sums) is sums
    assert all(same_bits(one, other + other) for one, other in zip(sums, first, strict=True))
