# SPDX-License-Identifier: Apache-2.0
"""What the executor computes, shown on formulas: symbolic stages over any schedule of any stage graph.

A symbolic stage makes a formula of everything that it is given: parameters, buffers, batch, key, values and cotangents,
told apart by port. What all stages make under a program must be what the whole model makes, one microbatch after the
other. Formulas are objects of their own, so it can also be seen when the executor lets go of them.
"""

import gc
import weakref
from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.runtime.executor import Execution, Inputs
from fpipe.runtime.instructions import link
from fpipe.runtime.local import LocalTransport, drive
from schedules import (
    B,
    F,
    Graph,
    I,
    W,
    chain,
    connect,
    gpipe,
    list_versions,
    lower,
    one_f_one_b,
    split_backward,
    update_weights,
)
from schedules.language.actions import KINDS
from schedules.testing import collective_orders, orders
from tests.common.sizes import few
from tests.common.symbolic import (
    Symbolic,
    SymbolicWeights,
    batch,
    key,
    runnable,
    stages_of,
    unit_of,
    weights,
)


def whole(schedule, graph: Graph):
    """The model itself, unit by unit: results, and the terms of every gradient by (stage, unit)."""
    units, versions = stages_of(graph, range(graph.stages), schedule), list_versions(schedule)
    results, terms, kept = {}, {}, {}
    for first in range(0, len(units), schedule.slices):
        here, values, cotangents = range(first, first + schedule.slices), {}, {}
        for unit, s, stage in [(u, *pair) for u in here for pair in units[u].items()]:
            got = tuple(v for one in stage.gets for v in values[one.source, s, unit - (one.source == s)])
            params = weights(s, versions[s, unit // schedule.slices])
            outputs, _, kept[s, unit] = stage.forward(params, (), batch(s, unit) + got, key(unit))
            outputs = list(outputs)
            if stage.results:
                results[unit] = tuple(outputs[:1])
                outputs = outputs[1:]
            for one in stage.gives:
                values[s, one.target, unit] = [outputs.pop(0) for _ in one.specs]
        for unit, s, stage in [(u, *pair) for u in reversed(here) for pair in reversed(units[u].items())]:
            got = tuple(v for one in stage.pulled_by for v in cotangents[one.source, s, unit + (one.source == s)])
            outgoing, (terms[s, unit],) = stage.backward(kept[s, unit], got)
            outgoing = list(outgoing)
            for one in stage.pulls:
                cotangents[s, one.target, unit] = [outgoing.pop(0) for _ in one.specs]
    return results, terms


FUNCTIONS = {
    "F": "forward",
    "C": "evaluate",
    "R": "forward",
    "OVERLAP_F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}


def plainly(action, function, *arguments):
    return function(*arguments)


def with_weights(weights, compute, action, function, *arguments):
    """Call a stage's function, whose weights must be there if it reads them."""
    if KINDS[action.kind].reads:
        weights.require_gathered(action.stage)
    return compute(action, function, *arguments)


class Hooked:
    """A stage whose functions are called through `compute(action, function, *arguments)`."""

    def __init__(self, stage, running, compute):
        self.stage, self.running, self.compute = stage, running, compute

    def __getattr__(self, name):
        found = getattr(self.stage, name)
        if name not in FUNCTIONS.values():
            return found
        return lambda *arguments: self.compute(self.running[0].at.action, found, *arguments)


def execution_through(rank, actions, units, schedule, transport, inputs, compute, phases=1):
    """An execution of these actions, in which the stages of each unit call `compute`."""
    running = []
    hooked = [{s: Hooked(stage, running, compute) for s, stage in stages.items()} for stages in units]
    linked = link(actions, hooked[0], schedule.placement, dict(enumerate(hooked)), phases, schedule.slices)
    running.append(Execution(rank, linked, transport, inputs))
    return running[0]


def execute(schedule, graph, compute=plainly, rows=None, phases=1):
    """Run a schedule's program, or these rows of actions, in one process: the executions, and their outcomes."""
    program = lower(schedule, graph)
    transport = LocalTransport()
    executions = []
    for rank in range(schedule.ranks):
        held = schedule.placement.stages_on(rank)
        units, own = stages_of(graph, held, schedule), SymbolicWeights(schedule, rank, phases)
        inputs = Inputs(
            params=own.of_units(len(units)),
            buffers=[dict.fromkeys(held, ())] * len(units),
            batch=batch,
            keys=list(map(key, range(len(units)))),
            group=own,
            update=own.update,
        )
        actions = list(program.actions(rank)) if rows is None else rows[rank]
        through = partial(with_weights, own, compute)
        executions.append(execution_through(rank, actions, units, schedule, transport, inputs, through, phases))
    return executions, dict(enumerate(drive(executions)))


def order(schedule, rank, s, kinds):
    return [
        unit_of(action, schedule) for action in schedule.actions(rank) if action.stage == s and action.kind in kinds
    ]


@settings(max_examples=few(450))
@given(orders() | collective_orders(), st.integers(1, 3))
def test_any_schedule_of_any_graph_computes_the_whole_model(case, phases):
    require_whole_model(*case, phases)


def require_whole_model(schedule, graph, phases=1):
    """Require that the executor makes what the whole model makes, under any correct schedule."""
    executions, outcomes = execute(schedule, graph, phases=phases)
    results, terms = whole(schedule, graph)
    placement = schedule.placement
    assert sorted(outcomes) == list(range(schedule.ranks))
    for rank, outcome in outcomes.items():
        mine = {i for i in results if placement.home(graph.stages - 1, i // schedule.slices) == rank}
        assert outcome.results == {i: results[i] for i in mine}, "on a rank of the last stage"
        assert set(outcome.buffers[0]) == set(outcome.grads) == set(placement.stages_on(rank))
        found = executions[rank].inputs.group.found
        for s in placement.stages_on(rank):
            forwards = order(schedule, rank, s, ("F", "C", "OVERLAP_F"))
            assert outcome.buffers[0][s] == tuple(map(key, forwards)), "buffers go in the order of F"
            if s in found:
                assert found[s] == list(split_at_updates(schedule, rank, s, terms)), "each update takes its own"
                assert outcome.grads[s] == ()
            else:
                assert outcome.grads[s] == total(schedule, s, terms), "and gradients as scheduled"
                assert outcome.updates.get(s, (s, 0, outcome.grads))[2][s] == outcome.grads[s]
    got = {(rank, *edge): copy for rank, outcome in outcomes.items() for edge, copy in outcome.shared.items()}
    crossing = {(route[t], s, t) for route in placement.routes for s, t in graph.gradients if route[s] != route[t]}
    totals = {s: total(schedule, s, terms) for s in range(graph.stages)}
    assert got == {(rank, s, t): Symbolic(graph, s).gradients_for(t, totals[s]) for rank, s, t in crossing}


def split_at_updates(schedule, rank, s, terms):
    """Yield the terms that each update of a stage applies, in the order in which backwards add them."""
    done, applied = order(schedule, rank, s, ("B", "W")), -1
    for action in schedule.actions(rank):
        if (action.kind, action.stage) == ("U", s):
            yield tuple(terms[s, i] for i in done if applied < i // schedule.slices <= action.microbatch)
            applied = action.microbatch


def total(schedule, s, terms):
    """The gradient of a stage: terms in the order of the schedule; of replicas, their sums in the order of routes."""
    ranks = schedule.placement.replicas(s)
    sums = [tuple(terms[s, i] for i in order(schedule, rank, s, ("B", "W"))) for rank in ranks]
    assert sorted(term for one in sums for term in one) == sorted(
        term for (stage, _), term in terms.items() if stage == s
    )
    added = tuple(sums) if len(ranks) > 1 else sums[0]
    reduces = any(action.kind == "REDUCE_GRAD" for action in schedule.actions(ranks[0]))
    return ("reduced", *added) if reduces else added


@given(runnable())
def test_an_update_finds_the_whole_gradient_of_its_stage_and_of_those_it_shares_with(case):
    schedule, graph = case
    _, outcomes = execute(schedule, graph)
    updated = update_weights(connect(schedule, graph))
    _, again = execute(updated, graph)
    for rank, outcome in again.items():
        assert outcome[:4] == outcomes[rank][:4], "an update changes nothing else"
        assert list(outcome.updates) == [action.stage for action in updated.actions(rank) if action.kind == "U"]
        for s, (stage, microbatch, grads, shared) in outcome.updates.items():
            assert (stage, schedule.placement.home(s, microbatch)) == (s, rank)
            assert grads[s] == outcome.grads[s]
            assert shared == {edge: copy for edge, copy in outcome.shared.items() if edge[1] == s}


@given(runnable())
def test_no_values_are_left_at_the_end(case):
    for execution in execute(*case)[0]:
        tables = execution.kept, execution.posted, execution.residuals, execution.deferred, execution.checkpoints
        assert list(tables) == [{}] * 5


@given(runnable())
def test_every_action_calls_its_stage_function(case):
    schedule, graph = case
    calls = defaultdict(list)

    def compute(action, function, *arguments):
        calls[schedule.placement.home(action.stage, action.microbatch)].append((action, function.__name__))
        return function(*arguments)

    execute(schedule, graph, compute)
    for rank in range(schedule.ranks):
        called = [action for action in schedule.actions(rank) if action.kind not in ("G", "OFFLOAD", "RELOAD")]
        assert calls[rank] == [(action, FUNCTIONS[action.kind]) for action in called]


@given(runnable())
def test_every_value_is_released_at_its_last_use(case):
    """Between two compute actions there are the residuals of what is in flight, the arguments of what is to be computed
    again, and nothing of what is done."""
    schedule, graph = case
    kept, arguments = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
    done = {}

    def compute(action, function, *given):
        kind, s, i = action.kind, action.stage, unit_of(action, schedule)
        flying = {where for where, latest in done.items() if latest in ("F", "R", "OVERLAP_F", "I")} - {(s, i)}
        assert {where for where in kept.values() if where != (s, i)} == flying
        used = {where for where, latest in done.items() if latest != "C"} - {(s, i)}
        assert not {where for where in arguments.values() if where in used}
        out = function(*given)
        if kind in ("F", "C", "R", "OVERLAP_F"):
            for value in given[2]:
                arguments[value] = s, i
        if kind in ("F", "R", "OVERLAP_F"):
            kept[out[2]] = s, i
        done[s, i] = kind
        return out

    gc.disable()
    try:
        execute(schedule, graph, compute)
    finally:
        gc.enable()
    assert not kept


def test_a_sent_value_is_released_by_both_ends():
    alive = weakref.WeakSet()
    most = 0

    def compute(action, function, *arguments):
        nonlocal most
        most = max(most, len(alive))
        out = function(*arguments)
        if action.kind == "F":
            alive.update(out[0])
        return out

    microbatches = 20
    executions, outcomes = execute(one_f_one_b(ranks=3, microbatches=microbatches), chain(3), compute)
    del executions, outcomes
    gc.collect()
    assert most < microbatches + 8, "results of the last stage stay; values that crossed do not"
    assert not alive


@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_the_position_is_that_of_the_running_action(kinds):
    schedule = gpipe(ranks=2, microbatches=2)
    schedule = split_backward(schedule) if kinds == "IW" else schedule
    seen = []

    def compute(action, function, *arguments):
        if action.stage == 0:
            seen.append((execution.at.position, action))
        return function(*arguments)

    program = list(lower(schedule, chain(2)).actions(0))
    graph, transport = chain(2), LocalTransport()
    inputs = [Inputs([{s: ""}] * 2, [{s: ()}] * 2, batch, [0, 1]) for s in range(2)]
    stages = [{s: Symbolic(graph, s)} for s in range(2)]
    execution = execution_through(0, program, stages[:1], schedule, transport, inputs[0], compute)
    other = Execution(1, link(lower(schedule, graph).actions(1), stages[1], schedule.placement), transport, inputs[1])
    drive([execution, other])
    assert [action for _, action in seen] == [program[position] for position, _ in seen] == list(schedule.actions(0))
    assert execution.at.position == len(program) - 1


@given(st.integers(1, 3), st.integers(1, 5))
def test_backwards_in_another_order_give_other_sums(ranks, microbatches):
    """Backwards of another order than stated give other sums: what the properties above would see."""
    schedule = gpipe(ranks=ranks, microbatches=microbatches)
    _, outcomes = execute(schedule, chain(ranks))
    _, terms = whole(schedule, chain(ranks))
    backwards = tuple(terms[0, i] for i in reversed(range(microbatches)))
    assert (outcomes[0].grads[0] == backwards) == (microbatches == 1)


def test_an_action_of_an_unknown_kind_or_out_of_order_is_an_error():
    schedule = gpipe(ranks=1, microbatches=1)
    with pytest.raises(KeyError):
        execute(schedule, chain(1), rows=[[F(0, 0)._replace(kind="X")]])
    for rows in ([[W(0, 0)]], [[F(0, 0), I(0, 0), W(0, 0), W(0, 0)]]):
        with pytest.raises(KeyError):
            execute(schedule, chain(1), rows=rows)
    assert execute(schedule, chain(1), rows=[[F(0, 0), B(0, 0)]])[1][0].grads[0]
