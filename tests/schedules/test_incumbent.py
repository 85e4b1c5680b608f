# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed.pipelining`: we read its files, it reads ours, and what it gets wrong is rejected."""

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as incumbent

from schedules import ProgramError, Schedule, ScheduleError, chain, check, gpipe, lower, one_f_one_b, split_backward
from schedules.files.cells import pipelining, pipelining_2_15
from schedules.files.csv import read_csv, table, write_csv
from schedules.language.actions import receive_of
from schedules.proof.interpreter import interpret
from schedules.proof.networks import fifo, rendezvous
from schedules.testing import schedules

LOOPED = [
    incumbent.ScheduleInterleaved1F1B,
    incumbent.ScheduleLoopedBFS,
    incumbent.ScheduleInterleavedZeroBubble,
]
VEE = [incumbent.ScheduleZBVZeroBubble, incumbent.ScheduleDualPipeV]
SHARDING = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
WAITS = hasattr(incumbent, "WAIT_SEND_F")  # as of torch 2.15
WORDS = pipelining_2_15 if WAITS else pipelining


def stages(ranks, chunks):
    """As much of its stages as its schedules look at before they run."""
    return [SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * chunks, submod=None)] * chunks


@st.composite
def orders(draw, kinds=(*LOOPED, *VEE)):
    """One of its schedules, of any size that it takes."""
    kind = draw(st.sampled_from(kinds))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    try:
        return kind(stages(ranks, 2 if kind in VEE else draw(st.integers(1, 3))), microbatches)
    except ValueError:
        assume(False)


def runtime(ranks, chunks, microbatches, defer=False):
    options = {"defer_pp_recv": True} if defer else {}
    return incumbent._PipelineScheduleRuntime(stages(ranks, chunks), microbatches, **options)


def can_defer():
    try:
        runtime(1, 1, 1, defer=True)
    except TypeError:  # before torch 2.13
        return False
    return True


deferring = pytest.mark.skipif(not can_defer(), reason="this version of torch does not defer receives")


def lower_by_torch(order, defer=False):
    """Its own lowering of one of its schedules."""
    done = runtime(order.pp_group_size, len(order._stages), order._n_microbatches, defer)
    done._prepare_schedule_with_comms({rank: [*row] for rank, row in order.pipeline_order.items()})
    return done


def dump(order, kind):
    """What we read in the file that it writes."""
    with TemporaryDirectory() as folder:
        order._dump_csv(path := Path(folder) / "order.csv", kind)
        return read_csv(path)


