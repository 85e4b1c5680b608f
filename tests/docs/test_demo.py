# SPDX-License-Identifier: Apache-2.0
"""The example prints the same losses however it is run, and fails where the pipeline differs from one device."""

import re
import shlex
import subprocess
import sys
import weakref

import pytest
import torch

import fpipe
from tests.common.examples import FOLDER, load_example
from tests.common.processes import run_under_torchrun
from tests.common.sizes import by_night

EXAMPLE = FOLDER / "train_gpt.py"
TINY = shlex.split(
    "--steps 4 --every 1 --checks 2 --layers 2 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4"
)
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")
EQUAL = "first 2 steps: loss, all 28 gradients and parameters are bit for bit those of "
BROKEN = """
import os, sys
import torch
sys.path.insert(0, {folder!r})
import train_gpt

original = train_gpt.plain_loop

def broken(*arguments):
    loss, grads = original(*arguments)
    if os.environ["RANK"] == "1":
        grads["blocks.1.up.weight"].view(torch.int32)[0, 0] ^= 1
    return loss, grads

train_gpt.plain_loop = broken
train_gpt.main({options!r})
"""


def start(*arguments):
    """A Python process with these arguments."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """Exit code and what was printed, within two minutes."""
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on
        raise
    return process.returncode, out, err


def losses(out):
    """Every loss that was printed, with its digits."""
    return re.findall(r"^step +(\d+) +loss (\S+)|^held-out loss (\S+) before, (\S+) after", out, flags=re.MULTILINE)


@pytest.fixture
def train_gpt():
    with load_example("train_gpt") as module:
        yield module


def flip_last_bit(tensor):
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[0] ^= 1


def test_one_process_and_two_print_the_same_losses(tmp_path, train_gpt, capsys):
    picture = tmp_path / "step.svg"
    pair = start(*TORCHRUN, EXAMPLE, *TINY, "--timeline", picture)
    train_gpt.main(["--ranks", "2", *TINY])
    out, (pair_code, pair_out, pair_err) = capsys.readouterr().out, finish(pair)
    assert pair_code == 0, pair_err
    assert len(losses(out)) == 5
    assert losses(out) == losses(pair_out)
    for printed in (out, pair_out):
        assert EQUAL + "a plain PyTorch loop and of fpipe.reference, on every rank" in printed
        assert "one_f_one_b(ranks=2, microbatches=4)\nrank 0 |F0 F1" in printed
        assert "bubble predicted from these times: 0." in printed
    assert "bubble measured: only under torchrun" in out
    assert "bubble measured: 0." in pair_out
    assert "waits by rank: " in pair_out
    drawn = picture.read_text()
    assert drawn.index(">measured, in seconds<") < drawn.index(">simulated with its costs<")
    for action in ("0F3 on rank 0", "1B3 on rank 1"):
        assert drawn.count(f"<title>{action}") == 2


@by_night
def test_a_difference_on_one_rank_fails_the_job(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(folder=str(EXAMPLE.parent), options=TINY))
    code, out, err = run_under_torchrun(script)
    assert code != 0
    assert "MismatchError: step 0, against the plain loop, gradient of blocks.1.up.weight: got other bits" in err
    assert "bit for bit" not in out


def test_dropout_is_compared_with_the_reference(train_gpt, capsys):
    train_gpt.main(["--ranks", "2", "--dropout", "0.2", "--schedule", "gpipe", *TINY])
    out = capsys.readouterr().out
    assert EQUAL + "fpipe.reference, on every rank" in out
    assert "gpipe(ranks=2, microbatches=4)" in out


def test_wrong_gradients_of_the_pipeline_are_found(train_gpt, monkeypatch):
    original = fpipe.value_and_grad

    def value_and_grad(pipe, **options):
        def broken(*arguments, **named):
            out, grads = original(pipe, **options)(*arguments, **named)
            flip_last_bit(grads["embedding.weight"])
            return out, grads

        return broken

    monkeypatch.setattr(fpipe, "value_and_grad", value_and_grad)
    with pytest.raises(fpipe.MismatchError, match=r"step 0, against fpipe\.reference, gradient of embedding\.weight"):
        train_gpt.main(["--ranks", "2", *TINY])


def test_wrong_parameters_are_found(train_gpt, monkeypatch):
    original, calls = train_gpt.update, []

    def update(optimizer, params, grads):
        original(optimizer, params, grads)
        calls.append(params)
        if len(calls) == 3:  # the pipeline's second: each step has one of the pipeline and one of the plain model
            flip_last_bit(params["norm.bias"])

    monkeypatch.setattr(train_gpt, "update", update)
    with pytest.raises(fpipe.MismatchError, match=r"step 1, after the update, norm\.bias"):
        train_gpt.main(["--ranks", "2", *TINY])


def test_a_step_begins_without_the_gradients_of_the_last(train_gpt, monkeypatch):
    original, alive = fpipe.value_and_grad, []

    def value_and_grad(pipe, **options):
        step, last = original(pipe, **options), []

        def stepping(*arguments, **named):
            alive.append(sum(ref() is not None for ref in last))
            out, grads = step(*arguments, **named)
            last[:] = map(weakref.ref, grads.values())
            return out, grads

        return stepping

    monkeypatch.setattr(fpipe, "value_and_grad", value_and_grad)
    train_gpt.main(["--ranks", "2", *TINY])
    assert len(alive) > 1
    assert not any(alive)


def test_too_little_text_is_an_error(train_gpt, monkeypatch, tmp_path):
    (tmp_path / "small.py").write_text("pass\n")
    monkeypatch.setattr(train_gpt.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="got 5 bytes of"):
        train_gpt.standard_library()


def test_text_is_split_by_module(train_gpt):
    training, held_out = train_gpt.standard_library(limit=10_000_000)
    assert len(training) > 5 * len(held_out)
