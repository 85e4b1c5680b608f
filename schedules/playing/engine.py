# SPDX-License-Identifier: Apache-2.0
"""Play all ranks together: in which order actions can run, and when each one ends.

Problem. Checking, simulating and drawing ask the same question: if each rank runs its actions in order and waits for
its inputs, how far does each rank get, and when does each action end?

Idea. `replay` answers it in one loop over all actions, holding only what is in flight. A rank is played until it blocks
on a dependency; the rank that produces it pushes the blocked rank back onto the stack of runnable ranks. The stack is
last in, first out, so a rank resumes soon after its input arrives.

Collectives and moves of memory go on beside the rank's other actions (`schedules.playing.lanes`).

A fused pair runs as one action: it starts once the inputs of both actions are there, and both outputs leave at its end.

Invariant: no rank waits for something that has arrived.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from schedules.errors import ScheduleError
from schedules.language.actions import BESIDE, KINDS, Action
from schedules.language.graph import Graph
from schedules.language.membership import explain_misfits
from schedules.language.schedule import Schedule, graph_of
from schedules.playing.costs import UNITS, Costs
from schedules.playing.dependencies import Dependency, Wire, Wires, wires
from schedules.playing.lanes import RankLanes
from schedules.playing.outputs import unit_of

Gives: TypeAlias = tuple[tuple[Dependency, float], ...]
Pending: TypeAlias = tuple[Gives, int] | tuple[()]
SPANS_AT_ONCE = 1024


class Span(NamedTuple):
    """The time from `start` to `end` that `rank` spent running `action`, or waiting for it if it is a transfer.

    Simulations have no spans for waits: a rank waits whenever it is not busy.
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def waits(self) -> bool:
        """True if the rank waited for a transfer: `RECV` for an input, `WAIT` for a send to complete.

        >>> from schedules import F, parse
        >>> Span(1, F(1, 0), 2, 3).waits, Span(1, parse("1RECV_F0<0"), 0, 2).waits
        (False, True)
        """
        return self.action.peer is not None


class ReplayState:
    """The progress of the replay; every attribute is indexed by rank.

    - `heads`: the next action, `None` at the end; `partners`: the one after it, if it has been read; `streams`: the
      rest.
    - `waits`: the dependency the rank is blocked on.
    - `draws`: the rank's random numbers, if there is jitter.
    - `begin`, `clock`: when the first action began and the last one ended; `busy`: the time spent in actions.
    - `held`, `peak`: current and peak memory.
    - `lanes`: what goes on beside the rank's other actions.
    """

    def __init__(self, streams: Sequence[Iterator[Action]], costs: Costs, wires: Wires, routes: int) -> None:
        P = len(streams)
        self.jitter, self.lanes = costs.jitter, [RankLanes(rank, rows, routes) for rank, rows in enumerate(wires)]
        self.draws = _make_draws(costs.seed, P) if costs.jitter else ()
        self.streams = streams
        self.heads = [next(stream, None) for stream in streams]
        self.partners: list[Action | None] = [None] * P
        self.waits: list[Dependency | None] = [None] * P
        self.begin, self.clock, self.busy = [inf] * P, [0.0] * P, [0.0] * P
        self.held, self.peak = [0.0] * P, [0.0] * P


def _make_draws(seed: int, ranks: int) -> Sequence[Callable[[float, float], float]]:
    """Return a generator of uniform random numbers for each rank."""
    from random import Random  # it is rarely needed, and slow to import

    return [Random(f"{seed}/{rank}").uniform for rank in range(ranks)]


def replay(
    schedule: Schedule, streams: Sequence[Iterator[Action]], wires: Wires, costs: Costs, spans: bool = True
) -> Generator[list[Span], None, ReplayState]:
    """Play the actions of all ranks to the end, yield spans in batches, and return the final `ReplayState`.

    `streams[r]` yields the actions of rank `r`. Spans come in an order the data dependencies allow; none if `spans` is
    false. Raise `ScheduleError` (rule `ordered`) if the ranks deadlock or wait for something no rank makes. Time is
    linear in the number of actions; memory is proportional to what is in flight.
    """
    with explain_misfits(schedule):
        state = ReplayState(streams, costs, wires, len(schedule.placement.routes))
        yield from _play(schedule, state, wires, costs, spans)
    if any(state.heads):
        raise _explain_deadlock(schedule, state)
    state.clock = [max(clock, *lanes.free.values(), 0.0) for clock, lanes in zip(state.clock, state.lanes, strict=True)]
    return state


