# SPDX-License-Identifier: Apache-2.0
"""Link a lowered program to its stages: look up, once, everything that is known before a step.

An instruction is at most one compute action with the transfers around it, `(WAIT | RECV)* compute? SEND*`. An action
of an earlier place than the action before it starts a new instruction. So any program runs as written, except that
receives may be posted before waits; on each channel, all posts stay in order.

The first action of a fused pair gets an extra instruction before it, which waits for the cotangents that the second,
the backward, needs, and keeps them. An update gets one for each gradient of shared parameters that it needs from
another stage, which waits for the gradient and stores it.

Collectives are posted where the program says, and waited for as late as possible: gathered weights before the first
action that reads them, reduced gradients before whatever uses them, or at the end. A reduction may take several
messages, one after the other; the next one is posted when the rank posts its next reduction, or needs the result.

Messages are numbered per rank. Channels follow from the placement, which the executor does not know.

Runs once per plan, at its first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise, zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from fpipe.runtime.contract import StageCrossing, StageLike
from fpipe.runtime.executor import ActionHandler, Instruction, LinkedProgram, Transfer
from fpipe.runtime.handlers import HANDLERS, TAKERS, do_nothing, keep_arrivals, reduce_further
from fpipe.runtime.transport import Route
from schedules.language.actions import KINDS, SENDS, Action, Kind, Message, is_own, message_of
from schedules.language.placement import Placement
from schedules.lowering.turns import target_of

BEFORE, COMPUTE, AFTER = range(3)
NO_STAGES: Mapping[int, Mapping[int, StageLike]] = MappingProxyType({})

ActionGroup: TypeAlias = list[tuple[int, Action]]


def link(
    actions: Iterable[Action],
    stages: Mapping[int, StageLike],
    placement: Placement,
    uneven: Mapping[int, Mapping[int, StageLike]] = NO_STAGES,
    phases: int = 1,
    slices: int = 1,
) -> LinkedProgram:
    """Return one rank's program, linked to its stages; it depends on neither parameters nor data.

    `uneven` has the stages of units of other shapes, by unit; `phases` is the number of messages that a reduction
    takes, `slices` that of slices of a microbatch. Gradients of shared parameters are taken before the update that uses
    them; without updates, at the end, since no action on the rank waits for them.
    """
    linker = Linker(stages, placement, uneven, PostedCollectives(phases), slices=slices)
    program = linker.program(actions)
    arriving = (one for stage in linker.arriving for one in linker.arriving[stage])
    program += [*linker.collectives.finish(), *arriving]
    return LinkedProgram(tuple(stages), tuple(linker.channels), tuple(program))


def _groups(actions: Iterable[Action]) -> Iterator[ActionGroup]:
    """Yield the actions of each instruction, with their positions."""
    group: ActionGroup = []
    latest = BEFORE
    for position, action in enumerate(actions):
        place = _place(action)
        if place < latest or place == latest == COMPUTE:
            yield group
            group = []
        group.append((position, action))
        latest = place
    if group:
        yield group


def _place(action: Action) -> int:
    """Return the place of an action in its instruction; `SEND_G` computes what it sends."""
    word = KINDS.get(action.kind)
    if word is None or not word.does or action.kind == "SEND_G":
        return COMPUTE
    return AFTER if word.does == "SEND" else BEFORE


class Linker:
    """The linker of one program, maybe in pieces: numbers its messages and channels, and what actions take and post.

    - `uneven`: the stages and specs of each unit whose shapes differ from the usual ones.
    - `partials`: per stage, the gradients of all its replicas, for its `G`, each with its place among them.
    - `arriving`: per stage, instructions that take the gradients of parameters it shares, for its `U` or for the end.
    """

    def __init__(
        self,
        stages: Mapping[int, StageLike],
        placement: Placement,
        uneven: Mapping[int, Mapping[int, StageLike]],
        collectives: PostedCollectives,
        handlers: Mapping[str, ActionHandler] = HANDLERS,
        slices: int = 1,
    ) -> None:
        self.usual, self.placement, self.collectives = (stages, _specs(stages)), placement, collectives
        self.handlers, self.slices = handlers, slices
        self.uneven = {i: (others, _specs(others)) for i, others in uneven.items()}
        self.numbers = defaultdict[Message, int](count().__next__)
        self.channels = defaultdict[Route, int](count().__next__)
        self.partials = defaultdict[int, list[tuple[int, int]]](list)
        self.arriving = defaultdict[int, list[Instruction]](list)

    def program(self, actions: Iterable[Action]) -> list[Instruction]:
        """Return the instructions of these actions, without what is left to wait for after them."""
        groups = [*_groups(actions)]
        return [one for pair in zip_longest(groups, groups[1:]) for one in self.instructions(*pair)]

    def instructions(self, group: ActionGroup, following: ActionGroup | None) -> list[Instruction]:
        """Return a group's instruction; before a `U`, or the first of a fused pair, also those that wait for data."""
        instruction = self.instruction(group)
        before = self.collectives.before(instruction)
        if instruction.action.kind == "U":
            before += self.arriving.pop(instruction.action.stage, [])
        elif instruction.action.kind == "G":
            before.append(self._keep_own(instruction))
        elif instruction.action.kind == "OVERLAP_F" and following is not None:
            before += self._keep_cotangents(instruction, following)
        return _precede(before, instruction)

    def _keep_own(self, instruction: Instruction) -> Instruction:
        """Return what keeps this rank's part of the gradient for a `G`, like those that arrive."""
        action = instruction.action._replace(kind="SEND_G", peer=instruction.action.stage)
        kept = (self.numbers[instruction.action], slice(None))
        return instruction._replace(action=action, handler=HANDLERS["SEND_G"], awaited=(), outputs=(kept,), sends=())

    def _keep_cotangents(self, instruction: Instruction, following: ActionGroup) -> list[Instruction]:
        """Return what waits for the cotangents of a fused pair's second action, before its first, and keeps them."""
        backward = next(action for _, action in following if _place(action) == COMPUTE)
        stage, (awaited, _) = self._stage(backward), self._match_messages(backward)
        if not awaited:
            return []
        action = backward._replace(kind="RECV_B", peer=stage.pulled_by[0].source)
        kept = _parts(awaited, stage.pulled_by, 0)
        unit, position = self._unit(action), instruction.position
        return [Instruction(position, action, unit, stage, keep_arrivals, (), (), tuple(awaited), kept, ())]

    def instruction(self, group: ActionGroup) -> Instruction:
        """Return the instruction of one group of actions."""
        actions = [action for _, action in group]
        at, action = next((pair for pair in group if _place(pair[1]) == COMPUTE), group[-1])
        receives = [self._transfer(other) for other in actions if KINDS[other.kind].does == "RECV"]
        waits = [self.numbers[message_of(other)] for other in actions if KINDS[other.kind].does == "WAIT"]
        sends = [self._transfer(other) for other in actions if KINDS[other.kind].does == "SEND"]
        for position, other in group:
            if other.kind == "RECV_G":
                self._take_later(position, other)
        taken, made = self._match_messages(action)
        stage, handler = self._stage(action), cast(ActionHandler, do_nothing)
        if _place(action) == COMPUTE:
            handler = getattr(action.kind, "handler", None) or self.handlers[action.kind]
        around = tuple(receives), tuple(waits), tuple(taken), made, tuple(sends)
        return Instruction(at, action, self._unit(action), stage, handler, *around)

    def _stage(self, action: Action) -> StageLike:
        return self._kind(action)[0][action.stage]

    def _kind(self, action: Action) -> tuple[Mapping[int, StageLike], Mapping[Any, tuple[Any, ...]]]:
        """Return the stages of the action's unit, and the specs of its messages."""
        return self.uneven.get(self._unit(action)[1], self.usual)

    def _unit(self, action: Action) -> tuple[int, int]:
        return action.stage, action.microbatch * self.slices + (action.slice or 0)

    def _transfer(self, action: Action) -> Transfer:
        message = message_of(action)
        _, specs = self._kind(message)
        route = self.placement.home(message.stage, message.microbatch), target_of(message, self.placement)
        found = specs[message.kind, message.stage, message.peer]
        return Transfer(self.numbers[message], self.channels[route], message, found)

    def _take_later(self, position: int, action: Action) -> None:
        message = message_of(action)
        number = self.numbers[message]
        if action.peer == action.stage:
            sender = self.placement.home(message.stage, message.microbatch)
            self.partials[action.stage].append((self.placement.replicas(action.stage).index(sender), number))
        else:
            stage, unit = self._stage(action), self._unit(action)
            taken = Instruction(position, action, unit, stage, HANDLERS["RECV_G"], (), (), (number,), (), ())
            self.arriving[action.stage].append(taken)

    def _match_messages(self, action: Action) -> tuple[list[int], tuple[tuple[int, slice], ...]]:
        """Return the messages that a compute action takes, and the slice of its results for each that it gives."""
        kind, s, i, _, k = action
        if kind == "G":
            own = self.placement.replicas(s).index(self.placement.home(s, i)), self.numbers[action]
            return [number for _, number in sorted([own, *self.partials.pop(s, [])])], ()
        if kind == "SEND_G":
            return [], ((self.numbers[message_of(action)], slice(None)),)
        what, stage = KINDS[kind].crosses if kind in KINDS else "", self._stage(action)
        if not what:
            return [], ()
        incoming, outgoing = (stage.gets, stage.gives) if what == "F" else (stage.pulled_by, stage.pulls)
        made = [self.numbers[Action(SENDS[what], s, i, crossing.target, k)] for crossing in outgoing]
        before = None if k is None else k - 1 if what == "F" else k + 1  # a stage's message to itself is its carry
        makers = [(crossing.source, before if crossing.source == s else k) for crossing in incoming]
        taken = [self.numbers[Action(SENDS[what], source, i, s, part)] for source, part in makers]
        return taken, _parts(made, outgoing, len(stage.results) if what == "F" else 0)


