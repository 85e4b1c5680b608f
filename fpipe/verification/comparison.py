# SPDX-License-Identifier: Apache-2.0
"""Compare what a pipeline computed, bit for bit, with one device.

There are two comparisons: with `fpipe.reference`, and with the user's own module run eagerly, forward and
`.backward()`, in a plain loop without fpipe. The reference alone is not enough: it shares the capture, so it can't
see what the capture lost.

Runs when `verify` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import MismatchError
from fpipe.pipelines.results import Merged
from fpipe.record.captured import Tensors
from fpipe.record.objective import Computed
from fpipe.tensors.placed import local_part
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import FakeTensor, finish_collective, is_dtensor
from fpipe.tensors.tree import flatten, same_bits, stored_values
from fpipe.verification.reference import CopySum

Pair: TypeAlias = tuple[str, Tensor | None, Tensor | None]
"""A leaf's name, and its value on either side."""
SPLIT: Final = (
    "Check that batch_dims splits every leaf into rows that belong together, that the loss is a mean over the same "
    "number of rows or tokens in each microbatch (if not, set weight or reduce of fpipe.Microbatching), and that no "
    "layer combines rows, as BatchNorm does."
)
ALIGNMENT = 64  # bytes; the alignment of a matrix affects how it is summed


class Verification(NamedTuple):
    """The number of leaves that `verify` found equal to the reference's, and to those of the user's module run eagerly.

    `eager` is 0 if the model draws random numbers, because eager dropout draws different ones. Gradients that are
    summed over stages (`tied="sum"`) are compared only with the reference, because the eager model adds in another
    order. The numbers are sums over all steps.
    """

    reference: int
    eager: int


class Results(NamedTuple):
    """The results by which two computations are compared; `None` for what one of them lacks."""

    loss: Tensor | None
    outputs: Any
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    aux: Sequence[Any] | None = None

    def restrict(self, params: Collection[str]) -> Results:
        """Return the same results with the gradients of these parameters only."""
        return self._replace(grads={name: grad for name, grad in self.grads.items() if name in params})


def run_eagerly(
    model: nn.Module,
    objective: Callable[[nn.Module, Sequence[Tensor]], Computed],
    microbatches: int,
    batch: Mapping[int, Sequence[Tensor]],
    sums: Mapping[str, CopySum],
    merge: Callable[[Mapping[int, Tensors]], Merged],
    skips: Collection[int] = (),
) -> Results:
    """Return the results of the user's module in a plain microbatch loop; restore its gradients and buffers.

    `objective` computes one microbatch, `batch` has the microbatches of each leaf. `sums` has, by parameter, the sum to
    add gradients to; those of other parameters are added as they come. `merge` merges the loss and outputs of all
    microbatches. `skips` has the microbatches without a backward.
    """
    results: dict[int, Tensors] = {}
    before = dict(model.named_buffers())
    with _restore_tensors(model):
        for i in range(microbatches):
            value, *others = objective(model, [_copy_aligned(parts[i]) for _, parts in sorted(batch.items())])
            assert value is not None, "there is a loss"
            if value.requires_grad and i not in skips:
                torch.autograd.backward(value)
            for name, p in model.named_parameters():
                if name in sums:
                    sums[name].add(i, p.grad)
                    p.grad = None
            leaves, _ = flatten(others[::-1], opaque=True)  # the loss's aux comes first
            results[i] = (value.detach(), *[leaf.detach() for leaf in leaves])
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        grads |= {name: total for name, terms in sums.items() if (total := terms.total()) is not None}
        buffers = {name: _state_after(buffer, before.get(name)) for name, buffer in model.named_buffers()}
    loss, outputs, aux = merge(results)
    return Results(loss, outputs, grads, buffers, aux)


def _copy_aligned(tensor: Tensor) -> Tensor:
    """Return a copy that the model may modify, with the same layout and alignment, on which kernels may depend."""
    spec = Spec.of(tensor)
    packed = spec.pack(tensor)
    memory = packed.new_empty(packed.numel() + ALIGNMENT)
    start = 0 if isinstance(tensor, FakeTensor) else (tensor.data_ptr() - memory.data_ptr()) % ALIGNMENT
    return spec.unpack(memory[start : start + packed.numel()].copy_(packed))


