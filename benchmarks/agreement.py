# SPDX-License-Identifier: Apache-2.0
"""The cost of the ranks agreeing before every step, and of the header on every message.

    python -m benchmarks.agreement

A GPT whose step takes about 50 ms on each rank, under 1F1B over Gloo. Steps with and without the agreement alternate;
the difference is what a user pays. The other ranks wait for the first one's forward, so what that rank spends on the
agreement in a step is on the critical path: to post it, and to wait, after the forward, for an answer that is not in
yet. If ranks share cores, it waits there until the others have begun the step, which it would have to wait for anyway;
so only its CPU time counts then. The agreement is also measured alone, over and over: its wall time when all ranks
arrive together, and its CPU time. Beside what the first rank spends stands what Gloo takes for two messages in its
place, to the last rank and back, which is the least. On a machine with other work, the fastest tenth shows what the
agreement takes, and the median includes what it waits. If ranks share cores, so do a step and its agreement, and CPU
time is what counts. A message is packed and unpacked with its header, and as bare bytes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

import fpipe
from benchmarks.common import ranks
from benchmarks.common.models import cross_entropy, gpt, starts
from benchmarks.common.rounds import rounds
from benchmarks.common.rows import Reach, most, row
from fpipe.network.channels import Envelope
from fpipe.pipelines.handshake import CommonArguments, agree_on_plan, call_fields
from fpipe.record.variant import TRAINING
from fpipe.tensors.spec import Spec
from schedules import one_f_one_b, parse

BLOCKS, WIDTH, HEADS, WORDS, LENGTH, ROWS, MICROBATCHES = 8, 64, 4, 256, 32, 16, 4
STEPS, CALLS, STEP = rounds(41), rounds(400), 0.05
MESSAGE: Final = parse("0SEND_F3>1")
FIRST: Final = "what the first rank spends on it in a step; torch: two messages of Gloo in its place"
THREAD: Final = "of it, its processor's time"


def measured() -> dict[str, float]:
    """Return this rank's measurements."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH))
    how = one_f_one_b(ranks=dist.get_world_size(), microbatches=MICROBATCHES)
    cuts = [str(layer) for layer in starts(BLOCKS, how.stages)]
    pipe = fpipe.pipeline(
        model,
        example=(tokens,),
        targets=targets,
        loss=cross_entropy,
        schedule=how,
        cuts=cuts,
        gradients=fpipe.Gradients(backward="graph"),
    )
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, (tokens,), targets)
    times = _in_turns(pipe.ranks, lambda: step(*state, (tokens,), targets))
    times |= _first_spends(pipe.ranks, lambda: step(*state, (tokens,), targets))
    times |= _least(pipe.ranks, lambda: step(*state, (tokens,), targets))
    with pipe.ranks.enter_call("a benchmark"):
        assert agree_on_plan(pipe, TRAINING) is pipe.training
        alone = _repeated(lambda: _agreed(pipe))
    return {**times, **alone, **_message()}


def _agreed(pipe: Any) -> None:
    """Run the agreement of a step."""
    fields = pipe.memo.agreements[pipe.planner.kind(TRAINING)].fields
    pipe.ranks.agree(lambda: [*fields, *call_fields(CommonArguments(), pipe.device)])


def _in_turns(reached: Any, step: Callable[[], object]) -> dict[str, float]:
    """Return the median times of steps with and without the agreement, and of the difference within a pair."""
    found: dict[str, list[float]] = {"agreeing": [], "not agreeing": []}
    for turn in range(2 * STEPS):
        name = ("agreeing", "not agreeing")[turn % 2]
        if name == "not agreeing":
            reached.post_agreement = lambda fields, then: then()
        dist.barrier()
        start = time.perf_counter()
        step()
        found[name].append(ranks.makespan(start, time.perf_counter()))
        vars(reached).pop("post_agreement", None)
    pairs = zip(found["agreeing"], found["not agreeing"], strict=True)
    more = statistics.median(one - other for one, other in pairs)
    return {"more": more, **{name: statistics.median(times) for name, times in found.items()}}


