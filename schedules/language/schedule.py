# SPDX-License-Identifier: Apache-2.0
"""Write schedules: the decorator, the factory it returns, and the frozen `Schedule` value.

Problem. A paper gives the step loop as a few lines of pseudocode per rank. Code it as a loop that also sends and
computes, and all you can do is run it; code it as a table, and the table must be generated, stored and trusted.

Idea. Write the pseudocode once, as a generator of compute actions for one rank. The decorator turns it into a factory.
Calling the factory returns a value that holds only the factory and its arguments, so it is hashable, pickles by name,
prints as the call that made it, and can regenerate any rank's actions at any time without storing them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch, update_wrapper
from math import inf
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

from schedules.arguments import bind, is_size, require_hash, require_size, require_takes, require_types, without_rank
from schedules.errors import ArgumentError, GraphError, ScheduleError, SizeError, quote
from schedules.language.actions import KINDS, Action
from schedules.language.graph import Graph, chain
from schedules.language.placement import Placement, Placer, linear

Arguments = ParamSpec("Arguments")
Actions = Iterator[Action]
VersionRule = Callable[[int], int]
TickRule = Callable[[int], tuple[Sequence[int], Sequence[int]]]
SIZES = ("ranks", "microbatches", "chunks", "slices")


@dataclass(frozen=True)
class Limits:
    """Limits that a schedule declares and `check` enforces. Each is a function of the rank and the arguments.

    - `memory`: the most activations the rank holds at once, in units of its activations for one microbatch. They are
      held from `F` (or `R`) to the end of `B` or `W`.
    - `versions`: the most weight versions the rank keeps at once.
    """

    memory: Callable[..., float] | None = None
    versions: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        require_types(Limits.__init__, vars(self))


UNLIMITED = Limits()


@singledispatch
def picture(value: object) -> str:
    """Return the text that `print(value)` shows. `schedules.drawing` extends it, since a picture needs a simulation."""
    return repr(value)


@singledispatch
def notebook_picture(value: object) -> str:
    """Return the HTML that a notebook shows for `value`. `schedules.drawing` extends it."""
    from html import escape  # rarely needed, and slow to import

    return f"<code>{escape(repr(value))}</code>"


@dataclass(frozen=True, repr=False)
class Schedule:
    """A schedule: for each rank, a generator of its compute actions in order.

    Two schedules are equal if the same factory made them from the same arguments. `repr` is that call; `str` draws the
    timeline. `graph` is the stage graph the schedule targets, by default the chain (`schedules.connect`). `version(i)`
    is the weight version that microbatch `i` uses on every rank: the number of updates before it. Without one, a rank
    uses its newest. `ticks(s)` are those of the forwards and of the backwards of stage `s`, by microbatch.

    >>> from schedules import one_f_one_b
    >>> s = one_f_one_b(ranks=2, microbatches=2)
    >>> s, list(s.actions(1))
    (one_f_one_b(ranks=2, microbatches=2), [F(1, 0), B(1, 0), F(1, 1), B(1, 1)])
    """

    factory: Factory[...]
    arguments: tuple[tuple[str, Hashable], ...]
    ranks: int = field(compare=False)
    microbatches: int = field(compare=False)
    placement: Placement = field(compare=False)
    slices: int = field(compare=False, default=1)
    backward: bool = field(compare=False, default=True)
    graph: Graph | None = field(compare=False, default=None)
    version: VersionRule | None = field(compare=False, default=None)
    ticks: TickRule | None = field(compare=False, default=None)
    limits: Limits = field(compare=False, default=UNLIMITED)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    def actions(self, rank: int) -> Actions:
        """Return an iterator over the compute actions of `rank`, in order. Each call generates them anew.

        It raises `ScheduleError` after as many actions as no correct schedule has: one of each kind for every stage,
        microbatch and slice. So whoever reads a generator that never ends comes to an end.
        """
        if not is_size(rank, 0, self.ranks - 1):
            expected = f"a rank from 0 to {self.ranks - 1}"
            raise SizeError.of("actions", "rank", rank, expected, "Pass one of the schedule's ranks.")
        found = self.factory.generator(rank, **dict(self.arguments))
        if not isinstance(found, Iterable):
            raise ArgumentError(
                f"{self.factory.__name__}: got {quote(found)} from it, expected a generator of one rank's actions. "
                "Write yield, as in yield F(rank, i)."
            )
        most = max(1, len(KINDS) * self.stages * self.microbatches * self.slices)
        return itertools.chain(itertools.islice(actions := iter(found), most), self._refuse_more(actions, rank, most))

    def _refuse_more(self, rest: Actions, rank: int, most: int) -> Actions:
        """Yield nothing; raise `ScheduleError` if there is more."""
        for action in rest:
            problem = f"comes after {most} actions, which is more than a rank of {self.stages} stages can have"
            raise ScheduleError("finite", rank, most, action, problem, "End the generator after its last action.")
        yield from ()

    def memory(self, rank: int) -> float:
        """Return the most activations `rank` may hold at once; infinity if unlimited.

        The unit is the rank's activations for one microbatch.
        """
        return self._limit(self.limits.memory, rank)

    def versions(self, rank: int) -> float:
        """Return the most weight versions `rank` may keep at once; infinity if unlimited."""
        return self._limit(self.limits.versions, rank)

    def _limit(self, limit: Callable[..., float] | None, rank: int) -> float:
        return inf if limit is None else limit(rank, **dict(self.arguments))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.factory.__name__}({arguments})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # called by IPython and Hypothesis
        printer.text(repr(self))

    def _repr_html_(self) -> str:  # called by notebooks
        return notebook_picture(self)

    def __str__(self) -> str:
        return picture(self)

    def __reduce__(self) -> tuple[Callable[..., Schedule], tuple[object, ...]]:
        return self.factory.make, (self.arguments,)


def graph_of(schedule: Schedule, graph: Graph | None) -> Graph:
    """Return `graph`, else the schedule's own graph, else the chain. Raise `GraphError` if the sizes differ."""
    if graph is None:
        return schedule.graph or chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise GraphError(
            f"got a graph of {graph.stages} stages for {quote(schedule)}, expected {schedule.stages}. "
            f"Cut the model into {schedule.stages} stages, or change the schedule's ranks or chunks."
        )
    return graph


