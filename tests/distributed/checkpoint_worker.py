# SPDX-License-Identifier: Apache-2.0
"""One of four processes that save under 1F1B, resume in pairs under ZB-V and alone, and refuse together.

One job does all of it: the four form one pipeline, then two, then four. It prints `passed` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import fpipe
from schedules import one_f_one_b, zb_h1, zb_v
from tests.common.resuming import Trainer, require_same_run, undisturbed
from tests.common.sizes import NIGHTLY
from tests.common.training import MICROBATCHES, MODELS, train_alone
from tests.common.training_runs import require_same_history, train_in_parts

RANKS, SUBJECTS = 4, ("tied", "dropping")
STEPS = 20 if NIGHTLY else 4


def split(size: int) -> Any:
    """Return the group of this process, of all groups of `size` neighbours."""
    groups = [dist.new_group([*range(first, first + size)]) for first in range(0, RANKS, size)]
    return groups[dist.get_rank() // size]


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


def interrupted_loops_equal_plain_ones(folder: Path, pair: Any) -> None:
    """Clipping, groups and a learning rate for each step; from four ranks to two and back."""
    four, two = (one_f_one_b(4, MICROBATCHES), None), (zb_v(2, MICROBATCHES), pair)
    for name in MODELS:
        parts = [four, two, (zb_h1(4, MICROBATCHES), None)]
        require_same_history(train_in_parts(name, parts, folder / name, dist.get_rank() < 2), train_alone(name))


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


def raises(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Raise unless `call` raises this error with these words."""
    try:
        call()
    except error as found:
        said = str(found)
    else:
        said = "nothing raised"
    assert words in said, said


def refuse_together(path: Path) -> None:
    """Whatever one rank can't do, no rank does, and the checkpoint of before is intact."""
    rank, four = dist.get_rank(), Trainer("tied", "1f1b on four")
    first = four.start()
    four.save(path, first, 0)

    def expect(words: str, call: Callable[[], object], on: int, error: type[Exception]) -> None:
        """The call raises this error on one rank, and on the others one that says so."""
        raises(error if rank == on else fpipe.TransportError, words, call)
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
    with patch("fpipe.checkpoints.save.commit", side_effect=OSError("no right to")):  # which rank 0 alone calls
        expect("no right to", lambda: four.save(path, later, 1), 0, OSError)
    other = (lambda: fpipe.load(four.pipe, path)) if rank == 3 else (lambda: four.save(path, later, 1))
    expect("call: got on ranks 0-2: begin_save", other, 0, every)


def refuse_what_does_not_fit(path: Path, pair: Any) -> None:
    """Every rank comes to the same verdict, whichever part it holds."""
    four, another = Trainer("tied", "1f1b on four"), Trainer("dropping", "zb_v on two", group=pair)
    raises(fpipe.InputError, "got no checkpoint.json", lambda: four.resume(path / "nowhere"))
    raises(fpipe.InputError, "missing ['0.0.weight'", lambda: another.resume(path))
    dist.barrier()
    shard = path / "save-1" / "model-00003-of-00004.safetensors"
    if dist.get_rank() == 0:
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()
    raises(fpipe.InputError, f"{shard.name}: got", lambda: four.resume(path))


def main(rank: int, store: str, where: str) -> None:
    """Run all of it."""
    torch.set_num_threads(1)
    folder = Path(where)
    method = f"file://{store}"
    dist.init_process_group("gloo", timeout=timedelta(minutes=10), init_method=method, rank=rank, world_size=RANKS)
    pair, alone = split(2), split(1)
    for subject in SUBJECTS:
        save_on_four(subject, folder / subject, folder / f"{subject}-half")
        resume_on_two_and_one(subject, folder / subject, pair, alone)
    save_while_training(folder / "background")
    refuse_together(folder / "refused")
    refuse_what_does_not_fit(folder / "refused", pair)
    replicas_get_their_copies(folder / "mirrored", pair)
    if NIGHTLY:
        interrupted_loops_equal_plain_ones(folder, pair)
    dist.destroy_process_group()
    print("passed")
