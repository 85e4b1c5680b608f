# SPDX-License-Identifier: Apache-2.0
"""The costs of actions and transfers: time and memory.

Users choose the units: one for all times and one for all sizes. A single number applies to all stages; a tuple has one
number per stage. Anything negative, infinite or not a number raises `SizeError`. So does a tuple of the wrong length,
once it is used with a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from schedules.arguments import is_number, is_size
from schedules.errors import SizeError
from schedules.language.actions import GATHERINGS
from schedules.own_kinds import OwnKind

Cost: TypeAlias = float | tuple[float, ...]
PER_UNIT: Final = ("microbatches", "slices")
"""The costs that are tuples for units, not for stages."""
ROUNDING: Final = 1e-9
"""Sums of fractions are not exact: a limit counts as exceeded only by more than this."""


def of_stage(cost: Cost, stage: int) -> float:
    """Return the number that applies to `stage`."""
    return cost[stage] if isinstance(cost, tuple) else cost


def require_stages(values: Costs | Link | Sizes, stages: int) -> None:
    """Raise `SizeError` for a tuple that does not have one number for each of `stages` stages."""
    for name, cost in vars(values).items():
        if isinstance(cost, Link):
            require_stages(cost, stages)
        elif name not in ("slow", *PER_UNIT) and isinstance(cost, tuple) and len(cost) != stages:
            raise _size_error(values, name, f"a number, or a tuple of {stages}: one for each stage")


def _require_costs(values: Costs | Link | Sizes, *names: str) -> None:
    for name in names:
        cost = getattr(values, name)
        parts = cost if isinstance(cost, tuple) else (cost,)
        if not parts or not all(map(_is_cost, parts)):
            raise _size_error(values, name, "a finite number of at least 0, or a tuple with one for each stage")


def _require_number(values: Costs | Link, name: str) -> None:
    if not _is_cost(getattr(values, name)):
        raise _size_error(values, name, "a finite number of at least 0")


def _is_cost(number: object) -> bool:
    try:
        return is_number(number) and 0 <= float(number) < inf  # type: ignore[arg-type]
    except OverflowError:  # an integer
        return False


def _is_slow(entry: object) -> bool:
    match entry:
        case ((source, target), factor):
            return is_size(source, 0) and is_size(target, 0) and _is_cost(factor)
    return False


def _size_error(values: Costs | Link | Sizes, name: str, expected: str) -> SizeError:
    return SizeError.of(type(values).__name__, name, getattr(values, name), expected, f"Correct {name}.")


@dataclass(frozen=True)
class Link:
    """A transfer time of `latency + bytes / bandwidth`. Transfers overlap with compute and with each other.

    - `bytes`: the size of what one stage sends another for one microbatch, a value or a cotangent, by sending stage.
    - `slow`: `((source rank, target rank), factor)` pairs, for links that differ from the others.
    - `back`: the size of the cotangents that a stage sends; `None` means `bytes`.

    >>> Link(latency=1, bandwidth=4, bytes=8, slow=(((0, 1), 3),)).time(stage=0, ends=(0, 1))
    9.0
    >>> Link(bandwidth=4, bytes=(8, 0), back=(0, 2)).time(stage=1, ends=(1, 0), what="B")
    0.5
    """

    latency: float = 0
    bandwidth: float = inf
    bytes: Cost = 0
    slow: tuple[tuple[tuple[int, int], float], ...] = ()
    back: Cost | None = None

    def __post_init__(self) -> None:
        _require_number(self, "latency")
        _require_costs(self, "bytes", *() if self.back is None else ("back",))
        if not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise _size_error(self, "bandwidth", "a number above 0, or infinity")
        if not isinstance(self.slow, tuple) or not all(map(_is_slow, self.slow)):
            raise _size_error(self, "slow", "((source rank, target rank), factor) pairs, with factors of at least 0")

    def time(self, stage: int, ends: tuple[int, int], what: str = "F") -> float:
        """Return the time from the end of the action that makes something to its arrival; `what` is `B` for cotangents.

        It is `F` for values, and `G` for gradients.
        """
        size = self.bytes if what != "B" or self.back is None else self.back
        return (self.latency + of_stage(size, stage) / self.bandwidth) * dict(self.slow).get(ends, 1)


@dataclass(frozen=True)
class Costs:
    """The time of each kind of action for one microbatch.

    - `F`, `B`: a forward, and a full backward; `None` for `B` means the time of its halves.
    - `I`, `W`: the halves of a backward; `None` means what the other half leaves of `B`, or half of it. If neither `B`
      nor a half is given, each half takes 1.
    - `C`, `R`: a checkpointed forward and a recomputation; `None` means the time of `F`.
    - `OVERLAP_F`: the time a forward adds to the backward it overlaps with; `None` means the time of `F`, so no gain.
    - `UNSHARD`, `REDUCE_GRAD`: the time to gather a stage's weights, and to reduce its gradient. A rank's collectives
      run one after the other, beside its other actions.
    - `OFFLOAD`, `RELOAD`: the time to move what a forward keeps off the device, and back; `None` means the time of
      `OFFLOAD`. Both go on beside all else, each one after the other of its kind.
    - `comm`: the time of a transfer between ranks, from the end of the action that makes a value, or of its fused pair,
      to its arrival: a number, or a `Link`. Transfers overlap with compute.
    - `jitter`: multiplies every action's time by a number drawn uniformly from `1 - jitter` to `1 + jitter`, by `seed`.
    - `microbatches`: per microbatch, how many times as long its passes take; by default, all take equally long.
    - `slices`: per slice of a sequence, its part of the time of the microbatch, in any unit; by default, all are equal.

    >>> Costs(F=(1, 5)).time("F", 1), Costs(F=2).time("R", 0)
    (5, 2)
    >>> [Costs(F=3, B=6).time(kind, 0) for kind in "BIW"], [Costs(I=3, W=1).time(kind, 0) for kind in "BIW"]
    ([6, 3.0, 3.0], [4, 3, 1])
    """

    F: Cost = 1
    B: Cost | None = None
    I: Cost | None = None  # noqa: E741 - the action's name
    W: Cost | None = None
    comm: float | Link = 0
    C: Cost | None = None
    R: Cost | None = None
    OVERLAP_F: Cost | None = None
    G: Cost = 0
    U: Cost = 0
    UNSHARD: Cost = 0
    REDUCE_GRAD: Cost = 0
    OFFLOAD: Cost = 0
    RELOAD: Cost | None = None
    jitter: float = 0
    seed: int = 0
    microbatches: tuple[float, ...] = ()
    slices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("B", "I", "W", "C", "R", "OVERLAP_F", "RELOAD") if getattr(self, name) is not None]
        _require_costs(self, "F", "G", "U", "UNSHARD", "REDUCE_GRAD", "OFFLOAD", *given)
        if not isinstance(self.comm, Link):
            _require_number(self, "comm")
        if type(self.seed) is not int:
            raise _size_error(self, "seed", "an integer")
        if not (_is_cost(self.jitter) and self.jitter < 1):
            raise _size_error(self, "jitter", "a share from 0 to less than 1")
        for name in PER_UNIT:
            factors = getattr(self, name)
            if not isinstance(factors, tuple) or not all(map(_is_cost, factors)) or (factors and not sum(factors)):
                raise _size_error(self, name, "a tuple of finite numbers of at least 0, not all of them 0")

    def time(self, kind: str, stage: int) -> float:
        """Return the time of one compute action on one microbatch, without jitter."""
        if kind == "RESHARD":
            return 0
        if isinstance(kind, OwnKind):
            return kind.time
        cost: Cost | None = getattr(self, kind)
        if cost is not None:
            return of_stage(cost, stage)
        if kind == "B":
            return self.time("I", stage) + self.time("W", stage)
        if kind not in "IW":
            return of_stage(self.OFFLOAD if kind == "RELOAD" else self.F, stage)
        other = self.W if kind == "I" else self.I
        if self.B is None:
            return 1
        whole = of_stage(self.B, stage)
        return whole / 2 if other is None else max(0, whole - of_stage(other, stage))

    def factors(self, microbatches: int, slices: int) -> list[float]:
        """Return by what to multiply the times of each unit, a slice or a whole microbatch; nothing if all are equal.

        Raise `SizeError` for other numbers of microbatches and slices.

        >>> Costs(microbatches=(1, 2), slices=(1, 3)).factors(microbatches=2, slices=2)
        [0.5, 1.5, 1.0, 3.0]
        """
        for name, count in zip(PER_UNIT, (microbatches, slices), strict=True):
            if len(getattr(self, name)) not in (0, count):
                raise _size_error(self, name, f"a tuple of {count}: one for each of the schedule's {name}")
        if not (self.microbatches or self.slices):
            return []
        parts = [slices * part / sum(self.slices) for part in self.slices] or [1.0] * slices
        return [one * part for one in self.microbatches or (1.0,) * microbatches for part in parts]

    def transfer(self, what: str, stage: int, source: int, target: int) -> float:
        """Return the time to transfer an output of `stage` from rank `source` to rank `target`; 0 within a rank."""
        if source == target:
            return 0
        return self.comm.time(stage, (source, target), what) if isinstance(self.comm, Link) else self.comm


@dataclass(frozen=True)
class Sizes:
    """The memory of one microbatch on one stage.

    - `activation`: what a forward saves for the backward, including its inputs.
    - `inputs`: what a checkpointed forward saves.
    - `residual`: what the input half of the backward leaves for the weight half; `None` means all of `activation`.
    - `weight`: one version of a stage's weights, always held; each further version of an asynchronous schedule takes as
      much again.
    - `gathered`: what gathering a stage's weights adds to its shard, until they are freed.

    >>> Sizes(activation=4, residual=1).growth("I", 0)
    -3
    """

    activation: Cost = 1
    inputs: Cost = 0
    residual: Cost | None = None
    weight: Cost = 0
    gathered: Cost = 0

    def __post_init__(self) -> None:
        _require_costs(
            self, "activation", "inputs", "weight", "gathered", *() if self.residual is None else ("residual",)
        )

    def growth(self, kind: str, stage: int, backward: bool = True) -> float:
        """Return the change in its rank's memory due to an action: increases at its start, decreases at its end.

        In a schedule without `backward`, passes save nothing.
        """
        if kind in GATHERINGS:
            gathered = of_stage(self.gathered, stage)
            return gathered if kind == "UNSHARD" else -gathered
        if isinstance(kind, OwnKind):
            return kind.growth * of_stage(self.activation, stage)
        if not backward:
            return 0
        activation, inputs = of_stage(self.activation, stage), of_stage(self.inputs, stage)
        residual = activation if self.residual is None else of_stage(self.residual, stage)
        changes = {
            "F": activation,
            "OVERLAP_F": activation,
            "C": inputs,
            "R": activation - inputs,
            "B": -activation,
            "I": residual - activation,
            "W": -residual,
            "OFFLOAD": -activation,
            "RELOAD": activation,
        }
        return changes.get(kind, 0)


UNITS: Final = Sizes()
"""Without sizes, memory is counted in activations of one microbatch on one stage."""
NO_COSTS: Final = Costs(F=0, B=0, I=0, W=0)
"""Nothing takes any time: the order alone counts."""
