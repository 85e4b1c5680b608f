# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, or of which one refuses: all of them raise at once, by name, before any computes.

`list_rows` is the matrix: a row for each public function that all ranks call, a cell for each argument, which differs
or is wrong on one rank, or the call is left out there. Afterwards a step has the bits that it had before.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

import fpipe
from fpipe.network.fingerprint import describe_value
from fpipe.tensors.tree import same_bits
from schedules import B, F, Link, dualpipe, forward_only, gpipe, one_f_one_b, schedule, zb_h1
from tests.common.cases import WIDTH
from tests.common.layers import linears
from tests.common.lookalikes import LOOKALIKES
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import case, gather, raises

# ---------------------------------------------------------------------- the matrix of calls and their arguments

CULPRIT = 1
AT_ONCE = 10.0  # seconds, on a machine with other work; a hundredth on a quiet one
NONE: Mapping[str, Any] = MappingProxyType({})


class Run:
    """A training run of two or more ranks, with what the calls of the matrix need."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.size, self.x, self.y = size, *torch.randn(2, 8, WIDTH)
        self.model = linears(*[nn.Tanh] * (size - 1))
        self.schedule = one_f_one_b(ranks=size, microbatches=4)
        self.batch = {"example": (self.x,), "targets": self.y, "loss": mse_loss}
        self.pipe = fpipe.pipeline(self.model, **grouped(self.batch), schedule=self.schedule)
        self.held = dict(zip(("params", "buffers"), self.pipe.init(self.model), strict=True))
        self.step = fpipe.value_and_grad(self.pipe)
        self.adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
        self.state = self.adam.init(self.held["params"])
        self.before, self.grads = self.take_step()
        self.train = fpipe.train_step(self.pipe, self.adam, 1.0)
        self.folder = Path(gather(tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else "")[0])
        for k in (1, 2):
            fpipe.save(self.pipe, self.folder / f"{k}", **self.held, step=k)

    def take_step(self, **options):
        return self.step(**{**self.held, "inputs": (self.x,), "targets": self.y, **options})


class Row(NamedTuple):
    """One function.

    - `call(run, **arguments)` calls it.
    - `differs`: by argument, the value on the culprit and on all others; `wrong`: a value on the culprit.
    - `named`: how errors name the call, if not by the row.
    """

    call: Callable[..., Any]
    differs: Mapping[str, tuple[Any, Any]] = NONE
    wrong: Mapping[str, Any] = NONE
    named: str = ""


def build_again(run: Run, **options: Any) -> Any:
    made = {**run.batch, "schedule": run.schedule, **options}
    return fpipe.pipeline(made.pop("model", run.model), **grouped(made))


def profile(run: Run, **options: Any) -> Any:
    model = options.pop("model", run.model)
    return fpipe.profile(
        model, (run.x,), run.y, **grouped({"loss": mse_loss, "microbatches": 2, "seconds": 0, **options}, fpipe.profile)
    )


def profile_pipe(run: Run, **options: Any) -> Any:
    return fpipe.profile(run.pipe, (run.x,), run.y, **grouped({"seconds": 0, **options}, fpipe.profile))


def plan(run: Run, **options: Any) -> Any:
    return fpipe.plan(
        run.model,
        (run.x,),
        run.y,
        loss=mse_loss,
        microbatches=2,
        **grouped({"ranks": run.size, **options}, fpipe.profile),
    )


def train(run: Run, **options: Any) -> Any:
    return run.train(**{**run.held, "state": run.state, "inputs": (run.x,), "targets": run.y, **options})


def make_train_step(run: Run, optimizer: Any = None, **options: Any) -> Any:
    return fpipe.train_step(run.pipe, run.adam if optimizer is None else optimizer, **options)


def infer(make: Callable[..., Any], run: Run, **options: Any) -> Any:
    return make(run.pipe)(**{**run.held, "inputs": (run.x,), **options})


def save(run: Run, **options: Any) -> Any:
    return fpipe.save(run.pipe, **{"path": run.folder / "new", **run.held, **options})


def clip(run: Run, **options: Any) -> Any:
    return fpipe.clip(run.pipe, **{"grads": run.grads, "max_norm": 1.0, **options})


def optimizers(run: Run) -> dict[str, Any]:
    """Return optimizers that each differ from the others in one thing."""
    make, adam = fpipe.optimizer, torch.optim.AdamW
    return {
        "class": make(torch.optim.Adam, lr=0.1),
        "option": make(adam, lr=0.2),
        "groups": make(adam, lr=0.1, groups={"*.bias": {"weight_decay": 0.0}}),
        "pattern": make(adam, lr=0.1, groups={"*.weight": {"weight_decay": 0.0}}),
        "names": make(adam, lr=0.1, names=run.pipe.names),
        "donate": make(adam, lr=0.1, donate=True),
        "masters": fpipe.masters(run.adam),
    }


def list_rows(run: Run) -> dict[str, Row]:
    """Return the matrix. Values that all ranks may choose for themselves, such as `record`, are only in `wrong`."""
    x, y, half, link = run.x, run.y, run.x[:4], Link(latency=1e-5, bandwidth=1e9)
    seeds = {"seed": (1, 2)}
    batch = {"inputs": ((half,), (x,)), **seeds}
    wrong = {"params": {}, "inputs": 3, "seed": "x"}
    other = {name: p + 1 for name, p in run.held["params"].items()}
    return {
        "pipeline": Row(
            build_again,
            {
                "schedule": (gpipe(run.size, 4), run.schedule),
                "mesh": ({"pp": run.size, "dp": 1}, None),
                "model": (linears(*[nn.ReLU] * (run.size - 1)), run.model),
                "loss": (l1_loss, mse_loss),
                "plans": (3, 4),
            },
            {"schedule": one_f_one_b, "cuts": "x", "plans": "x", "model": nn.Linear(3, 3), "example": 3, "mesh": 3},
        ),
        "pipe.rebuilt": Row(lambda run, model=run.model: run.pipe.rebuilt(model), NONE, {"model": 3}),
        "pipe.prepare": Row(
            lambda run, examples=(((half,), y[:4]),): run.pipe.prepare(examples),
            {"examples": ([((x[:6],), y[:6])], [((half,), y[:4])])},
            {"examples": [3]},
        ),
        "value_and_grad": Row(
            lambda run, **o: fpipe.value_and_grad(run.pipe, **o),
            {"outputs": (True, False), "sums": (torch.float64, None)},
            {"outputs": 3, "record": 3, "sums": torch.int32},
        ),
        "a step": Row(
            Run.take_step,
            {**seeds, "onto": (run.grads, None), "scale": (2.0, 4.0), "total": (4.0, 8.0)},
            {**wrong, "inputs sparse": (x.to_sparse(),), "onto": {"x": x}, "scale": -1.0, "total": "x"},
        ),
        "train_step": Row(
            make_train_step,
            {"outputs": (True, False), "max_norm": (1.0, 2.0)},
            {"optimizer": 3, "max_norm": -1.0, "record": 3},
        ),
        "a training step": Row(train, {**seeds, "lr": (0.1, 0.2)}, {**wrong, "state": {}, "lr": "x", "onto": {"x": x}}),
        "clip": Row(
            clip,
            {"max_norm": (1.0, 2.0), "order": (1.0, 2.0), "names": ("*.bias", "*")},
            {"grads": {"x": x}, "max_norm": "x", "order": float("nan"), "donate": 3, "names": "none"},
        ),
        "norm": Row(
            lambda run, **o: fpipe.norm(run.pipe, **{"grads": run.grads, **o}),
            {"order": (1.0, 2.0), "names": ("*.bias", "*")},
            {"grads": 3, "order": float("nan")},
        ),
        "all_finite": Row(lambda run, grads=run.grads: fpipe.all_finite(run.pipe, grads), NONE, {"grads": 3}),
        "require_same": Row(
            lambda run, **o: fpipe.require_same(run.pipe, **o),
            {"seed": (1, 2), "data": ({"name": "a"}, {"name": "b"}), "loss": (lambda x: x, lambda x: -x)},
        ),
        "evaluate": Row(lambda run, **o: fpipe.evaluate(run.pipe, **o), {"outputs": (True, False)}, {"record": 3}),
        "an evaluation": Row(partial(infer, fpipe.evaluate), batch, wrong),
        "predict": Row(lambda run: fpipe.predict(run.pipe)),
        "a prediction": Row(partial(infer, fpipe.predict), batch, wrong),
        "stream": Row(lambda run, take=print: fpipe.stream(run.pipe, take), NONE, {"take": 3}),
        "a stream of outputs": Row(partial(infer, lambda pipe: fpipe.stream(pipe, lambda *_: None)), batch, wrong),
        "generate": Row(
            lambda run, **o: fpipe.generate(run.pipe, **{"length": 8, **o}),
            {"length": (8, 9), "schedule": (gpipe(run.size, 2), gpipe(run.size, 4))},
            {"length": 0, "choose": 3, "decoder": 3, "schedule": forward_only(run.size + 1, 2)},
        ),
        "find_nonfinite": Row(partial(infer, fpipe.find_nonfinite, targets=y), seeds, wrong),
        "verify": Row(
            lambda run, **o: fpipe.verify(run.pipe, **{"model": run.model, "inputs": (x,), "targets": y, **o}),
            {"steps": (1, 2), "seed": (1, 2), "tolerance": (0.1, 0.0), "params": (run.held["params"], None)},
            {"steps": 0, "tolerance": -1.0, "model": 3},
        ),
        "begin_save": Row(
            save,
            {
                "path": (run.folder / "a", run.folder / "b"),
                "step": (1, 2),
                "data": ({"a": 1}, {"a": 2}),
                "state": (run.state, None),
            },
            {"path": 3, "step": "x", "data": object(), "params": other | {"x": x}, "state": {"x": {}}},
        ),
        "load": Row(
            lambda run, path=run.folder / "2": fpipe.load(run.pipe, path),
            {
                "path": (run.folder / "1", run.folder / "2"),
                "path of several": ([run.folder / "1"], [run.folder / "1", run.folder / "2"]),
                "path in a list": ([run.folder / "2"], run.folder / "2"),
            },
            {"path": 3, "path of several": [3]},
        ),
        "export": Row(
            lambda run, **o: fpipe.export(run.pipe, **{"path": run.folder / "new", "params": run.held["params"], **o}),
            {"path": (run.folder / "a", run.folder / "b")},
            {"params": {}, "path": 3},
        ),
        "timeline": Row(lambda run, spans=(): fpipe.timeline(run.pipe, spans), NONE, {"spans": 3}),
        "profile": Row(
            profile,
            {"microbatches": (2, 4), "link": (link, None)},
            {"microbatches": "x", "seconds": -1, "model": 3},
        ),
        "profile of a pipeline": Row(
            profile_pipe, {"link": (link, None), "source": (run.model, None)}, {"seconds": -1, "loss": 3}, "profile"
        ),
        "plan": Row(plan, {"ranks": (1, 2), "memory": ("1GB", "2GB"), "seconds": (1, 2)}, {"ranks": 0, "memory": "x"}),
    }


LOCAL = frozenset(
    {
        "as_tree",
        "by_name",
        "choose_likeliest",
        "clip_value",
        "costs",
        "even_costs",
        "is_checkpoint",
        "masters",
        "optimizer",
        "reference",
        "safetensors",
    }
    | {
        "capture",
        "catch_signals",
        "connect_stages",
        "cut",
        "execute",
        "processes",
        "prove",
        "stage",
        "train_stream",
    }  # tested where they are, and in `steps` and `streams`
    | {"delays", "error_feedback", "pipemare", "predict_weights", "reference_stream"}
    | {"sample", "save"}  # which is `begin_save`, and its end
)
"""Public functions that need nothing of other ranks."""
BUILDS = ("pipeline", "profile", "plan")
"""What all processes of the job call; instead of it, the culprit calls another of these."""


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < AT_ONCE


def cells(rows: Mapping[str, Row], kind: str) -> Iterator[tuple[str, Row, str, Any]]:
    for name, row in rows.items():
        for argument, value in getattr(row, kind).items():
            yield row.named or name, row, argument.split()[0], value


def end(run: Run, rank: int) -> None:
    """Require that a step computes what it did before all errors."""
    assert same_bits(run.take_step()[0].loss, run.before.loss)
    gather(None)
    if rank == 0:
        shutil.rmtree(run.folder)


@case(sizes=[2])
def arguments_that_differ_on_one_rank(rank, size):
    run = Run(size)
    for name, row, argument, (own, others) in cells(list_rows(run), "differs"):
        with raises(fpipe.TransportError, f"rank {rank}, {name} (call", "got ranks that differ") as raised, at_once():
            row.call(run, **{argument: own if rank == CULPRIT else others})
        assert re.search(r"\n- [^:]+: got .*on ranks? 0.*", raised.text), f"{name}({argument}): {raised.text}"
        assert "on rank 1: " in raised.text, f"{name}({argument}): {raised.text}"
    end(run, rank)


@case(sizes=[2])
def arguments_that_are_wrong_on_one_rank(rank, size):
    run = Run(size)
    for name, row, argument, value in cells(list_rows(run), "wrong"):
        mine = rank == CULPRIT
        words = () if mine else (f"rank {rank}, {name} (call", "got errors on some ranks", f"- rank {CULPRIT}: ")
        with raises(fpipe.PipelineError, *words) as raised, at_once():
            row.call(run, **({argument: value} if mine else {}))
        told = "" if mine else rf"- rank {CULPRIT}: \w*Error: .*"
        assert re.search(rf"{told}got .*expected .*\S[.?] \S", raised.text, re.DOTALL), (
            f"{name}({argument}): {raised.text}"
        )
    end(run, rank)


@case(sizes=[2])
def calls_that_one_rank_leaves_out(rank, size):
    run = Run(size)
    rows = list_rows(run)
    for name in rows:
        others = ("norm", "clip") if name not in BUILDS else BUILDS
        instead = next(one for one in others if one != name)
        with raises(fpipe.TransportError, "- call: got on rank", f"on rank 1: {instead} (call"), at_once():
            rows[instead if rank == CULPRIT else name].call(run)
    end(run, rank)


@case(sizes=[2])
def optimizers_that_differ_on_one_rank(rank, size):
    """In class, options, groups, patterns, and what else the update is made of."""
    run = Run(size)
    for what, other in optimizers(run).items():
        words = ("train_step (call", "- optimizer: got on rank", "on rank 1: ")
        with raises(fpipe.TransportError, *words), at_once():
            fpipe.train_step(run.pipe, other if rank == CULPRIT else run.adam)
        with raises(fpipe.TransportError, "require_same (call", "- values: got on rank", "['optimizer']"):
            fpipe.require_same(run.pipe, optimizer=other if rank == CULPRIT else run.adam)
        made = [] if what == "donate" else [fpipe.train_step(run.pipe, one, 1.0) for one in (run.adam, other)]
        for step in made[:1]:
            with raises(fpipe.TransportError, "a training step (call", "- update: got on rank", "on rank 1: "):
                chosen, init = (made[1], other.init) if rank == CULPRIT else (step, run.adam.init)
                chosen(**run.held, state=init(run.held["params"]), inputs=(run.x,), targets=run.y)
    end(run, rank)


@case(sizes=[2])
def checkpoints_that_one_rank_sees_otherwise(rank, size):
    """The same path, step and data, but other values: each rank is where another run has saved."""
    run = Run(size)
    for k, shift in enumerate((0.0, 1.0)):
        params = {name: p + shift for name, p in run.held["params"].items()}
        fpipe.save(run.pipe, run.folder / f"host-{k}" / "run", params=params, step=5)
    with contextlib.chdir(run.folder / f"host-{int(rank == CULPRIT)}"):
        for path in ("run", ["run"]):
            words = ("load (call", "- checkpoint: got on rank", "on rank 1: Manifest(save=1, token=")
            with raises(fpipe.TransportError, *words), at_once():
                fpipe.load(run.pipe, path)
    end(run, rank)


# -------------------------- Ranks that build different pipelines: all of them raise an error that names the difference

ALL_TANH = replace(ZOO["mlp"], build=lambda: linears(nn.Tanh, nn.Tanh, nn.Tanh))


@case(day=[2, 4])
def another_number_of_ranks(rank, size):
    words = (f"{size} processes", f"schedule's {size + 1} ranks", f"Start {size + 1}", f"ranks={size}")
    with raises(fpipe.TransportError, *words):
        fpipe.pipeline(
            nn.Sequential(*[nn.Linear(4, 4) for _ in range(size + 1)]),
            example=(torch.randn(4, 4),),
            loss=torch.mean,
            schedule=one_f_one_b(ranks=size + 1, microbatches=2),
        )


def backwards(count):
    return reversed(range(count))


def in_order(order):
    """Return a user's schedule whose name and arguments do not tell its body."""

    @schedule()
    def mine(rank, ranks, microbatches):
        for i in order(microbatches):
            yield F(rank, i)
        for i in order(microbatches):
            yield B(rank, i)

    return mine


