# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on a device mesh equal torch's own training on the mesh without the pipeline, bit for bit."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fpipe
from fpipe.tensors.placed import local_part, without_partial
from fpipe.tensors.tree import same_bits
from schedules import interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.common import tensor_parallel
from tests.common.comparison import require_part
from tests.common.generators import seeded
from tests.common.options import grouped
from tests.common.running import build
from tests.common.sizes import NIGHTLY
from tests.common.tensor_parallel import whole
from tests.common.training import llama
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, raises

FAMILIES = {"1f1b": one_f_one_b, "interleaved": interleaved_1f1b, "zb_h1": zb_h1, "zb_v": zb_v}
STEPS, LIMIT, MICROBATCHES, RATE = 20 if NIGHTLY else 2, 0.3, 2, 0.01
NEAR = 1e-6
HOW = one_f_one_b(ranks=2, microbatches=MICROBATCHES)


class Run(NamedTuple):
    """The end of a training run, by the parameters' names: what this process holds, and norms by step."""

    params: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    norms: list[Tensor]


class Task(NamedTuple):
    """A model to train, its loss, and the batches of all steps."""

    model: Any
    loss: Callable[..., Tensor]
    data: list[tuple[Tensor, Tensor]]


@cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """The mesh of these dimensions, always the same: each has process groups of its own."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def gpt() -> Task:
    one = ZOO["gpt"]
    model, (ids,), wanted = one.make(16)
    data = [(ids.roll(k, 0).roll(k, 1), wanted.roll(k, 0)) for k in range(STEPS)]
    return Task(model, one.loss, data)


def grouped_query_llama() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = llama()
    ids = torch.randint(model.config.vocab_size, (16, 12), generator=seeded(3))

    def loss(outputs, wanted):
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), wanted.flatten())

    return Task(model, loss, [(ids.roll(k, 0), ids.roll(k + 1, 1)) for k in range(STEPS)])


def parallel_gpt() -> Task:
    ids, wanted = tensor_parallel.words()
    data = [(torch.cat([ids, wanted]).roll(k, 0), torch.cat([wanted, ids]).roll(k, 0)) for k in range(STEPS)]
    return Task(tensor_parallel.GPT(), tensor_parallel.entropy, data)


TASKS = {"gpt": gpt, "llama": grouped_query_llama}
SPLIT_TASKS = {
    "split_gpt": (parallel_gpt, tensor_parallel.by_sequence),
    "split_llama": (grouped_query_llama, tensor_parallel.split_llama),
}
"""Models whose modules are split over `tp`, and how they are."""


def make_task(name: str, mesh: DeviceMesh | None, double: bool = False) -> Task:
    """Return a task, whose model is split over the mesh if it is one of those, and in double precision if asked for."""
    make, split = SPLIT_TASKS.get(name) or (TASKS[name], None)
    task = make()
    model = task.model.double() if double else task.model
    return task._replace(model=split(model, mesh["tp"]) if split and mesh else model)


def train_by_torch(task: Task, mesh: DeviceMesh) -> Run:
    """The training run of torch's own data parallelism: `fully_shard`, or, without shards, an all-reduce by hand."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # it returns a view, which nobody writes to
    model, loss, data = task
    around = mesh[tuple(name for name in mesh.mesh_dim_names or () if name in ("dp", "fsdp"))]
    sharded = "fsdp" in (around.mesh_dim_names or ())
    if sharded:
        for module in (*layers_of(model), model):
            fully_shard(module, mesh=around)
    copies, mine = around.size(), around.mesh.flatten().tolist().index(dist.get_rank())
    clip = clip_apart if "tp" in (mesh.mesh_dim_names or ()) else nn.utils.clip_grad_norm_
    adam, norms = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for x, y in data:
        rows = zip(*[one.chunk(copies)[mine].chunk(MICROBATCHES) for one in (x, y)], strict=True)
        for i, (a, b) in enumerate(rows):
            if sharded:
                model.set_requires_gradient_sync(i == MICROBATCHES - 1)
            (loss(model(a), b) / MICROBATCHES).backward()
        for p in model.parameters() if not sharded else ():
            p.grad = without_partial(p.grad)
            dist.all_reduce(local_part(p.grad), group=around.get_group())
            p.grad /= copies
        norms.append(whole(clip(model.parameters(), LIMIT)))
        adam.step()
        adam.zero_grad()
    named = dict(model.named_parameters())
    return Run({name: p.detach() for name, p in named.items()}, {n: adam.state[p] for n, p in named.items()}, norms)


