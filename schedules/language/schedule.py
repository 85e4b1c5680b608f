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
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import update_wrapper
from math import inf
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

from schedules.errors import SizeError
from schedules.language.actions import Action
from schedules.language.graph import Graph
from schedules.language.picture import picture
from schedules.language.placement import Placement, Placer, linear

Arguments = ParamSpec("Arguments")
Actions = Iterator[Action]
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


UNLIMITED = Limits()


@dataclass(frozen=True, repr=False)
class Schedule:
    """A schedule: for each rank, a generator of its compute actions in order.

    Two schedules are equal if the same factory made them from the same arguments. `repr` is that call; `str` draws the
    timeline. `graph` is the stage graph the schedule targets, by default the chain (`schedules.connect`).

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
    limits: Limits = field(compare=False, default=UNLIMITED)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    def actions(self, rank: int) -> Actions:
        """Return an iterator over the compute actions of `rank`, in order. Each call generates them anew."""
        return self.factory.generator(rank, **dict(self.arguments))

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

    def __str__(self) -> str:
        return picture(self)

    def __reduce__(self) -> tuple[Callable[..., Schedule], tuple[object, ...]]:
        return self.factory.make, (self.arguments,)


class Shape(NamedTuple):
    """The properties of a schedule that are known before any action is generated."""

    ranks: int
    microbatches: int
    placement: Placement
    slices: int = 1
    backward: bool = True
    graph: Graph | None = None


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
        self.generator, self.signature, self.shape, self.limits = generator, signature, shape, limits
        update_wrapper(self, generator)
        self.__signature__ = signature  # `help` shows the parameters a caller passes: no rank

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Schedule:
        """Return the schedule for these sizes."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.make(tuple(bound.arguments.items()))

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
) -> Callable[[Callable[Concatenate[int, Arguments], Actions]], Factory[Arguments]]:
    """Turn a generator function `(rank, ranks, microbatches, ...)` into a factory of schedules.

    - `placement` maps stages to ranks. It is called with those arguments that it accepts: if the function takes
      `chunks`, each rank holds that many stages, otherwise as many as the placement's default.
    - `limits` declares the schedule's memory and version limits.
    - `requires` is called with the arguments and raises `SizeError` for sizes the schedule does not support.
    - `backward` is false for a schedule without backwards, for inference.

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

    def decorate(generator: Callable[Concatenate[int, Arguments], Actions]) -> Factory[Arguments]:
        def shape(arguments: dict[str, Any]) -> Shape:
            taken = inspect.signature(placement).parameters
            sizes = {name: value for name, value in arguments.items() if name in taken or name in SIZES}
            for name, size in sizes.items():
                _require_positive(generator.__name__, name, size)
            if requires is not None:
                requires(**arguments)
            placed = placement(**{name: size for name, size in sizes.items() if name in taken})
            _require_positive(generator.__name__, "microbatches", sizes["microbatches"], len(placed.routes))
            return Shape(sizes["ranks"], sizes["microbatches"], placed, sizes.get("slices", 1), backward)

        return Factory(generator, without_rank(generator, "ranks", "microbatches"), shape, limits)

    return decorate


def without_rank(generator: Callable[..., Actions], *first: str) -> inspect.Signature:
    """Return the factory's signature: that of `generator` without `rank`.

    Raise `TypeError` unless the parameters of `generator` begin with `rank` and the names in `first`.
    """
    signature = inspect.signature(generator)
    names, expected = list(signature.parameters), ["rank", *first]
    if names[: len(expected)] != expected:
        raise TypeError(
            f"{generator.__name__}: got parameters {names}, expected them to begin with {', '.join(expected)}. "
            "Write a generator for one rank that takes these parameters first."
        )
    return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=Schedule)


def _require_positive(factory: str, name: str, size: object, least: int = 1) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise SizeError.of(factory, name, size, f"an integer of at least {least}", f"Choose {name} >= {least}.")
