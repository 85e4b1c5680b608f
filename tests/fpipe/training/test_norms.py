# SPDX-License-Identifier: Apache-2.0
"""Norms and clipping have the bits of torch's own functions on one device, whoever owns what."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.pipelines.norm_table import NormTable, list_gradients
from fpipe.tensors.torch_private import foreach_norm
from fpipe.tensors.tree import same_bits
from fpipe.training.norms import KEPT_TABLES
from schedules import Schedule, dualpipe_v, one_f_one_b, zb_v
from tests.common.generators import seeded
from tests.common.running import build, run
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
HOW = one_f_one_b(ranks=2, microbatches=4)
ORDERS = [2.0, 1.0, 0.5, 3.0, math.inf]


def gradient(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def test_norms_of_several_dtypes_are_combined_in_the_order_of_torch():
    """Few orders show in the last bit, so there are many tries."""
    for seed in range(40):
        grads = {f"p{k}": gradient([k + 2], DTYPES[k % 3], 100 * seed + k) for k in range(30)}
        table = NormTable.of([(0, 0, list_gradients(grads.items()))], grads, CPU)
        row = table.row([foreach_norm([grad], 2.0)[0] for grad in grads.values()], CPU)
        assert same_bits(table.combine(row[None], 2.0), torch.nn.utils.get_total_norm(list(grads.values())))


@st.composite
def owned_gradients(draw):
    """Gradients in the model's order, each with the process that owns it; `None` where there is no gradient."""
    count, processes = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    found = []
    for k in range(count):
        absent, owner = draw(st.integers(0, 4)) == 0, draw(st.integers(0, processes - 1))
        shape = draw(st.lists(st.integers(1, 5), max_size=2))
        grad = None if absent else gradient(shape, draw(st.sampled_from(dtypes)), k)
        found.append((f"p{k}", owner, grad))
    return processes, found


@given(owned_gradients(), st.sampled_from(ORDERS))
def test_a_table_gives_the_norm_of_one_device(drawn, order):
    """Owners list and send what they have in any order of theirs; the places put it in order."""
    processes, listed = drawn
    present = {name: grad for name, _, grad in listed if grad is not None}
    shares = [
        {name: grad for name, owner, grad in reversed(listed) if owner == process and grad is not None}
        for process in range(processes)
    ]
    table = NormTable.of(
        [(0, 0, list_gradients(share.items())) for share in shares], [name for name, *_ in listed], CPU
    )
    norms = [[foreach_norm([grad], order)[0] for grad in share.values()] for share in shares]
    rows = torch.stack([table.row(one, CPU) for one in norms])
    assert same_bits(table.combine(rows, order), torch.nn.utils.get_total_norm(list(present.values()), order))


@functools.cache
def step(name: str, how: Schedule = HOW):
    """The pipeline of a case, its model, and the gradients of one step, which no test modifies."""
    pipe, model, inputs, targets = build(ZOO[name], how, 2 * how.microbatches, capture="trace")
    return pipe, model, run(pipe, model, inputs, targets, seed=5).grads


def on_one_device(model: nn.Module, grads):
    """A copy of the model with these gradients, in its own order of parameters."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.grad = grads[name].clone() if name in grads else None
    return model


@sampled(1)
@pytest.mark.parametrize("name", ["gpt", "mixed_precision", "fourier", "unused", "normalised"])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_clip_is_that_of_one_device(name, order):
    pipe, model, grads = step(name)
    for limit in (1e-3, 1e3, 0):
        whole, before = on_one_device(model, grads), {key: grad.clone() for key, grad in grads.items()}
        total = torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, order)
        clipped, found = fpipe.clip(pipe, grads, limit, order)
        assert same_bits(found, total)
        assert same_bits(fpipe.norm(pipe, grads, order), total)
        assert list(clipped) == list(grads)
        for key, p in whole.named_parameters():
            assert p.grad is None if key not in grads else same_bits(clipped[key], p.grad)
        assert all(same_bits(grad, before[key]) for key, grad in grads.items()), "nothing that was passed is modified"


@sampled(1)
@pytest.mark.parametrize("how", [zb_v(ranks=2, microbatches=4), dualpipe_v(ranks=2, microbatches=4)])
def test_norms_do_not_depend_on_the_schedule(how):
    _, _, grads = step("gpt", one_f_one_b(ranks=4, microbatches=4))
    pipe, model, _ = step("gpt", how)
    total = torch.nn.utils.get_total_norm([grads[name] for name, _ in model.named_parameters()])
    assert same_bits(fpipe.norm(pipe, grads), total)


def test_donated_gradients_are_scaled_in_place():
    pipe, _, grads = step("gpt")
    grads = {name: grad.clone() for name, grad in grads.items()}
    kept, norm = fpipe.clip(pipe, grads, 0.01)
    donated, same_norm = fpipe.clip(pipe, grads, 0.01, donate=True)
    assert same_bits(norm, same_norm)
    assert all(donated[name] is grads[name] and same_bits(grads[name], kept[name]) for name in grads)
    clamped = fpipe.clip_value(grads, 1e-4)
    assert all(fpipe.clip_value(grads, 1e-4, donate=True)[name] is grads[name] for name in grads)
    assert all(same_bits(grads[name], clamped[name]) for name in grads)


def test_patterns_select_what_counts_and_what_is_scaled():
    pipe, model, grads = step("gpt")
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    clipped, norm = fpipe.clip(pipe, grads, 1e-3, names="*.bias")
    assert same_bits(norm, torch.nn.utils.get_total_norm([grads[name] for name in biases]))
    assert {name for name in grads if clipped[name] is not grads[name]} == set(biases)
    both = fpipe.norm(pipe, grads, names=("*.bias", "embed.*"))
    assert same_bits(both, torch.nn.utils.get_total_norm([grads[n] for n in ["embed.weight", *biases]]))


def test_clip_value_is_that_of_one_device():
    _, model, grads = step("gpt")
    whole = on_one_device(model, grads)
    torch.nn.utils.clip_grad_value_(whole.parameters(), 1e-3)
    clamped = fpipe.clip_value(grads, 1e-3)
    assert all(same_bits(clamped[name], p.grad) for name, p in whole.named_parameters())
    assert not same_bits(grads["embed.weight"], clamped["embed.weight"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_noticed(dtype, value):
    pipe, *_ = step("mlp")
    grads = {name: gradient(list(spec.shape), dtype, 1) for name, spec in pipe.training.params.items()}
    assert fpipe.all_finite(pipe, grads).item() is True
    largest = {name: grad if grad.is_complex() else grad.fill_(torch.finfo(dtype).max) for name, grad in grads.items()}
    assert fpipe.all_finite(pipe, largest), "large is not infinite"
    grads[next(iter(grads))].view(-1)[-1] = value
    assert fpipe.all_finite(pipe, grads).item() is False


def test_no_gradients_have_norm_zero():
    pipe, *_ = step("mlp")
    assert same_bits(fpipe.norm(pipe, {}), torch.nn.utils.get_total_norm([]))
    assert fpipe.clip(pipe, {}, 1.0)[0] == {}
    assert fpipe.all_finite(pipe, {})


def test_only_so_many_tables_are_kept():
    pipe, _, grads = step("gpt")
    for k in range(KEPT_TABLES + 5):
        some = {name: grad for n, (name, grad) in enumerate(grads.items()) if k >> (n % 6) & 1 or n > 6}
        fpipe.norm(pipe, some)
    assert len(pipe.norm_tables) == KEPT_TABLES
