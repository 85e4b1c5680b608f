# SPDX-License-Identifier: Apache-2.0
"""A pipeline is on one device, which is the process's own; anything else is named before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.meshes.arguments import Place, find_place
from fpipe.network import devices
from fpipe.pipelines.batch import find_home
from fpipe.record.model.skeleton import require_home
from fpipe.tensors.torch_private import FakeTensorMode
from schedules import one_f_one_b

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def on(device):
    with FakeTensorMode():
        return torch.empty(4, 2, device=device)


@pytest.mark.parametrize(
    ("places", "home"),
    [
        ((CPU, CPU), CPU),
        (("meta", FIRST), FIRST),
        ((FIRST, CPU), FIRST),  # lengths, say
        (("meta", "meta"), CPU),
    ],
)
def test_a_pipeline_is_where_the_example_is(places, home):
    assert find_home(tuple(map(on, places)), None) == home


@pytest.mark.parametrize("places", [(FIRST, SECOND), (CPU, FIRST)])
def test_a_batch_on_two_devices_is_refused(places):
    with pytest.raises(
        fpipe.InputError, match=rf"inputs\[1\]: got a tensor on {places[1]}, expected {places[0]}, that of"
    ):
        find_home(tuple(map(on, places)), None)


def test_a_batch_elsewhere_than_the_device_that_was_passed_is_refused():
    with pytest.raises(fpipe.InputError, match=r"inputs\[0\]: got a tensor on cuda:0, expected cpu, place.device"):
        find_home((on(FIRST),), None, "cpu")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(fpipe.InputError, match=f"device: got '{device}', expected a device of this machine"):
        find_home((), None, device)


def test_a_model_on_another_device_than_the_batch_is_refused():
    model = torch.nn.Linear(2, 2)
    require_home(model, FIRST)  # whose share pipe.init moves
    model.register_buffer("table", on(SECOND))
    with pytest.raises(fpipe.InputError, match=r"table: got a tensor of the model on cuda:1, expected one on cuda:0"):
        require_home(model, FIRST)


def test_device_is_where_an_example_without_values_is_computed():
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), torch.randn(4, 2)
    pipe = fpipe.pipeline(
        model,
        example=(x.to("meta"),),
        loss=torch.mean,
        schedule=one_f_one_b(2, 2),
        cuts=["1"],
        place=fpipe.Place(device="cpu"),
    )
    assert pipe.device == CPU
    assert fpipe.verify(pipe, model, (x,))


# ------------------------------------------------------------------------------------------ the processes of a job


@pytest.mark.parametrize(
    ("device", "kinds", "backend", "words"),
    [
        (CPU, [FIRST], "nccl", "got the backend 'nccl', which moves tensors on cuda, expected one for cpu"),
        (FIRST, [CPU], "gloo", "got the backend 'gloo', which moves tensors on cpu, expected one for cuda:0"),
        (CPU, [CPU], "mpi", "got the backend 'mpi', expected one whose transfers"),
    ],
)
def test_a_group_that_cannot_reach_the_device_is_refused(device, kinds, backend, words):
    with pytest.raises(fpipe.TransportError, match=words):
        devices.require_reachable(device, kinds, backend)


@pytest.mark.parametrize(
    ("current", "bound", "words"),
    [
        (0, None, r"got a pipeline on cuda:1, while the current device of this process is cuda:0"),
        (0, SECOND, r"init_process_group\(device_id=...\) does not select it. Call torch.cuda.set_device\(1\) before"),
        (1, FIRST, r"got a pipeline on cuda:1, while init_process_group was given device_id=cuda:0"),
    ],
)
def test_a_device_that_was_not_selected_is_refused(current, bound, words):
    with pytest.raises(fpipe.TransportError, match=words):
        devices.require_selected(SECOND, current, bound)


def test_a_device_that_was_selected_is_accepted():
    devices.require_selected(SECOND, 1, SECOND)
    devices.require_selected(SECOND, 1, None)
    devices.require_selected(CPU, None, FIRST)


@pytest.mark.parametrize("names", [("a 1", "a 2", "a 1"), ("a 1", "a 2", "b 1")])
def test_two_processes_on_one_device_are_refused(names):
    rows = []
    for name in names:
        devices.require_distinct(FIRST, lambda row: rows.append(row) or [row], name)

    def start():
        devices.require_distinct(FIRST, lambda _: rows, names[2])

    if len({*names}) == 3:
        start()
        return
    with pytest.raises(fpipe.TransportError, match=r"processes 0 and 2 of the job on one device \(a 1, on this"):
        start()


def test_a_mesh_of_other_devices_is_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        with pytest.raises(fpipe.InputError, match=r"mesh: got a mesh of cpu devices, expected one of cuda"):
            find_place(Place(mesh=mesh), 1, FIRST, lambda *_: None)
    finally:
        dist.destroy_process_group()
