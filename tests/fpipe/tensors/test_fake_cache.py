# SPDX-License-Identifier: Apache-2.0
"""What was remembered is what would have been worked out: metadata, memory, versions and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as f

from fpipe.tensors.fake import fake_mode

SHAPE = (4, 6, 8)
OPERATIONS = {
    "add": lambda x, y: x + y,
    "number": lambda x, y: x * 2 + 1.5,
    "matmul": lambda x, y: x @ y.mT @ y,
    "linear": lambda x, y: f.linear(x, y[0, :, :].new_ones(8, 8)),
    "biased": lambda x, y: f.linear(x.flatten(0, 1), y.new_ones(8, 8), y[0, 0]).view(SHAPE),
    "activations": lambda x, y: f.gelu(x.mT).mT + f.silu(y),
    "loss": lambda x, y: x * f.cross_entropy(x.flatten(0, 1), y.new_zeros(24, dtype=torch.int64), ignore_index=7),
    "norm": lambda x, y: f.layer_norm(x, (8,)) + y,
    "softmax": lambda x, y: torch.softmax(x, -1) * y,
    "transposed": lambda x, y: x.transpose(0, 1).contiguous().transpose(0, 1) + y,
    "view": lambda x, y: x.contiguous().view(2, -1).view(SHAPE) * y,
    "chunks": lambda x, y: torch.cat(list(reversed(x.chunk(2, -1))), -1),
    "unbound": lambda x, y: torch.stack(x.unbind(1), 1),
    "slice": lambda x, y: torch.cat([x[:, 2:], y[:, :2]], 1),
    "in place": lambda x, y: (x * 1).add_(y).mul_(2),
    "in place of a view": lambda x, y: _shifted(x * 1, y),
    "cast": lambda x, y: (x.double() + y).float(),
    "itself": lambda x, y: x.to(torch.float32) + y.contiguous(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "extremes": lambda x, y: x.max(-1, keepdim=True).values + y,
    "layouts": lambda x, y: torch.stack([(z * 2).mT for z in (x.mT, x.mT.contiguous(), x.mT)]).sum(0),
    "offsets": lambda x, y: [torch.cat([x, y])[k : k + 4].unsqueeze(0)[0] for k in (1, 3)][1],
    "conjugates": lambda x, y: x + torch.view_as_complex(y.view(4, 6, 4, 2)).conj().imag.repeat(1, 1, 2),
    "types": lambda x, y: x @ [torch.arange(8) * one for one in (1, True, 1.0)][2].expand(8, 8),
    "resized": lambda x, y: x + y.detach().new_empty(4).resize_(8),
    "new": lambda x, y: x + torch.arange(8) + torch.zeros(6, 1) + y.new_zeros(4, 1, 1),
}


def _shifted(x, y):
    x[1:].add_(y[1:])
    return x


def describe(tensor, tensors):
    memory = [k for k, other in enumerate(tensors) if other.untyped_storage()._cdata == tensor.untyped_storage()._cdata]
    ours = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *ours, tensor.requires_grad, tensor._is_view(), tensor._version, memory


def run(names, x, y):
    """Everything that a chain of operations makes, and the gradients of the last."""
    made = [x, y]
    for name in names:
        made.append(OPERATIONS[name](made[-1], y))
    grads = torch.autograd.grad(made[-1].sum(), [x, y], allow_unused=True)
    return [describe(tensor, made) for tensor in made], [None if g is None else (g.shape, g.stride()) for g in grads]


def leaves():
    return [torch.randn(SHAPE, requires_grad=True) for _ in range(2)]


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5))
@settings(max_examples=60)
def test_cached_results_agree_with_real_tensors(names):
    expected, mode = run(names, *leaves()), fake_mode()
    for _ in range(2):
        with mode:
            assert run(names, *leaves()) == expected


def test_every_operation_agrees_with_real_tensors():
    expected, mode = run(sorted(OPERATIONS), *leaves()), fake_mode()
    for _ in range(2):
        with mode:
            assert run(sorted(OPERATIONS), *leaves()) == expected


def test_the_default_dtype_decides():
    with fake_mode():
        x = torch.empty(3, dtype=torch.int64)
        assert (x * 1.0).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (x * 1.0).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def remembered(mode):
    return sum(len(table or ()) for table in mode.results.known.values())


def test_a_second_call_computes_nothing():
    mode = fake_mode()
    with mode:
        run(sorted(OPERATIONS), *leaves())
        worked = remembered(mode)
        run(sorted(OPERATIONS), *leaves())
    assert worked == remembered(mode) > len(OPERATIONS)


@pytest.mark.parametrize(
    "view", [lambda x: x.view(24), lambda x: x[1:], lambda x: x.unbind(0)[2], torch.Tensor.mT.__get__]
)
def test_writing_to_a_cached_view_writes_to_its_base(view):
    mode = fake_mode()
    for _ in range(2):
        with mode, torch.no_grad():
            base = torch.empty(4, 6)
            view(base).add_(1)
            assert base._version == 1
            assert view(base).untyped_storage()._cdata == base.untyped_storage()._cdata


def test_values_stay_unknown():
    mode = fake_mode()
    with mode:
        x = torch.empty(3)
        for _ in range(2):
            with pytest.raises(Exception, match="nonzero"):
                x.nonzero()
        assert [torch.tensor(k).item() for k in (3, 4)] == [3, 4]  # constants keep theirs


def test_as_many_values_as_were_assigned_through_a_mask_are_selected():
    mode = fake_mode()
    with mode:
        x = torch.empty(6)
        for count in (3, 3, 4):
            mask = torch.empty(6, dtype=torch.bool)
            torch.index_put(x, (mask,), torch.empty(count))
            assert len(x[mask]) == count


@pytest.mark.parametrize("other", [lambda masks: masks[1], lambda masks: masks[0].fill_(True)])
def test_an_assignment_tells_nothing_of_other_masks_in_the_same_memory(other):
    mode = fake_mode()
    with mode:
        x, masks = torch.empty(6), torch.empty(2, 6, dtype=torch.bool)
        x[masks[0]] = torch.empty(3)
        assert len(x[masks[0]]) == 3
        with pytest.raises(Exception, match="nonzero"):
            x[other(masks)]


def test_tensors_of_another_mode_are_left_to_torch():
    ours, other = fake_mode(), fake_mode()
    with ours:
        x = torch.empty(2)
    with other:
        y = torch.empty(2)
    with ours:
        x + y
    assert not ours.results.known[torch.ops.aten.add.Tensor]


def test_operators_that_write_are_not_cached():
    mode = fake_mode()
    with mode:
        torch.empty(4).add_(1)
    assert mode.results.known[torch.ops.aten.add_.Tensor] is None


def test_an_argument_that_is_returned_is_returned_again():
    mode, operation = fake_mode(), torch.ops.aten.to.dtype
    with mode:
        for x in (torch.empty(4), torch.empty(4)):
            assert mode.dispatch(operation, (), (x, torch.float32)) is x