def replay_to_end(schedule: Schedule, wires: Wires, costs: Costs) -> ReplayState:
    """Return the state at the end of a schedule's own actions. Raise what `replay` raises."""
    played = replay(schedule, [*map(schedule.actions, range(schedule.ranks))], wires, costs, spans=False)
    try:
        next(played)
    except StopIteration as end:
        state: ReplayState = end.value
        return state
    raise AssertionError("without spans, a replay yields nothing")


def find_makespan(schedule: Schedule, costs: Costs, graph: Graph | None = None) -> float:
    """Return how long a schedule takes. Raise what `replay` raises."""
    return max(replay_to_end(schedule, wires(schedule, graph_of(schedule, graph), costs, UNITS), costs).clock)


def _play(  # noqa: PLR0912, PLR0915 - the one hot loop: any call in it costs time on every action
    schedule: Schedule, state: ReplayState, wires: Wires, costs: Costs, spans: bool
) -> Iterator[list[Span]]:
    """Play until every rank has ended or is blocked."""
    slices, R, jitter = schedule.slices, len(schedule.placement.routes), costs.jitter
    factors = costs.factors(schedule.microbatches, slices)
    batch: list[Span] = []
    ready = [*reversed(range(len(wires)))]
    while ready:
        # Resume a rank where it blocked. Its state is in local variables as long as it runs.
        rank = ready.pop()
        pending: Pending = ()  # the outputs of the first action of a pair, until the pair ends
        rows, stream, action = wires[rank], state.streams[rank], state.heads[rank]
        now, busy, held, peak = state.clock[rank], state.busy[rank], state.held[rank], state.peak[rank]
        moves = state.lanes[rank].moves

        while action is not None:
            # Look up what the action takes, gives and costs.
            kind, stage, unit, _, part = action
            takes, gives, time, grows, special = rows[kind][stage if R == 1 else stage * R + unit % R]
            if part is not None:
                unit = unit * slices + part

            # Some actions go on beside the rank's other ones. Moves take and free memory while those run.
            if special and kind in BESIDE:
                if factors and unit < len(factors) and KINDS[kind].after:
                    time *= factors[unit]
                span = _run_beside(state, rank, action, now, time, takes, gives, unit, ready)
                if KINDS[kind].after:
                    insort(moves, (span.start if grows > 0 else span.end, grows), key=itemgetter(0))
                else:
                    held += grows
                    peak = max(held, peak)
                if spans:
                    batch.append(span)
                action = next(stream, None)
                continue

            # Find when it can start: its rank is free, and its inputs are there; for a pair, those of both actions. If
            # one is missing, the rank blocks.
            start = now
            if special and (start := max(now, _find_pair_start(schedule, state, rank, rows))) == inf:
                break
            blocked = False
            for dependency in takes:
                if (arrived := dependency.arrived.get(unit)) is None:
                    dependency.wanted, state.waits[rank] = unit, dependency
                    blocked = True
                    break
                if arrived > start:
                    start = arrived
            if blocked:
                break

            # Run it: use the inputs up, and move the clock on.
            for dependency in takes:
                del dependency.arrived[unit]
            if factors and unit < len(factors) and KINDS[kind].after:
                time *= factors[unit]
            if jitter:
                time *= state.draws[rank](1 - jitter, 1 + jitter)
            if not now:
                state.begin[rank] = min(start, state.begin[rank])
            now = start + time
            busy += time
            while moves and moves[0][0] <= (start if grows > 0 else now):
                held += moves.pop(0)[1]
                peak = max(held, peak)
            held += grows
            if held > peak:
                peak = held
            if spans:
                batch.append(Span(rank, action, start, now))
                if len(batch) >= SPANS_AT_ONCE:
                    yield batch
                    batch = []

            # The outputs of the first action of a pair leave when the second one ends.
            if special:
                pending = gives, unit
                action, state.partners[rank] = state.partners[rank], None
                continue

            # Send the outputs, and wake the ranks that wait for them.
            for dependency, delay in gives:
                dependency.arrived[unit] = now + delay
                if dependency.wanted == unit:
                    dependency.wanted = None
                    ready.append(dependency.consumer)
            if pending:
                _deliver(*pending, now, ready)
                pending = ()
            action = next(stream, None)

        # Save the state of the rank: it has blocked or ended.
        state.heads[rank] = action
        state.clock[rank], state.busy[rank], state.held[rank], state.peak[rank] = now, busy, held, peak
    if batch:
        yield batch


def _deliver(gives: Gives, unit: int, now: float, ready: list[int]) -> None:
    """Send the outputs of the first action of a pair, now that the pair has ended."""
    for dependency, delay in gives:
        dependency.arrived[unit] = now + delay
        if dependency.wanted == unit:
            dependency.wanted = None
            ready.append(dependency.consumer)


