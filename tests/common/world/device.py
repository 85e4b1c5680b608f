# SPDX-License-Identifier: Apache-2.0
"""The device of a simulated process: a stream on which torch's operations run late, and NCCL's manners beside it.

Its tensors are the host's. An operation on one whose value is not there yet is posted: its result has memory at once,
and a value later. So the host goes on, as it does ahead of a GPU, until it reads a value: then it waits for the device.

A kernel of messages starts once the stream has come to where it was posted, after those before it over the same end of
a group. Waiting for it makes the stream wait. It does not notice that a peer is dead. To abort a group is local, and
ends its kernels here: what they have not received is garbage. To destroy a group that was not aborted waits for all.

Invariant: an operation on memory that the stream has still to read or write is posted, or waited for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.network.waiting import NEVER_SENT
from fpipe.tensors.tree import list_tensors
from tests.common.world.fibers import Process, Signal, World

# ------------------------------------------------------------------------------------------ The stream of a process

Touched = tuple[int, ...]
"""The addresses of the memory that something reads or writes."""


class Mark:
    """A place in a stream: an event."""

    def __init__(self, device: Device) -> None:
        self.signal, self.device = Signal(device.world), device

    def query(self) -> bool:
        """Return whether the stream has come to it."""
        return self.signal.is_given

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.device.waits += not self.signal.is_given
        state = torch.get_rng_state()  # of all processes; others run meanwhile
        self.signal.wait()
        torch.set_rng_state(state)


class Device:
    """One process's device.

    - `stream`: what it has to do, in order. `late`: how much of that touches memory, by its address.
    - `waits`: how often the host has waited for it. `is_broken`: whether it may compute with garbage.
    """

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process, self.waits = world, process, 0
        self.stream = deque[Callable[[], None]]()
        self.late = Counter[int]()
        self.filled = Signal(world)
        self.is_started = self.is_broken = False

    def post(self, run: Callable[[], None]) -> None:
        """Let the stream do something after all that was posted before."""
        if not self.is_started:
            self.is_started = True
            self.world.start(self.process, "device", self._run)
        self.stream.append(run)
        self.filled.set()

    def _run(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            while True:
                while not self.stream:
                    self.filled = Signal(self.world)
                    self.filled.wait()
                self.stream[0]()
                self.stream.popleft()

    def mark(self) -> Mark:
        """Return a mark after all that was posted."""
        mark = Mark(self)
        if self.stream:
            self.post(mark.signal.set)
        else:
            mark.signal.set()
        return mark

    def synchronize(self) -> None:
        """Let the host wait for all that was posted."""
        self.mark().synchronize()

    def copy(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Mark]:
        """Post copies of tensors into the host's memory; return them, and the mark after them."""
        return (torch.stack([*tensors]).unbind() if tensors else ()), self.mark()

    def hold(self, touched: Touched) -> None:
        """Note that something posted touches memory."""
        self.late.update(touched)

    def let_go(self, touched: Touched) -> None:
        """Note that it is over."""
        for one in touched:
            self.late[one] -= 1
            if not self.late[one]:
                del self.late[one]

    def is_late(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether something posted touches one of the tensors."""
        late = self.late
        return bool(late) and any(_address(one) in late for one in tensors)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return the context in which this fiber computes on the device."""
        with Readers(self), Launches(self):
            yield


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------------------------- Operations, posted on a stream

PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
IN_MEMORY = ("tolist", "cpu", "numpy", "__array__", "data_ptr")
"""Methods that read a tensor of the host without an operation of torch."""


class Readers(TorchFunctionMode):
    """Methods that read memory wait for it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.late and getattr(func, "__name__", "") in IN_MEMORY and self.device.is_late(args[:1]):
            self.device.synchronize()
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Operations on memory that is late are posted; those that need a value to know what they return wait for it."""

    known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self.device, kwargs or {}
        if not device.late:
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented if DTensor in types else func(*args, **kwargs)
        tensors = [*list_tensors((*args, *kwargs.values()))]
        if device.is_late(tensors) and _is_composite(func):  # such as `contiguous`, which is a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        if not device.is_late(tensors) or func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func in READS or TAGS & {*func.tags} or any(one.device.type != "cpu" for one in tensors):
            device.synchronize()
            return func(*args, **kwargs)
        return self._post(func, args, kwargs, tensors)

    def _post(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        device, has_grad = self.device, torch.is_grad_enabled()
        try:
            rows = self._find_results(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # it has no rule for that
            device.synchronize()
            return func(*args, **kwargs)
        made = tuple(None if row is None else torch.empty_strided(row[0], row[1], dtype=row[2]) for row in rows)
        touched = tuple(_address(one) for one in (*tensors, *(one for one in made if one is not None)))
        inner, named = swap(args, _alias), {key: swap(value, _alias) for key, value in kwargs.items()}
        rooms = tuple(None if one is None else one.data for one in made)

        def run() -> None:
            try:
                with torch.set_grad_enabled(has_grad):  # on which kernels of recurrent layers depend
                    found = func(*inner, **named)
                for room, value in zip(rooms, found if isinstance(found, tuple | list) else (found,), strict=False):
                    if room is not None:
                        room.copy_(value)
            except Exception as error:
                if not device.is_broken:  # else it has computed with garbage
                    device.world.failure = error
            device.let_go(touched)

        device.hold(touched)
        device.post(run)
        return _collect(func, args, kwargs, made)

    def _find_results(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return shape, strides and dtype of each new result; `None` for one that is an argument, or no tensor."""
        key = (
            func,
            torch.is_grad_enabled(),
            _describe(args),
            tuple((name, _describe(value)) for name, value in kwargs.items()),
        )
        if key not in self.known:
            found = func(*swap(args, _stand_in), **{name: swap(value, _stand_in) for name, value in kwargs.items()})
            flat = found if isinstance(found, tuple | list) else (found,)
            returns = func._schema.returns
            aliases = [one.alias_info is not None for one in returns] if len(returns) == len(flat) else [False] * 99
            self.known[key] = tuple(
                None if alias or not isinstance(one, Tensor) else (one.shape, one.stride(), one.dtype)
                for one, alias in zip(flat, aliases, strict=False)
            )
        found = self.known[key]
        return tuple(found)


def _is_composite(func: Any) -> bool:
    """Return whether an operation consists of others; `silu_backward` has a kernel of its own, too, of other bits."""
    return bool(func._can_decompose()) and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")


def _collect(func: Any, args: Any, kwargs: Any, made: tuple[Tensor | None, ...]) -> Any:
    """Return what an operation returns: new tensors, and arguments that it modifies."""
    schema = func._schema
    if not schema.returns:
        return None
    if len(schema.returns) == 1 and schema.returns[0].alias_info is None:
        is_list = isinstance(schema.returns[0].type, torch.ListType)
        return [*made] if is_list else made[0]
    given = {one.name: args[k] if k < len(args) else kwargs.get(one.name) for k, one in enumerate(schema.arguments)}
    results = []
    for one, new in zip(schema.returns, made, strict=True):
        names = None if one.alias_info is None else one.alias_info.before_set
        same = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.before_set == names]
        results.append(given[same[0]] if names is not None else new)
    return results[0] if len(results) == 1 else tuple(results)


def swap(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(swap(one, change) for one in value) if type(value) in (tuple, list) else value


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory, and a count of its own of who has written to it."""
    return tensor.data


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_describe, value))
    return type(value), str(value)


# ------------------------------------------------------------------------------------- Kernels that carry messages


@contextmanager
def by_itself() -> Iterator[None]:
    """Return the context of what happens at a time, whichever fiber runs then."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class Part:
    """One transfer of a kernel."""

    def __init__(self, ends: tuple[int, int], tag: Any, data: Tensor, is_send: bool) -> None:
        self.ends, self.tag, self.is_send = ends, tag, is_send
        self.data = data.data  # of which autograd does not know that it is written to late
        self.kernel: Kernel | None = None
        self.is_done = False

    @property
    def is_over(self) -> bool:
        """True if it is done, or was aborted."""
        assert self.kernel is not None, "a kernel has parts"
        return self.is_done or self.kernel.signal.is_given

    def finish(self) -> None:
        """Let it be done."""
        assert self.kernel is not None, "a kernel has parts"
        self.is_done = True
        if all(one.is_done for one in self.kernel.parts):
            self.kernel.end()


class Kernel:
    """A kernel of messages over one end of a group; also its work."""

    def __init__(self, end: DeviceGroup, parts: Sequence[Part]) -> None:
        self.end_of, self.device, self.parts = end, end.device, parts
        self.is_due = False
        self.signal = Signal(end.device.world)
        self.touched = tuple(_address(part.data) for part in parts)
        self.device.hold(self.touched)
        for part in parts:
            part.kernel = self

    def end(self) -> None:
        """End it, whatever it has received; the next over this end of the group may start."""
        if not self.signal.is_given:
            self.device.let_go(self.touched)
            self.signal.set()
            self.end_of.kernels.remove(self)
            self.end_of.start_next()

    def wait(self, timeout: Any = None) -> bool:
        """Let the stream wait for it."""
        self.device.world.step("wait")
        if not self.signal.is_given:
            self.device.post(self.signal.wait)
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        self.device.world.step("wait")
        return self.signal.is_given


class Fabric:
    """What all processes of one group on devices share: what they have started, and who is here, or leaves."""

    def __init__(self, network: Any, ranks: tuple[int, ...]) -> None:
        self.network, self.ranks = network, ranks
        self.pending: dict[Any, tuple[deque[Part], deque[Part]]] = {}
        self.arrivals = Counter[Any]()
        self.present = dict[Any, set[int]]()
        self.complete = dict[Any, Signal]()

    def start(self, part: Part) -> None:
        """Start one end of a transfer."""
        world = self.network.world
        with by_itself():
            if part.is_send and self.network.manners.is_eager:
                part.data = part.data.clone()
            elif not part.is_send:
                part.data.view(-1).view(torch.uint8).fill_(0xFF)
        sends, receives = pair = self.pending.setdefault((part.ends, part.tag), (deque(), deque()))
        pair[not part.is_send].append(part)
        if part.is_send and self.network.manners.is_eager:
            part.finish()
        if sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            delay = self.network.delay(part.ends, part.tag)
            if delay is not None:
                time = max(world.now + delay, self.arrivals[part.ends])
                self.arrivals[part.ends] = time
                world.at(time, lambda: self._arrive(sent, received))

    def _arrive(self, sent: Part, received: Part) -> None:
        processes = self.network.world.processes
        is_sent = sent.is_done or not sent.is_over
        if received.is_over or not is_sent or any(processes[one].is_dead for one in sent.ends):
            return
        with by_itself():
            here, there = (one.data.view(-1).view(torch.uint8) for one in (sent, received))
            if len(here) != len(there):
                self.network.aborted.append(received.ends[1])
                return
            there.copy_(here)
        self.network.arrived(received)
        if not sent.is_done:
            sent.finish()
        received.finish()

    def meet(self, what: Any, rank: int, ranks: Iterable[int], seconds: float | None) -> None:
        """Block the host until all of these have come to the same; raise `RuntimeError` if that takes too long."""
        here = self.present.setdefault(what, set())
        signal = self.complete.setdefault(what, Signal(self.network.world))
        here.add(rank)
        if here >= {*ranks}:
            signal.set()
        if not signal.wait(seconds):
            raise RuntimeError("wait timeout")


class DeviceGroup:
    """One process's end of a process group on devices, perhaps with Gloo beside NCCL.

    - `kernels`: those over this end that are not over, in order. `gloo`: the end over which the host's bytes go.
    """

    def __init__(self, fabric: Fabric, device: Device, timeout: Any, desc: str, gloo: Any = None) -> None:
        self.fabric, self.device, self.process, self.gloo = fabric, device, device.process, gloo
        self.timeout, self.group_desc, self.collectives = timeout, desc, 0
        self.number = len(self.process.open)
        self.is_aborted = False
        self.kernels = list[Kernel]()

    def __hash__(self) -> int:
        """Return a number that is the same in every replay."""
        return self.number

    @property
    def room(self) -> DeviceGroup:
        """Itself: what has ranks and a timeout."""
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of the group."""
        return self.fabric.ranks

    def rank(self) -> int:
        """Return the number of this process in the group."""
        return self.ranks.index(self.process.rank)

    def size(self) -> int:
        """Return the number of processes."""
        return len(self.ranks)

    def send(self, tensors: Sequence[Tensor], target: int, tag: Any) -> Any:
        """Post a send to number `target` of the group."""
        return self.post([self.part(tensors[0], target, tag, True)], pair=target)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: Any) -> Any:
        """Post a receive from number `source` of the group."""
        if tag == NEVER_SENT:
            return self.gloo.recv(tensors, source, tag)
        return self.post([self.part(tensors[0], source, tag, False)], pair=source)

    def part(self, data: Tensor, other: int, tag: Any, is_send: bool) -> Part:
        """Return one end of a transfer."""
        mine, theirs = self.process.rank, self.ranks[other]
        return Part((mine, theirs) if is_send else (theirs, mine), tag, data, is_send)

    def post(self, parts: Sequence[Part], pair: int | None = None) -> Kernel:
        """Post a kernel; the first between a pair, or of all, waits for the others of it unless they are connected."""
        world = self.device.world
        world.step("launch")
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        ranks = self.ranks if pair is None else (self.process.rank, self.ranks[pair])
        if not self.fabric.network.manners.is_bound:
            self.fabric.meet(("connect", frozenset(ranks), pair is None), self.process.rank, ranks, self.seconds)
        kernel = Kernel(self, parts)
        self.kernels.append(kernel)

        def come() -> None:
            kernel.is_due = True
            self.start_next()

        if self.device.stream:
            self.device.post(come)
        else:
            come()
        return kernel

    @property
    def seconds(self) -> float:
        """The timeout."""
        seconds: float = self.timeout.total_seconds()
        return seconds

    def start_next(self) -> None:
        """Start the kernel whose turn it is, once the stream has come to it."""
        if self.kernels and self.kernels[0].is_due and not self.is_aborted:
            kernel = self.kernels[0]
            kernel.is_due = False
            for part in kernel.parts:
                self.fabric.start(part)
            if not kernel.parts:
                kernel.end()

    def abort(self) -> None:
        """End all kernels of this end, here."""
        self.device.world.pause()
        self.is_aborted = self.device.is_broken = True
        for kernel in [*self.kernels]:
            kernel.end()

    def destroy(self) -> None:
        """Block until this end is not used any more, and all others are destroyed, too; unless it was aborted."""
        if not self.is_aborted:
            for kernel in [*self.kernels]:
                kernel.signal.wait()
            self.fabric.meet("destroy", self.process.rank, self.ranks, None)

    def get_group_store(self) -> Any:
        """Return the store."""
        return self.fabric.network.open_store()
