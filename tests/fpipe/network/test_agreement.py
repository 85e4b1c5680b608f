# SPDX-License-Identifier: Apache-2.0
"""Ranks that make the same call agree; any others learn what differs and between whom, and nobody is left waiting.

What `describe_value` describes alike does the same, as far as one can see. tests/distributed compares processes.
"""

import logging
import threading
from dataclasses import dataclass
from functools import partial
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import distributed_c10d

from fpipe import InputError, TransportError
from fpipe.network.agreement import MOST_FIELDS, Field, agree, announce_refusal
from fpipe.network.fingerprint import describe_value, digest_tensor
from fpipe.network.groups import Control, Slate
from fpipe.network.job import require_process_group
from tests.common.lookalikes import LOOKALIKES, closure, function
from tests.common.sizes import few


class Room:
    """Ranks as threads, which exchange tensors as a collective does: of one shape, or everybody fails."""

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size, timeout=600)
        self.places, self.exchanges = [None] * size, 0

    def exchange(self, rank, mine):
        """Return what all ranks pass."""
        self.places[rank] = mine
        self.barrier.wait()
        found = list(self.places)
        self.exchanges += rank == 0
        self.barrier.wait()
        assert len({(one.shape, one.dtype) for one in found}) == 1, "a real collective would abort"
        return found


@dataclass
class Seat:
    """The place of one rank in a room."""

    room: Room
    rank: int

    def gather(self, mine):
        return self.room.exchange(self.rank, mine)

    def post(self, row):
        mine = torch.tensor(row)
        found = self.gather(mine)
        return lambda: len(found) if all(torch.equal(one, mine) for one in found) else found


def together(*acts):
    """What each of these returned or raised, called at once with (rank, seat); and how many exchanges it took."""
    room, found = Room(len(acts)), [None] * len(acts)

    def run(rank):
        try:
            found[rank] = acts[rank](rank, Seat(room, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, room.exchanges


def call(name, note=0, **fields):
    def act(rank, seat):
        return agree(rank, seat, name, [Field.of(key, lines) for key, lines in fields.items()], note)

    return act


def refusal(name, error):
    return lambda rank, seat: announce_refusal(seat, name, error)


def test_ranks_that_agree_exchange_one_row():
    found, exchanges = together(*[call("a step", note, seed=["3"], batch=["x", "y"]) for note in (5, 6, 7)])
    assert found == [[5, 6, 7]] * 3
    assert exchanges == 1


def test_differences_are_shown_by_rank_from_where_they_begin():
    same = ["first line"]
    acts = [
        call("a step", seed=[str(rank == 2)], batch=[*same, "other" if rank == 1 else "usual"]) for rank in range(4)
    ]
    found, _ = together(*acts)
    for rank, error in enumerate(found):
        assert isinstance(error, TransportError)
        assert f"rank {rank}, a step: got ranks that differ" in str(error)
        assert "- seed: got on ranks 0-1, 3: False; on rank 2: True" in str(error)
        assert "- batch: got on ranks 0, 2-3: usual; on rank 1: other" in str(error)
        assert "first line" not in str(error)


def test_long_lines_are_shown_around_the_difference():
    def line(word):
        return ["F " * 500 + word + " B" * 500]

    found, _ = together(call("a step", program=line("one")), call("a step", program=line("two")))
    assert len(str(found[0])) < 700
    assert "F one B" in str(found[0])
    assert "F two B" in str(found[0])


def test_different_calls_do_not_agree_whatever_their_fields():
    found, _ = together(call("a step (call 4)", seed=["1"]), call("an evaluation (call 4)"))
    for error in found:
        assert "- call: got on rank 0: a step (call 4); on rank 1: an evaluation (call 4)" in str(error)


def test_a_refusal_on_one_rank_reaches_all():
    error = InputError("inputs[0]: got nothing")
    found, _ = together(call("a step", seed=["1"]), refusal("a step", error), call("a step", seed=["1"]))
    assert found[1] is None
    assert "- rank 1: InputError: inputs[0]: got nothing" in str(found[0])
    assert "- rank 1: InputError: inputs[0]: got nothing" in str(found[2])


ACTS = st.one_of(
    st.builds(lambda name, seed, note: ("call", name, seed, note), *[st.sampled_from("ab")] * 2, st.integers(0, 3)),
    st.builds(lambda text: ("refuse", text), st.text(max_size=9)),
)


@settings(max_examples=few(25))
@given(st.one_of(st.lists(ACTS, min_size=1, max_size=4), ACTS.map(lambda act: [act] * 3)))
def test_all_agree_or_all_fail(rows):
    """Whatever ranks are in, all leave it, after the same exchanges, and only if all are in the same."""
    acts = [
        refusal("a", ValueError(row[1])) if row[0] == "refuse" else call(row[1], row[3], seed=[row[2]]) for row in rows
    ]
    found, _ = together(*acts)
    same = len({row[:3] for row in rows}) == 1 and rows[0][0] == "call"
    for row, one in zip(rows, found, strict=True):
        if row[0] == "refuse":
            assert one is None
        elif same:
            assert one == [row[3] for row in rows]
        else:
            assert isinstance(one, TransportError)


def test_every_row_has_the_same_size():
    shapes = []

    class Alone:
        def post(self, mine):
            shapes.append(tuple(torch.tensor(mine).shape))
            return lambda: 1

    for count in (0, 3, MOST_FIELDS):
        agree(0, Alone(), "a step", [Field.of(str(k), []) for k in range(count)])
    announce_refusal(Alone(), "a step", ValueError())
    assert set(shapes) == {(3,)}


class Wire:
    """A process group of threads, which counts the bytes that each sends and receives."""

    def __init__(self, size):
        self.size, self.moved = size, [0] * size
        self.queues = [Queue() for _ in range(2 * size)]

    def end(self, rank):
        return SimpleNamespace(send=partial(self._send, rank), recv=partial(self._recv, rank))

    def _send(self, rank, tensors, other, tag):
        self.moved[rank] += tensors[0].nbytes
        self.queues[2 * min(rank, other) + (rank < other)].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def _recv(self, rank, tensors, other, tag):
        self.moved[rank] += tensors[0].nbytes
        queue = self.queues[2 * min(rank, other) + (other < rank)]
        return SimpleNamespace(wait=lambda: tensors[0].copy_(queue.get(timeout=600)))


@pytest.mark.parametrize("odd", [None, 7])
def test_512_processes_that_agree_move_few_bytes(odd):
    """About 30 bytes each, and the last as many from and to each; all rows only if one differs."""
    wire, found = Wire(size := 512), [None] * 512

    def run(rank):
        table = Control(wire.end(rank), rank, tuple(range(size)))
        slate = Slate(size)
        slate.write((0, 3, int(rank == odd)))
        found[rank] = table.post(slate, lambda pending: [work.wait() for work in pending.works], "a step")()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if odd is None:
        assert found == [size] * size
        assert sum(wire.moved) / size < 64
    else:
        rows = [[0, 3, int(rank == odd)] for rank in range(size)]
        assert all([row.tolist() for row in one] == rows for one in (found[0], found[odd], found[-1]))


def test_memory_that_is_used_again_does_not_tell_of_earlier_agreements():
    """Each answer is that of its own rows: after a difference, and after none."""
    wire, odds, found = Wire(3), [None, 1, None, 2, 0, None], [[] for _ in range(3)]

    def run(rank):
        table, slate = Control(wire.end(rank), rank, (0, 1, 2)), Slate(3)
        for turn, odd in enumerate(odds):
            slate.write((0, turn, int(rank == odd)))
            answer = table.post(slate, lambda pending: [work.wait() for work in pending.works], "a step")()
            found[rank] += [answer if isinstance(answer, int) else [row.tolist() for row in answer]]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [
        3 if odd is None else [[0, turn, int(rank == odd)] for rank in range(3)] for turn, odd in enumerate(odds)
    ]
    assert found == [expected] * 3


@pytest.mark.parametrize("size", ["2", "16"])
def test_several_processes_without_a_process_group_are_refused(size):
    with pytest.raises(TransportError, match=rf"started {size} processes.*init_process_group\(\)"):
        require_process_group({"WORLD_SIZE": size})
    for alone in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}):
        require_process_group(alone)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_another_launcher_are_pointed_out(name, caplog):
    """They may be there for something else."""
    require_process_group({name: "1"})
    require_process_group({name: "8", "WORLD_SIZE": "1"})
    assert not caplog.records
    require_process_group({name: "8"})
    assert f"{name}=8: a launcher has started several processes" in caplog.text


