# SPDX-License-Identifier: Apache-2.0
"""What the executor posts ends on every model of a device: its transfers, and the collectives of copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe.runtime.executor import Execution, Inputs
from fpipe.runtime.instructions import link
from schedules import Action, Device, chain, families, lower, reduce_gradients, shard, update_weights
from schedules.language.actions import receive_of
from schedules.proof.devices import COMPUTE_STREAM, Post, play_posts
from schedules.testing import collective_orders
from tests.common.sizes import sampled
from tests.common.symbolic import Symbolic, batch, key


class Handle:
    """A posted transfer or collective; the host never knows that it is done."""

    is_done = False

    def __init__(self, action, message):
        self.action, self.message = action, message

    def take(self):
        return ("arrived",)


class Host:
    """One rank of one copy: the transport and the group of its executor, which only write down what is posted."""

    def __init__(self, rank, copy, copies):
        self.rank, self.copy, self.copies = rank, copy, copies
        self.posts, self.waits = [], []

    def post(self, action, stream, meets, ends, message):
        self.posts.append(Post(action, stream, meets=meets, ends=ends))
        return Handle(action, message)

    def compute(self):
        """What runs on the compute stream waits for all that the executor has waited for since."""
        self.posts.append(Post(Action("F", 0, len(self.posts), slice=0), COMPUTE_STREAM, tuple(self.waits)))
        self.waits.clear()

    def channel(self, *ends):
        return Ends(self, ends)

    def unshard(self, stage, number):
        return self.collect(Action("UNSHARD", stage, number), 0)

    def reduce(self, stage, microbatch, phase, values):
        return self.collect(Action("REDUCE_GRAD", stage, microbatch), phase)

    def collect(self, action, phase):
        name = action._replace(slice=phase)
        return self.post(name, "group", (self.rank, name), self.copies, action)

    def enter(self, stage, weights):
        pass

    reshard = reduced = lambda *_: ()


class Ends:
    def __init__(self, host, ends):
        self.host, self.ends = host, ends

    def send(self, message, payload, specs):
        return self.host.post(message, self.ends, (self.host.copy, message), 2, message)

    def receive(self, message, specs):
        return self.host.post(receive_of(message), self.ends, (self.host.copy, message), 2, message)


class Plain(Symbolic):
    """A stage whose values are of no interest."""

    def gradients_for(self, peer, total):
        return ("gradient",)

    add = complete = lambda *_: ("total",)


def posts_of(schedule, graph, rank, copy, copies, phases=3):
    """What the executor posts on one rank."""
    host, held = Host(rank, copy, copies), schedule.placement.stages_on(rank)
    n = schedule.slices
    units = [{s: Plain(graph, s, k, n) for s in held} for k in range(n)] * schedule.microbatches
    actions = lower(schedule, graph).actions(rank)
    linked = link(actions, units[0], schedule.placement, dict(enumerate(units)), phases, n)

    def on_device(handler):
        def run(*arguments):
            host.compute()
            return handler(*arguments)

        return run

    linked = linked._replace(
        instructions=tuple(one._replace(handler=on_device(one.handler)) for one in linked.instructions)
    )
    M = len(units)
    keys, params, buffers = map(key, range(M)), [dict.fromkeys(held, "")] * M, [dict.fromkeys(held, ())] * M
    inputs = Inputs(params, buffers, batch, [*keys], group=host, update=lambda *_: ())
    for handle in Execution(rank, linked, host, inputs).run():
        host.waits.append(handle.action)
    host.compute()
    return host.posts


DEVICES = [
    Device(),
    Device(queues=1),
    Device(queues=2),
    Device(blocks=True),
    Device(blocks=True, eager=True),
    Device(slots=1),
    Device(slots=2, ahead=2),
    *(Device(synchronizes=frozenset({(rank, n)}), eager=n % 2 == 0) for rank in range(2) for n in range(4)),
]


@sampled(8)
@pytest.mark.parametrize("name", families.__all__)
def test_every_family_ends_on_every_device(name):
    """As is, and with gathered, reduced and updated weights of two copies where a family can have them."""
    schedule = getattr(families, name)(ranks=2, microbatches=4)
    graph, kinds = chain(schedule.stages), {a.kind for r in range(2) for a in schedule.actions(r)}
    if schedule.backward and "U" not in kinds and schedule.slices == 1:
        schedule = update_weights(reduce_gradients(shard(schedule, limit=2)))
    rows = [posts_of(schedule, graph, rank, copy, 2) for copy in range(2) for rank in range(2)]
    for device in DEVICES:
        play_posts(rows, device)


@settings(deadline=None)
@given(collective_orders(), st.sampled_from(DEVICES), st.integers(1, 2))
def test_any_order_ends_on_any_device(case, device, copies):
    ranks = range(case[0].ranks)
    play_posts([posts_of(*case, rank, copy, copies) for copy in range(copies) for rank in ranks], device)
