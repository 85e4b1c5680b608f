# SPDX-License-Identifier: Apache-2.0
"""Sends, receives and waits in a run on formulas: posting never blocks, and `WAIT` waits for its send."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.language.actions import KINDS, Action, Message, message_of
from schedules.language.placement import Placement
from schedules.proof.formulas import Formula
from schedules.proof.gradients import Sums
from schedules.proof.inflight import Parcel, parcel_of
from schedules.proof.networks import Links
from schedules.proof.store import Store, Waits


class Transfers:
    """The transfers of one run over `links`. `sent` has each rank's sends that no `WAIT` has waited for yet."""

    def __init__(self, placement: Placement, store: Store, sums: Sums, links: Links) -> None:
        self.placement, self.store, self.sums, self.links = placement, store, sums, links
        self.sent: list[set[Message]] = [set() for _ in range(placement.ranks)]

    def run(self, rank: int, action: Action) -> Waits:
        """Run one transfer of `rank`."""
        does = KINDS[action.kind].does
        if does == "WAIT":
            yield from self._wait(rank, action)
        elif does == "SEND":
            self._send(rank, action)
        else:
            self._receive(rank, action)

    def _send(self, rank: int, action: Action) -> None:
        parcel, parcels = parcel_of(action), self.store.parcels[rank]
        if parcel.kind == "G":
            s, t = parcel.source, parcel.target
            gradient = self.sums.partial_sum(s, rank) if s == t else self.sums.full_gradient(s, rank)
            self.store.put(rank, gradient, parcel)
        if parcel not in parcels or action in self.sent[rank]:
            repair = "Send each value once, after the action that makes it."
            raise self.store.error(rank, "sends a value that does not exist, or sends it again", repair)
        self.sent[rank].add(action)
        self._deliver(self.links.send((rank, self._find_target(rank, parcel)), action, parcels.pop(parcel)))

    def _receive(self, rank: int, action: Action) -> None:
        message = message_of(action)
        parcel, source = parcel_of(message), self.placement.home(message.stage, message.microbatch)
        if rank != self._find_target(source, parcel):
            repair = "Receive it on the rank that holds the stage that uses it."
            raise self.store.error(rank, "is for another rank", repair)
        self._deliver(self.links.receive((source, rank), message))

    def _wait(self, rank: int, action: Action) -> Waits:
        message = message_of(action)
        if message not in self.sent[rank]:
            raise self.store.error(rank, "waits for no send, or waits again", "Wait once, after the send.")
        while self.links.is_pending(message):
            yield parcel_of(message)
        self.sent[rank].remove(message)

    def _deliver(self, messages: Iterator[tuple[Message, Formula]]) -> None:
        """Put each message on the rank that it goes to."""
        for message, value in messages:
            parcel = parcel_of(message)
            source = self.placement.home(message.stage, message.microbatch)
            self.store.put(self._find_target(source, parcel), value, parcel)

    def _find_target(self, source: int, parcel: Parcel) -> int:
        """Return the rank a parcel from rank `source` goes to: the target stage's, or that of another replica."""
        if parcel.source != parcel.target:
            return self.placement.home(parcel.target, parcel.microbatch)
        replicas = self.placement.replicas(parcel.source)
        if len(replicas) > 2 and parcel.slice is not None:
            return replicas[parcel.slice]
        return next((rank for rank in replicas if rank != source), source)