def list_differences(odd, size):
    """Yield what the rank that is `odd` builds otherwise, and what all ranks then say."""
    mlp, how = ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4)
    pick = lambda own, others: own if odd else others  # noqa: E731
    yield (mlp, pick(one_f_one_b(size, 2), how)), {}, ("- schedule: got on", "microbatches=2", "microbatches=4")
    yield (mlp, pick(gpipe(size, 4), how)), {}, ("- schedule: got on", "one_f_one_b", " gpipe(")
    cuts = pick(("1", "3", "6"), ("2", "4", "6"))[: size - 1]
    yield (mlp, how), {"cuts": cuts}, ("- cuts: got on", "before units", "; on rank")
    tied = pick("sum", "exact")
    yield (ZOO["tied_sequence"], how), {"tied": tied}, ("- tied: got on", "summed: ", ": nothing")
    same = {"cuts": ("2", "4", "6")[1 - size :]}
    yield (pick(ALL_TANH, mlp), how), same, ("- model: got on", "tanh", "relu")
    yield (pick(ZOO["frozen_below"], mlp), how), same, ("frozen",)
    yield (mlp, in_order(pick(backwards, range))(size, 4)), {}, ("- program: got on", "0F3 0F2", "0F0 0F1")


@case
def pipelines_that_differ_on_one_rank(rank, size):
    """Other schedules, cuts, ties, operators, frozen parameters, and bodies of schedules that are called the same."""
    for built, options, words in list_differences(rank == 1, size):
        with raises(fpipe.TransportError, f"rank {rank}", "on rank 1: ", *words) as raised:
            build(*built, 8, **options)
        assert len(raised.text) < 1000
    assert "- schedule" not in raised.text


