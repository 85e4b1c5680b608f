# SPDX-License-Identifier: Apache-2.0
"""Load values by name from a model or a state dict, and hold them in a module again.

Only this process's leaves are read and copied, one by one.

A mapping may be lazy, like `fpipe.safetensors`, or larger than memory, like `torch.load(..., mmap=True)`: only values
of this process's share are accessed. Values are copied to the device and into the layout that the pipeline was built
for; they are never cast.

Runs when `pipe.init` is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.front_ends.parts import as_module
from fpipe.record.model.skeleton import Module, on_meta, skeleton
from fpipe.tensors.placed import Placed, local_part, require_same_placement
from fpipe.tensors.spec import Spec
from fpipe.tensors.torch_private import finish_collective
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import Initializer, initialize, list_aliases, list_leaves
from fpipe.weights.state import require_leaf

ValueSource: TypeAlias = nn.Module | Sequence[Any] | Mapping[str, Tensor]


def load_values(
    model: nn.Module,
    held: Collection[str],
    placed: Mapping[str, Placed],
    source: ValueSource,
    fill: Initializer | None = None,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Return copies of the values of a model's `held` leaves; `fill` initializes buffers that no state dict has.

    `placed` says which leaves are DTensors, and how; the copies are of their local tensors.

    Raises `InputError` for a leaf without a value, or of another shape or dtype; for a leaf with two different values;
    and, if `strict`, for names that the model does not have.
    """
    values, known = _by_name(source), list_aliases(model)
    if strict:
        _require_known(values, known)
    found = {name: [alias for alias in known[name] if alias in values] for name in held}
    missing = [name for name in held if not found[name]]
    made: dict[str, Tensor] = {}
    if fill is not None:
        made = initialize(model, [name for name in missing if name in list_transient_buffers(model)], fill, seed=0)
    _require_none([name for name in missing if name not in made], list_transient_buffers(model))
    fakes = list_leaves(model)
    specs = {name: Spec.of(local_part(fakes[name])) for name in held}
    return {
        name: made[name] if name in made else _copy_value(values, found[name], specs[name], placed.get(name))
        for name in held
    }


def hold(model: Module, values: Mapping[str, Tensor]) -> Module:
    """Return a copy of `model`, which may be fake, with these `values`, by first name, and `None` for other tensors.

    Optimizers, `state_dict`, `torch.distributed.checkpoint` and averaged models expect a module, and torch skips `None`
    everywhere, as it does the bias of `nn.Linear(..., bias=False)`. Classes and attributes are those of the model, so
    code that groups parameters by the class of their module still works. A tied parameter is one `nn.Parameter` under
    all of its names. No memory is copied.
    """
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


def _by_name(source: ValueSource) -> Mapping[str, Any]:
    """Return the values of `source` by name; for a model, each under all of its names."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, nn.Module | list | tuple):
        raise InputError(
            f"source: got {type(source).__name__}, expected a model, a state dict by the model's own names, or "
            "fpipe.safetensors(path). To initialise with a function, call pipe.initialise(function, seed=0)."
        )
    model = as_module(source)
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def list_transient_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that state dicts omit."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _copy_value(source: Mapping[str, Any], places: Sequence[str], spec: Spec, placed: Placed | None) -> Tensor:
    value, *others = [_read_value(source, alias, spec, placed) for alias in places]
    for alias, other in zip(places[1:], others, strict=True):
        if not same_bits(value, other):
            raise InputError(
                f"source[{alias!r}]: got a different value from source[{places[0]!r}], expected the same: the model "
                "has one tensor for both. Drop one of them, or build the pipeline from a model that does not tie them."
            )
    with torch.no_grad():
        return spec.empty().copy_(value)


def _read_value(source: Mapping[str, Any], name: str, spec: Spec, placed: Placed | None) -> Tensor:
    value = source[name]
    if isinstance(value, Tensor):
        require_same_placement(f"source[{name!r}]", value, placed)
        value = finish_collective(local_part(value))
    require_leaf("source", name, value, spec)
    assert isinstance(value, Tensor), "checked"
    return value.detach()


def _require_known(source: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> None:
    every = {alias: None for places in known.values() for alias in places}
    unknown = [name for name in source if name not in every]
    if unknown:
        raise InputError(
            f"source: got {_some(unknown)}, which the model does not have, expected names like {_some(every)}. Rename "
            "or drop them, or ignore them with strict=False."
        )


def _require_none(missing: Sequence[str], not_persistent: Collection[str]) -> None:
    """Raise `InputError` if any leaf is missing; for `not_persistent` buffers, suggest `fill`."""
    lost = [name for name in missing if name not in not_persistent]
    if lost:
        raise InputError(
            f"source: got no value for {_some(lost)}, expected one for every leaf of this process's stages. Add "
            "them, as in ChainMap(source, others)."
        )
    if missing:
        raise InputError(
            f"source: got no value for {_some(missing)}, expected one. State dicts lack these buffers, which are not "
            "persistent. Pass fill=function, which initializes them module by module (for a Hugging Face model, "
            "model._init_weights), or add them, as in ChainMap(source, others)."
        )


def _some(listed: Collection[str]) -> str:
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return f"{list(islice(listed, 5))}{more}"
