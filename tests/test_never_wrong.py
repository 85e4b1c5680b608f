# SPDX-License-Identifier: Apache-2.0
"""`check` is never wrong: it accepts exactly what, run on formulas, computes the whole model.

Any correct schedule of any stage graph, with replicas, slices, recomputation, updates and fused pairs, is edited at
random, and so is its program. What `check` says of the result must be what the interpreter finds, for a program on a
network that matches tags and on one that does not. The interpreter shares nothing with the rules.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedules import PipelineError, ScheduleError, check, lower
from schedules.interpreter import ideal, interpret, prove, require_whole
from schedules.networks import fifo, rendezvous
from schedules.testing import mutants, orders
from schedules.testing.mutants import mutant_programs

often = settings(max_examples=settings().max_examples * 2, deadline=None, suppress_health_check=list(HealthCheck))


def accepted(plan, graph=None):
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


@often
@given(orders())
def test_every_correct_order_is_accepted_and_so_is_its_program(case):
    check(*case)
    check(lower(*case))
    prove(*case)


@often
@given(orders(), st.data())
def test_a_schedule_is_accepted_exactly_if_it_computes_the_whole_model(case, data):
    schedule, graph = case
    for _ in range(10):
        mutant = data.draw(mutants(schedule))
        assert accepted(mutant, graph) == computes(mutant, graph)


@often
@given(orders(), st.data())
def test_a_program_is_accepted_exactly_if_it_runs_over_either_network(case, data):
    program = lower(*case)
    for _ in range(10):
        mutant = data.draw(mutant_programs(program))
        assert accepted(mutant) == runs(mutant)
