# SPDX-License-Identifier: Apache-2.0
"""The description of a random model: a tree of `Leaf`, `Again` and `Nest`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.common.random_models.kinds import KINDS

NESTS = (
    "plain",
    "residual",
    "keyword",
    "tree",
    "object",
    "method",
    "twice",
    "checkpoint",
    "autocast",
    "no_grad",
    "eval",
)

SEALED_NESTS = ("checkpoint",)

GRAPH_NESTS = ("plain", "residual", "keyword", "tree")


@dataclass(frozen=True)
class Leaf:
    """A layer, which may be frozen or have a low-rank adapter; `feeds` number earlier values that go into it, too."""

    kind: str
    feeds: tuple[int, ...] = ()
    frozen: bool = False
    adapted: bool = False


@dataclass(frozen=True)
class Again:
    """Another call of layer number `which`."""

    which: int
    feeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nest:
    """Parts that run one after the other."""

    kind: str
    parts: tuple[Part, ...]
    feeds: tuple[int, ...] = ()


Part = Leaf | Again | Nest


@dataclass(frozen=True)
class Description:
    """A model: its parts, its ties (`b` of one layer with `a` of another), its outputs and inputs.

    - `returns`: a tensor, a tree, or the loss. `keywords`: inputs are keyword arguments.
    - `sequence`: it is an `nn.Sequential`, through which all values are passed on.
    """

    parts: tuple[Part, ...]
    ties: tuple[tuple[int, int], ...] = ()
    returns: str = "tensor"
    keywords: bool = False
    sequence: bool = False

    @property
    def leaves(self) -> list[Leaf]:
        return [part for part in self.walk() if isinstance(part, Leaf)]

    def walk(self) -> Iterator[Part]:
        todo = list(self.parts)
        while todo:
            part = todo.pop()
            yield part
            todo += part.parts if isinstance(part, Nest) else ()

    @property
    def random(self) -> bool:
        return any(KINDS[leaf.kind].random for leaf in self.leaves)

    @property
    def graph(self) -> bool:
        """Return whether front ends that make graphs can capture it."""
        nests = [part.kind for part in self.walk() if isinstance(part, Nest)]
        return all(KINDS[leaf.kind].graph for leaf in self.leaves) and all(kind in GRAPH_NESTS for kind in nests)

    def has(self, *kinds: str) -> bool:
        return any(part.kind in kinds for part in self.walk() if not isinstance(part, Again))

    @property
    def repeats(self) -> bool:
        """Return whether a module runs, or a parameter is used, more than once."""
        return bool(self.ties) or self.has("twice", "outside") or any(isinstance(p, Again) for p in self.walk())
