# SPDX-License-Identifier: Apache-2.0
"""The first forward of a step, which runs while ranks still agree on it: nothing of it lasts unless they do.

Here the other ranks do not even make the call before rank 0 has computed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import mse_loss

import fpipe
from fpipe.network.channels import DistributedChannel
from fpipe.network.lookout import Lookout
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.distributed.cases.checks import case, gather, raises

WIDTH, PATIENCE = 4, 20.0
WATCHED = {
    "sent": (DistributedChannel, "send"),
    "received": (DistributedChannel, "receive"),
    "waited": (Lookout, "wait"),
}


class Run:
    """A pipeline of which rank 0 comes first; `events` are what this rank has done in its last step, in order."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(0)
        parts = [part for _ in range(size) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())]
        self.model, (self.x, self.y) = nn.Sequential(*parts), torch.randn(2, 16, WIDTH)
        self.rank, self.events, self.act = rank, list[str](), int
        self.pipe = fpipe.pipeline(
            self.model,
            example=(self.x[:8],),
            targets=self.y[:8],
            loss=mse_loss,
            schedule=one_f_one_b(ranks=size, microbatches=4),
            cuts=[str(3 * s) for s in range(1, size)],
            recording=fpipe.Recording(plans=3),
        )
        self.held, self.path = self.pipe.init(self.model), Path(tempfile.mkdtemp(), "ran")
        self.step = fpipe.value_and_grad(self.pipe, record=self.note_action)
        for rows in (8, 12, 16):  # from now on, these kinds of batches are known
            self.take(rows)

    def note_action(self, span: Any) -> None:
        self.events.append("ran")
        if self.events == ["ran"] and self.rank == 0:
            self.path.touch()
            self.act()

    def take(self, rows: int = 8, seed: int = 1, function: Callable[..., Any] | None = None) -> Any:
        return (function or self.step)(*self.held, (self.x[:rows],), self.y[:rows], seed=seed)

    def list_kinds(self) -> list[str]:
        """Return the kinds of batches that are known, in the order of their last use."""
        return [str(signature) for _, signature in self.pipe.memo.agreements]

    def copy_state(self) -> list[torch.Tensor]:
        """Return copies of what a step that is refused leaves as it was."""
        return [tensor.clone() for tensor in (torch.get_rng_state(), *self.held[0].values(), *self.held[1].values())]

    @contextmanager
    def first(self, act: Callable[[], object] = int) -> Iterator[None]:
        """Return the context of a step in which the others wait until rank 0 has run a forward, and then acted."""
        self.path, self.act, self.events = Path(gather(tempfile.mkdtemp())[0], "ran"), act, []
        with ExitStack() as stack:
            for event, (owner, name) in WATCHED.items():
                stack.enter_context(patch.object(owner, name, self.watch(event, getattr(owner, name))))
            end = time.monotonic() + PATIENCE
            while self.rank and not self.path.exists():
                assert time.monotonic() < end, "rank 0 waits for the others before its first forward"
                time.sleep(0.001)
            yield

    def watch(self, event: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            found = act(*given)
            self.events.append(event)
            return found

        return watched


def fail() -> None:
    raise ValueError("on purpose")


def interrupt() -> None:
    raise KeyboardInterrupt


@case(day=[2, 4])
def a_first_forward_runs_while_ranks_agree(rank, size):
    """All bits are those of any other step, and nothing is sent before the answer is in."""
    run = Run(rank, size)
    want = run.take()
    with run.first():
        got = run.take()
    assert all(map(same_bits, flat(got), flat(want)))
    begin = ["ran", "waited", "sent"] if rank == 0 else ["waited", "received"]
    events = [event for k, event in enumerate(run.events) if event != "waited" or run.events[k - 1] != event or not k]
    assert events[: len(begin)] == begin, run.events


def flat(step: Any) -> list[torch.Tensor]:
    out, grads = step
    return [out.loss, *grads.values(), *out.buffers.values()]


@case(day=[2, 4])
def a_first_forward_leaves_nothing_if_ranks_differ(rank, size):
    """Whether they pass something else, refuse it, or make another call; and whatever the forward has raised."""
    run, is_last = Run(rank, size), rank == size - 1
    want, evaluate = run.take(), fpipe.evaluate(run.pipe)
    others: dict[str, dict[str, Any]] = {
        "- seed: got on": {"seed": 2},
        "- batch: got on": {"rows": 16},
        "": {"function": lambda params, *rest, **options: run.step({}, *rest, **options)},
        "- call: got on": {"function": evaluate},
    }
    for said, other in others.items():
        for act in (int, fail):
            before, kinds = run.copy_state(), run.list_kinds()
            words = [said, "got ranks that differ"] if said else ["params"] if is_last else ["got errors on some ranks"]
            with run.first(act), raises(fpipe.PipelineError, *words):
                run.take(**{"rows": 12, **(other if is_last else {})})
            assert run.events.count("ran") == (rank == 0)
            assert {*run.events} <= {"ran", "waited"}, "something was sent"
            assert all(map(same_bits, run.copy_state(), before))
            assert run.list_kinds() == kinds, "a kind of batch counts as used"
            assert all(map(same_bits, flat(run.take()), flat(want)))
    assert gather(run.list_kinds()) == [run.list_kinds()] * size


@case(day=[2, 4])
def a_first_forward_that_fails_alone_is_named(rank, size):
    """Also by ranks that make the call later; they name its place."""
    for act, error, said in ((fail, ValueError, "ValueError: on purpose"), (interrupt, KeyboardInterrupt, "Keyboard")):
        run = Run(rank, size)
        with run.first(act), raises(*((fpipe.RankError, said) if rank else (error,))) as raised:
            run.take()
        assert not rank or "first failure: rank 0, a step (call 6), position 0, 0F0" in raised.text, raised.text
        with raises(fpipe.TransportError, "failed midway"):
            run.take()
