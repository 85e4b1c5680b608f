# SPDX-License-Identifier: Apache-2.0
"""The memory layout of operator results, where torch's fake kernels get it wrong.

Problem. Many fake kernels are compositions of other operators. For the gradient of softplus, for example, it is a
`where` whose first operand is not the gradient, so the result gets the layout of another operand. The layout determines
the order in which kernels accumulate, which changes the last bits, and whether a recorded backward can view a gradient.

Idea. A table gives the layout of each operator's real kernel: row-major, that of an argument, or, for elementwise
kernels, one that follows from all operands, in an order specific to the operator.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fpipe.tensors.torch_private import compute_elementwise_output_strides, suggest_memory_format

LayoutRule: TypeAlias = Callable[[Sequence[Any], Tensor], Tensor]
"""Given an operator's arguments and its fake result, returns a result in the layout of the real kernel."""

aten = torch.ops.aten


def rows(args: Sequence[Any], out: Tensor) -> Tensor:
    """Return a result in row-major order, whatever the arguments."""
    return out.contiguous()


def host_rows(args: Sequence[Any], out: Tensor) -> Tensor:
    """Return a result in row-major order if on the CPU; other devices have other kernels."""
    return out.contiguous() if out.device.type == "cpu" else out


def images(position: int) -> LayoutRule:
    """Return the rule of norms over images, which follow the memory format of the argument at `position`."""

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        given = args[position]
        last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)
        mixed = last and not given.is_contiguous()
        return out.contiguous(memory_format=torch.channels_last if mixed else suggest_memory_format(given))

    return rule


def like(position: int) -> LayoutRule:
    """Return a rule that gives results the strides of the argument at `position`, if that is dense; not a number."""

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        return torch.empty_like(args[position], dtype=out.dtype) if out.dim() else out

    return rule


def elementwise(*order: int) -> LayoutRule:
    """Return the rule of elementwise kernels whose operands are the arguments at these positions, in this order.

    A result that is reduced to a number has no layout.
    """

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        operands = [args[k] for k in order if isinstance(args[k], Tensor)] if out.dim() else [out]
        expanded = [operand.expand(out.shape) for operand in operands]
        strides = compute_elementwise_output_strides(*expanded)
        return out if out.stride() == strides else out.new_empty_strided(out.shape, strides)

    return rule


ORDERS: Mapping[tuple[int, ...], Sequence[Any]] = MappingProxyType(
    {
        (0, 1): (
            *(aten.xlogy.Tensor, aten.floor_divide.default, aten.copysign.Tensor, aten.heaviside.default),
            *(aten.complex.default, aten.polar.default, aten.logaddexp.default, aten.logaddexp2.default),
            *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
            *(aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.hardtanh_backward.default),
            *(aten.softplus_backward.default, aten.logit_backward.default, aten.native_dropout_backward.default),
            *(aten.mish_backward.default, aten.special_xlog1py.default),
            *(aten.mse_loss.default, aten.smooth_l1_loss.default),
        ),
        (0, 5): (aten.elu_backward.default,),
        (1, 0): (aten.threshold_backward.default, aten.leaky_relu_backward.default),
        (1, 2, 0): (aten._prelu_kernel_backward.default,),
    }
)

LAYOUT_RULES: Mapping[Any, LayoutRule] = MappingProxyType(
    {
        aten.native_batch_norm.default: images(0),
        aten.native_batch_norm_backward.default: images(1),
        aten.native_layer_norm_backward.default: rows,
        aten._log_softmax_backward_data.default: rows,
        aten.mse_loss_backward.default: rows,
        aten.pow.Scalar: rows,
        aten.smooth_l1_loss_backward.default: rows,
        aten.huber_loss_backward.default: rows,
        aten.huber_loss.default: like(0),
        aten.binary_cross_entropy_backward.default: like(1),
        aten.soft_margin_loss_backward.default: like(2),
        aten.log_sigmoid_forward.default: host_rows,
        aten.log_sigmoid_backward.default: like(0),
        **{operation: elementwise(*order) for order, operations in ORDERS.items() for operation in operations},
    }
)


REDUCED = frozenset({torch.bfloat16, torch.float16})
"""The dtypes that fake kernels compute in float32, on copies of the operands."""


def rule_of(operation: Any, args: Sequence[Any]) -> LayoutRule | None:
    """Return the rule for an operator on these arguments; `None` if its fake kernel is right.

    A copy of an expanded operand is dense, and its layout counts; to the real kernel, expanded dimensions do not.
    """
    known, operands = LAYOUT_RULES.get(operation), [one for one in args if isinstance(one, Tensor)]
    if known is not None or len(operands) < 2 or torch.Tag.pointwise not in getattr(operation, "tags", ()):
        return known  # one operand alone may be copied into another layout on request, as by `clone`
    return elementwise(*range(len(args))) if any(map(_is_spread, operands)) else None


def _is_spread(one: Tensor) -> bool:
    """Return whether an operand of reduced precision is expanded."""
    steps = zip(one.stride(), one.shape, strict=True)
    return one.dtype in REDUCED and any(not step and size > 1 for step, size in steps)


def apply_layout(rule: LayoutRule, args: Sequence[Any], out: Any) -> Any:
    """Return an operator's results, with the rule applied to the first one and to those of the same shape."""
    if isinstance(out, Tensor):
        return rule(args, out)
    first = next((one for one in out if one is not None), None)
    alike = [first is not None and one is not None and one.shape == first.shape for one in out]
    return tuple(rule(args, one) if same else one for one, same in zip(out, alike, strict=True))
