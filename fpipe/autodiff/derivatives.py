# SPDX-License-Identifier: Apache-2.0
"""Autograd's formulas for the gradients of weights, to compute them later than autograd would.

A node computes the gradient of a weight from its saved tensors and the incoming gradient, in a few operations. These
are written out here for the nodes that take nearly all of the time: matrix products, convolutions and embeddings. Each
follows torch's `derivatives.yaml` and `FunctionsManual.cpp`, operation by operation, so the bits are autograd's.

Invariant: all tensors that `keep` returns are detached; otherwise they would keep everything before them alive.

Runs when a plan is made (`derivative_of`) and, if the schedule splits backwards, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, TypeAlias

import torch
from torch import Tensor

from fpipe.autodiff.interface import WeightIndex

AutogradNode: TypeAlias = Any
"""A node of the autograd graph; each class has its own attributes, `_saved_*`."""
Kept: TypeAlias = tuple[Any, ...]
InputIndex = NewType("InputIndex", int)
"""A position among the inputs of a node of the autograd graph."""


class Operand(NamedTuple):
    """A weight as an input of a node.

    - `weight`: which weight; `input`: which input of the node it is; `shape`: its shape there.
    - `transposed`: whether the node reads the transpose, as linear layers do.
    - `between`: the names of the other nodes between weight and node, starting at the weight.
    """

    weight: WeightIndex
    input: InputIndex
    shape: tuple[int, ...]
    transposed: bool
    between: tuple[str, ...]


class Derivative(NamedTuple):
    """The gradients of some operands of a node: `grads(incoming, keep(node), operands)`, one for each operand.

    - `inputs`: the inputs of the node that it covers; any subset may be requested.
    - `fits`: whether the formula applies to a node.
    - `transposes`: whether the gradient of a `transposed` operand is returned for the weight itself.
    - `together`: whether one operation computes all gradients, so that deferring only some saves nothing.
    - `fresh`: whether the gradients are always new memory, here and in autograd.
    """

    inputs: tuple[int, ...]
    keep: Callable[[AutogradNode], Kept]
    grads: Callable[[Tensor, Kept, Sequence[Operand]], Sequence[Tensor]]
    fits: Callable[[AutogradNode], bool] = lambda node: True
    transposes: bool = False
    together: bool = False
    fresh: bool = True


def _plain(node: AutogradNode) -> bool:
    """Return whether the node's scaling factors (alpha, beta) are 1."""
    return bool(node._saved_alpha == 1 and node._saved_beta == 1)


def _nothing(node: AutogradNode) -> Kept:
    return ()


def _bias(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """Return the gradient of a bias, summed over broadcast dimensions (usually the first), as autograd's engine does.

    If none was broadcast, return the incoming gradient itself.
    """
    shape = operands[0].shape
    rows = incoming.dim() == len(shape) + 1 and 1 not in shape
    return (incoming.sum(0) if rows else incoming.sum_to_size(shape),)


def _left(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """Return the gradient of the left factor in its layout, as `mm_mat1_backward` does."""
    right, strides = kept
    (operand,) = operands
    if strides == (1, operand.shape[0]):
        grad = right.mm(incoming.t())
        return (grad if operand.transposed else grad.t(),)
    grad = incoming.mm(right.t())
    return (grad.t() if operand.transposed else grad,)


def _right(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    """Return the gradient of the right factor in its layout, as `mm_mat2_backward` does."""
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


def _of_addmm_left(node: AutogradNode) -> Kept:
    return node._saved_mat2.detach(), node._saved_mat1_sym_strides


def _of_addmm_right(node: AutogradNode) -> Kept:
    return node._saved_mat1.detach(), node._saved_mat2_sym_strides


def _of_mm_left(node: AutogradNode) -> Kept:
    return node._saved_mat2.detach(), node._saved_self_sym_strides


def _of_mm_right(node: AutogradNode) -> Kept:
    return node._saved_self.detach(), node._saved_mat2_sym_strides


def _of_convolution(node: AutogradNode) -> Kept:
    options = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed)
    shape = (*options, node._saved_output_padding, node._saved_groups)
    return node._saved_input.detach(), node._saved_weight.detach(), node._saved_bias_sym_sizes_opt, shape


def _convolution(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    inputs = [operand.input for operand in operands]
    values, weight, bias, shape = kept
    mask = [False, 1 in inputs, 2 in inputs]
    found = torch.ops.aten.convolution_backward(incoming, values, weight, bias, *shape, mask)
    return [found[k] for k in inputs]


def _of_embedding(node: AutogradNode) -> Kept:
    return node._saved_indices.detach(), _to_signed(node._saved_padding_idx), node._saved_scale_grad_by_freq


def _to_signed(index: int) -> int:
    """Return the signed value of an index that torch returns as unsigned."""
    return index - 2**64 if index >= 2**63 else index


def _embedding(incoming: Tensor, kept: Kept, operands: Sequence[Operand]) -> Sequence[Tensor]:
    indices, padding, scaled = kept
    return (torch.ops.aten.embedding_dense_backward(incoming, indices, operands[0].shape[0], padding, scaled),)


DERIVATIVES: Mapping[str, Sequence[Derivative]] = MappingProxyType(
    {
        "AddmmBackward0": (
            Derivative((0,), _nothing, _bias, _plain, fresh=False),
            Derivative((1,), _of_addmm_left, _left, _plain, transposes=True),
            Derivative((2,), _of_addmm_right, _right, _plain, transposes=True),
        ),
        "MmBackward0": (
            Derivative((0,), _of_mm_left, _left, transposes=True),
            Derivative((1,), _of_mm_right, _right, transposes=True),
        ),
        "BaddbmmBackward0": (
            Derivative((0,), _nothing, _bias, _plain, fresh=False),
            Derivative((1,), lambda node: (node._saved_batch2.detach(),), _batched_left, _plain),
            Derivative((2,), lambda node: (node._saved_batch1.detach(),), _batched_right, _plain),
        ),
        "BmmBackward0": (
            Derivative((0,), lambda node: (node._saved_mat2.detach(),), _batched_left),
            Derivative((1,), lambda node: (node._saved_self.detach(),), _batched_right),
        ),
        "ConvolutionBackward0": (Derivative((1, 2), _of_convolution, _convolution, together=True),),
        "EmbeddingBackward0": (
            Derivative((0,), _of_embedding, _embedding, lambda node: not node._saved_sparse),
        ),
    }
)  # fmt: skip
"""The derivatives of every supported node, by its name."""


def derivative_of(name: str, input: InputIndex) -> Derivative | None:
    """Return the derivative by one input of the nodes with this name, or `None` if none is written out here."""
    return next((derivative for derivative in DERIVATIVES.get(name, ()) if input in derivative.inputs), None)
