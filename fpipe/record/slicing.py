# SPDX-License-Identifier: Apache-2.0
"""The slices of a microbatch, and the model's calls for them, each with what the one before has left.

Problem. A schedule of slices runs a sequence piece by piece. The model must know what earlier pieces have left: its
carry, such as keys and values of attention, or a recurrent state.

Idea. A model takes its carry as an argument, and a loop over slices calls it for one after the other. The loop is what
is recorded. So the carry is whatever the model's Python passes on, an object such as a cache included, and only the
tensors in it exist for the stages: values that one slice makes and the next one reads.

Invariant: a slice reads its own part of the batch only, and whatever is not cut along the sequence.

Runs when a plan is made, and when `verify` runs the model eagerly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from fpipe.errors import CaptureError, InputError

CARRY: Final = "carry"
CACHE: Final = "past_key_values"
MASK: Final = "attention_mask"
Lengths: TypeAlias = Callable[[int, int], Sequence[int]]
"""`lengths(length, slices)` returns the lengths of the slices of a sequence."""


@dataclass(frozen=True)
class Slicing:
    """The way to cut a microbatch into slices, and to call the model for each.

    - `count`: the number of slices. `keyword`: the argument by which the model takes its carry.
    - `dims`: for each tensor leaf of the inputs and the targets, the dimension of the sequence, or `None`.
    - `lengths`: returns the lengths of slices. `mean`: whether losses are means over a slice, rather than sums.
    """

    count: int
    keyword: str
    dims: tuple[int | None, ...]
    lengths: Lengths
    mean: bool

    def cut(self, k: int, leaves: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Return slice `k` of these leaves, of which the first is number `first` of the batch."""
        dims = self.dims[first : first + len(leaves)]
        return [
            leaf if d is None else leaf.narrow(d, *self._place(leaf.shape[d], k))
            for leaf, d in self._pairs(leaves, dims)
        ]

    def _pairs(self, leaves: Sequence[Tensor], dims: Sequence[int | None]) -> Iterator[tuple[Tensor, int | None]]:
        return zip(leaves, dims if self.count > 1 else [None] * len(dims), strict=True)

    def _place(self, length: int, k: int) -> tuple[int, int]:
        """Return where slice `k` of a sequence begins, and its length; raise `InputError` for wrong lengths."""
        found = [*self.lengths(length, self.count)]
        if len(found) != self.count or sum(found) != length or min(found) < 1:
            raise InputError(
                f"slice_lengths: got {found} for {self.count} slices of {length}, expected as many positive lengths "
                "that add up to it. Pass longer sequences, or a function (length, slices) -> lengths."
            )
        return sum(found[:k]), found[k]

    def share(self, k: int, leaves: Sequence[Tensor]) -> float:
        """Return the share of slice `k` in a loss that is a mean over the sequence; 1 for a sum."""
        if not self.mean or self.count == 1:
            return 1.0
        leaf, dim = next((leaf, dim) for leaf, dim in zip(leaves, self.dims, strict=True) if dim is not None)
        return self._place(leaf.shape[dim], k)[1] / leaf.shape[dim]

    def call(self, model: Callable[..., Any], inputs: Any, whole: Any, carry: Any) -> tuple[Any, Any]:
        """Call the model for a slice; return its outputs, and what it leaves for the next one.

        `inputs` are those of the slice, `whole` those of all slices, `carry` what the slice before left.
        """
        args, words = ((), dict(inputs)) if isinstance(inputs, dict) else (inputs, {})
        if self.keyword == CACHE:
            return self._call_with_cache(model, args, words, whole, carry)
        returned = model(*args, **words, **{CARRY: carry})
        if not isinstance(returned, tuple) or len(returned) != 2:
            if self.count == 1:  # an argument that only has this name
                return returned, None
            raise CaptureError(
                f"(root): got {type(returned).__name__} from a model that takes a carry, expected the pair (outputs, "
                "carry). Return both; a model that leaves nothing for the next slice returns (outputs, None)."
            )
        return returned

    def _call_with_cache(
        self, model: Callable[..., Any], args: tuple[Any, ...], words: dict[str, Any], whole: Any, cache: Any
    ) -> tuple[Any, Any]:
        """Call a decoder of transformers, which adds its keys and values to a cache; the mask is that of all tokens."""
        if self.count == 1:
            return model(*args, **words), None
        if cache is None:
            from transformers.cache_utils import DynamicCache

            cache = DynamicCache()
        mask = whole.get(MASK) if isinstance(whole, dict) else None
        if isinstance(mask, Tensor):
            seen = words["input_ids"].shape[1] + cache.get_seq_length()
            words[MASK] = mask.narrow(1, 0, seen)
        outputs = model(*args, **{**words, CACHE: cache, "use_cache": True})
        return replace(outputs, **{CACHE: None}), cache


def find_carry(model: nn.Module, inputs: Any) -> str:
    """Return the argument by which a model takes its carry; empty if it takes none."""
    try:
        names = [*inspect.signature(model.forward).parameters]
    except (TypeError, ValueError):
        return ""
    given = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=False))
    takes = [name for name in (CARRY, CACHE) if name in names and given.get(name) is None]
    return next((name for name in takes if name == CARRY or hasattr(model, "config")), "")
