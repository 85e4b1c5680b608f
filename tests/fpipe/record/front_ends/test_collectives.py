# SPDX-License-Identifier: Apache-2.0
"""Collectives in a model's forward: what one of several processes computes; tests/distributed runs several."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.common.collectives import CUTS, HOW, LAYERS, Later, Layer, Reduced, build, require_same
from tests.common.options import grouped
from tests.common.sizes import covering, sampled


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@sampled(2)
@covering(layer=LAYERS, cut=[*CUTS], backward=["autograd", "graph"])
def test_a_step_with_collectives_is_exact(layer, cut, backward):
    if (layer, cut) == (Later, "cut inside"):
        pytest.skip("refused, see below")
    require_same(layer, cut, backward)


def test_a_collective_is_captured():
    pipe, _ = build(Reduced, "cut inside", "autograd")
    assert [unit.does for unit in pipe.training.assembly.captured.units][:4] == [
        "linear[]",
        "detach[]",
        "sum[0]",
        "all_reduce[False]",
    ]


def test_a_module_that_waits_later_is_not_cut():
    with pytest.raises(fpipe.CutError, match=r"inside '1' \(Later\): a collective .* that is waited for later"):
        build(Later, "cut inside", "autograd")


@pytest.mark.parametrize("layer", [Reduced, Later])
def test_a_stage_with_collectives_is_not_recorded(layer):
    pipe, _ = build(layer, "whole", "graph")
    assert "whose handle no graph waits for" in pipe.stages[0].functions.remark
    assert pipe.stages[1].functions.remark == "as a graph"


class Counted(nn.Module):
    """Divides by a sum over all processes of what they mask."""

    def __init__(self, reduce):
        super().__init__()
        self.a, self.b, self.reduce = nn.Linear(4, 4), nn.Linear(4, 4), reduce

    def forward(self, x, mask):
        total = self.reduce(mask.sum()) * 1
        return self.b(self.a(x) / total) / total


def reduce_in_place(total):
    dist.all_reduce(total)
    return total


def reduce_functionally(total):
    return functional_collectives.all_reduce(total, "sum", dist.group.WORLD)


@pytest.mark.parametrize("reduce", [reduce_in_place, reduce_functionally, torch.clone])
def test_what_processes_have_exchanged_is_sent(reduce):
    """No stage repeats a collective: other processes would have to, too."""
    model, x, mask = Counted(reduce), torch.randn(4, 4), torch.rand(4, 4)
    pipe = fpipe.pipeline(model, example=(x, mask), loss=torch.mean, schedule=HOW, cuts=["b"])
    exchanged = reduce is not torch.clone
    assert len(pipe.stages[0].gives[0].specs) == 1 + exchanged
    assert bool(pipe.stages[1].prologue.specs) is not exchanged
    assert fpipe.verify(pipe, model, (x, mask)).eager


class Waiting(Layer):
    def forward(self, x):
        dist.barrier()
        return self.inner(x)


def test_a_barrier_is_refused():
    with pytest.raises(fpipe.CaptureError, match=r"module 1 \(Waiting\): got a barrier"):
        build(Waiting, "whole", "autograd")


class Sliced(Layer):
    """Slices a mesh, and looks at its numbers."""

    def __init__(self):
        super().__init__()
        self.mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))

    def forward(self, x):
        inner = self.mesh["tp"]
        assert inner.mesh.tolist() == [0]
        return self.inner(x) * functional_collectives.all_reduce(x, "sum", inner) / inner.size()


@sampled(2)
@covering(whole=[False, True], cut=[*CUTS], backward=["autograd", "graph"])
def test_a_mesh_is_sliced_in_a_forward(whole, cut, backward):
    """It is a constant, which is computed with for real."""
    if whole and cut == "cut inside":
        pytest.skip("a whole module is not cut")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Sliced(), nn.Linear(4, 4)), torch.randn(4, 4)
    more = {"cuts": [CUTS[cut]], "backward": backward, "whole": ["1"] if whole else []}
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=HOW, **grouped(more))
    assert fpipe.verify(pipe, model, (x,)).eager
