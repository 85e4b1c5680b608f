# SPDX-License-Identifier: Apache-2.0
"""The first hour on a GPU: what has only been modeled so far, run and measured there.

    python -m benchmarks.gpu                # all parts; also: make gpu
    python -m benchmarks.gpu verify times   # some of them, even if they have run before
    DRY=1 python -m benchmarks.gpu          # all of it on the CPU, over Gloo, with smaller sizes

One GPU suffices: the ranks that share it say that they are on different hosts, so NCCL connects them by sockets. So
times are those of one device that does the work of all ranks, and say nothing of several; bits, failures, waits of the
host and memory are what they are.

Each part is a job with a limit of ten minutes. It leaves its findings in `build/gpu/`, or `build/gpu-dry/`, from where
the next call goes on with the parts that are left; `page.md` there shows all of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fpipe
import schedules
from benchmarks.common import ranks
from benchmarks.common.contests import CONTESTS, Task, incumbents, ours, sequence
from benchmarks.common.machine import machine
from benchmarks.common.models import cross_entropy, gpt
from benchmarks.common.rows import figure

DRY: Final = bool(os.environ.get("DRY"))
FOLDER: Final = Path(__file__).parents[1] / "build" / ("gpu-dry" if DRY else "gpu")
DEVICE: Final = torch.device("cpu") if DRY else torch.device("cuda", 0)
LIMIT: Final = float(os.environ.get("LIMIT") or 600)  # seconds of a part
TIMEOUT: Final = timedelta(seconds=20 if DRY else 60)
BLOCKS, WIDTH, HEADS, WORDS, LENGTH = (8, 16, 2, 32, 8) if DRY else (8, 1024, 16, 4096, 512)
ROWS, MICROBATCHES, STEPS = (8, 4, 3) if DRY else (32, 8, 10)
SHARED: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
}
"""Several ranks on one device: no path between them but sockets, and room on it for the kernels of all."""


class Finding(NamedTuple):
    """What was found of something; on rank 0 if nothing else is said."""

    what: str
    found: str


class Part(NamedTuple):
    """A job of so many `ranks`: each calls `run`, and those of the first are kept."""

    ranks: int
    run: Callable[[], Iterator[Finding]]


def task() -> Task:
    """Return the task of training a GPT, the same in every process."""
    torch.manual_seed(0)
    model = gpt(BLOCKS, WIDTH, HEADS, WORDS, LENGTH).to(DEVICE)
    tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH)).to(DEVICE)
    return sequence(model, BLOCKS, tokens, targets, MICROBATCHES)


def wait_for_device() -> None:
    """Wait until everything that was posted is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------ the bits


def dropping(work: Task) -> nn.Module:
    """Return the model with dropout after each layer but the last."""
    layers = [layer for one in list(work.model)[:-1] for layer in (one, nn.Dropout(0.1))]  # type: ignore[call-overload]
    return nn.Sequential(*layers, work.model[-1]).to(DEVICE)  # type: ignore[index]


