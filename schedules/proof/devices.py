# SPDX-License-Identifier: Apache-2.0
"""Model devices to run programs on, as unhelpful as real ones.

Problem. On an accelerator, nothing is done when it is posted. A host posts its whole program to streams and runs ahead;
the device runs what it is given, in an order that depends on its queues, on its free multiprocessors, and on when
something synchronizes it. A program may finish on a network between CPUs and hang there.

Idea. What a host posts is a list of kernels (`Post`), each on a stream, with the earlier ones it waits for. A transfer
runs from its start until its other end has started, so a receive occupies the device until its message is sent. All
hosts and devices are played together until nothing moves. `Device` says what may delay a kernel, and its host.

The model is that of CUDA and NCCL as documented: one communicator and one stream per channel, and one stream for
collectives; a transfer starts only after what was on the compute stream when it was posted.

It shares no logic with the rule that `check` applies (`schedules.checking.posts`): each is tested against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from schedules.arguments import require_types
from schedules.checking.channels import LoweredProgram, streams_of
from schedules.errors import ProgramError
from schedules.language.actions import BESIDE, KINDS, Action, message_of, receive_of
from schedules.lowering.turns import Turns, target_of
from schedules.playing.costs import UNITS

COMPUTE_STREAM = "compute"
Growth: TypeAlias = Callable[[str], float]
"""What an action of a kind adds to the memory of its rank."""


@dataclass(frozen=True)
class Device:
    """The properties of a device that decide whether a program finishes on it, the same for all ranks.

    - `queues`: how many hardware queues its streams share; a queue starts its kernels in the order in which they were
      posted. 0 means one for each stream. (`CUDA_DEVICE_MAX_CONNECTIONS`)
    - `blocks`: true if each launch blocks the host until the kernel ends. (`CUDA_LAUNCH_BLOCKING=1`)
    - `eager`: true if a send may end before its receive starts, since the message fits into a buffer.
    - `slots`: how many kernels can run at once, first those that were posted first; 0 means any number.
    - `synchronizes`: pairs of a rank and the number of one of its compute actions, before which the host waits until
      the device has nothing left to do: kernels that are loaded when first used, memory that is freed.
    - `ahead`: how many compute actions the host may be ahead of the device; 0 means any number.
    """

    queues: int = 0
    blocks: bool = False
    eager: bool = False
    slots: int = 0
    synchronizes: frozenset[tuple[int, int]] = frozenset()
    ahead: int = 0


class Post(NamedTuple):
    """A kernel that a host posts to its device, or, without an action, the wait at its end.

    - `action`: what it does; different for each post of a host. `stream`: `COMPUTE_STREAM`, or another one.
    - `waits`: the actions of earlier posts that its stream waits for first.
    - `meets`, `ends`: the key at which it meets the other ends of a transfer, and how many there are.
    - `frees`: the actions of earlier transfers whose buffers are free once it has run.
    """

    action: Action | None
    stream: Hashable = COMPUTE_STREAM
    waits: tuple[Action, ...] = ()
    meets: Hashable = None
    ends: int = 1
    frees: tuple[Action, ...] = ()


class DeviceRun(NamedTuple):
    """The cost of a program on a device, per rank: the peak of its `memory`, and of the `messages` held at once.

    Memory is in the units of `simulate`. A message is held from its post until the device has passed the action that
    uses it, or the wait that frees it.
    """

    memory: tuple[float, ...]
    messages: tuple[int, ...]


def run_on_device(program: LoweredProgram, device: Device, copies: int = 1) -> DeviceRun:
    """Run a program on devices; `copies` of the pipeline meet in its collectives.

    Raise `ProgramError` if it never ends; the error says what each device waits for.

    >>> from schedules import lower, one_f_one_b
    >>> run_on_device(lower(one_f_one_b(ranks=2, microbatches=4)), Device(queues=1, blocks=True))
    DeviceRun(memory=(2.0, 1.0), messages=(4, 3))
    """
    require_types(run_on_device, locals())
    schedule = program.schedule
    unit = schedule.slices * schedule.stages / schedule.ranks
    growth = cache(lambda kind: UNITS.growth(kind, 0, schedule.backward) / unit)
    rows = [
        _list_posts(program, rank, stream, copy, copies)
        for copy in range(copies)
        for rank, stream in enumerate(streams_of(program))
    ]
    hosts = play_posts(rows, device, growth)[: schedule.ranks]
    return DeviceRun(tuple(one.peak for one in hosts), tuple(one.most for one in hosts))


def _list_posts(program: LoweredProgram, rank: int, stream: Iterator[Action], copy: int, copies: int) -> Iterator[Post]:
    """Yield what the host of one rank of one copy posts."""
    placement = program.schedule.placement
    turns = iter(Turns(program.schedule, program.graph, rank))
    turn, left = next(turns), 0
    collected: dict[str, list[Action]] = {"UNSHARD": [], "REDUCE_GRAD": []}  # collectives that nothing has waited for
    moved = dict[tuple[int, int, int | None], Action]()  # the last move of each unit's memory
    waits: list[Action] = []
    for action in stream:
        kind, s = action.kind, action.stage
        does = KINDS[kind].does
        if does == "WAIT":
            waits.append(message_of(action))
            continue
        if does:
            message = message_of(action)
            ends = placement.home(message.stage, message.microbatch), target_of(message, placement)
            reduced = tuple(collected["REDUCE_GRAD"]) if kind == "SEND_G" else ()
            yield Post(action, ends, reduced, (copy, message), 2)
            continue
        if not left:
            left = len(turn.actions)
            waits += map(receive_of, turn.waits)
        unit = s, action.microbatch, action.slice
        before = (moved.pop(unit),) if KINDS[kind].before in ("forward", "hosted") and unit in moved else ()
        if kind in ("OFFLOAD", "RELOAD"):
            moved[unit] = action
            yield Post(action, BESIDE[kind], before)
        elif kind in collected:
            collected[kind].append(action)
            yield Post(action, "group", (), (rank, action), copies)
        else:
            waits += before
            taken = [one for one in collected["UNSHARD"] if one.stage == s] if KINDS[kind].reads else []
            taken += collected["REDUCE_GRAD"] if kind == "U" else []
            yield Post(action, COMPUTE_STREAM, (*waits, *taken), frees=tuple(one for one in waits if one not in before))
            waits.clear()
        left -= 1
        if not left:
            turn = next(turns)
    waits += map(receive_of, turn.waits)
    yield Post(None, COMPUTE_STREAM, (*waits, *collected["REDUCE_GRAD"]), frees=tuple(waits))


class _Kernel:
    """A posted kernel, until it is done; `needs` are the earlier ones of the device that must be done first."""

    def __init__(self, post: Post, needs: list[_Kernel], queue: int) -> None:
        self.post, self.needs, self.queue = post, needs, queue
        self.started = self.done = False


class Host:
    """A host and its device: `window` has the kernels that are posted and not done, in the order of their posts.

    `peak` and `most` are the most memory, and the most messages, so far.
    """

    def __init__(self, number: int, posts: Iterable[Post], device: Device, growth: Growth) -> None:
        self.number, self.posts, self.device, self.growth = number, iter(posts), device, growth
        self.next = next(self.posts, None)
        self.window: list[_Kernel] = []
        self.posted: dict[Action | None, _Kernel] = {}
        self.last: dict[Hashable, _Kernel] = {}
        self.streams: dict[Hashable, int] = {}
        self.computed = self.behind = self.messages = self.most = 0
        self.held = self.peak = 0.0

    def post_next(self) -> bool:
        """Post the next kernel; return false if there is none, or the host waits."""
        post, device = self.next, self.device
        if post is None:
            return False
        computes = post.stream == COMPUTE_STREAM
        must_drain = device.blocks or (computes and (self.number, self.computed) in device.synchronizes)
        if self.window and (must_drain or (computes and device.ahead and self.behind >= device.ahead)):
            return False
        # A stream runs in order; a transfer comes after what is on the compute stream now.
        before = [self.last[stream] for stream in {post.stream, COMPUTE_STREAM} if stream in self.last]
        stream = self.streams.setdefault(post.stream, len(self.streams))
        queue = stream % device.queues if device.queues else stream
        kernel = _Kernel(post, [one for one in (*before, *(self.posted[a] for a in post.waits)) if not one.done], queue)
        self.last[post.stream] = self.posted[post.action] = kernel
        self.window.append(kernel)
        self.computed, self.behind = self.computed + computes, self.behind + computes
        self.messages += post.ends == 2
        self.most = max(self.most, self.messages)
        self.next = next(self.posts, None)
        return True

    def start_next(self) -> _Kernel | None:
        """Start the first kernel that can start, and return it; `None` if there is none."""
        blocked = set[int]()
        running = sum(kernel.started for kernel in self.window)
        if self.device.slots and running >= self.device.slots:
            return None
        for kernel in self.window:
            if kernel.started:
                continue
            if kernel.queue not in blocked and all(one.done for one in kernel.needs):
                kernel.started = True
                return kernel
            blocked.add(kernel.queue)
        return None

    def finish(self, kernel: _Kernel) -> None:
        """Note that a kernel is done."""
        post = kernel.post
        kernel.done = True
        self.window.remove(kernel)
        self.behind -= post.stream == COMPUTE_STREAM
        self.messages -= len(post.frees)
        for action in post.frees:
            del self.posted[action]
        if post.action is not None:
            grown = self.growth(post.action.kind)
            self.peak = max(self.peak, self.held + grown)
            self.held += grown

    def describe(self) -> str:
        """Return what keeps the device, and what waits for it."""
        runs = ", ".join(str(one.post.action) for one in self.window if one.started) or "nothing"
        waits = next((str(one.post.action) for one in self.window if not one.started), "nothing")
        return f"rank {self.number} runs {runs} and waits to start {waits}"


def play_posts(rows: Sequence[Iterable[Post]], device: Device, growth: Growth = lambda kind: 0) -> list[Host]:
    """Play what each host posts, and return the hosts; raise `ProgramError` if some kernel is never done.

    Hosts go first: each posts as much as its device lets it, so devices are as far behind as they can be.
    """
    hosts = [Host(number, row, device, growth) for number, row in enumerate(rows)]
    meetings: dict[Hashable, list[tuple[Host, _Kernel]]] = {}
    ready = [*reversed(hosts)]
    while ready:
        host = ready.pop()
        while True:
            if host.post_next():
                continue
            kernel = host.start_next()
            if kernel is None:
                break
            post = kernel.post
            if post.ends == 1:
                host.finish(kernel)
                continue
            there = meetings.setdefault(post.meets, [])
            there.append((host, kernel))
            if len(there) == post.ends:
                del meetings[post.meets]
                for other, end in there:
                    if not end.done:
                        other.finish(end)
                    ready.append(other)
            elif device.eager and post.action is not None and KINDS[post.action.kind].does == "SEND":
                host.finish(kernel)
    stuck = [host for host in hosts if host.window]
    if stuck:
        raise ProgramError(f"deadlock on a device: {'; '.join(host.describe() for host in stuck)}. {_REPAIR}")
    return hosts


_REPAIR = "Post transfers in an order that check(program, device=True) accepts."