def completes_gradient(schedule: Schedule, stage: int, rank: int) -> str:
    """Return what makes the gradient of `stage` on `rank` final: its `REDUCE_GRAD`, its `G`, or else every `done` unit.

    Generate the rank's actions to find out.
    """
    actions = (action for action in schedule.actions(rank) if type(action) is Action)
    if any(action.kind == "REDUCE_GRAD" and action.stage == stage for action in actions):
        return "REDUCE_GRAD"
    return "G" if len(schedule.placement.replicas(stage)) > 1 else "done"


class Shape(NamedTuple):
    """The properties of a schedule that are known before any action is generated."""

    ranks: int
    microbatches: int
    placement: Placement
    slices: int = 1
    backward: bool = True
    graph: Graph | None = None
    version: VersionRule | None = None
    ticks: TickRule | None = None


class Factory(Generic[Arguments]):
    """A callable that makes `Schedule` values; `@schedule` and `@transform` turn a generator function into one.

    `generator(rank, **arguments)` yields one rank's actions; `shape(arguments)` returns a `Shape`. A factory compares
    and pickles by name, like the function it replaces.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        generator: Callable[..., Actions],
        signature: inspect.Signature,
        shape: Callable[[dict[str, Any]], Shape],
        limits: Limits = UNLIMITED,
    ) -> None:
        for name, limit in vars(limits).items():
            require_takes(generator.__name__, name, limit, signature, "rank")
        self.generator, self.shape, self.limits = generator, shape, limits
        self.signature = signature.replace(return_annotation=Schedule)
        update_wrapper(self, generator)
        self.__signature__ = self.signature  # `help` shows the parameters a caller passes: no rank

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Schedule:
        """Return the schedule for these sizes."""
        arguments = bind(self.__name__, self.signature, *args, **kwargs)
        made = self.make(tuple(arguments.items()))
        require_hash(self.__name__, arguments)
        return made

    def make(self, arguments: tuple[tuple[str, Hashable], ...]) -> Schedule:
        """Return the schedule for these arguments: all of them, in signature order."""
        return Schedule(self, arguments, *self.shape(dict(arguments)), self.limits)

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__qualname__}"

    def __reduce__(self) -> str:
        return self.__qualname__


def schedule(
    placement: Placer = linear,
    limits: Limits = UNLIMITED,
    requires: Callable[..., None] | None = None,
    backward: bool = True,
    version: Callable[..., int] | None = None,
    ticks: Callable[..., tuple[Sequence[int], Sequence[int]]] | None = None,
) -> Callable[[Callable[Concatenate[int, Arguments], Actions]], Factory[Arguments]]:
    """Turn a generator function `(rank, ranks, microbatches, ...)` into a factory of schedules.

    - `placement` maps stages to ranks. It is called with those arguments that it accepts: if the function takes
      `chunks`, each rank holds that many stages, otherwise as many as the placement's default.
    - `limits` declares the schedule's memory and version limits.
    - `requires` is called with the arguments and raises `SizeError` for sizes the schedule does not support.
    - `backward` is false for a schedule without backwards, for inference.
    - `version(microbatch, ...)`, given the arguments too, returns the weight version that the microbatch uses, on every
      rank: the number of updates that made it. Without one, each rank uses the newest that it has at the forward.
    - `ticks(stage, ...)`, given the arguments too, returns two sequences of integers: the ticks of the stage's forwards
      and of its backwards, by microbatch and slice. They put the passes of all ranks into one order, in which nothing
      comes before what it needs. So on a ring, each rank can lower its program without looking at all others.

    If the function takes `slices`, every microbatch is cut into that many. Any other parameters must be hashable. The
    factory raises `SizeError` for sizes that are not positive integers.

    >>> from schedules import B, F, linear, schedule
    >>> @schedule(placement=linear)
    ... def one_at_a_time(rank, ranks, microbatches):
    ...     for i in range(microbatches):
    ...         yield F(rank, i)
    ...         yield B(rank, i)
    >>> one_at_a_time(ranks=2, microbatches=3)
    one_at_a_time(ranks=2, microbatches=3)
    """

    require_types(schedule, locals())

    def decorate(generator: Callable[Concatenate[int, Arguments], Actions]) -> Factory[Arguments]:
        signature = without_rank("schedule", generator, "ranks", "microbatches")
        require_takes(generator.__name__, "requires", requires, signature)
        require_takes(generator.__name__, "version", version, signature, "microbatch")
        require_takes(generator.__name__, "ticks", ticks, signature, "stage")

        def shape(arguments: dict[str, Any]) -> Shape:
            taken = inspect.signature(placement).parameters
            sizes = {name: value for name, value in arguments.items() if name in taken or name in SIZES}
            for name, size in sizes.items():
                require_size(generator.__name__, name, size)
            if requires is not None:
                requires(**arguments)
            placed = placement(**{name: size for name, size in sizes.items() if name in taken})
            if not isinstance(placed, Placement):
                raise ArgumentError(
                    f"{generator.__name__}: got {quote(placed)} from placement, expected a Placement. Pass a function "
                    "such as linear or looped."
                )
            require_size(generator.__name__, "microbatches", sizes["microbatches"], len(placed.routes))
            known = sizes["ranks"], sizes["microbatches"], placed, sizes.get("slices", 1), backward, None
            return Shape(*known, version and partial(version, **arguments), ticks and partial(ticks, **arguments))

        return Factory(generator, signature, shape, limits)

    return decorate