def load_in_torch(plan):
    """What it reads in the file that we write, and its own file of that."""
    program = not isinstance(plan, Schedule)
    s = plan.schedule if program else plan
    done = runtime(s.ranks, s.stages // s.ranks, s.microbatches)
    kind = "compute_comms" if program else "compute_only"
    with TemporaryDirectory() as folder:
        write_csv(plan, path := Path(folder) / "order.csv", words=WORDS)
        done._load_csv(path, kind)
        done._dump_csv(again := Path(folder) / "again.csv", kind)
        assert again.read_bytes().replace(b"\r\n", b"\n") == path.read_bytes()
    return done


def texts(row):
    """Its actions as text, without what is not for a schedule to say; a pair as two."""
    cells = (cell.sub_actions or (cell,) for cell in row if cell)
    return [str(action) for cell in cells for action in cell if action.computation_type.value not in SHARDING]


def ours(plan, rank):
    """Our actions as it would write them: no pairs and no peers, and no WAIT where it has none."""
    actions = [action for action in plan.actions(rank) if WAITS or "WAIT" not in action.kind]
    texts = (str(action).replace("OVERLAP_", "").replace("WAIT", "WAIT_SEND") for action in actions)
    return [text.partition(">")[0].partition("<")[0] for text in texts]


def ends(program):
    """Per channel, the receives that its sends ask for, and those that are posted, each in order."""
    found = defaultdict(lambda: ([], []))
    homes = program.schedule.placement.homes
    for rank in range(program.schedule.ranks):
        for action in program.actions(rank):
            if "SEND" in action.kind:
                found[rank, homes[action.peer]][0].append(receive_of(action))
            elif "RECV" in action.kind:
                found[homes[action.peer], rank][1].append(action)
    return found


@settings(deadline=None)
@given(orders())
def test_the_five_schedules_of_torch_pass(order):
    s = dump(order, "compute_only")
    check(s)
    assert (s.ranks, s.stages, s.microbatches) == (order.pp_group_size, order._num_stages, order._n_microbatches)
    assert dict(enumerate(s.placement.homes)) == order.stage_index_to_group_rank
    assert all(ours(s, rank) == texts(row) for rank, row in order.pipeline_order.items())


@settings(deadline=None)
@given(orders())
def test_programs_lowered_by_torch_are_read(order):
    theirs, s = lower_by_torch(order), dump(order, "compute_only")
    program = dump(theirs, "compute_comms")
    assert all(ours(program, rank) == texts(row) for rank, row in theirs.pipeline_order_with_comms.items())
    if isinstance(program, Schedule):
        assert s.ranks == 1
        return
    assert program.graph == chain(s.stages)
    assert program.schedule.placement == s.placement
    assert all(list(program.schedule.actions(rank)) == list(s.actions(rank)) for rank in range(s.ranks))
    check(program)
    for network in (rendezvous, fifo):
        interpret(program, network).require(program.graph, s.microbatches)


@deferring
@settings(deadline=None)
@given(orders())
def test_deferred_receives_of_torch_are_rejected_where_they_break_the_order_of_a_channel(order):
    program = dump(lower_by_torch(order, defer=True), "compute_comms")
    if isinstance(program, Schedule) or all(sent == posted for sent, posted in ends(program).values()):
        check(program)
        return
    with pytest.raises(ScheduleError, match=r"RECV_.* \[rule: channel_order\]"):
        check(program)
    with pytest.raises(ProgramError, match="at the head of its channel"):
        interpret(program, fifo)


@deferring
def test_the_simulator_of_torch_accepts_a_program_that_breaks_the_order_of_a_channel():
    theirs = lower_by_torch(VEE[0](stages(2, 2), 4), defer=True)
    program = dump(theirs, "compute_comms")
    with pytest.raises(ScheduleError, match=r"\[rule: channel_order\]"):
        check(program)
    for rank, row in theirs.pipeline_order_with_comms.items():  # which it does not simulate
        theirs.pipeline_order_with_comms[rank] = [a for a in row if a.computation_type.value not in SHARDING]
    assert theirs._simulate()


def reads(order, rows, kind):
    """It reads these cells without a complaint, but for a repeated send as of torch 2.15; so do we."""
    theirs = runtime(order.pp_group_size, len(order._stages), order._n_microbatches)
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "order.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
        try:
            theirs._load_csv(path, kind)
        except (AssertionError, ValueError) as error:
            if not WAITS or "Duplicate pipeline send" not in str(error):
                raise
        return read_csv(path)


@settings(deadline=None)
@given(orders(), st.data())
def test_repeated_actions_that_torch_accepts_are_rejected(order, data):
    rows = [[action for action in row if action] for row in order.pipeline_order.values()]
    row = data.draw(st.sampled_from(rows))
    at = data.draw(st.integers(0, len(row) - 1))
    row.insert(data.draw(st.integers(at + 1, len(row))), row[at])
    s = reads(order, rows, "compute_only")
    with pytest.raises(ScheduleError):
        check(s)


@settings(deadline=None)
@given(orders().filter(lambda order: order.pp_group_size > 1 and order._n_microbatches > 1), st.data())
def test_swapped_receives_that_torch_accepts_are_rejected(order, data):
    rows = list(lower_by_torch(order).pipeline_order_with_comms.values())
    rank = data.draw(st.integers(0, len(rows) - 1))
    kinds = {incumbent.RECV_F, incumbent.RECV_B}
    receives = [(at, action) for at, action in enumerate(rows[rank]) if action.computation_type in kinds]
    (a, first) = data.draw(st.sampled_from(receives))
    alike = [at for at, action in receives if action[:2] == first[:2] and at != a]
    rows[rank][a], rows[rank][b] = rows[rank][b := data.draw(st.sampled_from(alike))], first
    program = reads(order, rows, "compute_comms")
    with pytest.raises(ScheduleError):
        check(program)
    with pytest.raises(ProgramError):
        interpret(program, fifo)


@pytest.mark.parametrize("microbatches", [4, 5, 8])
def test_the_1f1b_table_of_torch_lacks_a_forward(microbatches):
    order = incumbent.Schedule1F1B(stages(4, 1)[0], microbatches)._get_pipeline_order()
    rows = tuple(",".join("" if action is None else str(action) for action in order[rank]) for rank in range(4))
    assert "3F0" not in rows[3]
    with pytest.raises(ScheduleError, match="3F0"):
        check(table(rows=rows))


def plans():
    """Schedules that it can read: its own orders, and ours."""
    linear = schedules([gpipe, one_f_one_b])
    return orders().map(lambda order: dump(order, "compute_only")) | linear | linear.map(split_backward)


@settings(deadline=None)
@given(plans())
def test_torch_reads_our_schedules(s):
    theirs = load_in_torch(s)
    assert all(ours(s, rank) == texts(row) for rank, row in theirs.pipeline_order.items())


@settings(deadline=None)
@given(plans())
def test_torch_reads_our_programs(s):
    program = lower(s)
    read, lowered = load_in_torch(program).pipeline_order_with_comms, load_in_torch(s).pipeline_order_with_comms
    for rank, row in read.items():
        assert ours(program, rank) == texts(row)
        assert sorted(map(str, row)) == sorted(set(map(str, lowered[rank])))  # it gathers weights again and again
