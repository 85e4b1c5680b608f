# SPDX-License-Identifier: Apache-2.0
"""Real processes over Gloo compute what one process computes, bit for bit, and fail clearly.

One job per number of ranks runs all cases of `tests/distributed/cases`; here every case is a test.
"""

import inspect
import json
import shlex
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.processes import TORCHRUN, finish, finish_ranks, once
from tests.common.resuming import Trainer, require_same_run, undisturbed
from tests.common.running import build, run
from tests.common.schedules import SCHEDULES
from tests.common.sizes import by_night
from tests.common.zoo import ZOO
from tests.distributed import worker
from tests.distributed.cases import agreements, checkpoints
from tests.distributed.cases.checks import names

SIZES = [size for size in (2, 4, 8) if names(size)]


class Job:
    """The reports of all ranks."""

    def __init__(self, size, folder, codes, printed):
        self.size, self.folder, self.codes, self.printed = size, Path(folder), codes, printed
        paths = [self.folder / f"{rank}.json" for rank in range(size)]
        self.reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]

    def require(self, name):
        for rank, report in enumerate(self.reports):
            found = report.get(name, f"did not run; the job ended with\n{self.ending()}")
            assert found.startswith("passed"), f"rank {rank}: {found}"

    def ending(self):
        reports = [(name, rank, text) for rank, report in enumerate(self.reports) for name, text in report.items()]
        failed = [f"{name}, rank {rank}: {text}" for name, rank, text in reports if not text.startswith("passed")]
        return "\n".join([*failed, *(text[-3000:] for text in self.printed)])


def start(size, folder):
    """Start two ranks as users do, and more of them by hand, which takes less time."""
    if size > 2:
        return size, str(folder), *finish_ranks(worker.__name__, size, folder, size, folder)
    code = finish((*shlex.split(TORCHRUN.format(size, 0)), worker.__file__, folder), folder / "log")
    return size, str(folder), [code], [(folder / "log").read_text()]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job of each size, which runs all cases of this size when it is asked for."""
    return cache(lambda size: Job(*once(tmp_path_factory, f"job-{size}", partial(start, size))))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in names(size)])
def test_all_ranks_pass(job, size, name):
    job(size).require(name)


@pytest.mark.parametrize("size", SIZES)
def test_jobs_exit_with_code_zero(job, size):
    assert not any(job(size).codes), "\n".join(job(size).printed)


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_is_the_same_on_one_process_and_several(job, size):
    """Ranks, cuts, schedule and transport: none of them changes a bit."""
    alone, found = run(*build(ZOO["dropping"], SCHEDULES["gpipe"](ranks=1, microbatches=4), 8), seed=5), {}
    for rank in range(size):
        grads, loss = torch.load(job(size).folder / f"dropping-{size}-{rank}.pt")
        assert same_bits(loss, alone.loss)
        found |= grads
    assert found.keys() == alone.grads.keys()
    assert all(same_bits(found[name], alone.grads[name]) for name in found)


@by_night
@pytest.mark.parametrize("path", [*[f"{one}-half/save-1" for one in checkpoints.SUBJECTS], "mirrored/0/save-1"])
def test_every_name_is_in_exactly_one_file_of_a_checkpoint(job, path):
    """Also the names of tied parameters, and of those of which two ranks have replicas."""
    found = fpipe.safetensors(job(4).folder / path)
    assert all(len(files) == 1 for files in found.files.values())
    assert len({file for files in found.files.values() for file in files}) == (2 if "mirrored" in path else 4)


@by_night
@pytest.mark.parametrize("subject", checkpoints.SUBJECTS)
@pytest.mark.parametrize("layout", ["1f1b on eight", "one"])
def test_this_process_resumes_what_four_saved(job, subject, layout):
    trainer, path = Trainer(subject, layout), job(4).folder / f"{subject}-half"
    run, step = trainer.resume(path)
    assert step == checkpoints.STEPS // 2
    assert fpipe.load(trainer.pipe, path).data == {"epoch": (1, "a")}
    run = trainer.train(run, range(step, checkpoints.STEPS))
    require_same_run(run, undisturbed(subject, "adamw", checkpoints.STEPS))


@by_night
def test_a_killed_peer_makes_the_others_fail(tmp_path):
    """One rank ends in the middle of a step: none of the others hangs, all fail."""
    codes, printed = finish_ranks(worker.__name__, 4, tmp_path, 4, tmp_path, "dies_in_the_middle")
    assert codes[2] == 7
    assert [codes[rank] for rank in (0, 1, 3)] == [1, 1, 1], "\n".join(printed)
    assert all("failed at once" in printed[rank] for rank in (0, 1, 3)), "\n".join(printed)


@by_night
def test_a_killed_peer_makes_a_rank_fail_that_waits_for_its_device(tmp_path):
    codes, printed = finish_ranks(worker.__name__, 2, tmp_path, 2, tmp_path, "dies_while_another_waits_for_its_device")
    assert codes == [1, 7], "\n".join(printed)
    assert "failed as it should" in printed[0], printed[0]


def test_every_public_function_is_in_the_matrix_or_needs_no_other_rank(monkeypatch):
    monkeypatch.setattr(agreements, "gather", lambda value: [value])
    monkeypatch.setattr(agreements.torch.distributed, "get_rank", lambda: 0)
    rows = agreements.list_rows(agreements.Run(1))
    functions = {name for name in fpipe.__all__ if inspect.isfunction(getattr(fpipe, name))}
    assert functions <= {*rows} | agreements.LOCAL
    assert not {*rows} & agreements.LOCAL
