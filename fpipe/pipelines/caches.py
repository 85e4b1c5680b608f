# SPDX-License-Identifier: Apache-2.0
"""What a pipeline remembers from one call to the next.

Invariant: nothing here changes what a step computes. It only saves asking or comparing again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor

from fpipe.batching.batch import Signature
from fpipe.ir.variant import Variant
from fpipe.runtime.transport.agreement import Field

BatchKind: TypeAlias = tuple[Variant, Signature]
"""Batches that run the same plan: in the same mode, and alike in everything but the values of their tensors."""


class Agreement(NamedTuple):
    """The fields that all ranks have agreed on for one kind of batch.

    - `digest`: of the plan's fields; 0 if all ranks are in this process.
    - `fields`: what they compare again in every step.
    """

    digest: int
    fields: tuple[Field, ...]


@dataclass(frozen=True, eq=False)
class Caches:
    """The values that a pipeline remembers.

    - `agreements`: by kind of batch. The first is the agreement on the pipeline itself.
    - `unquestioned`: the kinds of batches about whose values the model asks nothing.
    - `compared`: the kind of batch of the first step. Before it, ranks compare the tensors that several of them hold.
    - `trainable`: the trainable parameters that `init` and `initialise` returned, by id.
    """

    agreements: dict[BatchKind, Agreement] = field(default_factory=dict)
    unquestioned: set[BatchKind] = field(default_factory=set)
    compared: set[BatchKind] = field(default_factory=set)
    trainable: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