def _run_beside(
    state: ReplayState,
    rank: int,
    action: Action,
    now: float,
    time: float,
    takes: tuple[Dependency, ...],
    gives: Gives,
    unit: int,
    ready: list[int],
) -> Span:
    """Post what goes on beside, once its inputs are there; send its outputs when it ends, and return its span."""
    if state.draws:
        time *= state.draws[rank](1 - state.jitter, 1 + state.jitter)
    for dependency in takes:  # the end of another such action, which is known
        now = max(now, dependency.arrived.get(unit) or 0.0)
        del dependency.arrived[unit]
    start, end = state.lanes[rank].post(action, unit, now, time)
    state.begin[rank] = min(start, state.begin[rank])
    _deliver(gives, unit, end, ready)
    return Span(rank, action, start, end)


def _find_pair_start(schedule: Schedule, state: ReplayState, rank: int, rows: dict[str, dict[int, Wire]]) -> float:
    """Return when the inputs of a fused pair's second action are there, or infinity if they are not: the pair waits."""
    if state.partners[rank] is None:
        state.partners[rank] = next(state.streams[rank], None)
    action, latest = state.partners[rank], 0.0
    if action is None:
        return latest
    R = len(schedule.placement.routes)
    unit = unit_of(action, schedule.slices)
    for dependency in rows[action.kind][action.stage * R + action.microbatch % R].takes:
        if (arrived := dependency.arrived.get(unit)) is None:
            dependency.wanted, state.waits[rank] = unit, dependency
            return inf
        latest = max(latest, arrived)
    return latest


def _explain_deadlock(schedule: Schedule, state: ReplayState) -> ScheduleError:
    """Return the error for a replay that is stuck.

    Follow the waits from the lowest blocked rank until a rank waits for something never made, or a cycle closes. First
    read the rest of every stream: if one breaks a rule further on, it raises, and that is the cause. A cycle is blamed
    only if each of its ranks would eventually make what the previous one needs.
    """
    ahead = [[a for a in (head, partner) if a] for head, partner in zip(state.heads, state.partners, strict=True)]
    rest = [[*some, *stream] for some, stream in zip(ahead, state.streams, strict=True)]
    rank, seen = next(rank for rank, actions in enumerate(rest) if actions), list[int]()
    while True:
        seen.append(rank)
        dependency = state.waits[rank]
        assert dependency is not None, "a rank with actions to come waits"
        maker, name = dependency.producer, _name_dependency(dependency, schedule.slices)
        is_made = any(_is_made_by(action, dependency, schedule) for action in rest[maker])
        if maker == rank or not is_made:
            why, repair = _explain_missing(rank, maker, name, is_made)
            break
        if maker in seen:
            cycle = seen[seen.index(maker) :]
            names = [_name_dependency(wait, schedule.slices) for r in cycle if (wait := state.waits[r])]
            waits = [f"rank {r} at {rest[r][0]} needs {need}" for r, need in zip(cycle, names, strict=True)]
            rank, name, why = cycle[0], names[0], f"and the ranks wait for each other: {', '.join(waits)}"
            repair = "Reorder the actions of one of these ranks."
            break
        rank = maker
    position = sum(1 for _ in schedule.actions(rank)) - len(rest[rank])
    return ScheduleError("ordered", rank, position, rest[rank][0], f"needs {name}, {why}", repair)


def _explain_missing(rank: int, maker: int, name: str, is_made: bool) -> tuple[str, str]:
    """Return why `rank` waits forever for something that `maker` makes later, or never; and the repair."""
    if is_made:
        return "which this rank runs only later", f"Move {name} before it."
    runner = "no rank ever" if maker == rank else f"rank {maker} never"
    return f"which {runner} runs", f"Add {name} to rank {maker}."


def _is_made_by(action: Action, dependency: Dependency, schedule: Schedule) -> bool:
    """Return whether `action` produces what `dependency` waits for."""
    word = KINDS[action.kind]
    if action.stage != dependency.source:
        return False
    if dependency.what == "G":
        return word.after == "done"
    return word.crosses == dependency.what and unit_of(action, schedule.slices) == dependency.wanted


def _name_dependency(dependency: Dependency, slices: int) -> str:
    assert dependency.wanted is not None, "a rank waits for it"
    if dependency.what == "G":
        return f"all backwards of stage {dependency.source} on rank {dependency.producer}"
    i, part = divmod(dependency.wanted, slices)
    unit = f"{i}" if slices == 1 else f"{i}.{part}"
    s = dependency.source
    return f"{s}F{unit}" if dependency.what == "F" else f"{s}B{unit} or {s}I{unit}"