def layers_of(model: Any) -> nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.model.layers


def clip_apart(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip by the norm of all norms, as torch does on one device and on a mesh of one dimension.

    Its own `clip_grad_norm_` refuses plain gradients beside DTensors. On a mesh of two dimensions, it divides the norm
    of what is replicated by sqrt(n) and adds up n squares, which may change the last bit.
    """
    grads = [p.grad for p in parameters]
    total = torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(grad)) for grad in grads]))
    for grad in grads:
        local_part(grad).mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
    return total


def train_with_a_pipeline(task: Task, mesh: DeviceMesh, family: str, within: bool) -> Run:
    """The same run by fpipe; updates are in the step if `within`."""
    model, loss, data = task
    how, names = FAMILIES[family](ranks=2, microbatches=MICROBATCHES), mesh.mesh_dim_names or ()
    options: dict[str, Any] = {"dp": "dp"} if "dp" in names else {}
    options |= {"shard": fpipe.Sharded("fsdp", gathered=1)} if "fsdp" in names else {}
    x, y = data[0]
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how, **grouped({"mesh": mesh, **options}))
    params, buffers = pipe.init(model)
    adam, norms = fpipe.optimizer(torch.optim.AdamW, lr=RATE), []
    state = adam.init(params)
    step = fpipe.value_and_grad(pipe)
    update: Any = fpipe.train_step(pipe, adam, max_norm=LIMIT) if within else None
    for x, y in data:
        if within:
            _, params, state, norm = update(params, buffers, state, (x,), y)
        else:
            _, grads = step(params, buffers, (x,), y)
            grads, norm = fpipe.clip(pipe, grads, LIMIT)
            params, state = adam.update(grads, state, params)
        norms.append(norm)
    return Run({name: p.detach() for name, p in params.items()}, state, norms)


def require_same_run(got: Run, wanted: Run) -> None:
    """Require the same bits of everything that this process holds."""
    require_part([got.norms, got.params], [wanted.norms, wanted.params])
    for name, slot in product(got.params, ("exp_avg", "exp_avg_sq")):
        require_part(got.state[name][slot], wanted.state[name][slot], f"{slot} of {name}")


def training_has_the_bits_of_torch(name: str, family: str, sizes: Mapping[str, int], rank: int, size: int) -> None:
    mesh = mesh_of(**sizes)
    wanted = train_by_torch(make_task(name, mesh), mesh)
    for within in (False,) if "tp" in sizes else (False, True) if NIGHTLY else (True,):
        require_same_run(train_with_a_pipeline(make_task(name, mesh), mesh, family, within), wanted)


def flatten(params: Any, state: Any) -> dict[str, Tensor]:
    moments = {f"{slot} of {name}": state[name][slot] for name in params for slot in ("exp_avg", "exp_avg_sq")}
    return {name: whole(tensor.detach()) for name, tensor in (params | moments).items()}


def train_on_one_device(task: Task) -> dict[str, Tensor]:
    """Return the parameters and their moments after plain training with whole batches."""
    model, loss, data = task
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    for x, y in data:
        adam.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        adam.step()
    return flatten(dict(model.named_parameters()), {name: adam.state[p] for name, p in model.named_parameters()})


def training_ends_near_one_device(sizes: Mapping[str, int], rank: int, size: int) -> None:
    """In double precision: AdamW divides a gradient by its own size, so in single precision it turns the rounding noise
    of a gradient that is zero, such as that of a key's bias in attention, into steps as large as any.
    """
    mesh = mesh_of(**sizes)
    for name in SPLIT_TASKS if "tp" in sizes else TASKS:
        wanted = train_on_one_device(make_task(name, None, double=True))
        for family in FAMILIES:
            run = train_with_a_pipeline(make_task(name, mesh, double=True), mesh, family, within=False)
            found = flatten(run.params, run.state)
            assert found, "this rank holds parameters"
            for leaf, tensor in found.items():
                far = (tensor - wanted[leaf]).abs().max().item()
                assert far < NEAR, (family, leaf, far)


def spell(sizes: Mapping[str, int]) -> str:
    return "_".join(f"{size}_{name}" for name, size in sizes.items())


BY_DAY = {"gpt_interleaved_on_2_pp_2_fsdp"}
PLAIN = [{"pp": 2, "dp": 2}, {"pp": 2, "fsdp": 2}, {"pp": 2, "dp": 2, "fsdp": 2}]
SPLIT = [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "fsdp": 2, "tp": 2}]

for _name, _family, _sizes in [*product(TASKS, FAMILIES, PLAIN), *product(SPLIT_TASKS, FAMILIES, SPLIT)]:
    _title, _ranks = f"{_name}_{_family}_on_{spell(_sizes)}", 2 ** len(_sizes)
    _run = partial(training_has_the_bits_of_torch, _name, _family, _sizes)
    case(_run, sizes=[_ranks], day=[_ranks] if _title in BY_DAY else [], name=_title)

for _sizes in (*PLAIN, *SPLIT):
    _run = partial(training_ends_near_one_device, _sizes)
    case(_run, sizes=[2 ** len(_sizes)], day=[], name=f"one_device_in_double_on_{spell(_sizes)}")


def build_on_mesh(name: str, how: Any = HOW, **options: Any) -> Any:
    """Build a pipeline of a model of the zoo with a batch of 16 rows."""
    return build(ZOO[name], how, 16, capture="trace", **options)


@case(sizes=[4], day=[])
def rows_of_their_own_on_a_mesh(rank, size):
    """Every process may hold the whole batch, or the rows of its copy, also where rows have weights."""
    model, (x,), y = ZOO["mlp"].make(16)
    mesh, counts = mesh_of(pp=2, dp=2), torch.arange(1.0, 17.0)
    counts[4:8] = 0  # a microbatch of the first copy
    for weight in (None, lambda inputs, wanted: wanted[1].sum()):
        found = []
        for rows in ("whole", "own"):
            parts = [one.chunk(2)[mesh.get_local_rank("dp")] if rows == "own" else one for one in (x, y, counts)]
            pipe = fpipe.pipeline(
                model,
                example=(parts[0],),
                targets=tuple(parts[1:]),
                loss=lambda out, wanted: ZOO["mlp"].loss(out, wanted[0]),
                schedule=HOW,
                place=fpipe.Place(mesh=mesh, dp="dp", rows=rows),
                microbatching=fpipe.Microbatching(weight=weight),
            )
            found.append(fpipe.value_and_grad(pipe)(*pipe.init(model), (parts[0],), tuple(parts[1:])))
        (step, grads), (same, theirs) = found
        assert same_bits(step.loss, same.loss)
        assert all(same_bits(grads[name], theirs[name]) for name in grads)


@case(sizes=[4])
def a_mesh_is_verified(rank, size):
    """`verify` compares what every process holds of a sharded model with one device."""
    how, mesh = zb_h1(ranks=2, microbatches=2), mesh_of(pp=2, fsdp=2)
    pipe, model, (x,), y = build_on_mesh("tied_sequence", how, mesh=mesh, shard="fsdp")
    found = fpipe.verify(pipe, model, (x,), y, steps=2)
    assert found.reference == found.eager > 0
    params, _ = pipe.init(model)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in params.values())
    assert all(same_bits(p.full_tensor(), dict(model.named_parameters())[name]) for name, p in params.items())


@case(sizes=[4])
def wrong_tensors_on_a_mesh_are_refused_on_all_ranks(rank, size):
    mesh = mesh_of(pp=2, fsdp=2)
    pipe, model, (x,), y = build_on_mesh("mlp", mesh=mesh, shard="fsdp")
    params, buffers = pipe.init(model)
    step, name = fpipe.value_and_grad(pipe), next(iter(params))
    whole = params[name].full_tensor().detach().requires_grad_()
    spread = distribute_tensor(whole.detach(), mesh["fsdp"], [Replicate()]).requires_grad_()
    other = distribute_tensor(whole.detach(), mesh["pp"], [Shard(0)]).requires_grad_()
    for value, words in ((whole, "got a plain tensor"), (spread, "Replicate()"), (other, "on mesh ('pp',)")):
        bad = {**params, name: value} if rank == size - 1 else params
        with raises(fpipe.InputError if rank == size - 1 else fpipe.TransportError, words):
            step(bad, buffers, (x,), y)
    out, _ = step(params, buffers, (x,), y)
    assert len(set(gather(out.loss.item()))) == 1


@case(sizes=[4], day=[])
def a_run_on_a_mesh_goes_on_with_other_sizes(rank, size):
    """Saved from two shards of two ranks; loaded by two replicas of two ranks, and by one rank of four shards."""
    one = ZOO["gpt" if NIGHTLY else "mlp"]
    model, (x,), y = one.make(16)
    adam = fpipe.optimizer(torch.optim.SGD, lr=RATE, momentum=0.9)
    folder = f"{os.environ['REPORT']}/mesh"

    def build(how, **options):
        return fpipe.pipeline(model, example=(x,), targets=y, loss=one.loss, schedule=how, **grouped(options))

    def train(pipe, params, state, steps):
        step = fpipe.value_and_grad(pipe)
        for _ in range(steps):
            _, grads = step(params, {}, (x,), y)
            params, state = adam.update(fpipe.clip(pipe, grads, LIMIT)[0], state, params)
        return params, state

    sharded = build(zb_h1(ranks=2, microbatches=2), mesh=mesh_of(pp=2, fsdp=2), shard="fsdp")
    params, _ = sharded.init(model)
    params, state = train(sharded, params, adam.init(params), 2)
    fpipe.save(sharded, folder, params=params, state=state, step=2)
    wanted, _ = train(sharded, params, state, 2)
    wanted = {name: p.full_tensor() for name, p in wanted.items()}
    for pipe in (
        build(zb_v(ranks=2, microbatches=2), mesh=mesh_of(pp=2, dp=2), dp="dp"),
        build(one_f_one_b(ranks=1, microbatches=1), mesh=mesh_of(pp=1, fsdp=4), shard="fsdp"),
        build(interleaved_1f1b(ranks=2, microbatches=2), mesh=mesh_of(pp=2, fsdp=2), shard="fsdp"),
    ):
        found = fpipe.load(pipe, folder)
        got, _ = train(pipe, found.params, found.state, 2)
        for name, p in got.items():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.allclose(whole, wanted.get(name, whole), atol=1e-5), name
            if pipe.schedule.ranks == 2 and pipe.copies.shards == 2 and name in wanted:
                assert same_bits(whole, wanted[name]), name
    fpipe.export(sharded, f"{folder} exported", params)
    dist.barrier()
    weights = fpipe.safetensors(f"{folder} exported")
    assert all(same_bits(weights[name], p.full_tensor()) for name, p in params.items())


@case(sizes=[4])
def a_drop_in_model_on_a_mesh(rank, size):
    """The script for one device: two accumulated losses, clipping, an optimizer of DTensors, predictions."""
    one = ZOO["gpt"]
    model, (x,), y = one.make(16)
    plain = copy.deepcopy(model)
    net = fpipe.Pipelined(
        model,
        loss=one.loss,
        example=(x,),
        targets=y,
        schedule=HOW,
        place=fpipe.Place(mesh=mesh_of(pp=2, fsdp=2), shard="fsdp"),
    )
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=RATE, momentum=0.9) for one in (net, plain))
    for _ in range(2):
        for _ in range(2):
            loss = net(x, targets=y, steps=2)
            loss.backward()
            wanted = one.loss(plain(x), y) / 2
            wanted.backward()
            assert torch.isclose(loss, wanted)
        assert torch.isclose(net.clip_grad_norm_(LIMIT), torch.nn.utils.clip_grad_norm_(plain.parameters(), LIMIT))
        for adam in (ours, theirs):
            adam.step()
            adam.zero_grad()
    named = dict(plain.named_parameters())
    assert all(torch.allclose(p.full_tensor(), named[name], atol=1e-5) for name, p in net.named_parameters())
    out = net.eval()(x)
    assert torch.allclose(out, plain.eval()(x), atol=1e-4)


@case(sizes=[4], day=[])
def predictions_on_a_mesh_are_those_of_one_process(rank, size):
    how = zb_v(ranks=2, microbatches=2)
    pipe, model, (x,), _ = build_on_mesh("gpt", how, mesh=mesh_of(pp=2, dp=2), dp="dp")
    state = pipe.init(model)
    rows = [model.eval()(part).detach() for part in x.chunk(4)]
    assert same_bits(fpipe.predict(pipe)(*state, (x,)), torch.cat(rows))
    seen = {}
    fpipe.stream(pipe, seen.__setitem__)(*state, (x,))
    found = gather(sorted(seen))
    assert sorted(i for numbers in found for i in numbers) == [0, 1, 2, 3]
    assert all(same_bits(out, rows[i]) for i, out in seen.items())
    with raises(fpipe.InputError, "got one with 2 copies"):
        fpipe.generate(pipe, length=12)


class Numbered(nn.Sequential):
    """Layers that return the numbers of their rows, too."""

    def forward(self, x, numbers):
        return super().forward(x), numbers


@case(sizes=[4])
def predictions_on_a_mesh_leave_the_batch_alone(rank, size):
    """An output that is an input comes to all processes, but never into the memory of the user's batch."""
    x, numbers, received = torch.randn(8, 4), torch.arange(8), []
    model = Numbered(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = fpipe.pipeline(
        model,
        example=(x, numbers),
        loss=lambda outputs: outputs[0].square().mean(),
        schedule=HOW,
        place=fpipe.Place(mesh=mesh_of(pp=2, dp=2), dp="dp"),
    )

    def broadcast(data, src, **options):
        received.extend([data] * (src != rank))
        return torch.distributed.distributed_c10d.broadcast(data, src, **options)

    with mock.patch.object(dist, "broadcast", broadcast):
        _, seen = fpipe.predict(pipe)(*pipe.init(model), (x, numbers))
    assert same_bits(seen, numbers)
    assert numbers.untyped_storage().data_ptr() not in {one.untyped_storage().data_ptr() for one in received}
    assert received


@case(sizes=[4])
def checkpoints_of_fully_shard_load_on_a_mesh(rank, size):
    """What torch saves from a model that it has sharded is read into the shards of a pipeline, and the reverse."""
    mesh, folder = mesh_of(pp=2, fsdp=2), f"{os.environ['REPORT']}/dcp"
    pipe, model, *_ = build_on_mesh("mlp", mesh=mesh, shard="fsdp")
    theirs = copy.deepcopy(model)
    fully_shard(theirs, mesh=mesh["fsdp"])
    dcp.save(theirs.state_dict(), checkpoint_id=folder)
    params, _ = pipe.init({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    dcp.load(pipe.module(params, {}).state_dict(), checkpoint_id=folder)
    named = dict(theirs.named_parameters())
    for name, p in params.items():
        assert (p.placements, p.device_mesh) == (named[name].placements, named[name].device_mesh)
        assert same_bits(p.to_local(), named[name].to_local()), name


@case(sizes=[4])
def masters_on_a_mesh(rank, size):
    """Parameters in bfloat16 and masters in float32 are shards of what one process that plays the mesh has."""
    one = ZOO["mlp"]
    model, (x,), y = one.make(16)
    model, x, y = model.bfloat16(), x.bfloat16(), y.bfloat16()
    how, loss = zb_h1(ranks=2, microbatches=2), one.loss
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=y,
        loss=loss,
        schedule=how,
        place=fpipe.Place(mesh=mesh_of(pp=2, fsdp=2), shard="fsdp"),
    )
    adam = fpipe.masters(fpipe.optimizer(torch.optim.AdamW, lr=RATE))
    params, buffers = pipe.init(model)
    state, step = adam.init(params), fpipe.value_and_grad(pipe, sums=torch.float32)
    sums = None
    for _ in range(3):
        _, sums = step(params, buffers, (x,), y, onto=sums)
    params, state = adam.update(sums, state, params)
    whole = dict(model.named_parameters())
    _, grads = fpipe.reference(pipe, sums=torch.float32)(whole, {}, (x,), y)
    wanted, slots = adam.update({n: g + g + g for n, g in grads.items()}, adam.init(whole), whole)
    for name, p in params.items():
        assert same_bits(p.full_tensor(), wanted[name]), name
        assert same_bits(state[name]["master"].full_tensor(), slots[name]["master"]), name


@case(sizes=[4])
def meshes_that_differ_are_refused_on_all_ranks(rank, size):
    """One process replicates over a dimension that the others leave alone, or shard over."""
    for mine in ({"dp": "dp"}, {"shard": "dp"}, {"dp": "dp", "reduce": "sum"}, {"dp": "dp", "rows": "own"}):
        options = grouped({"mesh": mesh_of(pp=2, dp=2), **(mine if rank == 1 else {})})
        with raises(fpipe.TransportError, "differ"):
            build(ZOO["mlp"], HOW, 16, **options)


@case(sizes=[4])
def parameters_split_over_the_pipeline_are_refused_on_a_mesh(rank, size):
    model = tensor_parallel.column_and_row(tensor_parallel.GPT(), mesh_of(pp=2, dp=2)["pp"])
    ids, wanted = tensor_parallel.words()
    with raises(fpipe.CaptureError, "got a collective or message", "the same rank of a pipeline"):
        fpipe.pipeline(
            model,
            example=(ids,),
            targets=wanted,
            loss=tensor_parallel.entropy,
            schedule=HOW,
            place=fpipe.Place(mesh=mesh_of(pp=2, dp=2), dp="dp"),
        )


@case(sizes=[4], day=[])
def split_parameters_are_saved_from_a_mesh_and_loaded_whole(rank, size):
    """A checkpoint of modules that torch has split over two processes is that of the plain model."""
    ids, wanted = tensor_parallel.words()
    mesh, folder = mesh_of(pp=2, tp=2), f"{os.environ['REPORT']}/split"
    split = tensor_parallel.column_and_row(tensor_parallel.GPT(), mesh["tp"])
    shared = {"example": (ids,), "targets": wanted, "loss": tensor_parallel.entropy}
    pipe = fpipe.pipeline(split, schedule=zb_h1(ranks=2, microbatches=2), **grouped({"mesh": mesh, **shared}))
    params, buffers = pipe.init(split)
    adam = fpipe.optimizer(torch.optim.SGD, lr=RATE, momentum=0.9)
    _, grads = fpipe.value_and_grad(pipe)(params, buffers, (ids,), wanted)
    params, state = adam.update(grads, adam.init(params), params)
    fpipe.save(pipe, folder, params=params, buffers=buffers, state=state, step=1)
    again = fpipe.load(pipe, folder)
    for name, p in params.items():
        assert same_bits(local_part(again.params[name]), local_part(p)), name
        slots = (one[name]["momentum_buffer"] for one in (again.state, state))
        assert same_bits(*map(local_part, slots)), name
    plain = fpipe.pipeline(tensor_parallel.GPT(), schedule=one_f_one_b(4, 2), **grouped({"group": None, **shared}))
    whole = fpipe.load(plain, folder).params
    here = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in params.items()}
    assert all(same_bits(whole[name], p) for name, p in here.items() if name in whole)


@case(sizes=[4])
def timelines_on_a_mesh_are_those_of_one_copy(rank, size):
    pipe, model, (x,), y = build_on_mesh("mlp", mesh=mesh_of(pp=2, fsdp=2), shard="fsdp")
    spans = []
    fpipe.value_and_grad(pipe, record=spans.append)(*pipe.init(model), (x,), y)
    found = fpipe.timeline(pipe, spans)
    passes = [(span.rank, span.action) for span in found if span.action.kind in ("F", "B")]
    assert sorted(passes) == sorted((r, a) for r in range(2) for a in HOW.actions(r))
    assert {span.action.kind for span in found} >= {"UNSHARD", "REDUCE_GRAD"}
