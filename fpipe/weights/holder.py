# SPDX-License-Identifier: Apache-2.0
"""A module that holds a process's parameters and buffers under the model's own names.

Problem. Optimizers, `state_dict`, `torch.distributed.checkpoint` and averaged models expect a module. A process has a
dict of some of the model's tensors.

Idea. Copy the model's tree of modules, put in the tensors that the process has, and register the others as `None`, as
`nn.Linear(..., bias=False)` does with its bias: torch skips them everywhere. Classes and attributes are those of the
model, so code that groups parameters by the class of their module still works.

Invariants. A tied parameter is one `nn.Parameter` under all of its names. No memory is copied.

Runs when a holder is made, never in a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fpipe.errors import InputError
from fpipe.model.stateless import Module, on_meta, skeleton
from fpipe.weights.initialization import list_leaves


def hold(model: Module, values: Mapping[str, Tensor]) -> Module:
    """Return a copy of `model`, which may be fake, with these `values`, by first name, and `None` for other tensors."""
    known = list_leaves(model)
    unknown = [name for name in values if name not in known]
    if unknown:
        raise InputError(
            f"params, buffers: got {unknown}, which the model does not have, expected names like {list(known)[:5]}. "
            "Pass what pipe.init(model) returned."
        )
    names = {id(leaf): name for name, leaf in known.items()}

    def put(leaf: Tensor) -> Tensor:
        name = names[id(leaf)]
        return values[name].detach() if name in values else on_meta(leaf)

    made = skeleton(model, put)
    leaves = list_leaves(made)
    for name, value in values.items():
        leaves[name].requires_grad_(value.requires_grad)
    absent = {id(leaf) for name, leaf in leaves.items() if name not in values}
    for module in made.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: None for name, leaf in table.items() if id(leaf) in absent})
    return made
