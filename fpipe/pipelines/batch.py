# SPDX-License-Identifier: Apache-2.0
"""Split batches into microbatches, and describe what may differ from step to step.

Problem. Arguments are split along different dimensions or not at all, microbatches may differ in size, and later
batches may have other sizes. But a program is captured for shapes that are known before anything is sent.

Idea. A batch is the pair (inputs, targets). Its `Signature` is everything about it except the values of its tensors,
and so is a `Microbatch`. Both are values: every rank derives the same ones by itself, and plans and captures are looked
up by them, so shapes are never sent. A `Batching` holds the rules for splitting batches; a `SplitBatch` is the result.

Each tensor leaf is split in one of three ways (`fpipe.pipelines.leaf`). A batch thus has at most two kinds of
microbatches. One with fewer rows than microbatches has fewer of them, of a row each.

Invariants. Batches differ from the example only in sizes and in non-tensor leaves. A leaf that a rank is not given has
the example's shape; a meta tensor only tells its shape. Memory is laid out as in the example.

Runs when a pipeline is built and in every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.pipelines.leaf import META, Leaf
from fpipe.pipelines.loss_weights import Weight, compute_scales, require_total
from fpipe.pipelines.memory import Memory
from fpipe.record.numbers import DTYPES, as_tensor
from fpipe.record.questions import Answer
from fpipe.record.slicing import Slicing
from fpipe.tensors.arguments import require_primal
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import (
    Structure,
    broadcast,
    flatten,
    is_plain_number,
    list_lacking,
    number_leaves,
    require_same_tree,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Signature:
    """Everything about a batch except its tensors' values, plus the answers to the model's questions about these.

    - `leaves`: per tensor leaf, its spec, or those of its microbatches if a user's function splits it.
    - `program`: the non-tensor leaves, which are part of the program, but of numbers only the types; `halves`: the
      trees of inputs and of targets, which include them.
    - `divisor`: what losses are divided by, if they are not weighted: the number of all microbatches, or 1 for a sum.
    - `microbatches`: the number of microbatches of this batch.
    - `answers`: by microbatch, the answers to the model's questions; empty if it asks none.
    """

    leaves: tuple[tuple[Spec, ...], ...]
    program: str
    halves: tuple[Structure, Structure] = field(compare=False)
    divisor: float
    microbatches: int
    answers: tuple[tuple[Answer, ...], ...] = ()

    def __str__(self) -> str:
        said = f", answering {[[one.text for one in row] for row in self.answers]}" if self.answers else ""
        return f"{', '.join(' '.join(map(str, specs)) for specs in self.leaves)} and {self.program}{said}"

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The numbers among the leaves, which may differ from step to step."""
        return tuple(value for half in self.halves for _, value in half.numbers)

    def with_answers(self, rows: Sequence[tuple[Answer, ...]]) -> Signature:
        """Return the signature with the answers of each microbatch."""
        return replace(self, answers=tuple(rows) if any(rows) else ())


@dataclass(frozen=True)
class Microbatch:
    """Everything about a microbatch except its tensors' values.

    `leaves` are the specs of its tensors, in the order of the tree `structure`: (inputs, targets, scale), where the
    scale is `None` if losses are not weighted; then they are divided by `divisor`. The tensors that hold its numbers
    follow. `program` has the other leaves.
    `answers` are those to the model's questions so far.
    """

    leaves: tuple[Spec, ...]
    program: str
    structure: Structure = field(compare=False)
    divisor: float
    answers: tuple[Answer, ...] = ()

    def __str__(self) -> str:
        said = f", answering {[one.text for one in self.answers]}" if self.answers else ""
        return f"{', '.join(map(str, self.leaves))} and {self.program}{said}"

    def with_answer(self, answer: Answer) -> Microbatch:
        """Return the microbatch with one more answer."""
        return replace(self, answers=(*self.answers, answer))


