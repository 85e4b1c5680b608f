# SPDX-License-Identifier: Apache-2.0
"""Local tensors become DTensors and leave them again, with their gradients; no process talks to another here."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fpipe.errors import CaptureError, InputError
from fpipe.tensors.effects import storage_id
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.placed import (
    Arrivals,
    Placed,
    enter,
    leave,
    require_plain,
    require_whole_result,
    unwrap_state,
    wrap_state,
)
from fpipe.tensors.torch_private import FakeTensor


@pytest.fixture(scope="module")
def mesh():
    """A mesh of two processes, of which the other one does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def rows(mesh):
    """Two of four rows."""
    return Placed(mesh, (Shard(0),), (4, 3), (3, 1))


def test_a_local_tensor_becomes_the_part_of_a_dtensor_in_the_same_memory(rows):
    local = torch.randn(2, 3)
    made = rows.place(local)
    assert isinstance(made, DTensor)
    assert Placed.of(made) == rows
    assert storage_id(made) == storage_id(local)
    assert made.to_local().data_ptr() == local.data_ptr()


def test_gradients_go_through_both_ways(rows):
    arrivals, local, other = Arrivals(), torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    out = leave(enter(local, rows, 0, arrivals) * rows.place(other), 1, arrivals)
    assert type(out) is torch.Tensor
    out.backward(torch.ones(2, 3))
    assert torch.equal(local.grad, other)
    assert arrivals.placements == {0: (Shard(0),)}


def test_a_gradient_that_is_to_be_summed_stays_so(mesh):
    everywhere, arrivals = Placed(mesh, (Replicate(),), (3,), (1,)), Arrivals()
    local = torch.ones(3, requires_grad=True)
    made = enter(local, everywhere, 7, arrivals)
    made.backward(everywhere.move((Partial(),)).place(torch.full((3,), 2.0)))
    assert torch.equal(local.grad, torch.full((3,), 2.0))
    assert arrivals.of(7, everywhere).placements == (Partial(),)


def test_a_gradient_of_another_shape_is_placed_like_its_value(rows):
    arrivals, local = Arrivals(), torch.zeros(2, 3, requires_grad=True)
    whole = torch.arange(12.0).reshape(4, 3)
    enter(local, rows, 0, arrivals).backward(rows.move((Replicate(),)).place(whole))
    assert torch.equal(local.grad, whole[:2])
    assert arrivals.of(0, rows) == rows


def test_uses_whose_gradients_cannot_be_added_are_refused(mesh):
    everywhere, arrivals = Placed(mesh, (Replicate(),), (3,), (1,)), Arrivals()
    for placement in (Partial(), Replicate()):
        made = enter(torch.ones(3, requires_grad=True), everywhere, 7, arrivals)
        grad = everywhere.move((placement,)).place(torch.ones(3))
        if placement == Partial():
            made.backward(grad)
        else:
            with pytest.raises(CaptureError, match=r"several stages use.*Replicate.*expected.*Partial.*Cut the model"):
                made.backward(grad)


def test_plain_tensors_leave_as_they_are():
    tensor = torch.ones(2)
    assert leave(tensor, 0, Arrivals()) is tensor


def test_a_fake_of_a_dtensor_has_a_fake_local_tensor(rows):
    made = fake(fake_mode(), rows.place(torch.randn(2, 3)), torch.device("cpu"))
    assert isinstance(made, DTensor)
    assert type(made.to_local()) is FakeTensor
    assert Placed.of(made) == rows


def test_states_are_unwrapped_and_wrapped(rows):
    tensors = {"split": rows.place(torch.randn(2, 3)), "plain": torch.randn(2)}
    inside = unwrap_state("params", tensors, {"split": rows})
    assert inside["plain"] is tensors["plain"]
    assert type(inside["split"]) is torch.Tensor
    assert Placed.of(wrap_state(inside, {"split": rows})["split"]) == rows


def test_leaves_that_are_placed_otherwise_are_refused(rows):
    plain, split = torch.randn(4, 3), rows.place(torch.randn(2, 3))
    everywhere = rows.move((Replicate(),)).place(plain)
    with pytest.raises(InputError, match=r"params\['w'\]: got a plain tensor, expected a DTensor of shape \[4, 3\]"):
        unwrap_state("params", {"w": plain}, {"w": rows})
    with pytest.raises(InputError, match=r"params\['w'\]: got a DTensor.*expected a plain tensor"):
        unwrap_state("params", {"w": split}, {})
    with pytest.raises(InputError, match=r"params\['w'\]: got.*Replicate.*expected.*Shard.*redistribute"):
        unwrap_state("params", {"w": everywhere}, {"w": rows})
    with pytest.raises(InputError, match=r"save: got a model whose leaf w is a DTensor.*Use another\."):
        require_plain("save", {"w": rows}, "Use another.")


def test_results_of_which_each_process_has_a_part_are_refused(rows):
    require_whole_result("loss", None)
    require_whole_result("loss", rows.move((Replicate(),)))
    with pytest.raises(CaptureError, match=r"loss: got a DTensor.*full_tensor"):
        require_whole_result("loss", rows)
