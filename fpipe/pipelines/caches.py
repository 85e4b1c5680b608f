# SPDX-License-Identifier: Apache-2.0
"""The values that a pipeline caches from one call to the next.

Problem. Whoever trains on sequences of all lengths has a new kind of batch in nearly every step. Each has its own plan,
captures and agreement, some megabytes together. They can't all be kept.

Idea. Keep the agreements on the last kinds of batches that were used, and only what belongs to these. The kind that the
pipeline was built for stays: all others are cut where it is cut.

Invariants. Nothing here changes what a step computes. It only saves asking or comparing again. All ranks forget the
same kinds: an agreement is added, or used, right after all ranks have agreed, which either all of them do or none. So
its place in the order of use is the same on every rank.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor

from fpipe.batching.signature import Signature
from fpipe.ir.variant import Variant
from fpipe.pipelines.norm_table import NormTable
from fpipe.pipelines.step_plan import StepPlan
from fpipe.runtime.transport.agreement import Field

BatchKind: TypeAlias = tuple[Variant, Signature]
"""The kind of a batch: those of one kind run the same plan, and differ only in the values of their tensors."""


class Agreement(NamedTuple):
    """The plan that all ranks have agreed on for one kind of batch.

    - `plan`: this process's side of it.
    - `digest`: the digest of the plan's fields; there are none if all ranks are in this process.
    - `fields`: the fields of the batch, which they compare again in every step.
    """

    plan: StepPlan
    digest: int
    fields: tuple[Field, ...]


@dataclass(frozen=True, eq=False)
class Caches:
    """The caches of a pipeline.

    - `most`: the largest number of agreements that are kept besides the one on the pipeline itself.
    - `agreements`: by kind of batch. The first is the one on the pipeline itself; then the least recently used.
    - `unquestioned`: the last kinds of batches whose values the model asks nothing about.
    - `compared`: the kind of batch of the first step, when ranks have compared the tensors that several of them hold.
    - `trainable`: the trainable parameters that `init` and `initialise` returned, by id.
    - `norm_tables`: where norms of gradients are exchanged, by the digests of all ranks' lists of gradients.
    """

    most: int
    agreements: OrderedDict[BatchKind, Agreement] = field(default_factory=OrderedDict)
    unquestioned: dict[BatchKind, None] = field(default_factory=dict)
    compared: set[BatchKind] = field(default_factory=set)
    trainable: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    norm_tables: dict[tuple[int, ...], NormTable] = field(default_factory=dict)

    def add(self, kind: BatchKind, agreement: Agreement) -> None:
        """Add an agreement, and forget the least recently used ones if there are too many."""
        self.agreements[kind] = agreement
        _, *others = self.agreements
        for other in others[: -self.most]:
            del self.agreements[other]

    def add_unquestioned(self, kind: BatchKind) -> None:
        """Add a kind of batch whose values the model asks nothing about, and forget the oldest if there are too many.

        Ranks may forget others than each other: to ask again takes no message if there is no question.
        """
        self.unquestioned[kind] = None
        for old in [*self.unquestioned][: -1 - self.most]:
            del self.unquestioned[old]

    def clear(self) -> None:
        """Forget everything."""
        for cache in (self.agreements, self.unquestioned, self.compared, self.trainable, self.norm_tables):
            cache.clear()

    def use(self, kind: BatchKind) -> None:
        """Make a kind of batch the most recently used one."""
        if kind != next(iter(self.agreements)):
            self.agreements.move_to_end(kind)
