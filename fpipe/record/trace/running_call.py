# SPDX-License-Identifier: Apache-2.0
"""A torch call that is running, and the torch calls inside it, from which an answer can be computed again.

Runs while a model is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fpipe.record.captured import Value
from fpipe.record.trace.frames import tensors_at
from fpipe.record.trace.record import Values
from fpipe.tensors.tree import flatten_all


class InnerCall(NamedTuple):
    """A torch call inside another, such as one in the forward of a custom function, and its result."""

    function: Any
    args: Any
    kwargs: Any
    out: Any

    @property
    def writes(self) -> bool:
        """True if the function changes its first argument in place."""
        name = getattr(self.function, "__name__", "")
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def replay_calls(calls: Sequence[InnerCall], tensors: dict[int, Tensor]) -> Any:
    """Return the result of the last call, on real tensors in place of those with these ids."""
    known, out = dict(tensors), None
    for call in calls:
        leaves, spec = flatten_all((call.args, call.kwargs))
        args, kwargs = optree.tree_unflatten(spec, [known.get(id(leaf), leaf) for leaf in leaves])
        out = call.function(*args, **kwargs)
        made = tensors_at(out)
        known.update({id(fake): made[k] for k, fake in tensors_at(call.out).items() if k in made})
    return out


@dataclass
class RunningCall:
    """A torch call that is running: the values passed to calls inside it, and whether it calls a collective.

    `guarded`: whether questions inside it, which only guard its arguments, are answered with no. `inner`: the calls
    inside it so far.
    """

    used: dict[Value, None] = field(default_factory=dict)
    communicates: bool = False
    guarded: bool = False
    inner: list[InnerCall] = field(default_factory=list)

    def history(self, last: InnerCall, values: Values) -> tuple[list[InnerCall], dict[int, Value]]:
        """Return the calls inside that the arguments of `last` were computed by, and what else, by id of its tensor."""
        needed = {id(tensor): tensor for tensor in tensors_at((last.args, last.kwargs)).values()}
        calls: list[InnerCall] = []
        for call in reversed(self.inner):
            made = [*tensors_at(call.out).values(), *(call.args[:1] if call.writes else ())]
            if any(id(tensor) in needed for tensor in made):
                calls.insert(0, call)
                needed.update({id(tensor): tensor for tensor in tensors_at((call.args, call.kwargs)).values()})
        inside = {id(tensor) for call in calls for tensor in tensors_at(call.out).values()}
        return calls, {key: values.read(tensor) for key, tensor in needed.items() if key not in inside}

    def use(self, values: Iterable[Value]) -> None:
        """Note that these values are used inside."""
        self.used.update(dict.fromkeys(values))