@dataclass(frozen=True, eq=False)
class Batching:
    """The rules for splitting batches.

    - `leaves`: the tensor leaves of (inputs, targets).
    - `together`: for each entry of `batch_dims`, the numbers of the leaves that it is for; they have as many rows.
    - `example`: the signature of the example.
    - `microbatches`: the number of microbatches; `least`: how many a batch has that has not a row for each.
    - `weight`: the function that weighs a microbatch, or each slice of one; `None` if all weigh the same.
    - `home`: the device of the pipeline, on which batches are that come on the meta device.
    - `may_lack`: whether a batch may lack inputs that the example has, such as labels where no loss is computed.
    - `lacking`: the names of the inputs that these batches lack; they are not among the leaves.
    - `slicing`: for a model with a carry, how microbatches are cut into slices.
    """

    leaves: tuple[Leaf, ...]
    together: tuple[tuple[int, ...], ...]
    example: Signature
    microbatches: int
    least: int
    weight: Weight | None
    home: torch.device
    may_lack: bool = False
    lacking: tuple[str, ...] = ()
    slicing: Slicing | None = None

    @classmethod
    def of(
        cls,
        inputs: Any,
        targets: Any,
        dims: Any,
        microbatches: int,
        weight: Weight | None = None,
        divisor: int | None = None,
        least: int | None = None,
        home: torch.device | None = None,
        may_lack: bool = False,
    ) -> Batching:
        """Return the rules for splitting batches like an example along `dims`, a prefix of the tree (inputs, targets).

        `divisor` is the number of microbatches that losses are averaged over, by default these; 1 to sum them. Smaller
        batches have `least` microbatches or more, by default as many. `home` is the device of the pipeline, by default
        the example's. They may lack inputs if `may_lack`. Raise `InputError` if the example can't be split.
        """
        tensors, structure = flatten((inputs, targets))
        home = find_home(inputs, targets) if home is None else home
        along = broadcast("batch_dims", dims, structure)
        leaves = [
            Leaf.of(_name_leaf(path), tensor, dim, home)
            for path, tensor, dim in zip(structure.names, tensors, along, strict=True)
        ]
        entries = broadcast("batch_dims", number_leaves(dims), structure)
        together = [tuple(k for k, entry in enumerate(entries) if entry == one) for one in dict.fromkeys(entries)]
        known = [leaf.conform(tensor, microbatches) for leaf, tensor in zip(leaves, tensors, strict=True)]
        halves = flatten(inputs)[1], flatten(targets)[1]
        over = microbatches if divisor is None else divisor
        example = Signature(tuple(map(Leaf.specs, leaves, known)), _program(halves), halves, over, microbatches)
        batching = cls(tuple(leaves), tuple(together), example, microbatches, microbatches, weight, home, may_lack)
        batching._require_pieces(example)
        return batching if least is None else replace(batching, least=least)

    def leaf_name(self, number: int) -> str:
        """Return the name of a leaf, or of the scale, for error messages."""
        return name_leaf(self._structure(self.example), number)

    @property
    def scale(self) -> Spec | None:
        """The spec of a microbatch's scale, an additional last leaf; `None` if losses are not weighted.

        It is a number, or one for each slice.
        """
        shape = () if self.slices == 1 else (self.slices,)
        return None if self.weight is None else Spec(shape, (1,) * len(shape), torch.float64, self.home)

    @property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return 1 if self.slicing is None else self.slicing.count

    @property
    def has_targets(self) -> bool:
        """True if there are targets, even if they are an empty tree."""
        return self.example.halves[1].spec != flatten(None)[1].spec

    def of_inputs(self, inputs: Structure) -> Batching:
        """Return the rules for batches with these inputs: as these, without the leaves that the inputs lack."""
        whole, targets = self.example.halves
        if not self.may_lack or inputs.spec == whole.spec:
            return self
        absent = list_lacking(inputs, whole)
        kept = [k for k in range(len(self.leaves)) if k not in absent]
        together = [tuple(kept.index(k) for k in group if k in kept) for group in self.together]
        leaves, specs = (
            zip(*[(self.leaves[k], self.example.leaves[k]) for k in kept], strict=True) if kept else ((), ())
        )
        lacking = tuple([self.leaves[k].name for k in sorted(absent)])
        halves = (inputs, targets) if absent else self.example.halves
        example = replace(self.example, leaves=specs, program=_program(halves, lacking), halves=halves)
        return replace(self, leaves=leaves, together=tuple(filter(None, together)), example=example, lacking=lacking)

    def split(self, signature: Signature) -> list[Microbatch]:
        """Return the microbatches of batches with this signature."""
        structure, count = self._structure(signature), signature.microbatches
        leaves = self.of_inputs(signature.halves[0]).leaves
        columns = [leaf.part_specs(specs, count) for leaf, specs in zip(leaves, signature.leaves, strict=True)]
        scale = () if self.scale is None else (self.scale,)
        numbers = [Spec((), (), DTYPES[type(number)], CPU) for number in signature.numbers]
        rows = [(*[column[i] for column in columns], *scale, *numbers) for i in range(count)]
        answers = signature.answers or ((),) * count
        return [
            Microbatch(row, signature.program, structure, signature.divisor, said)
            for row, said in zip(rows, answers, strict=True)
        ]

    def _structure(self, signature: Signature) -> Structure:
        trees = [half.unflatten([torch.empty(0, device=META)] * len(half.names)) for half in signature.halves]
        return flatten((*trees, None if self.weight is None else torch.empty(0, device=META)))[1]

    def split_batch(self, inputs: Any, targets: Any, total: float | None = None) -> SplitBatch:
        """Split a batch; `total` is the weight of all microbatches that losses are averaged over, these among them.

        For inputs or targets that this rank doesn't need, pass `None` if they are like the example except for values,
        else meta tensors. A leaf in another memory layout is copied. Raise `InputError`, naming the leaf, if it can't
        be split or does not match the example.
        """
        rules = self if inputs is None else self.of_inputs(flatten(inputs)[1])
        if rules.lacking != self.lacking:
            return rules.split_batch(inputs, targets, total)
        halves, given = [], list[Tensor | None]()
        for what, tree, expected in zip(("inputs", "targets"), (inputs, targets), self.example.halves, strict=True):
            tensors, structure = (None, expected) if tree is None else flatten(tree)
            require_same_tree(what, structure, expected)
            halves.append(structure)
            given += [None] * len(expected.names) if tensors is None else tensors
            require_primal(what, dict(enumerate(tensors or ())))
        few = self._shrink(given)
        if total is not None:
            require_total(total, 0 if self.weight is not None else min(few.microbatches, self.example.divisor))
        known = [
            None if tensor is None else leaf.conform(tensor, few.microbatches)
            for leaf, tensor in zip(self.leaves, given, strict=True)
        ]
        specs = [
            example if parts is None else leaf.specs(parts)
            for leaf, parts, example in zip(self.leaves, known, self.example.leaves, strict=True)
        ]
        both = (halves[0], halves[1])
        divisor = few.divisor if total is None or self.weight is not None else total
        signature = Signature(tuple(specs), _program(both, self.lacking), both, divisor, few.microbatches)
        if signature.leaves != self.example.leaves:
            few._require_pieces(signature)
        memories = [
            Memory(leaf.name, () if tensor is None or parts is None else leaf.memory(tensor, parts, few.microbatches))
            for leaf, tensor, parts in zip(self.leaves, given, known, strict=True)
        ]
        wanting = tuple(
            leaf.name for leaf, one in zip(self.leaves, given, strict=True) if one is not None and one.requires_grad
        )
        return SplitBatch(few, signature, tuple(known), tuple(memories), total, wanting)

    @property
    def divisor(self) -> float:
        """The number that losses are divided by, if they are not weighted."""
        known = self.example
        return known.divisor if self.microbatches == known.microbatches else min(known.divisor, self.microbatches)

    def of_batch(self, inputs: Any, targets: Any) -> Batching:
        """Return the rules for this batch: as these, with fewer microbatches if it has not a row for each."""
        return self._shrink([*flatten(inputs)[0], *flatten(targets)[0]])

    def _shrink(self, given: Sequence[Tensor | None]) -> Batching:
        """Return the rules for a batch of these leaves."""
        rows = [
            one.shape[leaf.dim]
            for leaf, one in zip(self.leaves, given, strict=False)
            if one is not None and isinstance(leaf.dim, int) and one.dim() == len(leaf.spec.shape) and not one.is_nested
        ]
        count = max(self.least, min([self.microbatches, *rows]))
        return self if count == self.microbatches else replace(self, microbatches=count)

    def difference(self, signature: Signature) -> str:
        """Return a description of what differs from the example, for error messages."""
        lacking = self.of_inputs(signature.halves[0]).lacking
        if lacking:
            return f"{', '.join(lacking)}: got nothing, where the example has a tensor"
        for leaf, specs, example in zip(self.leaves, signature.leaves, self.example.leaves, strict=True):
            if specs != example:
                got, had = (", ".join(map(str, some)) for some in (specs, example))
                return f"{leaf.name}: got {got}, where the example has {had}"
        if signature.program == self.example.program:
            return f"the batch: got other values than the example's, about which the model asks: {signature}"
        return f"the batch: got {signature.program} besides tensors, where the example has {self.example.program}"

    def _require_pieces(self, signature: Signature) -> None:
        """Raise `InputError` if a leaf has too few rows, or if leaves would be split between different rows."""
        shapes = [(leaf, specs[0].shape) for leaf, specs in zip(self.leaves, signature.leaves, strict=True)]
        for group in self.together:
            _require_same_size([shapes[k] for k in group])
        for leaf, shape in shapes:
            leaf.require_rows(shape, self.least)
        sizes = [(leaf, shape[leaf.dim]) for leaf, shape in shapes if isinstance(leaf.dim, int)]
        for leaf, size in sizes:
            other, another = next(((o, n) for o, n in sizes if n != size), (leaf, size))
            if size % self.microbatches and another != size:
                raise InputError(
                    f"{leaf.name}: got {size} in dimension {leaf.dim}, and {another} in dimension {other.dim} of "
                    f"{other.name}, expected the same size, or sizes divisible by {self.microbatches}: otherwise rows "
                    "that belong together are in different microbatches. Pad or truncate the batch, or say in "
                    "batch_dims how to split both leaves. On a rank that lacks part of it, pass that part on the meta "
                    "device, for its shape."
                )
        self._require_same_pieces(signature)

    def _require_same_pieces(self, signature: Signature) -> None:
        """Raise `InputError` if a function splits a leaf into other sizes than a leaf with as many rows."""
        pairs = zip(self.leaves, signature.leaves, strict=True)
        pieces = [(leaf, sizes) for leaf, specs in pairs if (sizes := leaf.piece_sizes(specs, self.microbatches))]
        for leaf, sizes in pieces:
            for other, theirs in pieces:
                if callable(leaf.dim) and sum(sizes) == sum(theirs) and sizes != theirs:
                    raise InputError(
                        f"{leaf.name}: got pieces of {sizes} rows from the function in batch_dims, but {theirs} of "
                        f"{other.name}, expected the same: otherwise rows that belong together are in different "
                        "microbatches. Split both the same way."
                    )