def counting(factor):
    return lambda inputs, targets: len(targets) * factor


def cutting(first):
    return lambda leaf, microbatches: list(leaf.chunk(microbatches)) if first else list(leaf.split(2))


@case
def other_functions_on_one_rank(rank, size):
    """Functions are compared by their bodies and the contents of their cells, not by names or addresses."""
    one = ZOO["mlp"]
    model, inputs, targets = one.make(8)
    common = {"example": inputs, "targets": targets, "cuts": one.at(size), "loss": one.loss}
    common["schedule"] = one_f_one_b(ranks=size, microbatches=4)
    for options, words in (
        ({"weight": counting(1 + (rank == 1))}, ("- weight: got on", "cell factor: 1", "on rank 1: cell factor: 2")),
        ({"batch_dims": cutting(rank == 1)}, ("- batch_dims: got on", "on rank 1: cell first: True")),
        ({"batch_dims": cutting(True) if rank else 0}, ("- batch: got on rank 0",)),
        ({"loss": one.loss if rank else lambda x, y: one.loss(y, x)}, ("- loss: got on rank 0",)),
    ):
        with raises(fpipe.TransportError, *words):
            fpipe.pipeline(model, **(grouped(common | options)))
    fpipe.pipeline(model, **(grouped(common | {"weight": counting(3), "batch_dims": cutting(True)})))


