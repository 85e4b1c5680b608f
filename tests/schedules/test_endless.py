# SPDX-License-Identifier: Apache-2.0
"""Windows, put together, are the program of any number of batches; what does not repeat is refused."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules import (
    B,
    F,
    Graph,
    ScheduleError,
    SizeError,
    U,
    chain,
    check,
    from_rows,
    gpipe,
    linear,
    list_versions,
    looped,
    lower,
    pipedream,
    pipedream_2bw,
    recompute,
    schedule,
    split_backward,
    update_weights,
)
from schedules.checking.channels import check_transfers
from schedules.checking.rules import count_versions
from schedules.endless import EndlessProgram, lengthen
from schedules.playing.rows import edit
from tests.common.sizes import few


@schedule(placement=looped)
def two_stages_each(rank, ranks, microbatches, late, chunks=2):
    """Two stages on each rank, one after the other, whose updates come `late` microbatches late."""
    stages = (rank, rank + ranks)
    ahead = 2 * ranks
    for i in range(microbatches + ahead + late):
        for s in stages if i < microbatches else ():
            yield F(s, i)
        for s in reversed(stages) if 0 <= i - ahead < microbatches else ():
            yield B(s, i - ahead)
        for s in stages if 0 <= i - ahead - late < microbatches else ():
            yield U(s, i - ahead - late)


@st.composite
def repeating(draw):
    ranks = draw(st.integers(1, 5))
    m = draw(st.integers(ranks, 6))
    made = draw(
        st.sampled_from(
            [
                pipedream(ranks, 1),
                pipedream_2bw(ranks, m, accumulate=m),
                two_stages_each(ranks, 1, draw(st.integers(0, 3))),
            ]
        )
    )
    for change in draw(st.lists(st.sampled_from([split_backward, recompute]), max_size=1)):
        made = change(made)
    return made


@st.composite
def graphs_of(draw, stages):
    edges = {(s, s + 1) for s in range(stages - 1)}
    pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))
    edges |= {(s, t) for s, t in draw(st.sets(pairs, max_size=3)) if s < t}
    cotangents = draw(st.sets(st.sampled_from(sorted(edges)))) if edges and draw(st.booleans()) else edges
    shared = draw(st.sets(pairs, max_size=3)) if draw(st.booleans()) else set()
    return Graph(stages, frozenset(edges), frozenset(cotangents), frozenset((s, t) for s, t in shared if s != t))


def require_windows(endless, batches):
    """The windows of so many batches are their program; those that are not among the last ones never change."""
    program = endless.lower(batches)
    check_transfers(program)
    for rank, reach in enumerate(endless.reach):
        windows = [endless.window(rank, k, batches) for k in range(batches)]
        assert [action for window in windows for action in window] == list(program.actions(rank))
        early = range(max(batches - reach, 0))
        assert windows[: len(early)] == [endless.window(rank, k) for k in early]


@settings(max_examples=few(60), deadline=None)
@given(st.data())
def test_windows_are_the_program_of_any_number_of_batches(data):
    how = data.draw(repeating())
    endless = EndlessProgram(how, data.draw(graphs_of(how.stages)))
    known = endless.known
    for batches in {1, 2, known - 1, known, known + 1, data.draw(st.integers(1, 3 * known))}:
        longer = lengthen(how, batches)
        check(longer, replace(endless.graph, gradients=frozenset()))
        if not endless.sharing and endless.graph.values == endless.graph.cotangents:
            assert [*endless.lower(batches).actions(0)] == [*lower(longer, endless.graph).actions(0)]
        require_windows(endless, batches)


def test_a_first_window_may_name_a_later_batch_than_those_that_repeat():
    """Rank 3 looks ahead by two batches at first, while it fills, and by one from then on."""
    chained, shared = {(s, s + 1) for s in range(4)}, frozenset({(2, 4)})
    endless = EndlessProgram(
        pipedream(ranks=5, microbatches=1), Graph(5, frozenset(chained), frozenset({(0, 1), (1, 2)}), shared)
    )
    assert endless.reach == (5, 4, 2, 2, 2)
    for batches in range(1, endless.known + 2):
        require_windows(endless, batches)


@pytest.mark.parametrize(
    "how", [pipedream(4, 1), pipedream_2bw(3, 3, accumulate=3), two_stages_each(2, 1, 1)], ids=repr
)
def test_shared_parameters_have_the_version_of_the_latest_stage(how):
    """Gradients of a batch arrive before the first forward that uses them, and not before they are complete."""
    S, each = how.stages, how.microbatches
    graph = replace(chain(S), gradients=frozenset({(0, S - 1), (S - 1, 0)}))
    endless = EndlessProgram(how, graph)
    versions = list_versions(lengthen(how, 9))
    for i in range(9 * each):
        assert endless.shared_version(i) == min(versions[s, i] for s in (0, S - 1))
    program = endless.lower(9)
    for s, rank in ((s, how.placement.home(s, 0)) for s in (0, S - 1)):
        taken = given = 0
        for kind, stage, i, _, _ in program.actions(rank):
            taken += (kind, stage) == ("F", 2 * S + s)
            given += (kind, stage) == ("F", S + s)
            if (kind, stage) == ("F", s):
                assert taken == endless.shared_version(i) <= given
        assert taken == given == 9


@schedule(placement=linear)
def slower_and_slower(rank, ranks, microbatches):
    """Hold more microbatches with every update."""
    waiting, hold = [], 1
    for i in range(microbatches):
        yield F(rank, i)
        waiting.append(i)
        if len(waiting) == hold:
            for j in waiting:
                yield B(rank, j)
                yield U(rank, j)
            waiting, hold = [], hold + 1
    for j in waiting:
        yield B(rank, j)
        yield U(rank, j)


@schedule(placement=linear, version=lambda microbatch, **sizes: max(microbatch - 3 + 2 * (microbatch % 2), 0))
def to_and_fro(rank, ranks, microbatches):
    """Use versions that go back and forth."""
    yield from pipedream.generator(rank, ranks, microbatches)


def test_what_does_not_repeat_is_refused():
    for how, problem in (
        (slower_and_slower(1, 1), "is not the same for every batch"),
        (pipedream(2, 4), "is not the one update of a batch of 4 microbatches, after microbatch 3"),
        (update_weights(gpipe(2, 4)), "is not the one update of a batch"),
        (gpipe(2, 4), "ends in window 1 of 2, with updates of 0 of its 1 stages"),
        (to_and_fro(2, 1), "declares version 0 for microbatch 2 after 0|after .*, so no version could ever be freed"),
    ):
        with pytest.raises(ScheduleError, match=problem):
            EndlessProgram(how, chain(how.stages)).known  # noqa: B018
    with pytest.raises(SizeError, match="expected one whose factory takes the number of microbatches"):
        lengthen(from_rows(((F(0, 0), B(0, 0), U(0, 0)),), linear(1), 1), 2)


@pytest.mark.parametrize("how", [pipedream(3, 1), pipedream_2bw(3, 3, accumulate=3)], ids=repr)
def test_lengthening_keeps_what_was_asked_for(how):
    assert lengthen(how, 1) == how
    assert lengthen(lengthen(how, 2), 3) == lengthen(how, 6)
    assert lengthen(split_backward(how), 2) == split_backward(lengthen(how, 2))


def test_2bw_uses_the_versions_of_its_paper():
    """Microbatch k uses version max(k // m - 1, 0) on every rank, and two are kept (arXiv 2006.09503, section 3.1)."""
    for ranks in (1, 2, 4):
        how = pipedream_2bw(ranks, 16, accumulate=4)
        check(how)
        assert list_versions(how) == {(s, k): max(k // 4 - 1, 0) for s in range(ranks) for k in range(16)}
        assert all(count_versions(how, rank) == {rank: 2} for rank in range(ranks))


@schedule(placement=linear, version=lambda microbatch, early, **sizes: max(microbatch - early, 0))
def declared(rank, ranks, microbatches, early):
    """PipeDream with versions as old as `early`."""
    yield from pipedream.generator(rank, ranks, microbatches)


def test_a_version_must_be_made_before_its_use():
    check(declared(3, 6, early=2))
    with pytest.raises(
        ScheduleError, match=r"0F2: uses version 1 of the weights, and the rank has made versions 0 to 0"
    ):
        check(declared(3, 6, early=1))
    kept = [count_versions(declared(3, 9, early=2), rank)[rank] for rank in range(3)]
    assert kept == [3, 3, 3]


@settings(max_examples=few(60))
@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 12))
def test_rows_keep_the_declared_versions(ranks, early, microbatches):
    assume(early >= ranks - 1)
    how = declared(ranks, microbatches, early)
    same = edit(how, [how.actions(rank) for rank in range(ranks)])
    assert list_versions(same) == list_versions(how)
    assert [count_versions(same, rank) for rank in range(ranks)] == [count_versions(how, rank) for rank in range(ranks)]
