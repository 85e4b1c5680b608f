# SPDX-License-Identifier: Apache-2.0
"""`check` is never wrong: it accepts exactly what, run on formulas, computes the whole model.

Any correct schedule of any stage graph, with replicas, slices, recomputation, updates, fused pairs and collectives, is
edited at random, and so is its program. What `check` says of the result must be what the interpreter finds, for a
program on a network that matches tags and on one that does not. The interpreter shares nothing with the rules.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedules import PipelineError, ScheduleError, chain, check, gpipe, lower, parse
from schedules.proof.interpreter import ideal, interpret, prove, require_whole
from schedules.proof.networks import fifo, rendezvous
from schedules.testing import collective_orders, mutants, orders
from schedules.testing.mutants import EditedProgram, mutant_programs

often = settings(max_examples=settings().max_examples * 2, deadline=None, suppress_health_check=list(HealthCheck))


def is_accepted(plan, graph=None):
    try:
        check(plan, graph)
    except ScheduleError:
        return False
    return True


def computes(schedule, graph):
    try:
        require_whole(ideal(schedule, graph), schedule, graph)
    except PipelineError:
        return False
    return True


def runs(program):
    try:
        for network in (rendezvous, fifo):
            require_whole(interpret(program, network), program.schedule, program.graph)
    except PipelineError:
        return False
    return True


CASES = pytest.mark.parametrize("cases", [orders(), collective_orders()], ids=["alone", "with collectives"])


@CASES
@often
@given(st.data())
def test_every_correct_order_is_accepted_and_so_is_its_program(cases, data):
    case = data.draw(cases)
    check(*case)
    check(lower(*case))
    prove(*case)


@CASES
@often
@given(st.data())
def test_a_schedule_is_accepted_exactly_if_it_computes_the_whole_model(cases, data):
    schedule, graph = data.draw(cases)
    for _ in range(10):
        mutant = data.draw(mutants(schedule))
        assert is_accepted(mutant, graph) == computes(mutant, graph)


@CASES
@often
@given(st.data())
def test_a_program_is_accepted_exactly_if_it_runs_over_either_network(cases, data):
    program = lower(*data.draw(cases))
    for _ in range(10):
        mutant = data.draw(mutant_programs(program))
        assert is_accepted(mutant) == runs(mutant)


def judge(*rows):
    rows = tuple(tuple(map(parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError) as caught:
        check(EditedProgram(gpipe(2, 1), chain(2), rows))
    return str(caught.value)


FIRST, SECOND = "0RECV_B0<1 0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((FIRST.replace(" 0SEND_F0>1", ""), SECOND), "1F0: waits for 0SEND_F0>1, which rank 0 never runs"),
        ((FIRST, SECOND.replace("1RECV_F0<0 ", "")), "1F0: waits for 0SEND_F0>1, for which no receive is posted"),
        (("0RECV_B0<1 0F0 0B0 0SEND_F0>1", SECOND), "for each other: rank 0 at 0B0, rank 1 at 1F0 [rule: flows]"),
        ((FIRST + " 0SEND_F0>1", SECOND), "0SEND_F0>1: is sent before it is made, or twice"),
        ((FIRST, SECOND + " 1WAIT_B0>0 1WAIT_B0>0"), "1WAIT_B0>0: waits for no earlier send, or waits twice"),
        ((FIRST, SECOND + " 1RECV_F0<0"), "1RECV_F0<0 is posted, but never sent [rule: nothing_left]"),
        ((FIRST + " 1RECV_B0<0", SECOND), "1RECV_B0<0: is not a message for rank 0 [rule: received_once]"),
        ((FIRST + " 0SEND_F0>7", SECOND), "names a stage that does not exist"),
    ],
)
def test_a_wrong_program_is_refused_with_the_reason(rows, why):
    assert why in judge(*rows)
