# SPDX-License-Identifier: Apache-2.0
"""Examples compute what one device computes, however they are run, and fail where they do not."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import weakref

import pytest
import torch

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.examples import FOLDER, load_example
from tests.common.processes import ENVIRONMENT, run_under_torchrun
from tests.common.sizes import by_night, sampled

# ---------- The example prints the same losses however it is run, and fails where the pipeline differs from one device

EXAMPLE = FOLDER / "train_gpt.py"
DEMO = shlex.split(
    "--steps 4 --every 1 --checks 2 --layers 2 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4"
)
TORCHRUN = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")
EQUAL = "first 2 steps: loss, all 28 gradients and parameters equal, bit for bit, those of "
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


@by_night
def test_one_process_and_two_print_the_same_losses(tmp_path, train_gpt, capsys):
    picture = tmp_path / "step.svg"
    command = [sys.executable, *TORCHRUN, EXAMPLE, *DEMO, "--timeline", picture]
    pair = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    train_gpt.main(["--ranks", "2", *DEMO])
    out, (pair_out, pair_err) = capsys.readouterr().out, pair.communicate(timeout=600)
    assert pair.returncode == 0, pair_err
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
    script.write_text(BROKEN.format(folder=str(EXAMPLE.parent), options=DEMO))
    code, out, err = run_under_torchrun(script)
    assert code != 0
    assert "MismatchError: step 0, against the plain loop, gradient of blocks.1.up.weight: got other bits" in err
    assert "bit for bit" not in out


def test_dropout_is_compared_with_the_reference(train_gpt, capsys):
    train_gpt.main(["--ranks", "2", "--dropout", "0.2", "--schedule", "gpipe", *DEMO])
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
        train_gpt.main(["--ranks", "2", *DEMO])


def test_wrong_parameters_are_found(train_gpt, monkeypatch):
    original, calls = train_gpt.update, []

    def update(optimizer, params, grads):
        original(optimizer, params, grads)
        calls.append(params)
        if len(calls) == 3:  # the pipeline's second: each step has one of the pipeline and one of the plain model
            flip_last_bit(params["norm.bias"])

    monkeypatch.setattr(train_gpt, "update", update)
    with pytest.raises(fpipe.MismatchError, match=r"step 1, after the update, norm\.bias"):
        train_gpt.main(["--ranks", "2", *DEMO])


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
    train_gpt.main(["--ranks", "2", *DEMO])
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


# ---------------------------------------- A run whose ranks are killed ends with the bits of one that nobody disturbed


@pytest.fixture
def resume():
    with load_example("resume") as module:
        yield module


def saved(path):
    """Every tensor of the last checkpoint by name."""
    (folder,) = max(path.glob("step-*")).glob("save-*")
    return fpipe.safetensors(folder)


def require_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


def test_a_run_goes_on_from_where_it_stopped(resume, tmp_path, capsys):
    """The first batch that it takes after a restart is the one that follows the checkpoint."""
    options = ["--path", str(tmp_path / "run"), "--every", "2"]
    resume.main([*options, "--steps", "4"])
    made, original = [], resume.make_batch
    resume.make_batch = lambda step: made.append(step) or original(step)
    resume.main([*options, "--steps", "6"])
    assert made == [0, 4, 5], "the example's batch, and those of two steps"
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["2", "4", "6"]


def test_a_run_goes_on_from_the_checkpoint_before_one_that_was_altered(resume, tmp_path, capsys):
    options = ["--path", str(tmp_path / "run"), "--every", "2"]
    resume.main([*options, "--steps", "4"])
    (shard,) = (tmp_path / "run" / "step-000004").glob("save-*/*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resume.main([*options, "--steps", "4"])
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["2", "4", "4"]
    resume.main(["--path", str(tmp_path / "whole"), "--steps", "4", "--every", "4"])
    require_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))


def test_a_run_that_gets_a_signal_saves_and_goes_on_later(resume, tmp_path, capsys):
    """It saves after the step in which the signal came, and ends with the bits of a run that nobody stopped."""
    options = ["--path", str(tmp_path / "run"), "--every", "4", "--steps", "6"]
    make_batch, before = resume.make_batch, signal.getsignal(signal.SIGTERM)

    def interrupted(step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return make_batch(step)

    resume.make_batch = interrupted
    resume.main(options)
    assert signal.getsignal(signal.SIGTERM) is before
    resume.make_batch = make_batch
    resume.main(options)
    resume.main(["--path", str(tmp_path / "whole"), "--every", "6", "--steps", "6"])
    assert re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE) == ["3", "4", "6", "6"]
    require_same(saved(tmp_path / "run"), saved(tmp_path / "whole"))


def test_the_last_three_checkpoints_are_kept(resume, tmp_path):
    resume.main(["--path", str(tmp_path), "--steps", "5", "--every", "1"])
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-000003", "step-000004", "step-000005"]


# -------- Every example but the demo fits on a page, runs in one process, and prints the same on two ranks of torchrun

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks
TINY = {
    "custom_schedule": "",
    "drop_in": "--steps 3",
    "functional_loop": "--steps 2",
    "generate": "--layers 2 --width 16 --prompts 4 --groups 2 --context 4 --count 4",
    "lora": "--steps 1",
    "mesh": "--steps 2",
    "own_backward": "",
    "pure_stages": "",
    "slices": "",
    "trainer": "--steps 2 --path {folder}",
}
SAME = {  # the lines that must be the same on any number of ranks
    "custom_schedule": "42 tensors equal those of one device, 42 those of the module",
    "drop_in": "step|.* of the next words",
    "functional_loop": "step",
    "generate": "likeliest|drawn|all 16 tokens equal those of the plain loop",
    "lora": "step|final loss .* on one device too",
    "mesh": r"step|process 0 of \d+: [1-9]\d* parameters equal those of one device, bit for bit",
    "own_backward": "loss .*; 4 of 4 gradients equal those of autograd",
    "pure_stages": "gpipe|one_f_one_b|zb_h1|parameters equal those of the loop under all schedules, bit for bit",
    "slices": "one_f_one_b|seq_1f1b",
    "trainer": "step|held-out loss .*, with the saved model on one device too",
}
LINES = {
    "drop_in": 3,
    "functional_loop": 2,
    "generate": 3,
    "lora": 2,
    "mesh": 3,
    "custom_schedule": 1,
    "own_backward": 1,
    "pure_stages": 10,
    "slices": 3,
    "trainer": 3,
}


def lines_of(name, printed):
    """The lines that say what was computed, without times, and without what each process holds."""
    found = re.findall(rf"^(?:{SAME[name]}).*$", printed, re.MULTILINE)
    return [re.sub(r"; [0-9.]+ ms.*| of \d+: \d+ parameters", "", line) for line in found]


def options_of(name, folder):
    return shlex.split(TINY[name].format(folder=folder))


@pytest.fixture
def run_alone(monkeypatch, capsys, tmp_path):
    def run(name):
        monkeypatch.setattr(sys, "argv", [name, *options_of(name, tmp_path / "alone")])
        with load_example(name) as example:
            example.main()
        return capsys.readouterr().out

    return run


@sampled(1)
@pytest.mark.parametrize("name", TINY)
def test_an_example_runs_in_one_process(name, run_alone):
    printed = run_alone(name)
    assert len(lines_of(name, printed)) == LINES[name], printed


@by_night
@pytest.mark.parametrize(
    "name", [name for name in TINY if name not in ("custom_schedule", "mesh", "own_backward", "pure_stages")]
)
def test_two_ranks_print_the_same(name, run_alone, tmp_path):
    code, out, err = run_under_torchrun(FOLDER / f"{name}.py", *options_of(name, tmp_path / "ranks"))
    assert code == 0, err
    assert lines_of(name, out) == lines_of(name, run_alone(name))


@by_night
def test_two_launchers_print_the_same(run_alone):
    """As on two machines: each starts one of the ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id 17 --rdzv-endpoint localhost:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(options), FOLDER / "drop_in.py"]
    both = [
        subprocess.Popen([*command, *shlex.split(TINY["drop_in"])], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(2)
    ]
    printed = "".join(one.communicate(timeout=600)[0] for one in both)
    assert [one.returncode for one in both] == [0, 0]
    assert lines_of("drop_in", printed) == lines_of("drop_in", run_alone("drop_in"))


@by_night
@pytest.mark.parametrize(("name", "ranks"), [("mesh", 4), ("pure_stages", 4)])
def test_more_ranks_print_the_same(name, ranks, run_alone, tmp_path):
    code, out, err = run_under_torchrun(FOLDER / f"{name}.py", *options_of(name, tmp_path), ranks=ranks)
    assert code == 0, err
    assert sorted(lines_of(name, out)) == sorted(lines_of(name, run_alone(name)))


@by_night
def test_an_invented_schedule_runs_on_three_ranks():
    code, out, err = run_under_torchrun(FOLDER / "custom_schedule.py", ranks=3)
    assert code == 0, err
    assert re.search(r"^[1-9]\d* tensors equal those of one device, [1-9]\d* those of the module", out, re.MULTILINE)


def test_every_example_but_the_demo_and_the_experiment_fits_on_a_page():
    long = {path.name for path in FOLDER.glob("*.py") if len(path.read_text().splitlines()) >= 100}
    assert long == {"train_gpt.py", "late_weights.py"}
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *TINY,
        "plan_and_look",
        "train_gpt",
        "resume",
        "late_weights",
    }


