# SPDX-License-Identifier: Apache-2.0
"""Front end: dynamo, through strict `torch.export`, which reads the model's bytecode instead of running it.

Problem. Dynamo bypasses guards on a model, and silently drops what a graph cannot represent; strict export (torch 2.13)
also drops the dtypes of autocast.

Idea. First rehearse: run the model on fake tensors, as plain Python and with guards on. This refuses what a graph would
lose, and raises the model's errors where they occur. Then let dynamo make the graph.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fpipe.capture.aten import read_program
from fpipe.capture.eager_types import show_fakes
from fpipe.capture.export import Flat
from fpipe.capture.guards import refuse_autocast, refuse_hooks
from fpipe.capture.places import blame, module_place
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.captured import Captured
from fpipe.ir.objective import Objective
from fpipe.model.stateless import skeleton
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.tree import Structure
from fpipe.torch_private import torch_pytree

DYNAMO_REPAIR = 'Rewrite that part, or choose capture="trace", which runs the model instead of reading it.'


def dynamo(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture `model` and its loss for one microbatch; see `FrontEnd`."""
    refuse_hooks(model)
    device = leaves[0].device if leaves else torch.device("cpu")
    mode = fake_mode()
    bare = skeleton(model, lambda tensor: fake(mode, tensor, device))
    fakes = [fake(mode, leaf, device) for leaf in leaves]
    with mode:
        structure = _rehearse(bare, objective, fakes)
    batch = objective.batch.unflatten(fakes)
    program = _export_strict(_Whole(bare, objective), batch)
    number = {id(leaf): k for k, leaf in enumerate(fakes)}
    order = [number[id(leaf)] for leaf in torch_pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]

    def returned(nodes: Sequence[Any]) -> tuple[Any, list[Any]]:
        loss, outputs = torch_pytree.tree_unflatten(nodes, program.call_spec.out_spec)
        constant = dict(structure.constants)
        return loss, [node for k, node in enumerate(structure.spec.flatten_up_to(outputs)) if k not in constant]

    return read_program(program, bare, order, returned, structure, mode, device)


class _Whole(nn.Module):
    """A model and its loss as one module, called with the batch's trees."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, *batch: Any) -> tuple[Tensor | None, Any]:
        """Return the loss, or `None` if there is none, and the outputs."""
        return self.objective.of(self.model, batch)


def _rehearse(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Structure:
    """Run the model and return the tree of its outputs; raise `CaptureError` for what a graph would lose."""
    trees: list[Structure] = []
    try:
        with refuse_autocast(model):
            flat = Flat(model, objective, trees.append)
            flat.rehearse(leaves)
            flat(*leaves)
    except PipelineError:
        raise
    except Exception as error:
        _raise_unreadable(blame(error.__traceback__, model), "the model did not run on fake tensors", error)
    return trees[-1]


def _export_strict(whole: _Whole, batch: Any) -> ExportedProgram:
    try:
        with warnings.catch_warnings(), show_fakes():
            # it warns about in-place changes of buffers, but they are in the graph
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            return torch.export.export(whole, batch, strict=True)
    except PipelineError:
        raise
    except Exception as error:
        _raise_unreadable(_module_being_read(error, whole.model), "dynamo could not read it", error)


def _module_being_read(error: Exception, model: nn.Module) -> str:
    """Return the place of the first module whose `forward` is the innermost one that dynamo was reading."""
    for frame in reversed(getattr(error, "real_stack", None) or []):
        for name, module in model.named_modules():
            code = type(module).forward.__code__
            if (code.co_filename, code.co_name) == (frame.filename, frame.name) and frame.lineno in {
                line for _, _, line in code.co_lines()
            }:
                return module_place(name, module)
    return "the model or its loss"


def _raise_unreadable(where: str, what: str, error: Exception) -> NoReturn:
    said = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].rstrip("\n.")
    raise CaptureError(
        f"{where}: {what}: {said}. Expected control flow and shapes that do not depend on data. {DYNAMO_REPAIR}"
    ) from error
