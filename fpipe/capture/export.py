# SPDX-License-Identifier: Apache-2.0
"""Front end: non-strict `torch.export`, which runs the model's Python and records the operators; see `aten`.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fpipe.capture.aten import read_program
from fpipe.capture.guards import guard, refuse_hooks
from fpipe.capture.module_state import plain_state, require_unchanged
from fpipe.capture.places import blame
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.captured import Captured, Tensors
from fpipe.ir.objective import Objective
from fpipe.model.stateless import skeleton
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.tree import Structure, flatten, require_transparent
from fpipe.torch_private import FakeTensorMode


def export_model(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture `model` and its loss for one microbatch; see `FrontEnd`."""
    refuse_hooks(model)
    device = leaves[0].device if leaves else torch.device("cpu")
    mode = fake_mode()
    trees: list[Structure] = []
    flat = Flat(skeleton(model, lambda tensor: fake(mode, tensor, device)), objective, trees.append)
    program = _export(flat, tuple(fake(mode, leaf, device) for leaf in leaves), mode)

    def returned(nodes: Sequence[Any]) -> tuple[Any, list[Any]]:
        return (None, [*nodes]) if objective.loss is None else (nodes[0], [*nodes[1:]])

    return read_program(program, flat.model, range(len(leaves)), returned, trees[-1], mode, device)


class Flat(nn.Module):
    """A guarded model and its loss as one module that takes and returns flat tensors.

    `report` is called with the tree of the outputs.
    """

    def __init__(self, model: nn.Module, objective: Objective, report: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model, self.objective, self.report = model, objective, report

    def rehearse(self, leaves: Sequence[Tensor]) -> None:
        """Run once, so that what the model does only on its first call (complete its configuration, say) is done."""
        with guard(self.model):
            self.objective(self.model, leaves)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the loss, if there is one, and the tensors of the outputs."""
        with guard(self.model):
            before = plain_state(self.model)
            loss, outputs = self.objective(self.model, leaves)
            require_unchanged(before, plain_state(self.model), "the new value would be lost")
        tensors, structure = flatten(outputs, opaque=True)
        require_transparent("outputs", structure)
        self.report(structure)
        return *(() if loss is None else (loss,)), *tensors


def _export(flat: Flat, leaves: Tensors, mode: FakeTensorMode) -> ExportedProgram:
    try:
        with mode:
            flat.rehearse(leaves)
        return torch.export.export(flat, leaves, strict=False)
    except PipelineError:
        raise
    except Exception as error:
        where = blame(error.__traceback__, flat.model)
        raise CaptureError(
            f"{where}: torch.export could not trace it: {error}. Expected control flow and shapes that do not depend "
            'on data. Rewrite that part, or choose capture="trace", where modules run as they are.'
        ) from error