def _first_spends(reached: Any, step: Callable[[], object]) -> dict[str, float]:
    """Return the median seconds that the first rank spends on the agreement of a step, by two clocks; 0 on the others.

    Its thread computes for the second number of them, and waits for the rest.
    """
    spent: list[list[float]] = []

    def timed(act: Callable[..., object]) -> Callable[..., object]:
        def acting(*given: Any) -> object:
            start, busy = time.perf_counter(), time.thread_time()
            found = act(*given)
            busy, end = time.thread_time() - busy, time.perf_counter()
            spent[-1] = [spent[-1][0] + end - start, spent[-1][1] + busy]
            return found

        return acting

    reached.post_agreement, reached.calls.settle = timed(reached.post_agreement), timed(reached.calls.settle)
    for _ in range(STEPS):
        dist.barrier()
        spent.append([0.0, 0.0])
        step()
    del reached.post_agreement, reached.calls.settle
    found = [0.0 if dist.get_rank() else statistics.median(one) for one in zip(*spent, strict=True)]
    return dict(zip(("first", "first's thread"), found, strict=True))


def _least(reached: Any, step: Callable[[], object]) -> dict[str, float]:
    """Return what the first rank would spend if it only sent and received: the seconds of Gloo's own calls."""
    control, row, answer, posted = reached.control, torch.zeros(3, dtype=torch.int64), torch.zeros(1), list[Any]()
    home, others = control.processes[control.home], [p for k, p in enumerate(control.processes) if k != control.home]

    def post(fields: object, then: Callable[[], object]) -> None:
        if control.rank == control.home:
            receives: list[Any] = [dist.irecv(row, other, control.group) for other in others]
            for one in receives:
                one.wait()
            posted.extend(dist.isend(answer, other, control.group) for other in others)
        else:
            posted.extend((dist.irecv(answer, home, control.group), dist.isend(row, home, control.group)))
        then()

    def settle() -> None:
        while posted:
            posted.pop().wait()

    reached.post_agreement, reached.calls.settle = post, settle
    found = _first_spends(reached, step)
    return {f"least {name}": value for name, value in found.items()}


def _repeated(act: Callable[[], object]) -> dict[str, float]:
    for _ in range(20):
        act()
    times = []
    dist.barrier()
    busy = time.process_time()
    for _ in range(CALLS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    busy = time.process_time() - busy
    return {"alone": statistics.median(times), "quick": statistics.quantiles(times, n=10)[0], "processor": busy / CALLS}


def _message() -> dict[str, float]:
    """Return CPU seconds for both ends of a message of 32 KiB, with and without a header."""
    tensor, cpu = torch.ones(8, LENGTH, 32), torch.device("cpu")
    spec = Spec.of(tensor)
    envelope = Envelope(MESSAGE, (spec,), cpu)

    def headed() -> None:
        (head,) = envelope.pack((tensor,))
        envelope.buffers()
        envelope.require(head[:64])
        envelope.unpack((head,))

    def bare() -> None:
        data = spec.pack(tensor)
        spec.buffer()
        spec.unpack(data)

    return {"headed": _repeated(headed)["processor"], "bare": _repeated(bare)["processor"]}


def rank() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks.report(measured())
    dist.destroy_process_group()


def main() -> None:
    for count in (2, 4):
        is_apart = count <= (os.cpu_count() or 1)
        apart, shared = (most(1), None) if is_apart else (None, most(1))
        found = ranks.maxima(ranks.start("benchmarks.agreement", count, *sys.argv[1:]))
        floor = {FIRST: found["least first"] * 1e6, THREAD: found["least first's thread"] * 1e6}
        lines: list[tuple[str, str, float, Reach | None]] = [
            ("a step with agreement", "ms", found["agreeing"] * 1e3, None),
            ("the same without", "ms", found["not agreeing"] * 1e3, None),
            ("what agreement adds to it", "us", found["more"] * 1e6, None),
            (FIRST, "us", found["first"] * 1e6, most(100) if is_apart else None),
            (THREAD, "us", found["first's thread"] * 1e6, None if is_apart else most(100)),
            ("agreement alone, all ranks at once", "us", found["alone"] * 1e6, most(100)),
            ("the same, the quickest tenth", "us", found["quick"] * 1e6, None),
            ("the same, the processor's time", "us", found["processor"] * 1e6, None),
            ("median over a step of 50 ms", "%", 100 * found["alone"] / STEP, apart),
            ("the processor's time over 50 ms of it", "%", 100 * found["processor"] / STEP, shared),
            ("quickest tenth over a step of 50 ms", "%", 100 * found["quick"] / STEP, None),
            ("head of a message of 32 KiB, both ends", "us", (found["headed"] - found["bare"]) * 1e6, None),
        ]
        for what, unit, value, reach in lines:
            print(row(f"{what}, {count} ranks", unit, value, floor.get(what), reach), flush=True)


if __name__ == "__main__":
    rank() if ranks.inside() else main()
