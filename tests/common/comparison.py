# SPDX-License-Identifier: Apache-2.0
"""The result of a step, and every leaf in which two results differ in any bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fpipe.tensors.placed import local_part
from fpipe.tensors.tree import same_bits


class Result(NamedTuple):
    """What a step computes."""

    loss: Tensor | None
    outputs: Any
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def differences(got: Result, want: Result) -> Iterator[str]:
    """Every leaf in which two results differ, in any bit."""
    outputs = [optree.tree_flatten(one.outputs) for one in (got, want)]
    if outputs[0][1] != outputs[1][1]:
        yield f"outputs: {outputs[0][1]} is not {outputs[1][1]}"
        return
    leaves = [{f"outputs {k}": leaf for k, leaf in enumerate(found)} for found, _ in outputs]
    for mine, theirs in (
        ({"loss": got.loss}, {"loss": want.loss}),
        leaves,
        (got.grads, want.grads),
        (got.buffers, want.buffers),
    ):
        if mine.keys() != theirs.keys():
            yield f"names: {sorted(mine)} are not {sorted(theirs)}"
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            same = same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            if not same:
                yield f"{name}: {a} is not {b}"


def assert_same(got: Result, want: Result) -> None:
    found = list(differences(got, want))
    assert not found, "\n".join(found)


def require_part(got: Any, want: Any, what: str = "") -> None:
    """Raise unless all that is in `got`, a tree of dicts and lists, is in `want`, too, with the same types and bits.

    A dict may lack names, since a process holds a part of them. Of DTensors, what this process holds is compared.
    """
    if isinstance(got, Mapping):
        for name in got:
            require_part(got[name], want[name], f"{what} {name}")
    elif isinstance(got, list | tuple):
        for k, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            require_part(mine, theirs, f"{what} {k}")
    elif isinstance(got, Tensor):
        assert same_bits(local_part(got.detach()), local_part(want.detach())), f"{what}: {got}, expected {want}"
    else:
        assert (type(got), got) == (type(want), want), f"{what}: {got}, expected {want}"


def require_same_slots(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Raise unless the state of an optimizer has the same slots for each parameter that it has."""
    require_part(got, want, "state")
    assert {name: {*got[name]} for name in got} == {name: {*want[name]} for name in got}
