# SPDX-License-Identifier: Apache-2.0
"""Arguments about the mesh that do not fit are refused before anything is built."""

import pytest
import torch

import fpipe
from schedules import interleaved_1f1b, one_f_one_b, reduce_gradients, shard
from tests.common.cases import mse
from tests.common.options import grouped
from tests.common.zoo import ZOO

HOW = one_f_one_b(ranks=2, microbatches=2)
WRONG = {
    "a dimension without a mesh": ({"dp": "dp"}, "dp: got 'dp' without a mesh"),
    "a mesh without the dimension": ({"mesh": {"pp": 2, "dp": 2}, "dp": "data"}, "dp: got 'data', which the mesh"),
    "no dimension of the pipeline": ({"mesh": {"dp": 2}, "dp": "dp"}, "pp: got 'pp', which the mesh does not have"),
    "one dimension twice": ({"mesh": {"pp": 2, "dp": 2}, "dp": "dp", "shard": "dp"}, "got 'dp', as for"),
    "shards over the pipeline": ({"mesh": {"pp": 2}, "shard": "pp"}, "got 'pp', as for"),
    "another number of ranks": ({"mesh": {"pp": 4, "dp": 2}, "dp": "dp"}, "got 4 processes along 'pp'"),
    "a size of zero": ({"mesh": {"pp": 2, "dp": 0}, "dp": "dp"}, "mesh['dp']: got 0"),
    "a list of sizes": ({"mesh": [2, 2], "dp": "dp"}, "mesh: got [2, 2], expected a DeviceMesh or a dict"),
    "a dimension that modules need": ({"mesh": {"pp": 2, "tp": 2}}, "in one process"),
    "a group besides": ({"mesh": {"pp": 2}, "group": object()}, "group: got <object"),
    "other rows": ({"mesh": {"pp": 2, "dp": 2}, "dp": "dp", "rows": "mine"}, "rows: got 'mine'"),
    "another reduction": ({"mesh": {"pp": 2, "dp": 2}, "dp": "dp", "reduce": "max"}, "reduce: got 'max'"),
    "too few rows": ({"mesh": {"pp": 2, "dp": 5}, "dp": "dp"}, "expected at least 10"),
}


def build(**options):
    model, (x,), y = ZOO["mlp"].make(8)
    return fpipe.pipeline(model, example=(x,), targets=y, loss=mse, **grouped({"schedule": HOW, **options}))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    options, words = WRONG[case]
    with pytest.raises(fpipe.PipelineError) as caught:
        build(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize("how", [reduce_gradients(HOW), shard(HOW, limit=1)])
def test_collectives_need_copies(how):
    words = r"got .(REDUCE_GRAD|UNSHARD).* on rank 0, expected no such action: there are no copies of the.*Pass mesh"
    with pytest.raises(fpipe.InputError, match=words):
        build(schedule=how)


def test_gradients_that_are_reduced_already_are_not_reduced_again():
    how = reduce_gradients(interleaved_1f1b(ranks=2, microbatches=2))
    assert build(schedule=how, mesh={"pp": 2, "dp": 2}, dp="dp").schedule == how


def test_copies_that_would_modify_buffers_are_refused():
    model, (x,), y = ZOO["normalised"].make(8)
    with pytest.raises(fpipe.CutError, match="on 2 copies of the pipeline"):
        fpipe.pipeline(
            model, example=(x,), targets=y, loss=mse, schedule=HOW, place=fpipe.Place(mesh={"pp": 2, "dp": 2}, dp="dp")
        )


def test_onto_of_another_shape_is_refused():
    pipe = build(mesh={"pp": 2, "fsdp": 2}, shard="fsdp")
    model, (x,), y = ZOO["mlp"].make(8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    name = next(iter(state[0]))
    with pytest.raises(fpipe.InputError, match="onto"):
        step(*state, (x,), y, onto={name: torch.zeros(3)})


def test_a_parameter_without_dimensions_is_not_sharded():
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return super().forward(x) * self.scale

    x, mesh = torch.ones(4, 4), {"pp": 1, "fsdp": 2}
    how = one_f_one_b(ranks=1, microbatches=2)
    with pytest.raises(fpipe.InputError, match=r"params.'scale'.: got a parameter without dimensions"):
        fpipe.pipeline(
            Scaled(), example=(x,), loss=torch.mean, schedule=how, place=fpipe.Place(mesh=mesh, shard="fsdp")
        )
