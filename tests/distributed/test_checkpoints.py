# SPDX-License-Identifier: Apache-2.0
"""Four real processes save and resume, in one pipeline, in two and in four; and one process reads what they saved."""

from pathlib import Path

import pytest

import fpipe
from tests.common.processes import finish_workers, once
from tests.common.resuming import Trainer, require_same_run, undisturbed
from tests.distributed import checkpoint_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four processes have saved what the worker says."""

    def start(folder):
        finish_workers(checkpoint_worker, 4, folder)
        return str(folder)

    return Path(once(tmp_path_factory, "checkpoints", start))


def test_four_processes_save_resume_and_refuse_together(folder):
    assert fpipe.is_checkpoint(folder / "tied")


@pytest.mark.parametrize("path", ["tied-half/save-1", "dropping-half/save-1", "mirrored/0/save-1"])
def test_every_name_is_in_exactly_one_file(folder, path):
    """Also the names of tied parameters, and of those of which two ranks have replicas."""
    found = fpipe.safetensors(folder / path)
    assert all(len(files) == 1 for files in found.files.values())
    assert len({file for files in found.files.values() for file in files}) == (2 if "mirrored" in path else 4)


@pytest.mark.parametrize("subject", checkpoint_worker.SUBJECTS)
@pytest.mark.parametrize("layout", ["1f1b on eight", "one"])
def test_this_process_resumes_what_four_saved(folder, subject, layout):
    trainer = Trainer(subject, layout)
    run, step = trainer.resume(folder / f"{subject}-half")
    assert step == checkpoint_worker.STEPS // 2
    assert fpipe.load(trainer.pipe, folder / f"{subject}-half").data == {"epoch": (1, "a")}
    run = trainer.train(run, range(step, checkpoint_worker.STEPS))
    require_same_run(run, undisturbed(subject, "adamw", checkpoint_worker.STEPS))
