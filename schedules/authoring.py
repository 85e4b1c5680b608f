# SPDX-License-Identifier: Apache-2.0
"""Writing a schedule: the decorator, the factory it makes, and the frozen `Schedule` value.

Problem. The step loop of a paper is a few lines of pseudocode per rank. Written as a loop that also sends and computes
it can only be run; written as a table it must be generated, kept and trusted.

Idea. Write the pseudocode once, as a generator of compute actions for one rank. The decorator makes a factory of it;
calling the factory gives a value that knows its factory and arguments and nothing else, so it is hashable, pickles by
name, prints as the call that makes it, and can produce any rank's actions again and again without keeping them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import update_wrapper
from math import inf
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

from schedules.actions import Action
from schedules.errors import SizeError
from schedules.graph import Graph
from schedules.placement import Place, Placement, linear

Sizes = ParamSpec("Sizes")
Actions = Iterator[Action]
SIZES = ("ranks", "microbatches", "chunks", "slices")


@dataclass(frozen=True)
class Limits:
    """What a schedule promises to keep within; `check` holds it to that. Each is a function of rank and arguments.

    - `memory`: the most activations that the rank holds at once, in units of its activations of one microbatch, held
      from `F` (or `R`) to the end of `B` or `W`.
    - `versions`: the most versions of its weights that the rank keeps at once.
    """

    memory: Callable[..., float] | None = None
    versions: Callable[..., int] | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who does what in which order: per rank, a generator of compute actions.

    Two schedules are equal when the same factory made them from the same arguments; `repr` is that call, `str` the
    picture of the timeline. `graph` is the stage graph that it is for, by default the chain (`schedules.connect`).

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
        """How many stages the schedule drives."""
        return self.placement.stages

    def actions(self, rank: int) -> Actions:
        """The compute actions of `rank`, in order, generated afresh by every call."""
        return self.factory.generator(rank, **dict(self.arguments))

    def memory(self, rank: int) -> float:
        """The most activations that `rank` may hold, in units of its activations of one microbatch."""
        return self._limit(self.limits.memory, rank)

    def versions(self, rank: int) -> float:
        """The most versions of its weights that `rank` may keep."""
        return self._limit(self.limits.versions, rank)

    def _limit(self, limit: Callable[..., float] | None, rank: int) -> float:
        return inf if limit is None else limit(rank, **dict(self.arguments))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.factory.__name__}({arguments})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what IPython and Hypothesis ask for
        printer.text(repr(self))

    def __str__(self) -> str:
        from schedules.drawing import text  # drawing looks at schedules; a schedule only asks to be drawn

        return text(self)

    def __reduce__(self) -> tuple[Callable[..., Schedule], tuple[object, ...]]:
        return self.factory.make, (self.arguments,)


class Shape(NamedTuple):
    """What is known of a schedule before any action is generated."""

    ranks: int
    microbatches: int
    placement: Placement
    slices: int = 1
    backward: bool = True
    graph: Graph | None = None


class Factory(Generic[Sizes]):
    """Makes `Schedule` values: what `@schedule` and the transforms turn a generator function into.

    `generator(rank, **arguments)` yields one rank's actions; `shape(arguments)` gives what `Shape` names. A factory is
    compared and pickled by name, as the function is that it stands for.
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
        self.__signature__ = signature  # what `help` shows is what a caller gives: no rank

    def __call__(self, *args: Sizes.args, **kwargs: Sizes.kwargs) -> Schedule:
        """The schedule of these sizes."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.make(tuple(bound.arguments.items()))

    def make(self, arguments: tuple[tuple[str, Hashable], ...]) -> Schedule:
        """The schedule of these arguments, given whole and in order."""
        return Schedule(self, arguments, *self.shape(dict(arguments)), self.limits)

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__qualname__}"

    def __reduce__(self) -> str:
        return self.__qualname__


def schedule(
    placement: Place = linear,
    limits: Limits = UNLIMITED,
    requires: Callable[..., None] | None = None,
    backward: bool = True,
) -> Callable[[Callable[Concatenate[int, Sizes], Actions]], Factory[Sizes]]:
    """Turn a generator function `(rank, ranks, microbatches, ...)` into a factory of schedules.

    - `placement` says where stages live. It is given those of the arguments that it takes: if the function takes
      `chunks`, that many stages live on each rank, else as many as the placement's own default.
    - `limits` says what the schedule keeps within.
    - `requires` is called with the arguments, and raises `SizeError` for those for which the schedule means nothing.
    - `backward` says whether anything comes back: a schedule without backwards is for inference.

    If the function takes `slices`, every microbatch is cut into that many. Further parameters must be hashable. The
    factory raises `SizeError` for sizes that are no positive integers.

    >>> from schedules import B, F, linear, schedule
    >>> @schedule(placement=linear)
    ... def one_at_a_time(rank, ranks, microbatches):
    ...     for i in range(microbatches):
    ...         yield F(rank, i)
    ...         yield B(rank, i)
    >>> one_at_a_time(ranks=2, microbatches=3)
    one_at_a_time(ranks=2, microbatches=3)
    """

    def decorate(generator: Callable[Concatenate[int, Sizes], Actions]) -> Factory[Sizes]:
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
    """The signature of the factory of `generator`, whose parameters must begin with `rank` and the names `first`."""
    signature = inspect.signature(generator)
    names, expected = list(signature.parameters), ["rank", *first]
    if names[: len(expected)] != expected:
        raise TypeError(
            f"{generator.__name__}: got parameters {names}, expected them to begin with {', '.join(expected)}. "
            "Write the generator of one rank, and take what it needs by these names."
        )
    return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=Schedule)


def _require_positive(factory: str, name: str, size: object, least: int = 1) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise SizeError.of(factory, name, size, f"an integer of at least {least}", f"Choose {name} >= {least}.")
