# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in a pipeline: one action of one rank does something else than its handler would.

A fault is a row of a table: which kinds of actions it can strike, in which model, and what happens there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.pipelines.modes import suspend_autocast
from fpipe.pipelines.step import training_variant
from fpipe.verification.verify import Trial
from schedules import Action


class NoFaultError(Exception):
    """Here the fault has nothing to change: it would do what the handler does."""


@dataclass
class Moment:
    """The action that a fault strikes, as its handler sees it.

    - `arrived`: what the action gets from other stages. `history`: earlier actions of this rank, with what they got and
      gave.
    - `handle`: what the handler does. `later`: what happens after the next action of this kind and stage.
    """

    run: Any
    action: Action
    stage: Any
    arrived: tuple[Any, ...]
    handle: Callable[..., Any]
    history: list[tuple[Action, tuple[Any, ...], tuple[Any, ...]]]
    later: list[tuple[Action, Callable[[], None]]]

    @property
    def at(self) -> tuple[int, int]:
        return self.action.stage, self.action.microbatch

    def go(self, arrived: tuple[Any, ...] | None = None) -> Any:
        """Do what the handler does, with something else than what arrived, if that is given."""
        return self.handle(self.run, self.action, self.stage, self.arrived if arrived is None else arrived)

    def before(self, gave: bool) -> tuple[Any, ...]:
        """What the last action of this kind and stage got or gave."""
        same = [one for one in self.history if one[0].kind == self.action.kind and one[0].stage == self.action.stage]
        require(same and same[-1][1 + gave])
        return same[-1][1 + gave]

    def give(self, **others: Any) -> Any:
        """Do what the handler does, with other inputs of the step."""
        usual = self.run.inputs
        self.run.inputs = usual._replace(**others)
        try:
            return self.go()
        finally:
            self.run.inputs = usual


def require(there: object) -> None:
    """Raise `NoFaultError` unless there is something to change."""
    if not there:
        raise NoFaultError


