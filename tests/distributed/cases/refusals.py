# SPDX-License-Identifier: Apache-2.0
"""Steps that one rank refuses, or in which it does something else: all ranks raise before any computes."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import torch

import fpipe
from fpipe.network.fingerprint import describe_value
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, one_f_one_b
from tests.common.lookalikes import LOOKALIKES
from tests.common.loops import loop
from tests.common.running import build
from tests.common.zoo import ZOO
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import case


@case
def refused_on_every_rank(rank, size):
    """Each rank says what is wrong before anything is sent; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    params, buffers = pipe.init(model)
    step = fpipe.value_and_grad(pipe)
    for _ in range(2):
        with raises(fpipe.InputError, "params", "missing"):
            step({}, buffers, inputs, targets)
    out, _ = step(params, buffers, inputs, targets)
    assert same_bits(out.loss, loop(model, ZOO["mlp"].loss, inputs, targets, 4).loss)


@case
def refused_on_one_rank(rank, size):
    """If one rank refuses a step, all ranks raise at once; a valid step works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    for culprit, bad, words in (
        (0, (None, targets), ["inputs[0]: got nothing", "a stage of this rank reads it"]),
        (size - 1, (inputs, None), ["targets: got nothing"]),
        (1, ([*inputs], targets), ["inputs: got the tree"]),
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
def wrong_arguments_on_one_rank(rank, size):
    """If one rank passes an argument of another type, all ranks raise at once; a valid call works afterwards."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    grads = step(*state, inputs, targets)[1]
    calls = {
        "max_norm: got 'x'": lambda wrong: fpipe.clip(pipe, grads, "x" if wrong else 1.0),
        "order: got nan": lambda wrong: fpipe.norm(pipe, grads, float("nan") if wrong else 2.0),
        "grads: got int": lambda wrong: fpipe.all_finite(pipe, 3 if wrong else grads),
        "seed: got 2.5": lambda wrong: step(*state, inputs, targets, seed=2.5 if wrong else 2),
        "spans: got 3": lambda wrong: fpipe.timeline(pipe, 3 if wrong else []),
        "path: got 3": lambda wrong: fpipe.export(pipe, 3 if wrong else "nowhere", state[0]),
        "path: got None": lambda wrong: fpipe.load(pipe, None if wrong else "nowhere"),
        "inputs[0]: got a tensor of layout": lambda wrong: step(
            *state, (inputs[0].to_sparse(),) if wrong else inputs, targets
        ),
    }
    for culprit, (words, call) in enumerate(calls.items()):
        mine = rank == culprit % size
        expected = (fpipe.InputError, words) if mine else (fpipe.TransportError, "InputError: ", words)
        with raises(*expected):
            call(mine)
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
def state_of_another_rank(rank, size):
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=size, microbatches=4), 8)
    everything = dict(model.named_parameters())
    with raises(fpipe.InputError, "params", "unexpected", "pipe.init(model)"):
        fpipe.value_and_grad(pipe)(everything, {}, inputs, targets)


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
def a_skipped_evaluation(rank, size):
    """One rank runs the next step, or builds a timeline, in place of an evaluation."""
    one = ZOO["mlp"]
    pipe, model, inputs, targets = build(one, one_f_one_b(ranks=size, microbatches=4), 8)
    state, step, evaluate = pipe.init(model), fpipe.value_and_grad(pipe), fpipe.evaluate(pipe)
    with raises(fpipe.TransportError, "- call: got on rank 0: an evaluation (call", "a step (call"):
        (step if rank else evaluate)(*state, inputs, targets)
    with raises(fpipe.TransportError, "- call: got on rank 0: timeline (call", "a step (call"):
        step(*state, inputs, targets) if rank else fpipe.timeline(pipe, [])
    assert same_bits(evaluate(*state, inputs, targets).loss, loop(model, one.loss, inputs, targets, 4).loss)


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