@dataclass(frozen=True, eq=False)
class SplitBatch:
    """A split batch: its signature, and the leaves that this process was given (`known`), with their memory.

    `total`: the weight that losses are averaged over; `None` for that of these microbatches. `wanting`: the names of
    the leaves that require a gradient.
    """

    batching: Batching
    signature: Signature
    known: tuple[tuple[Tensor, ...] | None, ...]
    memories: tuple[Memory, ...]
    total: float | None = None
    wanting: tuple[str, ...] = ()

    def without_values(self) -> SplitBatch:
        """Return the same batch for a process that was given none of its leaves."""
        return replace(self, known=(None,) * len(self.known))

    def named_leaves(self) -> dict[str, Tensor | None]:
        """Return one tensor of each leaf by its name; `None` for those not given."""
        pairs = zip(self.batching.leaves, self.known, strict=True)
        return {leaf.name: None if known is None else known[0] for leaf, known in pairs}

    def require_no_gradients(self) -> None:
        """Raise `InputError` for a leaf that requires a gradient: a step returns none, so it would be lost."""
        for name in self.wanting:
            raise InputError(
                f"{name}: got a tensor that requires a gradient, expected one that does not: a step returns only the "
                "gradients of parameters, and this one would be lost. Pass x.detach(), or move the code that computes "
                "it into the model."
            )

    def take(self, needed: Iterable[int] | None = None) -> dict[int, Sequence[Tensor]]:
        """Return the microbatches of the `needed` leaves, by leaf number, including the scale; by default, of all.

        Raise `InputError` for a leaf that this process was not given.
        """
        tensors = len(self.known) + (self.batching.weight is not None)
        numbers = self.signature.numbers
        wanted = sorted(set(range(tensors + len(numbers)) if needed is None else needed))
        taken = {number: self._parts(number) for number in wanted if number < len(self.known)}
        if self.batching.weight is not None and len(self.known) in wanted:
            taken[len(self.known)] = self._scale_tensors()
        for number in wanted[bisect_left(wanted, tensors) :]:
            taken[number] = (as_tensor(numbers[number - tensors]),) * self.batching.microbatches
        return taken

    def _parts(self, number: int) -> Sequence[Tensor]:
        leaf, known = self.batching.leaves[number], self.known[number]
        if known is None or any(tensor.device == META for tensor in known):
            what = "nothing" if known is None else "a tensor on the meta device"
            raise InputError(
                f"{leaf.name}: got {what}, expected {leaf.spec} with values: a stage of this rank reads it. Pass the "
                "batch on this rank."
            )
        return leaf.parts(known, self.batching.microbatches)

    @cached_property
    def scales(self) -> list[float]:
        """The factors of the losses of microbatches, or of their slices, if these are weighted."""
        weight = self.batching.weight
        assert weight is not None
        return compute_scales(weight, self.trees(), self.total, self.batching.slices)

    def _scale_tensors(self) -> Sequence[Tensor]:
        spec = self.batching.scale
        assert spec is not None
        every = torch.tensor(self.scales, dtype=spec.dtype, device=spec.device)
        return every.view(-1, *spec.shape).unbind()

    def trees(self) -> Iterable[tuple[Any, Any]]:
        """Yield the inputs and targets of each microbatch, or of each slice of one, `None` for those not given."""
        batching = self.batching
        columns = [
            None if known is None else leaf.parts(known, batching.microbatches)
            for leaf, known in zip(batching.leaves, self.known, strict=True)
        ]
        first, second = self.signature.halves
        split = len(first.names)
        for i in range(batching.microbatches):
            whole = [None if column is None else column[i] for column in columns]
            for k in range(batching.slices):
                leaves = [None if one is None else self._cut(k, number, one) for number, one in enumerate(whole)]
                yield _tree(first, leaves[:split]), _tree(second, leaves[split:])

    def _cut(self, k: int, number: int, leaf: Tensor) -> Tensor:
        """Return slice `k` of a microbatch's leaf."""
        slicing = self.batching.slicing
        return leaf if slicing is None else slicing.cut(k, [leaf], number)[0]


