# SPDX-License-Identifier: Apache-2.0
"""The values that a pipeline caches from one call to the next.

Invariant: nothing here changes what a step computes. It only saves asking or comparing again.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor

from fpipe.batching.signature import Signature
from fpipe.ir.variant import Variant
from fpipe.pipelines.norm_table import NormTable
from fpipe.runtime.transport.agreement import Field

BatchKind: TypeAlias = tuple[Variant, Signature]
"""The kind of a batch: those of one kind run the same plan, and differ only in the values of their tensors."""


class Agreement(NamedTuple):
    """The fields that all ranks have agreed on for one kind of batch.

    - `digest`: the digest of the plan's fields; there are none if all ranks are in this process.
    - `fields`: the fields of the batch, which they compare again in every step.
    """

    digest: int
    fields: tuple[Field, ...]


@dataclass(frozen=True, eq=False)
class Caches:
    """The caches of a pipeline.

    - `agreements`: by kind of batch. The first is the agreement on the pipeline itself.
    - `unquestioned`: the kinds of batches whose values the model asks nothing about.
    - `compared`: the kind of batch of the first step, when ranks have compared the tensors that several of them hold.
    - `trainable`: the trainable parameters that `init` and `initialise` returned, by id.
    - `norm_tables`: where norms of gradients are exchanged, by the digests of all ranks' lists of gradients.
    """

    agreements: dict[BatchKind, Agreement] = field(default_factory=dict)
    unquestioned: set[BatchKind] = field(default_factory=set)
    compared: set[BatchKind] = field(default_factory=set)
    trainable: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    norm_tables: dict[tuple[int, ...], NormTable] = field(default_factory=dict)
