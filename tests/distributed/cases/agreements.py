# SPDX-License-Identifier: Apache-2.0
"""Every public function that all ranks call, with an argument that differs or is wrong on one rank, or left out there.

`ROWS` is the matrix: a row for each function, a cell for each argument. In every cell all ranks raise at once, by name,
before anything is computed; afterwards a step has the bits that it had before.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import Link, forward_only, gpipe, one_f_one_b
from tests.common.cases import WIDTH
from tests.common.layers import linears
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case

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
        self.pipe = fpipe.pipeline(self.model, **self.batch, schedule=self.schedule)
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


def build(run: Run, **options: Any) -> Any:
    made = {**run.batch, "schedule": run.schedule, **options}
    return fpipe.pipeline(made.pop("model", run.model), **made)


def profile(run: Run, **options: Any) -> Any:
    model = options.pop("model", run.model)
    return fpipe.profile(model, (run.x,), run.y, **{"loss": mse_loss, "microbatches": 2, "seconds": 0, **options})


def profile_pipe(run: Run, **options: Any) -> Any:
    return fpipe.profile(run.pipe, (run.x,), run.y, **{"seconds": 0, **options})


def plan(run: Run, **options: Any) -> Any:
    return fpipe.plan(run.model, (run.x,), run.y, loss=mse_loss, microbatches=2, **{"ranks": run.size, **options})


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
            build,
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
            {**wrong, "onto": {"x": x}, "scale": -1.0, "total": "x"},
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
            {"grads": {"x": x}, "max_norm": "x", "donate": 3, "names": "none"},
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
        "evaluate": Row(lambda run, **o: fpipe.evaluate(run.pipe, **o), NONE, {"record": 3}),
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
    {"choose_likeliest", "clip_value", "costs", "is_checkpoint", "masters", "optimizer", "reference", "safetensors"}
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


@case
def arguments_that_differ_on_one_rank(rank, size):
    run = Run(size)
    for name, row, argument, (own, others) in cells(list_rows(run), "differs"):
        with raises(fpipe.TransportError, f"rank {rank}, {name} (call", "got ranks that differ") as raised, at_once():
            row.call(run, **{argument: own if rank == CULPRIT else others})
        assert re.search(r"\n- [^:]+: got .*on ranks? 0.*", raised.text), f"{name}({argument}): {raised.text}"
        assert "on rank 1: " in raised.text, f"{name}({argument}): {raised.text}"
    end(run, rank)


@case
def arguments_that_are_wrong_on_one_rank(rank, size):
    run = Run(size)
    for name, row, argument, value in cells(list_rows(run), "wrong"):
        mine = rank == CULPRIT
        words = () if mine else (f"rank {rank}, {name} (call", "got errors on some ranks", f"- rank {CULPRIT}: ")
        with raises(fpipe.PipelineError, *words) as raised, at_once():
            row.call(run, **({argument: value} if mine else {}))
        assert re.search(r"got .*expected .*\S[.?] \S", raised.text, re.DOTALL), f"{name}({argument}): {raised.text}"
    end(run, rank)


@case
def calls_that_one_rank_leaves_out(rank, size):
    run = Run(size)
    rows = list_rows(run)
    for name in rows:
        others = ("norm", "clip") if name not in BUILDS else BUILDS
        instead = next(one for one in others if one != name)
        with raises(fpipe.TransportError, "- call: got on rank", f"on rank 1: {instead} (call"), at_once():
            rows[instead if rank == CULPRIT else name].call(run)
    end(run, rank)


@case
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


@case
def checkpoints_that_one_rank_sees_otherwise(rank, size):
    """The same path, step and data, but other values: each rank is where another run has saved."""
    run = Run(size)
    for k, shift in enumerate((0.0, 1.0)):
        params = {name: p + shift for name, p in run.held["params"].items()}
        fpipe.save(run.pipe, run.folder / f"host-{k}" / "run", params=params, step=5)
    with contextlib.chdir(run.folder / f"host-{int(rank == CULPRIT)}"):
        for path in ("run", ["run"]):
            words = ("load (call", "- checkpoint: got on rank", "on rank 1: file 0: ", "checksum")
            with raises(fpipe.TransportError, *words), at_once():
                fpipe.load(run.pipe, path)
    end(run, rank)