def _require_same_size(shapes: Sequence[tuple[Leaf, tuple[int, ...]]]) -> None:
    """Raise `InputError` if leaves that one entry of `batch_dims` is for differ in size along their dimension.

    One of them has no rows of the batch then, such as the offsets of packed documents, and is not sliced like them.
    """
    split = [(leaf, shape, shape[leaf.dim]) for leaf, shape in shapes if isinstance(leaf.dim, int)]
    for leaf, shape, size in split[1:]:
        first, theirs, expected = split[0]
        if size != expected:
            raise InputError(
                f"{leaf.name}: got {size} in dimension {leaf.dim} of shape {list(shape)}, expected "
                f"{expected}, as in dimension {first.dim} of {first.name}, of shape {list(theirs)}: one entry "
                "of batch_dims is for both. If they do not belong together row by row, say for each how it is split, "
                "as in batch_dims=((0, None), 0): along a dimension, not at all (None), or by a function (leaf, "
                "microbatches) -> tensors. On a rank that lacks part of the batch, pass that part on the meta device, "
                "for its shape."
            )


def find_home(inputs: Any, targets: Any, asked: torch.device | str | None = None) -> torch.device:
    """Return the device of a pipeline: `asked`, or that of the first tensor that has values; the CPU if none has.

    Raise `InputError` if tensors are on several devices, but for those on the CPU, such as lengths.
    """
    tensors, structure = flatten((inputs, targets))
    places = {
        _name_leaf(path): tensor.device
        for path, tensor in zip(structure.names, tensors, strict=True)
        if tensor.device != META
    }
    home = next(iter(places.values()), CPU) if asked is None else _find_device(asked)
    known = {CPU, home} if home in places.values() or not places else {home}
    for name, device in places.items():
        if device not in known:
            why = "place.device" if asked is not None else f"that of {next(iter(places))}"
            raise InputError(
                f"{name}: got a tensor on {device}, expected {home}, {why}. Move the batch to one device; only what "
                "the model reads on the CPU may stay there."
            )
    return home