def bits() -> Iterator[Finding]:
    """Compare pipelines with one device, with deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    size, work = dist.get_world_size(), task()
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    x, y = torch.randn(ROWS, WIDTH, device=DEVICE), torch.randint(0, 8, (ROWS,), device=DEVICE)
    low = torch.autocast(DEVICE.type, torch.bfloat16)
    given: dict[str, Any] = {"example": (work.tokens,), "targets": work.targets, "loss": cross_entropy}
    flat: dict[str, Any] = {"example": (x,), "targets": y, "loss": nn.functional.cross_entropy}
    two: dict[str, Any] = {"ranks": size, "microbatches": MICROBATCHES}
    cases: dict[str, tuple[nn.Module, dict[str, Any], schedules.Schedule, str, Any]] = {
        "MLP, 1F1B, one microbatch": (mlp.to(DEVICE), flat, schedules.one_f_one_b(size, 1), "graph", None),
        "MLP, DualPipe-V": (mlp, flat, schedules.dualpipe_v(**two), "graph", None),
        "GPT, 1F1B": (work.model, given, schedules.one_f_one_b(**two), "graph", None),
        "GPT, 1F1B, by autograd": (work.model, given, schedules.one_f_one_b(**two), "autograd", None),
        "GPT, ZB-H1": (work.model, given, schedules.zb_h1(**two), "graph", None),
        "GPT, GPipe, moved to the host": (work.model, given, schedules.offload(schedules.gpipe(**two)), "graph", None),
        "GPT, ZB-V, under autocast": (work.model, given, schedules.zb_v(**two), "graph", low),
        "GPT with dropout, interleaved": (dropping(work), given, schedules.interleaved_1f1b(**two), "graph", None),
        "GPT in bfloat16, 1F1B": (task().model.bfloat16(), given, schedules.one_f_one_b(**two), "graph", None),
    }
    for name, (model, batch, how, backward, cast) in cases.items():
        draws = any(isinstance(one, nn.Dropout) for one in model.modules())
        with cast or nullcontext():
            pipe = fpipe.pipeline(model, schedule=how, gradients=fpipe.Gradients(backward=backward), **batch)
            try:
                report = fpipe.verify(pipe, model, batch["example"], batch["targets"], seed=1 if draws else None)
                yield Finding(name, str(report).splitlines()[0])
            except fpipe.PipelineError as error:
                yield Finding(name, f"**differs**: {str(error).splitlines()[0]}")
        pipe.close()


def pure() -> Iterator[Finding]:
    """Run stages of pure functions, one of which draws, in one process."""

    def first(params: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.dropout(torch.tanh(inputs[0] @ params["w"]), 0.5)

    def last(params: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return (inputs[0] @ params["w"] - inputs[1]).square().mean()

    torch.manual_seed(0)
    params = [{"w": torch.randn(WIDTH, WIDTH, device=DEVICE)}, {"w": torch.randn(WIDTH, 1, device=DEVICE)}]
    x, y = torch.randn(ROWS, WIDTH, device=DEVICE), torch.randn(ROWS, 1, device=DEVICE)
    stages = fpipe.connect_stages([fpipe.stage(first), fpipe.stage(last)])
    losses = list[float]()
    for how in (schedules.gpipe(2, MICROBATCHES), schedules.zb_h1(2, MICROBATCHES)):
        program = schedules.lower(how, stages.graph)
        for seed in (1, 2):
            torch.manual_seed(len(losses))  # must not matter
            out, _ = fpipe.execute(program, stages, params, [(), ()], (x,), y, seed=seed)
            losses.append(float(out.loss))
    same = losses[0] == losses[2] and losses[1] == losses[3]
    yield Finding("dropout in a pure stage depends on the seed alone", "yes" if same else f"**no**: {losses}")
    yield Finding("another seed draws other numbers", "yes" if losses[0] != losses[1] else f"**no**: {losses}")


# ----------------------------------------------------------------------------------------------------- times and memory


def seconds(step: Callable[[], object]) -> tuple[float, float]:
    """Return how long the host takes to post a step, and how long the step takes; means over several."""
    for _ in range(2):
        step()
    wait_for_device()
    dist.barrier()
    start, posted = time.perf_counter(), 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        posted += time.perf_counter() - begin
    wait_for_device()
    return posted / STEPS, (time.perf_counter() - start) / STEPS


def plain(work: Task) -> Callable[[], None]:
    """Return a step of a plain loop over microbatches."""
    tokens, targets = work.tokens.chunk(work.microbatches), work.targets.chunk(work.microbatches)

    def step() -> None:
        work.model.zero_grad()
        for one, wanted in zip(tokens, targets, strict=True):
            (work.loss(work.model(one), wanted) / work.microbatches).backward()

    return step


def times() -> Iterator[Finding]:
    """Time steps of this library, of torch's own pipelining, and of a plain loop."""
    form = "{:.2f} ms, of which the host posts for {:.2f} ms"
    for name in ("1F1B", "interleaved"):
        for who, make in {"fpipe": ours, "torch.distributed.pipelining": incumbents}.items():
            posted, whole = seconds(make(CONTESTS[name], task()))
            yield Finding(f"a step of {name}, {who}", form.format(1e3 * whole, 1e3 * posted))
    dist.barrier()
    if dist.get_rank() == 0:
        work = task()
        step = plain(work)
        step()
        wait_for_device()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait_for_device()
        yield Finding("the same work in a plain loop", f"{1e3 * (time.perf_counter() - start) / STEPS:.2f} ms")


def gaps() -> Iterator[Finding]:
    """Measure for how much of a step the device computes for a rank; the ranks share it."""
    step = ours(CONTESTS["1F1B"], task())
    for _ in range(2):
        step()
    wait_for_device()
    kinds = [ProfilerActivity.CPU if DRY else ProfilerActivity.CUDA]
    with profile(activities=kinds) as seen:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait_for_device()
        whole = time.perf_counter() - start
    events = seen.key_averages()
    own = [one for one in events if "nccl" not in one.key.lower()]  # whose kernels spin until the other side comes
    busy = sum(one.self_cpu_time_total if DRY else one.self_device_time_total for one in own) / 1e6
    yield Finding("share of a step in which kernels of rank 0 compute", figure(min(busy / whole, 1.0)))


