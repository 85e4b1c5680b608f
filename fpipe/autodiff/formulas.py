# SPDX-License-Identifier: Apache-2.0
"""How autograd's nodes compute the gradients of weights, so that it can be done later.

A node computes the gradient of a weight by a few operations on what it saved and on the incoming gradient. They are
written out here for the nodes that take nearly all of the time: products, convolutions and embeddings. Each formula
is that of torch's `derivatives.yaml` and `FunctionsManual.cpp`, operation by operation, so its bits are autograd's.

Invariant: nothing that `keep` returns carries a graph; an undetached tensor would keep everything before it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any
"""A node of the autograd graph; each class has its own attributes, `_saved_*`."""
Kept: TypeAlias = tuple[Any, ...]


class Operand(NamedTuple):
    """A weight as a node reads it.

    - `weight`: its number among the weights; `number`: which input of the node it is; `shape`: its shape there.
    - `transposed`: whether the node reads the transpose, as linear layers do.
    - `between`: the names of other nodes between the two, starting at the weight.
    """

    weight: int
    number: int
    shape: tuple[int, ...]
    transposed: bool
    between: tuple[str, ...]


class Formula(NamedTuple):
    """The gradients of some operands of a node: `grads(incoming, keep(node), operands)`, one for each operand.

    - `numbers`: the inputs of the node that it covers; any subset may be requested.
    - `fits`: whether the formula holds for a node.
    - `transposes`: whether the gradient of a `transposed` operand is returned for the weight itself.
    - `together`: whether computing one gradient without the others saves nothing.
    """

    numbers: tuple[int, ...]
    keep: Callable[[Node], Kept]
    grads: Callable[[Tensor, Kept, Sequence[Operand]], Sequence[Tensor]]
    fits: Callable[[Node], bool] = lambda node: True
    transposes: bool = False
    together: bool = False


def _plain(node: Node) -> bool:
    """Return whether the node has no scaling factors (alpha, beta)."""
    return bool(node._saved_alpha == 1 and node._saved_beta == 1)


def _nothing(node: Node) -> Kept:
    return ()


def _summed(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """Return the gradient of a bias: the engine sums over broadcast dimensions, for most only the first."""
    shape = operands[0].shape
    rows = incoming.dim() == len(shape) + 1 and 1 not in shape
    return (incoming.sum(0) if rows else incoming.sum_to_size(shape),)


def _left(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """`mm_mat1_backward`: the result has the operand's layout."""
    right, strides = kept
    (operand,) = operands
    if strides == (1, operand.shape[0]):
        grad = right.mm(incoming.t())
        return (grad if operand.transposed else grad.t(),)
    grad = incoming.mm(right.t())
    return (grad.t() if operand.transposed else grad,)


def _right(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """`mm_mat2_backward`: the result has the operand's layout."""
    left, strides = kept
    (operand,) = operands
    if strides == (1, operand.shape[0]):
        grad = incoming.t().mm(left)
        return (grad if operand.transposed else grad.t(),)
    grad = left.t().mm(incoming)
    return (grad.t() if operand.transposed else grad,)


def _batched_left(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    return (incoming.bmm(kept[0].transpose(1, 2)),)


def _batched_right(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    return (kept[0].transpose(1, 2).bmm(incoming),)


def _of_addmm_left(node: Node) -> Kept:
    return node._saved_mat2.detach(), node._saved_mat1_sym_strides


def _of_addmm_right(node: Node) -> Kept:
    return node._saved_mat1.detach(), node._saved_mat2_sym_strides


def _of_mm_left(node: Node) -> Kept:
    return node._saved_mat2.detach(), node._saved_self_sym_strides


def _of_mm_right(node: Node) -> Kept:
    return node._saved_self.detach(), node._saved_mat2_sym_strides


def _of_convolution(node: Node) -> Kept:
    options = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed)
    shape = (*options, node._saved_output_padding, node._saved_groups)
    return node._saved_input.detach(), node._saved_weight.detach(), node._saved_bias_sym_sizes_opt, shape


def _convolution(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    numbers = [operand.number for operand in operands]
    values, weight, bias, shape = kept
    mask = [False, 1 in numbers, 2 in numbers]
    found = torch.ops.aten.convolution_backward(incoming, values, weight, bias, *shape, mask)
    return [found[number] for number in numbers]


def _of_embedding(node: Node) -> Kept:
    return node._saved_indices.detach(), _signed(node._saved_padding_idx), node._saved_scale_grad_by_freq


def _signed(index: int) -> int:
    """Return an index that torch returns as if it were unsigned."""
    return index - 2**64 if index >= 2**63 else index


def _embedding(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    indices, padding, scaled = kept
    return (torch.ops.aten.embedding_dense_backward(incoming, indices, operands[0].shape[0], padding, scaled),)


FORMULAS: Mapping[str, Sequence[Formula]] = MappingProxyType(
    {
        "AddmmBackward0": (
            Formula((0,), _nothing, _summed, _plain),
            Formula((1,), _of_addmm_left, _left, _plain, transposes=True),
            Formula((2,), _of_addmm_right, _right, _plain, transposes=True),
        ),
        "MmBackward0": (
            Formula((0,), _of_mm_left, _left, transposes=True),
            Formula((1,), _of_mm_right, _right, transposes=True),
        ),
        "BaddbmmBackward0": (
            Formula((0,), _nothing, _summed, _plain),
            Formula((1,), lambda node: (node._saved_batch2.detach(),), _batched_left, _plain),
            Formula((2,), lambda node: (node._saved_batch1.detach(),), _batched_right, _plain),
        ),
        "BmmBackward0": (
            Formula((0,), lambda node: (node._saved_mat2.detach(),), _batched_left),
            Formula((1,), lambda node: (node._saved_self.detach(),), _batched_right),
        ),
        "ConvolutionBackward0": (Formula((1, 2), _of_convolution, _convolution, together=True),),
        "EmbeddingBackward0": (
            Formula((0,), _of_embedding, _embedding, lambda node: not node._saved_sparse),
        ),
    }
)  # fmt: skip
"""The formulas of every supported node, by its name."""


def formula_of(name: str, number: int) -> Formula | None:
    """Return the formula for one input of a node, if there is one."""
    return next((formula for formula in FORMULAS.get(name, ()) if number in formula.numbers), None)
