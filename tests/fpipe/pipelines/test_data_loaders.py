# SPDX-License-Identifier: Apache-2.0
"""A pipeline trains in one thread while a data loader starts its workers in another."""

from threading import Thread

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fpipe
from schedules import one_f_one_b
from tests.common.processes import finish
from tests.common.sizes import NIGHTLY, by_night

ROWS = [torch.full((4,), float(k)) for k in range(8)]
EPOCHS = 3
BY_DAY = ["no workers", "fork"]
STARTS = [*BY_DAY, "persistent fork", "spawn", "persistent spawn", "forkserver", "persistent forkserver"]
LATE = """
import os, signal, sys, threading
import torch
import fpipe
from fpipe.tensors.torch_private import import_tracer
from schedules import gpipe

late = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed._functional_collectives", "sympy"}
assert not late & {*sys.modules}, late & {*sys.modules}

thread = threading.Thread(target=import_tracer)
thread.start()
while "torch._dynamo" not in sys.modules:
    pass
child = os.fork()
if not child:
    signal.alarm(60)
    import_tracer()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "a fork did not wait for the import"
thread.join()

before = {*sys.modules}
model, x = torch.nn.Linear(4, 1), torch.ones(4, 4)
pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(1, 2))
fpipe.value_and_grad(pipe)(*pipe.init(model), (x,))
assert before == {*sys.modules}, sorted({*sys.modules} - before)
"""


def read(start):
    """Yield the batches of some epochs, from workers that start as it says; raise if one hangs."""
    *keep, method = start.split()
    options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": bool(keep), "timeout": 120}
    loader = DataLoader(ROWS, batch_size=4, generator=torch.Generator(), **(options if keep != ["no"] else {}))
    for _ in range(EPOCHS):
        yield from loader


def train(model, batches):
    """Build a pipeline, take a step for each batch, and return the losses."""
    how = one_f_one_b(ranks=2, microbatches=2)
    with fpipe.pipeline(model, example=(torch.ones(4, 4),), loss=torch.mean, schedule=how) as pipe:
        state, step = pipe.init(model), fpipe.value_and_grad(pipe)
        return [step(*state, (batch,))[0].loss for batch in batches]


@by_night
@pytest.mark.filterwarnings("ignore:.*fork.. may lead to deadlocks:DeprecationWarning")  # Python 3.12 and later
@pytest.mark.parametrize("start", STARTS if NIGHTLY else BY_DAY)
def test_a_pipeline_trains_beside_data_loaders(start):
    """One loader feeds it, and one the other thread; both start workers in each epoch. Threads swap places once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batches = [*read("no workers")]
    losses = train(model, batches)
    for k in range(2):
        found = [list[torch.Tensor](), list[torch.Tensor]()]
        acts = [
            lambda found=found: found[0].extend(train(model, read(start))),
            lambda found=found: found[1].extend(read(start)),
        ]
        there, here = acts if k % 2 else acts[::-1]
        thread = Thread(target=there)
        thread.start()
        here()
        thread.join()
        assert found[0] == losses
        assert torch.equal(torch.stack(found[1]), torch.stack(batches))


def test_the_tracer_is_imported_late_at_once_and_before_forks(tmp_path):
    """A worker that is forked during an import, by another thread, could never import the same module."""
    script, log = tmp_path / "late.py", tmp_path / "log"
    script.write_text(LATE)
    assert finish((script,), log) == 0, log.read_text()
