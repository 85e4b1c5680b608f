# SPDX-License-Identifier: Apache-2.0
"""Let torch's functions that clip by a norm take that of the whole model.

Problem. A script for one device calls `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`. On one rank's share of
the parameters it would scale by the norm of that share: ranks would go on from other numbers than one device, and
copies of tied parameters would drift apart. Nobody would notice.

Idea. All of these functions, however they were imported, run one function of torch for the norm. While there is a
drop-in module, that function asks first whether it got the gradients of one. If it got all of them, all ranks compute
the norm of the whole model, as `fpipe.norm` does. If it got some, or others beside them, it refuses: another rank holds
none of these, and does not call.

Invariant: one process answers as several do. When the last module is gone, torch's function is back.

Runs when torch computes a norm of gradients, while there is a drop-in module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.tensors.torch_private import total_norm_cell
from fpipe.training.norms import norm


class WholeNorm:
    """The norm of gradients: of the whole model if they are those of one of `modules`, else what torch computes."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.modules = plain, WeakSet[Any]()

    def __call__(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Return the norm, a tensor without dimensions; raise `InputError` for some of the gradients of a module."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        module = self._find(given)
        if module is None:
            found: Tensor = self.plain(given, norm_type, error_if_nonfinite, foreach)
            return found
        grads = _gradients_of(module)
        if _identify(given) != _identify(grads.values()):
            raise InputError(
                f"torch.nn.utils: got {len(given)} gradients to take the norm of, which are not all {len(grads)} of a "
                "fpipe.Pipelined and no others, expected these: each rank holds a share, and a rank that holds nothing "
                "of a part would not make this call. Call model.clip_grad_norm_(1.0) for the whole model. For a part, "
                'call on every rank fpipe.clip(model.pipe, grads, 1.0, names="head.*", donate=True), with all grads by '
                "name."
            )
        total = norm(module.pipe, grads, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is {float(total)}, so it cannot be clipped. Pass "
                "error_if_nonfinite=False to scale by it anyway."
            )
        return total

    def _find(self, given: list[Tensor]) -> Any:
        """Return the module that has some of these gradients.

        A rank may have none, as if all of its parameters are frozen: then no gradients are those of the one module that
        has none here.
        """
        ids = _identify(given)
        for module in self.modules:
            if ids & _identify(_gradients_of(module).values()):
                return module
        shares = [] if ids else [one for one in self.modules if _holds_share(one) and not _gradients_of(one)]
        return shares[0] if len(shares) == 1 else None


def watch_norms(module: nn.Module) -> None:
    """Let torch's functions take norms over the whole model for gradients of this module, for as long as it exists."""
    cell = total_norm_cell()
    if not isinstance(cell.cell_contents, WholeNorm):
        cell.cell_contents = WholeNorm(cell.cell_contents)
    cell.cell_contents.modules.add(module)
    weakref.finalize(module, _restore)


def _restore() -> None:
    """Put torch's function back if no module is left."""
    cell = total_norm_cell()
    known = cell.cell_contents
    if isinstance(known, WholeNorm) and not [*known.modules]:
        cell.cell_contents = known.plain


def _identify(grads: Iterable[Tensor]) -> set[int]:
    """Return which tensors these are, without those that have no numbers, as a rank without gradients has one."""
    return {id(grad) for grad in grads if grad.numel()}


def _gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _holds_share(module: Any) -> bool:
    return len(module.pipe.ranks.ranks) < int(module.pipe.schedule.ranks)
