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

from schedules import ProgramError, Schedule, ScheduleError, chain, check
from schedules.cells import pipelining
from schedules.interchange import listing, read_csv, table, write_csv
from schedules.interpreter import interpret
from schedules.networks import fifo, receive_of, rendezvous

LOOPED = [
    incumbent.ScheduleInterleaved1F1B,
    incumbent.ScheduleLoopedBFS,
    incumbent.ScheduleInterleavedZeroBubble,
]
VEE = [incumbent.ScheduleZBVZeroBubble, incumbent.ScheduleDualPipeV]
SHARDING = {"UNSHARD", "RESHARD", "REDUCE_GRAD"}


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
    return incumbent._PipelineScheduleRuntime(stages(ranks, chunks), microbatches, defer_pp_recv=defer)


def lowered(order, defer=False):
    """Its own lowering of one of its schedules."""
    done = runtime(order.pp_group_size, len(order._stages), order._n_microbatches, defer)
    done._prepare_schedule_with_comms({rank: [*row] for rank, row in order.pipeline_order.items()})
    return done


def dumped(order, kind):
    """What we read in the file that it writes."""
    with TemporaryDirectory() as folder:
        order._dump_csv(path := Path(folder) / "order.csv", kind)
        return read_csv(path)


def loaded(plan):
    """What it reads in the file that we write, and its own file of that."""
    program = not isinstance(plan, Schedule)
    s = plan.schedule if program else plan
    done = runtime(s.ranks, s.stages // s.ranks, s.microbatches)
    kind = "compute_comms" if program else "compute_only"
    with TemporaryDirectory() as folder:
        write_csv(plan, path := Path(folder) / "order.csv", words=pipelining)
        done._load_csv(path, kind)
        done._dump_csv(again := Path(folder) / "again.csv", kind)
        assert again.read_bytes().replace(b"\r\n", b"\n") == path.read_bytes()
    return done


def texts(row):
    """Its actions as text, without what is not for a schedule to say; a pair as two."""
    cells = (cell.sub_actions or (cell,) for cell in row if cell)
    return [str(action) for cell in cells for action in cell if action.computation_type.value not in SHARDING]


def ours(plan, rank):
    """Our actions as it would write them: no pairs, no peers, no WAIT."""
    actions = (str(action).replace("OVERLAP_", "") for action in plan.actions(rank) if "WAIT" not in action.kind)
    return [text.partition(">")[0].partition("<")[0] for text in actions]


def with_waits(program):
    """The same program, waiting for all its sends at the end, as the incumbent does."""
    sends = ([a for a in program.actions(rank) if "SEND" in a.kind] for rank in range(program.schedule.ranks))
    waits = ([str(a).replace("SEND", "WAIT") for a in row] for row in sends)
    return listing(tuple(",".join((row, *late)) for row, late in zip(program.rows, waits, strict=True)))


def run(program, network):
    interpret(with_waits(program), network).require(program.graph, program.schedule.microbatches)


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
def test_its_five_orders_pass(order):
    s = dumped(order, "compute_only")
    check(s)
    assert (s.ranks, s.stages, s.microbatches) == (order.pp_group_size, order._num_stages, order._n_microbatches)
    assert dict(enumerate(s.placement.homes)) == order.stage_index_to_group_rank
    assert all(ours(s, rank) == texts(row) for rank, row in order.pipeline_order.items())


@settings(deadline=None)
@given(orders())
def test_its_lowering_is_read(order):
    theirs, s = lowered(order), dumped(order, "compute_only")
    program = dumped(theirs, "compute_comms")
    assert all(ours(program, rank) == texts(row) for rank, row in theirs.pipeline_order_with_comms.items())
    if isinstance(program, Schedule):
        assert s.ranks == 1
        return
    assert program.graph == chain(s.stages)
    assert program.schedule.placement == s.placement
    assert all(list(program.schedule.actions(rank)) == list(s.actions(rank)) for rank in range(s.ranks))
    run(program, rendezvous)
    run(program, fifo)


@settings(deadline=None)
@given(orders())
def test_its_deferred_receives_are_rejected_where_they_break_the_order_of_a_channel(order):
    program = dumped(lowered(order, defer=True), "compute_comms")
    if isinstance(program, Schedule) or all(sent == posted for sent, posted in ends(program).values()):
        return
    with pytest.raises(ProgramError, match="at the head of its channel"):
        run(program, fifo)


@pytest.mark.parametrize("ranks", range(2, 6))
@pytest.mark.parametrize("kind", VEE)
def test_its_deferred_receives_of_a_v_placement_are_rejected(kind, ranks):
    theirs = lowered(kind(stages(ranks, 2), 2 * ranks), defer=True)
    with pytest.raises(ProgramError, match="at the head of its channel"):
        run(dumped(theirs, "compute_comms"), fifo)


@pytest.mark.parametrize("microbatches", [4, 5, 8])
def test_its_table_of_1f1b_lacks_a_forward(microbatches):
    order = incumbent.Schedule1F1B(stages(4, 1)[0], microbatches)._get_pipeline_order()
    rows = tuple(",".join("" if action is None else str(action) for action in order[rank]) for rank in range(4))
    assert "3F0" not in rows[3]
    with pytest.raises(ScheduleError, match="3F0"):
        check(table(rows=rows))
