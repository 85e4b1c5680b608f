# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument of the public functions is refused, at once, with an error that says how to repair it."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn

import fpipe
from schedules import gpipe, linear, one_f_one_b
from tests.common.options import grouped
from tests.common.wrong_calls import Known, complain

NAN, MANY, FOREVER = math.nan, itertools.count, itertools.repeat
HUGE = 10**400  # more than any float
DEEP = functools.reduce(lambda tree, _: [tree], range(1000), 0)
X = torch.ones(4, 4)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Every public function, with arguments that it takes, and values of the right type that it must refuse."""
    path = tmp_path_factory.mktemp("files")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = {"example": (X,), "loss": torch.mean}
    how = one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, **grouped(batch), schedule=how, cuts=["2"])
    params, buffers = pipe.init(model)
    spans = []
    step = fpipe.value_and_grad(pipe, record=spans.append)
    _, grads = step(params, buffers, (X,))
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    state, held = adam.init(params), {"params": params, "buffers": buffers}
    fpipe.save(pipe, path / "run", params=params)
    fpipe.export(pipe, path / "model", params)
    measured = fpipe.profile(model, (X,), loss=torch.mean, microbatches=2, seconds=0)
    measured.save(path / "profile.json")
    found = fpipe.plan(model, (X,), loss=torch.mean, ranks=2, microbatches=2, profile=measured, seconds=1)
    found.save(path / "plan.json")
    measured_step = fpipe.timeline(pipe, spans)
    saving = {"pipe": pipe, "path": path / "run", "params": params}
    sparse, nested = X.to_sparse(), torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    numbers, missing = (-1, 0, NAN, math.inf, HUGE), path / "missing"
    paths = ("\0", "a" * 5000, "a\udcff")
    unscalable = [{**grads, "0.weight": one} for one in (nested, X.long(), X.to("meta"), sparse)]
    misfit = {**grads, "0.weight": X[0]}
    batches = {
        "params": ({}, {**params, "0.bias": params["0.bias"].double()}, {**params, "0.weight": nested}),
        "inputs": ((X.double(),), (sparse,), (nested,), (3,), X, None),
        "targets": (X,),
    }
    files = {"path": (*paths, missing)}
    return {
        "all_finite": Known(
            fpipe.all_finite, {"pipe": pipe, "grads": grads}, {"grads": ({"x": X}, misfit, *unscalable[:3])}
        ),
        "begin_save": Known(
            fpipe.begin_save,
            {**saving, "path": path / "other"},
            {
                "path": (*paths, path / "profile.json"),
                "data": ({1: 2}, object(), nn.Linear(1, 1), DEEP, 2**20000, [nested]),
                "step": (-1, 10**30),
                "state": ({"x": {}}, {"0.bias": {"a": object()}}),
                "params": ({}, {"x": X}),
            },
        ),
        "choose_likeliest": Known(fpipe.choose_likeliest, {"logits": X, "generator": torch.Generator()}),
        "clip": Known(
            fpipe.clip,
            {"pipe": pipe, "grads": grads, "max_norm": 1.0},
            {
                "max_norm": (-1, NAN),
                "names": ("nothing", FOREVER("*"), ()),
                "grads": ({"x": X}, misfit, *unscalable[:3]),
                "order": (NAN, HUGE),
            },
        ),
        "clip_value": Known(
            fpipe.clip_value,
            {"grads": grads, "value": 1.0},
            {"value": (-1, NAN), "grads": ({"x": "y"}, *unscalable[:2], unscalable[3])},
        ),
        "costs": Known(fpipe.costs, {"pipe": pipe, "timelines": measured_step}, {"timelines": ([3], MANY())}),
        "evaluate": Known(fpipe.evaluate, {"pipe": pipe}),
        "export": Known(
            fpipe.export,
            {"pipe": pipe, "path": path / "new", "params": params},
            {"path": (*paths, path / "profile.json" / "x"), "params": ({},)},
        ),
        "generate": Known(fpipe.generate, {"pipe": pipe, "length": 4}, {"length": (0, -1), "schedule": (gpipe(4, 2),)}),
        "is_checkpoint": Known(fpipe.is_checkpoint, {"path": path}),
        "load": Known(fpipe.load, {"pipe": pipe, "path": path / "run"}, {"path": (*files["path"], [])}),
        "LossScale": Known(
            fpipe.LossScale,
            {},
            {"scale": numbers, "growth": (1, *numbers), "backoff": (1, *numbers), "interval": (0,), "good": (-1, 2000)},
        ),
        "LossScale.unscale": Known(fpipe.LossScale().unscale, {"grads": grads}),
        "LossScale.next": Known(fpipe.LossScale().next, {"finite": True}, {"finite": (torch.ones(2),)}),
        "masters": Known(fpipe.masters, {"optimizer": adam}, {"dtype": (torch.int32,)}),
        "ModuleGraph": Known(
            fpipe.ModuleGraph,
            {"parts": {"a": fpipe.Part(nn.Linear(1, 1), "x")}, "inputs": ["x"], "outputs": "a"},
            {
                "parts": ({}, {"a": 3}, {3: fpipe.Part(abs, "x")}),
                "inputs": ([3], ["y"]),
                "outputs": ("b", "__import__('os')", "a["),
            },
        ),
        "norm": Known(fpipe.norm, {"pipe": pipe, "grads": grads}, {"order": (NAN,), "names": ("nothing", MANY())}),
        "optimizer": Known(
            fpipe.optimizer,
            {"cls": torch.optim.SGD},
            {
                "cls": (torch.optim.LBFGS, torch.optim.Optimizer, nn.Linear),
                "groups": ({"a": 3}, {3: {}}, {"*": {"x": 1}}),
                "names": (MANY(),),
                "options": ({"x": 1}, {"lr": "x"}),
            },
        ),
        "update": Known(
            adam.update,
            {"grads": grads, "state": state, "params": params},
            {"grads": ({"x": X}, misfit, *unscalable[2:]), "state": ({},), "groups": ({"x": {}},)},
        ),
        "pipeline": Known(
            fpipe.pipeline,
            {"model": model, **batch, "schedule": how},
            {
                "model": ([], [3], nn.DataParallel(model)),
                "stages": (3, 0),
                "schedule": (gpipe(2, 10**12),),
                "cuts": ("x", 3, FOREVER("2")),
                "unsplittable": (FOREVER("2"),),
                "plans": (0, -1),
                "example": ((sparse,), (nested,), ()),
                "batch_dims": (9, "x", lambda x: x, lambda x, count: FOREVER(x), lambda x, count: 3),
                "mesh": ({"pp": 3}, {"pp": 0}),
                "capture": ("x", lambda: 0),
                "backward": ("x",),
                "tied": ("x", {"0.bias": "x"}),
                "dp": ("dp",),
                "rows": ("x",),
                "reduce": ("x",),
            },
        ),
        "plan": Known(
            fpipe.plan,
            {"model": model, **batch, "ranks": 2, "microbatches": 2, "profile": measured, "seconds": 0.1},
            {
                "memory": (-1, "x", (1,)),
                "microbatches": (0, (), (0,), FOREVER(2)),
                "weights": numbers,
                "seconds": (-1, NAN, HUGE),
                "ranks": (0, -1, 10**12),
                "schedules": ((), (3,), (lambda: 0,), (lambda ranks, microbatches: None,)),
                "cuts": (("x",), FOREVER("2")),
                "stages": (FOREVER(("2", None)),),
            },
        ),
        "Plan.read": Known(fpipe.Plan.read, {"path": path / "plan.json"}, files),
        "Plan.save": Known(found.save, {"path": path / "again.json"}, {"path": ("\0", path)}),
        "predict": Known(fpipe.predict, {"pipe": pipe}),
        "profile": Known(
            fpipe.profile,
            {"model": model, **batch, "microbatches": 2, "seconds": 0},
            {
                "microbatches": (0, -1, 10**12),
                "cuts": ("x", FOREVER("2")),
                "seconds": (-1, NAN),
                "source": ({},),
            },
        ),
        "Profile.read": Known(fpipe.Profile.read, {"path": path / "profile.json"}, files),
        "Profile.save": Known(measured.save, {"path": path / "again.json"}, {"path": ("\0", path)}),
        "Profile.costs": Known(measured.costs, {"cuts": ["2"]}, {"cuts": (["x"], [0], [99], ["2", "2"])}),
        "Profile.sizes": Known(measured.sizes, {"cuts": ["2"]}, {"cuts": (["x"],), "placement": (linear(3),)}),
        "Pipeline.init": Known(pipe.init, {"source": model}, {"source": ({}, {"0.bias": X}, nn.Linear(1, 1))}),
        "Pipeline.initialise": Known(pipe.initialise, {"seed": 0}),
        "Pipeline.module": Known(pipe.module, {"params": params, "buffers": buffers}, {"params": ({"x": X},)}),
        "Pipeline.prepare": Known(
            pipe.prepare,
            {"examples": [((X,), None)]},
            {"examples": ([3], [((X.double(),), None)], FOREVER(((X,), None)))},
        ),
        "Pipeline.rebuilt": Known(pipe.rebuilt, {"model": model}),
        "Pipelined": Known(fpipe.Pipelined, {"model": model, **batch, "schedule": how}, {"weights": ({},)}),
        "reference": Known(fpipe.reference, {"pipe": pipe}, {"sums": (torch.int32,)}),
        "Roofline": Known(
            fpipe.Roofline,
            {"flops": 1e9, "bandwidth": 1e9},
            {"flops": numbers, "bandwidth": numbers, "overhead": (-1, NAN)},
        ),
        "sample": Known(fpipe.sample, {}, {"temperature": numbers[:3], "top": (0, -1)}),
        "safetensors": Known(fpipe.safetensors, {"paths": path / "model"}, {"paths": ("\0", missing, [missing], [3])}),
        "save": Known(fpipe.save, saving),
        "Sharded": Known(fpipe.Sharded, {"dim": "fsdp"}, {"gathered": (0, -1)}),
        "stream": Known(fpipe.stream, {"pipe": pipe, "take": print}, {"take": (lambda: 0,)}),
        "timeline": Known(
            fpipe.timeline,
            {"pipe": pipe, "spans": spans},
            {"spans": (MANY(), [3], [spans[0]._replace(rank=9)])},
        ),
        "train_step": Known(fpipe.train_step, {"pipe": pipe, "optimizer": adam}, {"max_norm": (-1, NAN)}),
        "value_and_grad": Known(fpipe.value_and_grad, {"pipe": pipe}, {"sums": (torch.int32,), "record": (lambda: 0,)}),
        "verify": Known(
            fpipe.verify,
            {"pipe": pipe, "model": model, "inputs": (X,)},
            {"steps": (0, -1), "tolerance": (-1, NAN), "unsplit": (-1, NAN), **batches},
        ),
        "a step": Known(
            step, {**held, "inputs": (X,)}, {"scale": numbers, "total": numbers, "onto": ({"x": X},), **batches}
        ),
        "an evaluation": Known(fpipe.evaluate(pipe), {**held, "inputs": (X,)}, batches),
        "a prediction": Known(fpipe.predict(pipe), {**held, "inputs": (X,)}, {"inputs": batches["inputs"]}),
        "a training step": Known(
            fpipe.train_step(pipe, adam, 1.0), {**held, "state": state, "inputs": (X,)}, {**batches, "state": ({},)}
        ),
        "the reference": Known(fpipe.reference(pipe), {**held, "inputs": (X,)}, batches),
    }


def test_wrong_arguments_are_refused(known):
    assert not [line for one in known.values() for line in complain(one)]