def waits() -> Iterator[Finding]:
    """Measure whether anything but the last line of a training step waits for the device."""
    work = task()
    how = schedules.one_f_one_b(dist.get_world_size(), work.microbatches)
    batch: dict[str, Any] = {"example": (work.tokens,), "targets": work.targets, "loss": work.loss}
    pipe = fpipe.pipeline(work.model, schedule=how, cuts=work.cuts(how.stages), **batch)
    (params, buffers), step = pipe.init(work.model), fpipe.value_and_grad(pipe)
    for k in range(3):
        start = time.perf_counter()
        out, grads = step(params, buffers, (work.tokens,), work.targets)
        stepped = time.perf_counter()
        _, norm = fpipe.clip(pipe, grads, 1.0)
        clipped = time.perf_counter()
        norm.item()
        done = time.perf_counter()
        if k == 2:
            parts = (1e3 * (stepped - start), 1e3 * (clipped - stepped), 1e3 * (done - clipped))
            yield Finding("host: step, clip, then reading the norm", "{:.2f}, {:.2f}, {:.2f} ms".format(*parts))
    yield Finding("the loss", f"{out.loss.item():.6f}" if out.loss is not None else "**none**")


def held() -> float:
    """Return the MiB that are held: on the device beside torch's own, or of this process."""
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory() -> Iterator[Finding]:
    """Measure what groups of processes hold."""
    work = task()
    wait_for_device()
    dist.barrier()  # until all ranks have what torch itself needs on the device
    before = held()
    for name in ("1F1B", "interleaved"):
        step = ours(CONTESTS[name], work)
        step()
        wait_for_device()
        dist.barrier()
        now = held()
        yield Finding(f"MiB beside torch's own that the first step of {name} adds, all ranks", figure(now - before))
        before = now


def moves() -> Iterator[Finding]:
    """Measure what moving activations to the host saves, and what it costs."""
    work, plain = task(), schedules.gpipe(dist.get_world_size(), MICROBATCHES)
    batch: dict[str, Any] = {"example": (work.tokens,), "targets": work.targets, "loss": work.loss}
    for name, how in {"kept": plain, "moved": schedules.offload(plain)}.items():
        graph = fpipe.Gradients(backward="graph")
        pipe = fpipe.pipeline(work.model, schedule=how, cuts=work.cuts(how.stages), gradients=graph, **batch)
        (params, buffers), step = pipe.init(work.model), fpipe.value_and_grad(pipe)
        call = partial(step, params, buffers, (work.tokens,), work.targets)
        if DEVICE.type == "cuda":
            call()
            torch.cuda.reset_peak_memory_stats()
        _, whole = seconds(call)
        most = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at most" if DEVICE.type == "cuda" else ""
        yield Finding(f"a step of GPipe, activations {name}", f"{1e3 * whole:.2f} ms{most}")
        pipe.close()


# ------------------------------------------------------------------------------------------------------------- failures


def faults() -> Iterator[Finding]:
    """Raise in the loss of one rank while the others wait for their devices."""
    work, size = task(), dist.get_world_size()
    how = schedules.one_f_one_b(size, work.microbatches)
    batch: dict[str, Any] = {"example": (work.tokens,), "targets": work.targets}
    fuse = SimpleQueue[bool]()

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not fuse.empty() and dist.get_rank() == size - 1:
                raise RuntimeError("on purpose")
            return grad

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return Fused.apply(work.loss(outputs, targets))

    pipe = fpipe.pipeline(
        work.model,
        loss=loss,
        schedule=how,
        recording=fpipe.Recording(whole="loss"),
        gradients=fpipe.Gradients(backward="autograd"),
        **batch,
    )
    state, step = pipe.init(work.model), fpipe.value_and_grad(pipe)
    step(*state, (work.tokens,), work.targets)
    wait_for_device()
    fuse.put(True)
    for call in ("this call", "the next one"):  # where the host is ahead of its device, it hears in the next
        start = time.perf_counter()
        try:
            step(*state, (work.tokens,), work.targets)
            wait_for_device()
            found = "nothing"
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        took = time.perf_counter() - start
        yield Finding(f"the last rank raises: what rank 0 says in {call}", f"{found} ({took:.1f} s)")