def test_private_names_of_torch():
    """Where groups are looked up, and what they are called by."""
    assert isinstance(distributed_c10d._world.pg_map, dict)
    assert isinstance(vars(torch.distributed.ProcessGroup)["group_desc"], property)


# ------------------------------------------------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("what", LOOKALIKES)
def test_functions_that_differ_have_different_descriptions(what):
    one, two = LOOKALIKES[what]
    assert describe_value(one) != describe_value(two)
    assert describe_value(one) == describe_value(one)


def test_functions_that_do_the_same_have_equal_descriptions():
    for pair in (
        (function("def f(x): return x + 1"), function("\n\n# a word\ndef f(x):\n    return x + 1")),
        (function("def f(x): return x + 1"), function("def f(other): return other + 1")),
        (
            function("def f(x): return g", g=logging.getLogger("a")),
            function("def f(x): return g", g=logging.getLogger("b")),
        ),
        (closure(torch.device("cuda", 0)), closure(torch.device("cuda", 1))),
        (closure([1, 2]), closure([1, 2])),
    ):
        assert describe_value(pair[0]) == describe_value(pair[1])


def test_descriptions_of_large_values_are_short():
    assert len(describe_value(closure(list(range(10**6))))) < 2000
    assert len(describe_value([[k] * 900 for k in range(900)])) <= 20_000


def test_values_of_parameters_are_not_described():
    """A model that a loss closes over may have been made with other numbers, and is loaded later."""
    assert describe_value(closure(nn.Linear(2, 2))) == describe_value(closure(nn.Linear(2, 2)))
    assert describe_value(closure(nn.Linear(2, 2))) != describe_value(closure(nn.Linear(2, 3)))


def test_a_recursive_function_is_described():
    assert describe_value(function("def f(x): return f(x)"))


def test_bits_are_compared_whatever_the_layout():
    tensor = torch.randn(3, 4)
    assert digest_tensor(tensor) == digest_tensor(tensor.t().contiguous().t())
    assert digest_tensor(torch.zeros(1)) != digest_tensor(-torch.zeros(1))
    assert digest_tensor(torch.empty(0)) == digest_tensor(torch.empty(0))
    assert digest_tensor(tensor.to("meta")) == "none"
    assert digest_tensor(tensor.to_sparse()) == digest_tensor(tensor)
