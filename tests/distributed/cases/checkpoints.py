# SPDX-License-Identifier: Apache-2.0
"""Four processes save under 1F1B, resume in pairs under ZB-V and alone, and refuse together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import fpipe
from schedules import one_f_one_b, zb_h1, zb_v
from tests.common.resuming import Trainer, pipeline, require_same_run, step_of, undisturbed
from tests.common.training import MICROBATCHES, MODELS, require_same_history, train_alone, train_in_parts
from tests.distributed.cases.checks import case, raises
from tests.distributed.cases.training import neighbours

SUBJECTS = ("tied", "dropping")
STEPS = 20


def save_on_four(subject: str, *paths: Path) -> None:
    """Train half of the run on all, and save it."""
    four = Trainer(subject, "1f1b on four")
    run = four.train(four.start(), range(STEPS // 2))
    for path in paths:
        four.save(path, run, STEPS // 2, data={"epoch": (1, "a")})


def resume_on_two_and_one(subject: str, path: Path, pair: Any, alone: Any) -> None:
    """Two replicas go on where the four have stopped; one of them saves; every process alone reads that."""
    two, one = Trainer(subject, "zb_v on two", group=pair), Trainer(subject, "one", group=alone)
    run, step = two.resume(path)
    dist.barrier()  # one pair's save removes what the other may still be reading
    run, want = two.train(run, range(step, STEPS)), undisturbed(subject, "adamw", STEPS, alone)
    require_same_run(run, want)
    if dist.get_rank() < 2:
        two.save(path, run, STEPS)
    dist.barrier()
    again, step = one.resume(path)
    assert (step, len(again.params)) == (STEPS, len(want.params))
    require_same_run(again, want)


def replicas_get_their_copies(path: Path, pair: Any) -> None:
    """Both ranks of a bidirectional schedule hold all stages; one writes each name, both read it."""
    trainer, path = Trainer("tied", "dualpipe on two", group=pair), path / str(dist.get_rank() // 2)
    run = trainer.train(trainer.start(), range(2))
    trainer.save(path, run, 2)
    again, _ = trainer.resume(path)
    assert again.params.keys() == run.params.keys()
    assert len(trainer.pipe.owned) < len(run.params) or dist.get_rank() % 2 == 0
    require_same_run(trainer.train(again, range(2, 4)), trainer.train(run, range(2, 4)))


def save_while_training(path: Path) -> None:
    """What is saved is the run as it was when the save began."""
    four = Trainer("tied", "1f1b on four")
    run = four.train(four.start(), range(1))
    finish = fpipe.begin_save(four.pipe, path, **run._asdict(), step=1)
    later = four.train(run, range(1, 3))
    dist.barrier()
    assert not fpipe.is_checkpoint(path)
    dist.barrier()
    finish()
    again, step = four.resume(path)
    require_same_run(four.train(again, range(step, 3)), later)


def refuse_together(path: Path) -> None:
    """Whatever one rank can't do, no rank does, and the checkpoint of before is intact."""
    rank, four = dist.get_rank(), Trainer("tied", "1f1b on four")
    first = four.start()
    four.save(path, first, 0)

    def expect(words: str, call: Callable[[], object], on: int, error: type[Exception]) -> None:
        """The call raises this error on one rank, and on the others one that says so."""
        with raises(error if rank == on else fpipe.TransportError, words):
            call()
        found, step = four.resume(path)
        assert step == 0
        require_same_run(found, first)

    later = four.train(first, [0])
    wrong = later._replace(params={**later.params, next(iter(first.params)): torch.ones(1)})
    numbered, every, marked = later._replace(state={"state": {}}), fpipe.TransportError, torch.ones(1) * (rank == 1)
    expect("got float32[1]", lambda: four.save(path, wrong if rank == 2 else later, 1), 2, fpipe.InputError)
    expect("numbers them", lambda: four.save(path, numbered if rank == 1 else later, 1), 1, fpipe.InputError)
    expect("step: got on ranks 0-2: 1; on rank 3: 2", lambda: four.save(path, later, 1 + rank // 3), 0, every)
    expect("data: got", lambda: four.save(path, later, 1, data=[marked]), 0, every)
    with patch("fpipe.checkpoints.save.write_safetensors", side_effect=OSError("no space left") if rank == 1 else None):
        expect("no space left", lambda: four.save(path, later, 1), 1, OSError)
    with patch("fpipe.checkpoints.save.Claim.commit", side_effect=OSError("no right to")):  # which rank 0 alone calls
        expect("no right to", lambda: four.save(path, later, 1), 0, OSError)
    other = (lambda: fpipe.load(four.pipe, path)) if rank == 3 else (lambda: four.save(path, later, 1))
    expect("call: got on ranks 0-2: begin_save", other, 0, every)


def refuse_what_does_not_fit(path: Path, pair: Any) -> None:
    """Every rank comes to the same verdict, whichever part it holds."""
    four, another = Trainer("tied", "1f1b on four"), Trainer("dropping", "zb_v on two", group=pair)
    with raises(fpipe.InputError, "got no checkpoint.json"):
        four.resume(path / "nowhere")
    with raises(fpipe.InputError, "missing ['0.0.weight'"):
        another.resume(path)
    dist.barrier()
    shard = path / "save-1" / "model-00003-of-00004.safetensors"
    if dist.get_rank() == 0:
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()
    with raises(fpipe.InputError, f"{shard.name}: got"):
        four.resume(path)


@case(sizes=[4], day=[])
def runs_are_saved_and_resumed_on_other_ranks(rank, size):
    """The four form one pipeline, then two, then four."""
    folder, pair, alone = Path(os.environ["REPORT"]), neighbours(2), neighbours(1)
    for subject in SUBJECTS:
        save_on_four(subject, folder / subject, folder / f"{subject}-half")
        resume_on_two_and_one(subject, folder / subject, pair, alone)
    save_while_training(folder / "background")
    refuse_together(folder / "refused")
    refuse_what_does_not_fit(folder / "refused", pair)
    replicas_get_their_copies(folder / "mirrored", pair)
    pipeline.cache_clear()  # their channels end with the case
    step_of.cache_clear()


@case(sizes=[4], day=[])
def interrupted_loops_are_plain_loops(rank, size):
    """Clipping, groups and a learning rate for each step; from four ranks to two and back."""
    four, two = (one_f_one_b(4, MICROBATCHES), None), (zb_v(2, MICROBATCHES), neighbours(2))
    for name in MODELS:
        parts, path = [four, two, (zb_h1(4, MICROBATCHES), None)], Path(os.environ["REPORT"], f"interrupted-{name}")
        require_same_history(train_in_parts(name, parts, path, rank < 2), train_alone(name))


@case(sizes=[2, 4])
def a_signal_on_one_rank_stops_all_after_the_same_step(rank, size):
    """They save, and go on with the same bits; handlers of before are back, and get what nobody was told of."""
    seen, path = [], Path(os.environ["REPORT"]) / f"signal-{size}"
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    trainer, steps = Trainer("tied", "1f1b on four" if size == 4 else "zb_v on two"), 5
    run, whole = trainer.start(), trainer.train(trainer.start(), range(steps))
    with fpipe.catch_signals(trainer.pipe, [signal.SIGTERM, signal.SIGUSR1]) as is_caught:
        for i in range(steps):
            timer = threading.Timer(0.001 * i, os.kill, (os.getpid(), signal.SIGTERM))
            if (i, rank) == (2, size - 1):
                timer.start()
                timer.join()
            run = trainer.train(run, range(i, i + 1))
            if is_caught():
                trainer.save(path, run, i + 1)
                break
        signal.raise_signal(signal.SIGUSR1)
    assert i == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not seen, "all were told of a signal already"
    run, step = trainer.resume(path)
    require_same_run(trainer.train(run, range(step, steps)), whole)
    with fpipe.catch_signals(trainer.pipe, [signal.SIGUSR1]) as is_caught:
        assert not is_caught()
        signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1], "nobody was told"
    wrong = [signal.SIGKILL] if rank else [signal.SIGTERM]
    with (
        raises(fpipe.InputError if rank else fpipe.TransportError, "9", "can catch"),
        fpipe.catch_signals(trainer.pipe, wrong),
    ):
        pass
    signal.signal(signal.SIGUSR1, before)