def spin() -> Iterator[Finding]:
    """Find which calls of the host wait while a kernel occupies another stream, as an early receive does."""
    if DEVICE.type != "cuda":
        yield Finding("calls beside a kernel that spins", "needs a device")
        return
    side, ready = torch.cuda.Stream(), torch.ones(512, 512, device=DEVICE)
    query = torch.ones(1, 4, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    rate = torch.cuda.get_device_properties(DEVICE).clock_rate * 1000 if DEVICE.type == "cuda" else 0
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a kernel that was loaded": lambda: ready.fill_(2),
        "reading a value": ready[0, 0].item,
        "the first use of an elementwise kernel": lambda: torch.erfinv(ready),
        "the first matmul": lambda: ready @ ready,
        "the first attention": lambda: nn.functional.scaled_dot_product_attention(query, query, query),
        "an allocation of 1 GiB": lambda: torch.empty(2**30, dtype=torch.uint8, device=DEVICE),
        "empty_cache": torch.cuda.empty_cache,
        "pinned memory": lambda: torch.empty(2**24, pin_memory=True),
        "a copy from pageable memory": lambda: torch.ones(64).to(DEVICE),
        "the generator's state": torch.cuda.get_rng_state,
        "a backward": lambda: (ready.clone().requires_grad_() * 2).sum().backward(),
        "an event with timing": lambda: torch.cuda.Event(enable_timing=True).record(),
    }
    for name, call in calls.items():
        wait_for_device()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(2 * rate))  # about two seconds
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        yield Finding(f"beside a kernel of two seconds: {name}", f"{took:.3f} s" + (", **waits**" if took > 1 else ""))


def tests() -> Iterator[Finding]:
    """Run the tests of one process with their models and batches on the device."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    left = {name: value for name, value in os.environ.items() if name not in launched}
    rooms = ("runtime",) if DRY else ("runtime", "verification", "training", "functional", "pipelines")
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "--tb=line"]
    ran = subprocess.run(
        [*command, *[f"tests/fpipe/{room}" for room in rooms]],
        cwd=Path(__file__).parents[1],
        env={**left, "TEST_DEVICE": str(DEVICE)},
        capture_output=True,
        text=True,
        timeout=0.9 * LIMIT,
        check=False,
    )
    lines = ran.stdout.splitlines()
    yield Finding(f"tests of {', '.join(rooms)} on {DEVICE}", lines[-1] if lines else f"**{ran.stderr[-200:]}**")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield Finding("**failed**", line.partition(" ")[2])


PARTS: Final = {
    "bits": Part(2, bits),
    "pure": Part(1, pure),
    "times": Part(2, times),
    "gaps": Part(2, gaps),
    "waits": Part(2, waits),
    "memory": Part(4, memory),
    "moves": Part(2, moves),
    "faults": Part(2, faults),
    "spin": Part(1, spin),
    "tests": Part(1, tests),
}


# ----------------------------------------------------------------------------------------------------------------- jobs


def measure(name: str) -> list[Finding]:
    """Run a part as a job; return what it found, or how it ended."""
    start = time.perf_counter()
    try:
        found = ranks.start_within(LIMIT, "benchmarks.gpu", PARTS[name].ranks, name, **({} if DRY else SHARED))[0]
    except ranks.UnfinishedError as error:
        found = [*(error.found or [[]])[0], ("**unfinished**", str(error))]
    return [*[Finding(*row) for row in found], Finding("seconds", figure(time.perf_counter() - start))]


def page(findings: dict[str, list[Finding]]) -> str:
    """Return all findings, as Markdown."""
    lines = [f"# On {'a CPU, dry' if DRY else 'one GPU'}", "", machine()]
    for name, found in findings.items():
        doc = (PARTS[name].run.__doc__ or "").strip()
        lines += ["", f"## {name}", "", doc, "", "| what | found |", "|---|---|", *[f"| {a} | {b} |" for a, b in found]]
    return "\n".join(lines) + "\n"


def main(chosen: list[str]) -> None:
    """Run the parts that are left, or those that are chosen, and write the page."""
    if not DRY and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: got no CUDA device, expected one. Run make gpu DRY=1 to try it on the CPU.")
    unknown = set(chosen) - PARTS.keys()
    if unknown:
        sys.exit(f"benchmarks.gpu: got {sorted(unknown)}, expected some of {[*PARTS]}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        path = FOLDER / f"{name}.json"
        if name in chosen or (not chosen and not path.exists()):
            path.write_text(json.dumps(measure(name)))
    paths = {name: FOLDER / f"{name}.json" for name in PARTS}
    known = {
        name: [Finding(*row) for row in json.loads(one.read_text())] for name, one in paths.items() if one.exists()
    }
    (FOLDER / "page.md").write_text(page(known))
    print(page(known))


def rank(name: str) -> None:
    """Be one rank of a part."""
    torch.set_num_threads(1)
    if not DRY:
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"  # else NCCL refuses two ranks on one device
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo" if DRY else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    faulthandler.dump_traceback_later(0.9 * LIMIT)  # where it hangs
    found = list[Finding]()
    for one in PARTS[name].run():
        found.append(one)
        ranks.write(found)  # a part that is cut off keeps what it has found
        if dist.get_rank() == 0:
            print(f"{name}: {one.what}: {one.found}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if name == "faults":  # groups may be broken: nobody waits for anybody
        time.sleep(3)
        os._exit(0)
    ranks.report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1]) if ranks.inside() else main(sys.argv[1:])