def _find_device(asked: torch.device | str) -> torch.device:
    """Return a device, with its number; raise `InputError` if there is none such."""
    try:
        device = torch.device(asked)
        return CPU if device.type == "cpu" else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device: got {str(asked)!r}, expected a device of this machine ({str(error).splitlines()[0]}). Pass one, "
            "as in device=f'cuda:{local_rank}'."
        ) from error


def _tree(half: Structure, leaves: list[Tensor | None]) -> Any:
    """Return the inputs or targets of a microbatch, or `None` if they were not given."""
    return None if leaves and leaves[0] is None else half.unflatten(leaves)


def _program(halves: tuple[Structure, Structure], lacking: Sequence[str] = ()) -> str:
    kinds = [[type(value) if is_plain_number(value) else value for _, value in half.constants] for half in halves]
    return f"{kinds!r} without {', '.join(lacking)}" if lacking else repr(kinds)


def name_leaf(structure: Structure, number: int) -> str:
    """Return the name of a leaf of a microbatch: a tensor, or a number, which come after the tensors."""
    paths = [*structure.names, *[structure.paths[leaf] for leaf, _ in structure.numbers]]
    return _name_leaf(paths[number]) if number < len(paths) else "a number in the batch"


def _name_leaf(path: str) -> str:
    """Return a leaf's name in errors: `[0][1]` in the tree (inputs, targets, scale) is `inputs[1]`."""
    part = path[:3]
    return "the scale of the loss" if part == "[2]" else ("inputs" if part == "[0]" else "targets") + path[3:]
