# SPDX-License-Identifier: Apache-2.0
"""Improve orders with a constraint solver, and prove how good they are: CP-SAT of OR-Tools, if it is installed.

Every pass is an interval of fixed length, passes of a rank do not overlap, and what a rank holds is a cumulative
resource, taken from the start of a forward to the end of its halves. The solver begins at the best orders known.

The solver counts in whole numbers. Times that are not become so by a common factor, and what remains is rounded down:
then the solver's bound is below the true one, and its orders are played with the true times.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from schedules.errors import SolverError
from schedules.playing.instance import FORWARD, INPUT_HALF, WEIGHT_HALF, Contender, Instance, Job
from schedules.searching.timing import time_orders

FINEST: Final = 1_000_000
"""Times that no factor makes whole are counted in this many parts of the makespan."""


class Solution(NamedTuple):
    """The best orders, and a lower bound on the makespan of all schedules."""

    contender: Contender
    bound: float


Solver: TypeAlias = Callable[[Instance, Contender, float, int], Solution]
"""Improves a contender at an instance within so many seconds, with a seed for random numbers."""


def cp_sat(instance: Instance, contender: Contender, seconds: float, seed: int) -> Solution:
    """Return the best orders that CP-SAT finds from a contender, and the bound that it proves.

    It runs on one thread; with the same seed it takes the same steps, so only `seconds` may change the result. For the
    `solver` of `search`. Raise `SolverError` if OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverError(
            "solver: got cp_sat, expected OR-Tools to be installed. Run pip install 'fpipe-torch[solver]', or leave "
            "out solver=."
        ) from error
    model = IntegerModel(cp_model.CpModel(), instance, contender)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # the workers take turns: deterministic, and on one thread
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(contender, 0.0)
    found = model.read_orders(solver.value)
    return Solution(min(contender, found, key=lambda one: one.makespan), solver.best_objective_bound / model.factor)


class IntegerModel:
    """A CP-SAT model of an instance. `starts` has a variable per pass; `factor` makes times whole."""

    def __init__(self, model: Any, instance: Instance, contender: Contender) -> None:
        self.model, self.instance, self.contender = model, instance, contender
        self.factor = instance.factor or FINEST / contender.makespan
        played = time_orders(instance, contender.orders)
        assert played is not None, "contenders can be played"
        self.horizon = int(contender.makespan * self.factor) + 1
        self.starts = {job: model.new_int_var(0, self.horizon, "") for order in contender.orders for job in order}
        for order, times in zip(contender.orders, played.starts, strict=True):
            for job, time in zip(order, times, strict=True):
                model.add_hint(self.starts[job], int(time * self.factor))
        self._connect()
        for rank in range(instance.ranks):
            self._share(rank)
        makespan = model.new_int_var(0, self.horizon, "")
        for job in self.starts:
            model.add(makespan >= self._end(job))
        model.minimize(makespan)

    def _time(self, kind: int, n: int) -> int:
        return int(self.instance.times[kind][n] * self.factor + 1e-6)

    def _end(self, job: Job) -> Any:
        return self.starts[job] + self._time(job[0], job[1])

    def _connect(self) -> None:
        """Say which pass comes after which others."""
        for kind, n, k in self.starts:
            start = self.starts[kind, n, k]
            if k:
                self.model.add(start >= self._end((kind, n, k - 1)))
            if kind:
                self.model.add(start >= self._end((kind - 1, n, k)))
            for other, transfer in self.instance.needs[kind][n]:
                self.model.add(start >= self._end((kind, other, k)) + int(transfer * self.factor + 1e-6))

    def _share(self, rank: int) -> None:
        """Say that passes of a rank do not overlap, and that what it holds fits."""
        jobs = [job for job in self.starts if self.instance.rank[job[1]] == rank]
        new = self.model.new_fixed_size_interval_var
        self.model.add_no_overlap([new(self.starts[job], self._time(job[0], job[1]), "") for job in jobs])
        if self.instance.caps[rank] == inf or INPUT_HALF not in self.instance.kinds:
            return
        held, sizes = [], []
        unit = self.instance.caps[rank] / FINEST
        for kind, n, k in jobs:
            size = -self.instance.growth[kind][n]
            if kind != FORWARD and size > 0:
                start, end = self.starts[FORWARD, n, k], self._end((kind, n, k))
                lasts = self.model.new_int_var(0, self.horizon, "")
                held.append(self.model.new_interval_var(start, lasts, end, ""))
                sizes.append(int(size / unit))
        self.model.add_cumulative(held, sizes, FINEST)

    def read_orders(self, value: Callable[[Any], int]) -> Contender:
        """Return the orders of a solution; without the rounding they may take a little longer, or not fit."""
        orders: list[list[Job]] = [[] for _ in range(self.instance.ranks)]
        last = {kind: kind for kind in (FORWARD, INPUT_HALF, WEIGHT_HALF)}
        for job in sorted(self.starts, key=lambda job: (value(self.starts[job]), last[job[0]])):
            orders[self.instance.rank[job[1]]].append(job)
        played = time_orders(self.instance, orders)
        if played is None or not self.instance.fits(orders):
            return self.contender
        return Contender(played.makespan, orders, f"{self.contender.origin}, improved by CP-SAT")