def _parts(numbers: Sequence[int], crossings: Sequence[StageCrossing], start: int) -> tuple[tuple[int, slice], ...]:
    """Return, with the number of each message, where its values are among those of all, which begin at `start`."""
    ends = [*accumulate([len(crossing.specs) for crossing in crossings], initial=start)]
    return tuple([(number, slice(*pair)) for number, pair in zip(numbers, pairwise(ends), strict=True)])


def _precede(others: Sequence[Instruction], last: Instruction) -> list[Instruction]:
    """Return the instructions in order; the first one does the posts and waits of the last."""
    if not others:
        return [last]
    first, *between = others
    early = first._replace(receives=last.receives, waits=last.waits)
    return [early, *between, last._replace(receives=(), waits=())]


class PostedCollectives:
    """The collectives, and moves of memory, that the program has posted and not waited for yet.

    - `gathering`: per stage, the `UNSHARD` whose weights no action has read yet.
    - `reducing`: per stage, its `REDUCE_GRAD` and the next phase to post, in the order of the program.
    - `reloading`: per unit, the `RELOAD` whose memory no action has used yet.
    """

    def __init__(self, phases: int) -> None:
        self.phases = phases
        self.gathering: dict[int, Instruction] = {}
        self.reducing: dict[int, tuple[Instruction, int]] = {}
        self.reloading: dict[tuple[Any, ...], Instruction] = {}

    def before(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that must come before this one, and note what it posts itself."""
        kind, s, _, peer, _ = instruction.action
        word = KINDS[kind] if kind in KINDS or is_own(kind) else Kind("")
        unit, found = instruction.action[1:], list[Instruction]()
        if word.before == "forward" and unit in self.reloading:
            found = [_await(self.reloading.pop(unit))]
        # Nobody may free weights that are still on their way, so a RESHARD waits for them like a reader.
        if s in self.gathering and (kind == "RESHARD" or word.reads):
            found += [_await(self.gathering.pop(s))]
        elif kind == "UNSHARD":
            self.gathering[s] = instruction
        elif kind == "RELOAD":
            self.reloading[unit] = instruction
        elif kind == "REDUCE_GRAD":
            found = list(self._advance(list(self.reducing)))  # their last messages had time to arrive
            self.reducing[s] = instruction, 1
        elif kind == "U" or (kind == "SEND_G" and peer != s):
            shared = instruction.stage.shared_by if kind == "U" else ()
            found = list(self.finish([one for one in (s, *(own.source for own in shared)) if one in self.reducing]))
        return found

    def finish(self, stages: Sequence[int] | None = None) -> Iterator[Instruction]:
        """Yield the instructions that finish the reductions of these stages, by default all."""
        stages = list(self.reducing) if stages is None else stages
        # Each stage advances by one phase before any does by two, so that their messages travel together.
        for _ in range(self.phases):
            yield from self._advance(stages)
        for s in stages:
            posted, _ = self.reducing.pop(s)
            yield _await(posted)

    def _advance(self, stages: Sequence[int]) -> Iterator[Instruction]:
        """Yield the instructions that post the next phase of the reductions of these stages."""
        for s in stages:
            posted, phase = self.reducing[s]
            if phase < self.phases:
                yield _await(posted, reduce_further(phase))
                self.reducing[s] = posted, phase + 1


def _await(posted: Instruction, handler: ActionHandler | None = None) -> Instruction:
    """Return an instruction that waits for what an action posted last, and passes what it gave to the handler."""
    handler = handler or TAKERS[posted.action.kind]
    return posted._replace(handler=handler, receives=(), waits=(), awaited=(posted.action,), outputs=(), sends=())


def _specs(stages: Mapping[int, StageLike]) -> dict[tuple[str, int, int | None], tuple[Any, ...]]:
    """Return the specs of all messages, by kind and both stages; replicas exchange all gradients of a stage."""
    specs: dict[tuple[str, int, int | None], tuple[Any, ...]]
    specs = {("SEND_G", s, s): tuple(stage.totals) for s, stage in stages.items()}
    for stage in stages.values():
        values, cotangents = (*stage.gives, *stage.gets), (*stage.pulls, *stage.pulled_by)
        ends = {"SEND_F": values, "SEND_B": cotangents, "SEND_G": (*stage.shares, *stage.shared_by)}
        specs |= {(what, one.source, one.target): one.specs for what, crossings in ends.items() for one in crossings}
    return specs