def test_late_weights_are_those_of_a_loop_with_the_same_delays(capsys):
    with load_example("late_weights") as late_weights:
        chosen = [run for run in late_weights.RUNS if run.schedule.ranks < 8]
        curves = late_weights.main(6, 1, tuple(chosen))
    out = capsys.readouterr().out
    assert "PipeDream, P = 2 has the losses of a loop with the same delays: True" in out
    assert len({*map(tuple, curves.values())}) == len(chosen)
    assert all(len(losses) == 6 for losses in curves.values())


def test_a_plan_is_run_and_looked_at(tmp_path, monkeypatch, capsys):
    """The plan that was saved is the one that is printed, and the page has a measured and a predicted timeline."""
    monkeypatch.setattr(sys, "argv", ["plan_and_look", *shlex.split(f"--seconds 0.5 --steps 2 --path {tmp_path}")])
    with load_example("plan_and_look") as example:
        example.main()
    require_looked_at(tmp_path, capsys.readouterr().out)


@by_night
def test_two_ranks_plan_run_and_look(tmp_path):
    options = shlex.split(f"--seconds 0.5 --steps 2 --path {tmp_path}")
    code, out, err = run_under_torchrun(FOLDER / "plan_and_look.py", *options)
    assert code == 0, err
    require_looked_at(tmp_path, out)


def require_looked_at(folder, printed):
    plan = fpipe.Plan.read(folder / "plan.json")
    assert printed.startswith(str(plan))
    assert re.search(r"^simulated with measured costs\nrank 0 \|", printed, re.MULTILINE)
    assert re.search(r"^step: \d+\.\d ms measured, \d+\.\d ms predicted", printed, re.MULTILINE)
    assert re.search(r"^[1-9]\d* tensors equal those of one device, bit for bit", printed, re.MULTILINE)
    page = (folder / "step.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.index('"measured"') < page.index('"predicted"')