class Shifted(nn.Sequential):
    """Adds a tensor that is neither parameter nor buffer."""

    def __init__(self, by):
        super().__init__(*[nn.Linear(6, 6) for _ in range(4)])
        self.by = torch.full((6,), by)

    def forward(self, x):
        return super().forward(x) + self.by


@case
def other_tensor_attributes(rank, size):
    def built(by):
        torch.manual_seed(0)
        x = torch.randn(4, 6)
        how = one_f_one_b(ranks=size, microbatches=2)
        return fpipe.pipeline(Shifted(by), example=(x,), loss=torch.sum, schedule=how)

    with raises(
        fpipe.TransportError, "- tensors that are neither parameters nor buffers: got on rank 0", "[6] of values"
    ):
        built(float(rank == 0))
    built(1.0)


# ---------------- Steps that one rank refuses, or in which it does something else: all ranks raise before any computes


@case
def refused_on_every_rank(rank, size):
    """Each rank says what is wrong before anything is sent; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for _ in range(2):
        with raises(fpipe.InputError, "params", "missing"):
            step({}, buffers, inputs, targets)
        with raises(fpipe.InputError, "params", "unexpected", "pipe.init(model)"):
            step(dict(model.named_parameters()), buffers, inputs, targets)
    out, _ = step(params, buffers, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case(sizes=[2])
def plans_are_certified_on_every_rank(rank, size):
    """A rank that got another program than is certified says so, and nothing is sent; the file as it was runs."""
    one, options = ZOO["mlp"], {"ranks": size, "microbatches": 4, "schedules": one_f_one_b}
    model, inputs, targets = one.make(8)
    plan = fpipe.plan(model, inputs, targets=targets, loss=one.loss, seconds=1, **options)
    other = replace(plan, schedule=zb_h1(ranks=size, microbatches=4))
    build = partial(fpipe.pipeline, model, example=inputs, targets=targets, loss=one.loss)
    if rank == 1:
        with raises(fpipe.InputError, "plan.certificate: got another program for rank 0, expected that of zb_h1"):
            build(plan=other)
    else:
        with raises(fpipe.TransportError, "pipeline (call", "got errors on some ranks", "- rank 1: ", "got another"):
            build(plan=plan)
    pipe = build(plan=plan)
    out, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert same_bits(out.loss, loop(model, one.loss, inputs, targets, 4).loss)
    assert {one.certificate for one in gather(plan)} == {plan.certificate}


@case
def refused_on_one_rank(rank, size):
    """If one rank refuses a step, all ranks raise at once; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    for culprit, bad, words in (
        (0, (None, targets), ["inputs[0]: got nothing", "a stage of this rank reads it"]),
        (size - 1, (inputs, None), ["targets: got nothing"]),
        (1, ([*inputs], targets), ["inputs: got ["]),
    ):
        if rank == culprit:
            with raises(fpipe.InputError, *words):
                step(*state, *bad)
        else:
            with raises(fpipe.TransportError, f"- rank {culprit}: InputError: ", *words):
                step(*state, inputs, targets)
    out, _ = step(*state, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def altered_checkpoints(rank, size):
    """Each rank compares some of the checksums; if one differs, all ranks raise, or take the checkpoint before."""
    pipe, model, _, _ = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    folder = Path(gather(tempfile.mkdtemp() if rank == 0 else "")[0])
    for step in (1, 2):
        fpipe.save(pipe, folder / f"{step}", params=params, buffers=buffers, step=step)
    if rank == 0:
        (shard,) = (folder / "2").glob(f"save-1/*-00002-of-{size:05}.safetensors")
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    gather(None)
    expected = (fpipe.InputError, "the file was altered") if rank == 1 else (fpipe.TransportError, "was altered")
    with raises(*expected):
        fpipe.load(pipe, folder / "2")
    assert fpipe.load(pipe, [folder / "2", folder / "1"]).step == 1
    gather(None)
    shutil.rmtree(folder, ignore_errors=True)


@case
def one_batch_ahead(rank, size):
    """One rank is a batch ahead, in two sizes that all ranks have seen; a valid step works afterwards."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, evaluate = pipe.init(model), fpipe.value_and_grad(pipe), fpipe.evaluate(pipe)
    batches = [(inputs, targets), ((inputs[0][:4],), targets[:4])]
    for batch in batches:
        step(*state, *batch)
        evaluate(*state, *batch)
    for function, called in ((step, "a step (call"), (evaluate, "an evaluation (call")):
        words = ("inputs[0]: float32[8, ", "inputs[0]: float32[4, ", "on rank 0")
        with raises(fpipe.TransportError, f"rank {rank}, {called}", "- batch: got", *words) as raised:
            function(*state, *batches[rank == 0])
        assert len(raised.text) < 700
    assert same_bits(step(*state, *batches[0])[0].loss, loop(model, one.loss, *batches[0], 4).loss)


@case
def another_pipeline_on_one_rank(rank, size):
    how = one_f_one_b(ranks=size, microbatches=4)
    one, two = (build(ZOO[name], how, 8, ("2", "4", "6")[: size - 1]) for name in ("mlp", "frozen_below"))
    pipe, model, *batch = two if rank else one
    step = fpipe.value_and_grad(pipe)
    with raises(fpipe.TransportError, "- pipeline: got on rank 0: parameters: ", "trained", "frozen"):
        step(*pipe.init(model), *batch)


@case
def other_settings_on_one_rank(rank, size):
    """Autocast, the default dtype, and the seed."""
    pipe, model, inputs, targets = build(ZOO["dropping"], one_f_one_b(ranks=size, microbatches=4), 8, capture="trace")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    with (
        raises(fpipe.TransportError, "- variant: got on rank 0: Variant(", "torch.bfloat16"),
        torch.autocast("cpu", enabled=rank == 0),
    ):
        step(*state, inputs, targets, seed=1)
    torch.set_default_dtype(torch.float32 if rank else torch.float64)
    try:
        refused = fpipe.TransportError if rank else fpipe.InputError
        with raises(refused, "torch: the default dtype: got torch.float64, expected torch.float32"):
            step(*state, inputs, targets, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    with raises(fpipe.TransportError, "- seed: got on rank 0: 0; on rank 1: 1"):
        step(*state, inputs, targets, seed=rank)
    step(*state, inputs, targets, seed=1)


OTHERWISE = {  # what one rank sets otherwise, and how it is set back; what the error says of it
    "threads": (partial(torch.set_num_threads, 2), partial(torch.set_num_threads, 1), "threads within an operator: 2"),
    "deterministic": (
        partial(torch.use_deterministic_algorithms, True),
        partial(torch.use_deterministic_algorithms, False),
        "deterministic algorithms: True",
    ),
    "precision": (
        partial(torch.set_float32_matmul_precision, "medium"),
        partial(torch.set_float32_matmul_precision, "highest"),
        "bf16",
    ),
    "denormal": (partial(torch.set_flush_denormal, True), partial(torch.set_flush_denormal, False), "flushed to zero"),
}


@case
def other_bits_on_one_rank(rank, size):
    """What changes the last bits of results is compared when a pipeline is built, and what is cheap in every step."""
    how = one_f_one_b(ranks=size, microbatches=4)
    pipe, model, inputs, targets = build(ZOO["mlp"], how, 8)
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    for what, (change, restore, word) in OTHERWISE.items():
        for in_step in {False, what in ("threads", "deterministic")}:
            if rank == size - 1:
                change()
            try:
                with raises(
                    fpipe.TransportError,
                    "- settings: got on rank",
                    word,
                    "Use the same settings of torch in every process",
                ):
                    step(*state, inputs, targets) if in_step else build(ZOO["mlp"], how, 8)
            finally:
                restore()
    with (
        raises(fpipe.TransportError, "vectors of the processor: got on rank", f"AVX9{rank}", "ATEN_CPU_CAPABILITY"),
        patch.object(torch.backends.cpu, "get_cpu_capability", lambda: f"AVX9{rank}"),
    ):
        build(ZOO["mlp"], how, 8)
    step(*state, inputs, targets)


@case
def other_values_of_what_several_ranks_hold(rank, size):
    """Tied parameters and stages with replicas are compared before the first step."""
    for name, how in (
        ("tied_sequence", one_f_one_b(ranks=size, microbatches=4)),
        ("mlp", dualpipe(ranks=size, microbatches=4)),
    ):
        pipe, model, inputs, targets = build(ZOO[name], how, 8)
        params, buffers = pipe.init(model)
        first = next(iter(params)) if rank == size - 1 else None
        other = {n: p + 1 if n == first else p for n, p in params.items()}
        with raises(fpipe.TransportError, "hold copies: got different values on ranks 0 and", "checkpoint"):
            fpipe.value_and_grad(pipe)(other, buffers, inputs, targets)
        fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)


@case
def a_second_thread(rank, size):
    """While one thread runs a step, another is refused by name, and changes nothing."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, found = pipe.init(model), []

    def elsewhere():
        with raises(fpipe.TransportError, "in thread 'another'", "one thread at a time") as raised:
            fpipe.evaluate(pipe)(*state, inputs, targets)
        found.append(raised.text)

    def record(span):
        thread = threading.Thread(target=elsewhere, name="another")
        thread.start()
        thread.join()

    out, _ = fpipe.value_and_grad(pipe, record=record)(*state, inputs, targets)
    assert len(found) > 8
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def functions_are_described_alike(rank, size):
    """Descriptions are equal in all processes, each of which hashes strings differently."""
    for one, two in LOOKALIKES.values():
        found = gather((describe_value(one), describe_value(two)))
        assert found == [found[0]] * size
