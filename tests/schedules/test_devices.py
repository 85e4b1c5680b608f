# SPDX-License-Identifier: Apache-2.0
"""Programs end on every device: shared queues, launches that block, synchronization, few multiprocessors."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Device,
    ProgramError,
    ScheduleError,
    SizeError,
    chain,
    check,
    dualpipe_v,
    eager_1f1b,
    families,
    gpipe,
    interleaved_zero_bubble,
    lower,
    merge_backward,
    mirror,
    offload,
    one_f_one_b,
    overlap,
    parse,
    pipedream,
    recompute,
    run_on_device,
    seq_1f1b,
    simulate,
    split_backward,
)
from schedules.testing import collective_orders, orders, schedules
from schedules.testing.mutants import EditedProgram, mutant_programs
from tests.common.sizes import NIGHTLY, in_turn, sampled

DEVICES = {
    "ideal": Device(),
    "one queue": Device(queues=1),
    "two queues": Device(queues=2, eager=True),
    "launches block": Device(blocks=True),
    "launches block, eager": Device(blocks=True, eager=True),
    "one multiprocessor": Device(slots=1),
    "two multiprocessors": Device(slots=2, eager=True),
    "synchronized": Device(synchronizes=frozenset((rank, n) for rank in range(4) for n in range(0, 40, 3))),
    "a host that is not far ahead": Device(ahead=1),
}


@st.composite
def devices(draw, ranks):
    """Any device, which something synchronizes before any actions."""
    few = st.integers(0, 3)
    sometimes = st.frozensets(st.tuples(st.integers(0, ranks - 1), st.integers(0, 30)))
    return Device(draw(few), draw(st.booleans()), draw(st.booleans()), draw(few), draw(sometimes), draw(few))


@pytest.mark.parametrize(("name", "device"), in_turn(families.__all__, DEVICES), ids=str)
def test_every_family_ends_on_every_device_in_the_memory_that_is_simulated(name, device):
    schedule = getattr(families, name)(ranks=4, microbatches=8)
    require_memory(run_on_device(lower(schedule), DEVICES[device]), schedule, DEVICES[device])


def require_memory(run, schedule, device, graph=None):
    """Require the memory that is simulated. Where memory is moved off the device, it may be less, since a move may end
    earlier, and more, by what is moved, only if moves share hardware queues with what waits for other ranks."""
    each = schedule.ranks / (schedule.slices * schedule.stages)  # of one microbatch on one stage
    for rank, (most, bound) in enumerate(zip(run.memory, simulate(schedule, graph=graph).peak_memory, strict=True)):
        moved = sum(action.kind == "OFFLOAD" for action in schedule.actions(rank))
        late = moved * each if device.queues else 0
        assert most == pytest.approx(bound) or (moved and most < bound + late + 1e-9)


@sampled(1)
@pytest.mark.parametrize("cases", [orders(), collective_orders()], ids=["alone", "with collectives"])
@settings(deadline=None, max_examples=50_000 if NIGHTLY else settings().max_examples)
@given(st.data())
def test_any_order_ends_on_any_device(cases, data):
    schedule, graph = data.draw(cases)
    check(schedule, graph, device=True)
    program, copies = lower(schedule, graph), data.draw(st.integers(1, 2))
    device = data.draw(devices(schedule.ranks))
    require_memory(run_on_device(program, device, copies), schedule, device, graph)


FAMILIES = [one_f_one_b, eager_1f1b, interleaved_zero_bubble, seq_1f1b, pipedream, dualpipe_v]
TRANSFORMS = [split_backward, merge_backward, recompute, offload, overlap, mirror]


@settings(deadline=None)
@given(schedules(FAMILIES), st.lists(st.sampled_from(TRANSFORMS), min_size=1, max_size=3), st.data())
def test_what_transforms_make_ends_on_any_device(s, several, data):
    for change in several:
        with suppress(SizeError):  # what cannot be mirrored
            s = change(s)
    check(s, device=True)
    device = data.draw(devices(s.ranks))
    require_memory(run_on_device(lower(s), device), s, device)


def ends(program, device):
    try:
        run_on_device(program, device)
    except ProgramError:
        return False
    return True


def is_accepted(program, device):
    try:
        check(program, device=device)
    except ScheduleError:
        return False
    return True


@settings(deadline=None)
@given(orders(), st.data())
def test_a_program_ends_on_every_device_exactly_if_check_accepts_it(case, data):
    program = lower(*case)
    for _ in range(10):
        mutant = data.draw(mutant_programs(program))
        if is_accepted(mutant, device=False):
            assert is_accepted(mutant, device=True) == ends(mutant, Device(blocks=True))
            assert not is_accepted(mutant, device=True) or ends(mutant, data.draw(devices(mutant.schedule.ranks)))


HASTY = "0RECV_B0<1 0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"


def test_a_receive_that_is_posted_before_what_its_message_depends_on_is_refused():
    rows = tuple(tuple(map(parse, row.split())) for row in HASTY)
    program = EditedProgram(gpipe(2, 1), chain(2), rows)
    check(program)
    with pytest.raises(ScheduleError) as caught:
        check(program, device=True)
    assert str(caught.value) == (
        "rank 0, position 0, 0RECV_B0<1: would never end on a device that does one thing at a time: rank 0 at "
        "0RECV_B0<1, rank 1 at 1RECV_F0<0 wait for each other [rule: posts]. Post it after the actions that its "
        "message depends on, and the transfers of all ranks in one order, as lower() does."
    )
    run_on_device(program, Device())
    for device in (Device(blocks=True, eager=True), Device(slots=1), Device(synchronizes=frozenset({(0, 0)}))):
        with pytest.raises(ProgramError, match="rank 0 runs 0RECV_B0<1 and waits to start"):
            run_on_device(program, device)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_messages_are_as_many_as_the_host_is_ahead_whatever_the_number_of_microbatches(ahead):
    most = [max(run_on_device(lower(one_f_one_b(4, m)), Device(ahead=ahead)).messages) for m in (8, 16, 32)]
    assert most[0] == most[1] == most[2] <= 8 + 2 * ahead
    assert max(run_on_device(lower(one_f_one_b(4, 32)), Device()).messages) == 128, "none is freed before the end"