@contextmanager
def _restore_tensors(model: nn.Module) -> Iterator[None]:
    """Clear the gradients; afterwards, restore gradients and buffers."""
    grads = [(p, p.grad) for p in model.parameters()]
    places = [(one._buffers, name, buffer) for one in model.modules() for name, buffer in one._buffers.items()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for table, name, buffer in places:
            table[name] = buffer
        for buffer, old in buffers:
            buffer.copy_(old)


def _state_after(buffer: Tensor, before: Tensor | None) -> Tensor:
    """Return a copy of a buffer after a run; if it has grown, as caches do, of `before`: steps don't carry it over."""
    has_grown = before is not None and (before.shape, before.dtype) != (buffer.shape, buffer.dtype)
    return before.clone() if has_grown and before is not None else buffer.clone()


def require_equal(got: Results, expected: Results, against: str, tolerance: float = 0) -> int:
    """Return the number of leaves compared; raise `MismatchError` at the first that differs.

    A leaf differs if any bit does; with a `tolerance`, if it differs by more than that fraction of its largest
    magnitude.
    """
    count = 0
    for name, mine, theirs in list_pairs(got, expected):
        count += 1
        if mine is None or theirs is None:
            which = "nothing" if mine is None else "a tensor"
            raise MismatchError(
                f"{name}: got {which}, expected {'a tensor' if mine is None else 'nothing'}, as in {against}."
            )
        if not same_bits(mine, theirs) and not (tolerance and _is_close(mine, theirs, tolerance)):
            far = _difference(mine, theirs) if mine.shape == theirs.shape else float("nan")
            what = f"closer than {tolerance} of the largest magnitude" if tolerance else "the same"
            raise MismatchError(
                f"{name}: got different bits from {against}, expected {what}; the largest difference is {far:.3g}. "
                "First make sure that all ranks have the same model and batch (torch.manual_seed), and that both sides "
                "use the same number of intra-op threads (torch.get_num_threads()) and deterministic kernels."
            )
        if name.startswith("gradient ") and _layout(mine) != _layout(theirs):
            raise MismatchError(
                f"{name}: got strides {mine.stride()}, expected {theirs.stride()}, as in {against}: sums over it, such "
                "as its norm, may have other bits. Report this as a bug; until it is fixed, call .contiguous() on "
                "gradients."
            )
    return count


def require_near(
    got: Results, other: Results, apart: Iterable[Pair], fraction: float, against: str, repair: str
) -> None:
    """Raise `MismatchError` unless results are near those of `against`, such as the whole batch in one piece.

    The loss, the gradients, and each of the pairs in `apart` may differ by `fraction` of the largest magnitude in the
    loss, in all gradients, and in that pair.
    """
    kinds: list[list[Pair]] = [[("loss", got.loss, other.loss)], *[[pair] for pair in apart]]
    kinds.append([(f"gradient {name}", grad, other.grads.get(name)) for name, grad in got.grads.items()])
    for kind in kinds:
        pairs = [(name, *_local_pair(mine, theirs)) for name, mine, theirs in kind]
        largest = max([_magnitude(theirs) for *_, theirs in pairs if theirs is not None], default=0.0)
        for name, mine, theirs in pairs:
            if mine is None or theirs is None:
                which, wanted = ("nothing", "a tensor") if mine is None else ("a tensor", "nothing")
                raise MismatchError(f"{name}: got {which}, expected {wanted}, as in {against}. {repair}")
            same = mine.shape == theirs.shape
            far = _difference(mine, theirs) if same else float("nan")
            if not far <= fraction * largest:
                what = f"a difference of {far:.3g}" if same else f"shape {list(mine.shape)}, not {list(theirs.shape)},"
                raise MismatchError(
                    f"{name}: got {what} from {against}, expected at most {fraction:.2g} of {largest:.3g}. {repair}"
                )


def _magnitude(tensor: Tensor) -> float:
    return float(_as_dense(tensor).abs().max().double()) if tensor.numel() else 0.0


def _layout(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor in dimensions with several elements; nothing if it is sparse."""
    if tensor.layout is not torch.strided:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def require_numbers(results: Results) -> None:
    """Raise `MismatchError` for a loss or a gradient that is all nan, since equality then proves nothing."""
    grads = {f"gradient {name}": grad for name, grad in results.grads.items()}
    for name, tensor in {"loss": results.loss, **grads}.items():
        values = None if tensor is None or isinstance(tensor, FakeTensor) else stored_values(tensor)
        if values is not None and values.is_floating_point() and values.numel() and bool(values.isnan().all()):
            raise MismatchError(
                f"{name}: got nan on both sides, expected numbers: comparing nan with nan shows nothing. Pass "
                "parameters and a batch for which the loss is a number."
            )


def _is_close(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    return _difference(mine, theirs) <= tolerance * _magnitude(theirs)


def _difference(mine: Tensor, theirs: Tensor) -> float:
    return float((_as_dense(mine).double() - _as_dense(theirs).double()).abs().max())


def _as_dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _local_pair(mine: Tensor | None, theirs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the local tensors of two DTensors, placed as the first; other tensors as they are."""
    if is_dtensor(mine) and is_dtensor(theirs):
        if mine.placements != theirs.placements:
            theirs = theirs.redistribute(placements=mine.placements)
        return finish_collective(local_part(mine)), finish_collective(local_part(theirs))
    return mine, theirs


def list_pairs(got: Results, expected: Results) -> Iterator[Pair]:
    """Yield each leaf's name, and its value on either side, of DTensors the local one."""
    for name, *pair in _leaf_pairs(got, expected):
        yield name, *_local_pair(*pair)


def _leaf_pairs(got: Results, expected: Results) -> Iterator[Pair]:
    """Yield each leaf's name, and its value on either side; gradients may exist on one side only."""
    yield "loss", got.loss, expected.loss
    for what in ("outputs", "aux"):
        one, other = getattr(got, what), getattr(expected, what)
        if one is not None and other is not None:
            mine, structure = flatten(one)
            theirs, _ = flatten(other)
            yield from zip([f"{what}{path}" for path in structure.names], mine, theirs, strict=True)
    for name, tensor in got.buffers.items():
        yield f"buffer {name}", tensor, expected.buffers.get(name)
    for name in {**got.grads, **expected.grads}:
        yield f"gradient {name}", got.grads.get(name), expected.grads.get(name)