def each(function: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    """Change all tensors of a tuple."""
    require([one for one in tensors if isinstance(one, Tensor)])
    return tuple(function(one) if isinstance(one, Tensor) else one for one in tensors)


def floats(function: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    """Change the floating-point tensors of a tuple."""
    require([one for one in tensors if isinstance(one, Tensor) and one.is_floating_point()])
    return tuple(function(one) if isinstance(one, Tensor) and one.is_floating_point() else one for one in tensors)


def swapped(tensors: Any) -> tuple[Any, ...]:
    """Exchange the first two tensors of one shape."""
    for a, one in enumerate(tensors):
        for b in range(a + 1, len(tensors)):
            other = tensors[b]
            if one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype):
                found = list(tensors)
                found[a], found[b] = other, one
                return tuple(found)
    raise NoFaultError


def convert(x: Tensor) -> Tensor:
    """There and back."""
    return x.double().to(x.dtype)


# ------------------------------------------------------------------------------------------- What happens instead


def got(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Something else arrives."""
    return lambda at: at.go(change(at.arrived))


def gave(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Something else is given."""

    def strike(at: Moment) -> Any:
        values = at.go()
        return (*values[: len(at.stage.results)], *change(values[len(at.stage.results) :]))

    return strike


def result(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Something else is delivered."""

    def strike(at: Moment) -> Any:
        require(at.stage.results)
        deliver = at.run.deliver
        at.run.deliver = lambda i, values: deliver(i, (change(values[0]), *values[1:]))
        try:
            return at.go()
        finally:
            at.run.deliver = deliver

    return strike


def weights(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Other weights are used."""

    def strike(at: Moment) -> Any:
        s, i = at.at
        params = [dict(one) for one in at.run.inputs.params]
        params[i][s] = tuple(
            new if new is old or not isinstance(new, Tensor) else new.detach().requires_grad_(old.requires_grad)
            for old, new in zip(params[i][s], change(params[i][s]), strict=True)
        )
        return at.give(params=params)

    return strike


def key(change: Callable[[list[int], int], int]) -> Callable[[Moment], Any]:
    """Other random numbers are drawn."""

    def strike(at: Moment) -> Any:
        keys = list(at.run.inputs.keys)
        keys[at.action.microbatch] = change(keys, at.action.microbatch)
        before = torch.get_rng_state()
        values = at.give(keys=keys)
        require(not torch.equal(before, torch.get_rng_state()))  # the stage draws
        return values

    return strike


def batch(change: Callable[[Moment, Any], Any]) -> Callable[[Moment], Any]:
    """Another part of the batch is used."""

    def strike(at: Moment) -> Any:
        take = at.run.inputs.batch
        return at.give(batch=lambda s, i: change(at, take(s, i)))

    return strike


def other_rows(at: Moment, rows: Any) -> Any:
    """The next microbatch's part of the batch."""
    s, i = at.at
    require(rows)
    return at.run.inputs_before.batch(s, i + 1 if i + 1 < len(at.run.inputs.keys) else 0)


def buffers(change: Callable[[Any, Any], Any]) -> Callable[[Moment], Any]:
    """Other buffers are passed on: `change(before, after)`."""

    def strike(at: Moment) -> Any:
        s, i = at.at
        before = tuple(one.clone() for one in at.run.buffers[i][s])
        require(before)
        values = at.go()
        at.run.buffers[i][s] = change(before, at.run.buffers[i][s])
        return values

    return strike


def read_buffers(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Other buffers are read, and the right ones are passed on."""

    def strike(at: Moment) -> Any:
        s, i = at.at
        right = at.run.buffers[i][s]
        require(right)
        at.run.buffers[i][s] = change(right)
        values = at.go()
        return values

    return strike


def kept(where: str) -> Callable[[Moment], Any]:
    """What another microbatch has kept on this stage is used, and the other way round."""

    def strike(at: Moment) -> Any:
        s, i = at.at
        state = getattr(at.run, where)
        others = [one for one in state if one[0] == s and one[1] != i]
        require(others and state.get((s, i)) is not None)
        require(where != "deferred" or at.run.grads[s])  # a sum of two has no order
        state[s, i], state[others[0]] = state[others[0]], state[s, i]
        return at.go()

    return strike


def total(change: Callable[[Any, Any], Any]) -> Callable[[Moment], Any]:
    """The sum of gradients becomes another: `change(before, after)`."""

    def strike(at: Moment) -> Any:
        s = at.action.stage
        before = tuple(None if one is None else one.clone() for one in at.run.grads[s])
        values = at.go()
        require([one for one in at.run.grads[s] if one is not None])
        at.run.grads[s] = change(before, at.run.grads[s])
        return values

    return strike


def begins(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """The sum goes on from another one."""

    def strike(at: Moment) -> Any:
        at.run.grads[at.action.stage] = change(at)
        return at.go()

    return strike


def from_zero(at: Moment) -> Any:
    """A sum that begins with 0."""
    require(not at.run.grads[at.action.stage] and at.stage.totals)
    return tuple(spec.allocate().zero_() for spec in at.stage.totals)


def from_nothing(at: Moment) -> Any:
    """A sum that begins anew."""
    require(at.run.grads[at.action.stage])
    return ()


def no_skips(before: Any, after: Any) -> Any:
    """What was there before; nothing is known if nothing was."""
    require(before)
    return before


def twice(before: Any, after: Any) -> Any:
    """The last gradient counts twice."""
    require(before)
    return tuple(b if a is None or b is None else b + (b - a) for a, b in zip(before, after, strict=True))


def swapped_in_first(both: Any) -> Any:
    """Two gradients of the first of two replicas trade places. (Those of one parameter may: a sum of two commutes.)"""
    half = len(both) // 2
    return (*swapped(both[:half]), *both[half:])


def output_before(at: Moment) -> Any:
    """What the stage gave for the microbatch before goes on to later stages."""
    require(at.stage.gives)  # results leave the pipeline otherwise
    at.go()
    return at.before(True)


def late(at: Moment) -> Any:
    """The gradient of this microbatch is added after that of the next one."""
    s, i = at.at
    require(at.run.grads[s] and i + 1 < len(at.run.inputs.keys))
    so_far = tuple(None if one is None else one.clone() for one in at.run.grads[s])
    at.run.grads[s] = ()
    values = at.go()
    own, at.run.grads[s] = at.run.grads[s], so_far

    def add() -> None:
        sums = at.run.grads[s]
        at.run.grads[s] = tuple(a if b is None else a + b for a, b in zip(sums, own, strict=True))

    at.later.append((at.action, add))
    return values


def shared(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """Another gradient of a parameter arrives from a stage that shares it."""
    return lambda at: at.go(change(at.arrived))


def tied_later(at: Moment) -> Any:
    """A stage adds its share of a tied gradient to the next one's, in place of what it got."""
    got = [k for k, one in enumerate(at.arrived) if one is not None and one.dim() == 2 and one.shape[0] == one.shape[1]]
    require(got and len(at.stage.pulls) and len(at.stage.pulled_by))
    values = at.go(tuple(torch.zeros_like(one) if k == got[-1] else one for k, one in enumerate(at.arrived)))
    ours = [k for k, one in enumerate(values) if one is not None and one.shape == at.arrived[got[-1]].shape]
    require(ours)
    return tuple(one + at.arrived[got[-1]] if k == ours[-1] else one for k, one in enumerate(values))


def stale(at: Moment) -> Any:
    """What the input half has left for the weight half is not what it was."""
    state = at.run.deferred[at.at]
    found = [k for k, one in enumerate(state) if isinstance(one, Tensor) and one.is_floating_point()]
    require(found)
    state[found[0]] = state[found[0]] * 0.5
    return at.go()


def past_the_first(strike: Callable[[Moment], Any]) -> Callable[[Moment], Any]:
    """A fault that changes nothing in the first stage, a linear layer: its gradients do not depend on its weights."""

    def strike_later(at: Moment) -> Any:
        require(at.action.stage)
        return strike(at)

    return strike_later


def checkpoint(change: Callable[[Any], Any]) -> Callable[[Moment], Any]:
    """A recomputation starts from something else."""

    def strike(at: Moment) -> Any:
        at.run.checkpoints[at.at] = change(at.run.checkpoints[at.at])
        return at.go()

    return strike


def early(at: Moment) -> Any:
    """A replica adds the first replica's sum twice, and the second's not at all."""
    first = at.arrived[: len(at.arrived) // 2]
    return at.go((*first, *first))


def updating(change: Callable[[Tensor], Tensor]) -> Callable[[Moment], Any]:
    """An update takes other gradients."""

    def strike(at: Moment) -> Any:
        s, right = at.action.stage, at.run.grads[at.action.stage]
        at.run.grads[s] = each(change, right)
        values = at.go()
        require(at.run.updates[s].params)
        at.run.grads[s] = right
        return values

    return strike


def again(at: Moment) -> Any:
    """A stage updates what it has just updated."""
    values = at.go()
    new = at.run.updates[at.action.stage]
    require(new.params)
    moved = {name: (p.detach() + (p.detach() - 1)).requires_grad_(p.requires_grad) for name, p in new.params.items()}
    at.run.updates[at.action.stage] = new._replace(params=moved)
    return values


def lost(at: Moment) -> Any:
    """A stage keeps the weights that it had."""
    s, i = at.at
    values = at.go()
    new = at.run.updates[s]
    old = dict(zip(at.stage.parameters, at.run.inputs.params[i][s], strict=False))
    require(new.params)
    at.run.updates[s] = new._replace(params={name: old[name] for name in new.params})
    return values


def stateless(at: Moment) -> Any:
    """A stage forgets what its optimizer keeps."""
    values = at.go()
    new = at.run.updates[at.action.stage]
    require(new.params)
    at.run.updates[at.action.stage] = new._replace(state={name: {} for name in new.state})
    return values


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the kind of action that it strikes, what happens instead, and in which model and schedule.

    `later`: what differs first is computed elsewhere, by who uses what the action gave. `mesh`: the copies of the
    pipeline, if there are several. `handler`: the one that is struck, of an action with several.
    """

    name: str
    kind: str
    strike: Callable[[Moment], Any]
    model: str = "mlp"
    schedule: str = "one_f_one_b"
    later: bool = False
    tied: str = "exact"
    mesh: str = ""
    handler: str = ""


def plant(
    fault: Fault, pipe: Any, model: Any, inputs: Any, targets: Any, choose: Callable[[int], int]
) -> tuple[int, Action]:
    """Plant a fault at one of the actions that it can strike, which `choose` chooses; return its rank and action."""
    plan = find_plan(pipe, model, inputs, targets, fault.kind == "U")
    places = [
        (part, rank, k)
        for part in plan.parts.values()
        for rank, program in part.programs.items()
        for k, one in enumerate(program.instructions)
        if one.action.kind == fault.kind and one.handler.__name__ in (fault.handler or one.handler.__name__)
    ]
    part, rank, at = places[choose(len(places))]
    program = part.programs[rank]
    wrapped = tuple(struck(one, fault.strike if k == at else None) for k, one in enumerate(program.instructions))
    part.programs[rank] = program._replace(instructions=wrapped)
    return rank, program.instructions[at].action


def find_plan(pipe: Any, model: Any, inputs: Any, targets: Any, updates: bool) -> Any:
    """The plan of the step that a proof runs, without or with updates."""
    variant = training_variant(False, None) if updates else Trial(pipe, model, (inputs, targets), 0).variant
    with suspend_autocast(variant) as cast:
        plan = pipe.plan(cast, pipe.batch(cast, inputs, targets).signature)
    return plan.updating if updates else plan


def struck(instruction: Any, strike: Callable[[Moment], Any] | None) -> Any:
    """An instruction whose handler remembers, and does something else if it is struck."""
    handler = instruction.handler

    def handle(run: Any, action: Action, stage: Any, arrived: tuple[Any, ...]) -> Any:
        history, later = vars(run).setdefault("history", []), vars(run).setdefault("later", [])
        due = [one for one in later if (one[0].kind, one[0].stage) == (action.kind, action.stage)]
        run.inputs_before = run.inputs
        moment = Moment(run, action, stage, arrived, handler, history, later)
        values = strike(moment) if strike is not None else moment.go()
        history.append((action, arrived, values))
        for one in due:
            later.remove(one)
            one[1]()
        return values

    return instruction._replace(handler=handle)


def rows() -> Iterator[Fault]:
    """The table."""
    zero, one, plus, twofold = torch.zeros_like, lambda x: x * 1, lambda x: x + 0, lambda x: x * 2
    yield Fault("an output to which 0 is added", "F", gave(lambda out: each(plus, out)))
    yield Fault("an output times 1", "F", gave(lambda out: each(one, out)))
    yield Fault("an output that is converted", "F", gave(lambda out: each(convert, out)))
    yield Fault("an output that is doubled", "F", gave(lambda out: each(twofold, out)))
    yield Fault("an output that is 0", "F", gave(lambda out: each(zero, out)), later=True)
    yield Fault("outputs that are swapped", "F", gave(swapped), "skips", later=True)
    yield Fault("the output of the microbatch before", "F", output_before, "mlp", "gpipe", later=True)
    yield Fault("a receive one message late", "F", lambda at: at.go(at.before(False)), later=True)
    yield Fault("a value that arrives as 0", "F", got(lambda x: each(zero, x)))
    yield Fault("a value that is converted", "F", got(lambda x: floats(convert, x)))
    yield Fault("values that are swapped", "F", got(swapped), "skips")
    yield Fault("a value that arrives to be flipped", "F", got(lambda x: floats(lambda y: y.flip(0), x)))
    yield Fault("a key off by one", "F", key(lambda keys, i: keys[i] + 1), "dropping")
    yield Fault("the key of another microbatch", "F", key(lambda keys, i: keys[i - 1]), "dropping")
    yield Fault("a key that is 0", "F", key(lambda keys, i: 0), "gpt_dropout")
    yield Fault("a buffer that is not passed on", "F", buffers(lambda old, new: old), "normalised", later=True)
    yield Fault("a buffer to which 0 is added", "F", buffers(lambda old, new: floats(plus, new)), "normalised")
    yield Fault(
        "a buffer that is swapped", "F", buffers(lambda old, new: swapped(new)), "normalised", "gpipe", later=True
    )
    yield Fault("a buffer that is read as 0", "F", read_buffers(lambda x: floats(zero, x)), "normalised", later=True)
    yield Fault(
        "a buffer that is updated twice",
        "F",
        lambda at: (require(at.stage.buffers), at.go(), at.go())[2],
        "normalised",
        later=True,
    )
    yield Fault("weights times 1", "F", weights(lambda x: each(one, x)))
    yield Fault("weights that are swapped", "F", weights(swapped), "gpt", later=True)
    yield Fault("weights that are rounded", "F", weights(lambda x: each(lambda w: w.half().float(), x)))
    yield Fault("stale weights", "F", weights(lambda x: each(lambda w: w - 0.5 * w, x)))
    yield Fault("targets of another microbatch", "F", batch(other_rows), later=True)
    yield Fault("a batch to which 0 is added", "F", batch(lambda at, x: each(plus, x)))
    yield Fault("a batch with its rows reversed", "F", batch(lambda at, x: each(lambda y: y.flip(0), x)), "gpt")
    yield Fault("a loss that is doubled", "F", result(twofold))
    yield Fault("a loss that is forgotten", "F", result(zero), later=True)
    yield Fault("a loss to which 0 is added", "F", result(plus))
    yield Fault("a cotangent that is skipped", "B", got(lambda x: each(zero, x)))
    yield Fault("a cotangent times 1", "B", got(lambda x: each(one, x)))
    yield Fault("a cotangent that is doubled", "B", got(lambda x: each(twofold, x)))
    yield Fault("a cotangent that is converted", "B", got(lambda x: floats(convert, x)))
    yield Fault("cotangents that are swapped", "B", got(swapped), "skips")
    yield Fault("a cotangent one message late", "B", lambda at: at.go(at.before(False)))
    yield Fault("a cotangent that is given as 0", "B", gave(lambda x: floats(zero, x)), later=True)
    yield Fault("a cotangent with another sign", "B", gave(lambda x: floats(torch.neg, x)))
    yield Fault("the cotangent of the microbatch before", "B", lambda at: (at.go(), at.before(True))[1], later=True)
    yield Fault("a tied cotangent with a share of 1", "B", gave(lambda x: floats(lambda y: y + 1, x)), "chained")
    yield Fault("a tied cotangent added later", "B", tied_later, "one_weight", later=True)
    yield Fault("residuals of another microbatch", "B", kept("residuals"), "mlp", "gpipe", later=True)
    yield Fault("a gradient that is lost", "B", total(no_skips), later=True)
    yield Fault("a gradient that counts twice", "B", total(twice))
    yield Fault("a gradient from which 0 is taken", "B", total(lambda a, b: each(lambda x: x - 0, b)))
    yield Fault("a sum that is doubled", "B", total(lambda a, b: each(twofold, b)))
    yield Fault("a sum that is converted", "B", total(lambda a, b: each(convert, b)))
    yield Fault("a sum that begins with 0", "B", begins(from_zero))
    yield Fault("a sum that begins anew", "B", begins(from_nothing), later=True)
    yield Fault("two sums swapped", "B", total(lambda a, b: swapped(b)), "gpt", later=True)
    yield Fault("a gradient added after the next", "B", late, later=True)
    yield Fault("an input half without its cotangent", "I", got(lambda x: each(zero, x)), "mlp", "zb_h1", later=True)
    yield Fault("an input half that gives 0", "I", gave(lambda x: floats(zero, x)), "mlp", "zb_h1", later=True)
    yield Fault("an input half of another microbatch", "I", kept("residuals"), "mlp", "zb_h1", later=True)
    yield Fault(
        "an input half whose cotangent is late", "I", lambda at: at.go(at.before(False)), "mlp", "zb_h1", later=True
    )
    yield Fault("a weight half of another microbatch", "W", kept("deferred"), "mlp", "zb_h2", later=True)
    yield Fault("a weight half that is lost", "W", total(no_skips), "mlp", "zb_h1", later=True)
    yield Fault("a weight half that counts twice", "W", total(twice), "mlp", "zb_h1")
    yield Fault("a weight half that begins anew", "W", begins(from_nothing), "mlp", "zb_h1", later=True)
    yield Fault("a weight half that begins with 0", "W", begins(from_zero), "mlp", "zb_h1")
    yield Fault("weight halves whose sums are swapped", "W", total(lambda a, b: swapped(b)), "gpt", "zb_h1", later=True)
    yield Fault("a weight half added after the next", "W", late, "mlp", "zb_h1", later=True)
    yield Fault("a stale operand in a weight half", "W", stale, "mlp", "zb_h1")
    yield Fault(
        "a checkpoint of other inputs",
        "R",
        checkpoint(lambda kept: (kept[0], each(plus, kept[1]))),
        "mlp",
        "recomputed",
    )
    yield Fault("a recomputation with another key", "R", key(lambda keys, i: keys[i] + 1), "dropping", "recomputed")
    yield Fault(
        "a recomputation with other buffers",
        "R",
        checkpoint(lambda kept: (floats(plus, kept[0]), kept[1])),
        "normalised",
        "recomputed",
    )
    yield Fault("a recomputation of the next rows", "R", batch(other_rows), "mlp", "recomputed", later=True)
    yield Fault(
        "a recomputation with stale weights",
        "R",
        past_the_first(weights(lambda x: each(lambda w: w - 0.5 * w, x))),
        "mlp",
        "recomputed",
    )
    yield Fault(
        "a checkpointed forward that gives 0", "C", gave(lambda out: floats(zero, out)), "mlp", "recomputed", later=True
    )
    yield Fault(
        "a checkpointed forward whose value is late",
        "C",
        lambda at: at.go(at.before(False)),
        "mlp",
        "recomputed",
        later=True,
    )
    yield Fault("a replica whose sum is lost", "G", got(lambda x: each(zero, x)), "mlp", "dualpipe")
    yield Fault("a replica whose sum is doubled", "G", got(lambda x: each(twofold, x)), "mlp", "dualpipe")
    yield Fault("a replica whose sums are swapped", "G", got(swapped_in_first), "gpt", "dualpipe", later=True)
    yield Fault("a replica that sums too early", "G", early, "mlp", "dualpipe", later=True)
    yield Fault("a tied sum that is 0", "RECV_G", got(lambda x: each(zero, x)), "chained", tied="sum", later=True)
    yield Fault("a tied sum that is doubled", "RECV_G", got(lambda x: each(twofold, x)), "chained", tied="sum")
    yield Fault(
        "a shard reduced twice",
        "REDUCE_GRAD",
        begins(lambda at: each(lambda x: x + x, at.run.grads[at.action.stage])),
        mesh="shard",
        handler="_reduce",
    )
    yield Fault(
        "a shard reduced before its last gradient",
        "REDUCE_GRAD",
        begins(lambda at: each(lambda x: x * 0.5, at.run.grads[at.action.stage])),
        mesh="shard",
        handler="_reduce",
    )
    yield Fault(
        "a shard that is lost",
        "REDUCE_GRAD",
        got(lambda x: (*x[:1], *each(zero, x[1:]))),
        mesh="shard",
        handler="_take_reduced",
        later=True,
    )
    yield Fault(
        "shards in another order",
        "REDUCE_GRAD",
        got(lambda x: (require([one for one in x if one.numel()]), x[::-1])[1]),
        mesh="three",
        handler="_take_reduced",
    )
    yield Fault(
        "a replica reduced twice",
        "REDUCE_GRAD",
        begins(lambda at: each(lambda x: x + x, at.run.grads[at.action.stage])),
        mesh="dp",
        handler="_reduce",
    )
    yield Fault(
        "a sum of replicas that is lost",
        "REDUCE_GRAD",
        got(lambda x: each(zero, x)),
        mesh="dp",
        handler="_take_reduced",
        later=True,
    )
    yield Fault(
        "weights gathered in another order", "UNSHARD", got(swapped), mesh="shard", handler="_enter_weights", later=True
    )
    yield Fault(
        "weights of which a shard is lost",
        "UNSHARD",
        got(lambda x: (*x[:1], *each(zero, x[1:]))),
        mesh="shard",
        handler="_enter_weights",
        later=True,
    )
    yield Fault("an update from half a sum", "U", updating(lambda x: x * 0.5))
    yield Fault("an update from the first microbatch", "U", updating(lambda x: x - 0))
    yield Fault("an update with another sign", "U", updating(torch.neg))
    yield Fault(
        "an update that is lost",
        "U",
        lost,
        later=True,
    )
    yield Fault("an update that comes twice", "U", again, later=True)
    yield Fault("an update of which the state is lost", "U", stateless, later=True)


FAULTS = {one.name: one for one in rows()}
