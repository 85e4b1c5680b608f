# SPDX-License-Identifier: Apache-2.0
"""Python state that a run changes, and state of the original model that code outside of it reads.

Problem. Stages run a copy of the model. A loss or a hook that closes over the original, or over a dict or an object
that the original holds, doesn't see what the copy's forward stores there.

Idea. Find the attributes that a run of the copy changes, and those that outside code reads from the original. If any
attribute is in both sets, refuse. What only a model's first call changes is no obstacle if the model was called before
the pipeline was built.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.record.captured import Buffer, Captured, Constant, Hooks
from fpipe.record.model.places import module_place
from fpipe.record.model.snapshot import ContainerState, Snapshot
from fpipe.record.model.walk import NOT_SET, Walk, named_globals, visible
from fpipe.record.refusals import original_state_error
from fpipe.record.validity import observe
from fpipe.tensors.torch_private import is_dtensor
from fpipe.tensors.tree import PLAIN, Structure, flatten

TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def place(path: str, module: nn.Module, name: str) -> str:
    """Return text that names an attribute of a module in errors."""
    return f"{module_place(path, module)}, attribute {name!r}"


def changed_attributes(model: nn.Module, before: Snapshot, after: Snapshot) -> frozenset[str]:
    """Return the places of the attributes of user modules that a run changed, or whose contents it changed."""
    pairs = {
        key: (before.containers[key], one)
        for key, one in after.containers.items()
        if key in before.containers and not one.outside
    }
    changed = {key: names for key, pair in pairs.items() if (names := _changes(*pair))}
    if not changed:
        return frozenset()
    rows = {place(*row) for row in _attributes(model) if row[-1] in changed.get(id(vars(row[1])), ())}
    return frozenset({*rows, *holding_attributes(model, changed)})


def shared_attributes(model: nn.Module, outside: object) -> frozenset[str]:
    """Return the places of the attributes whose contents code `outside` reaches other than through the model."""
    mine, others = Walk(), Walk()
    mine.follow([model])
    others.seen.update({id(module): module for module in model.modules()})
    others.enter()
    others.follow([outside])
    both = mine.containers.keys() & others.containers.keys()
    return frozenset(holding_attributes(model, both) if both else ())


def holding_attributes(model: nn.Module, containers: Collection[object]) -> Iterator[str]:
    """Yield the places of the attributes that are, or contain, one of these containers."""
    modules = {id(module): module for module in model.modules()}
    for path, module, name in _attributes(model):
        walk = Walk()
        walk.seen.update(modules)
        walk.follow([vars(module)[name]])
        if not walk.containers.keys().isdisjoint(containers):
            yield place(path, module, name)


def require_own_state(moved: Collection[str], read: Collection[str]) -> None:
    """Raise `CaptureError` if outside code reads from the original model what the forward changes in the copy.

    `moved`, `read`: the places of the attributes that are changed, and of those that are read.
    """
    for where in sorted({*moved} & {*read}):
        raise original_state_error(where)


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of each attribute of the user's modules."""
    for path, module in model.named_modules():
        if not is_torchs(module):
            yield from [(path, module, name) for name in vars(module) if name not in TABLES]


def _changes(old: ContainerState, new: ContainerState) -> list[object]:
    """Return the keys of a dict, or the positions in another container, whose contents have changed."""
    was, now = old.by_key, new.by_key
    return [key for key in {**was, **now} if not _is_equal(was.get(key, NOT_SET), now.get(key, NOT_SET))]


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))


def plain_state(model: nn.Module) -> dict[str, Structure]:
    """Return the structure of each attribute of the user's modules, by its place; of buffers, the names only.

    Parameters, submodules, backward hooks and the training flag are left out.
    """
    return {
        place(path, module, name): flatten(value, opaque=True)[1]
        for path, module in model.named_modules()
        if not is_torchs(module)
        for name, value in (*vars(module).items(), ("_buffers", dict.fromkeys(module._buffers)))
        if name not in ("_parameters", "_modules", "_backward_hooks", "training")
    }


def require_unchanged(before: Mapping[str, Structure], after: Mapping[str, Structure]) -> None:
    """Raise `CaptureError`, naming the attribute, if a run changed the `plain_state` of modules."""
    for where in {**before, **after}:
        if where not in before or where not in after or not _is_same(before[where], after[where]):
            raise CaptureError(
                f"{where}: got a forward that changes it, expected one with no state but buffers: each microbatch "
                "would see another value. Make it a buffer that is changed in place, or fill it before the pipeline is "
                "built."
            )


def _is_same(a: Structure, b: Structure) -> bool:
    if a.spec != b.spec or len(a.constants) != len(b.constants):
        return False
    pairs = zip(a.constants, b.constants, strict=True)
    return all(i == j and _is_equal(old, new) for (i, old), (j, new) in pairs)


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, whose only Python state is caches."""
    return type(module).__module__.startswith("torch.nn.")


def collect_gradient_hooks(model: nn.Module) -> Hooks:
    """Return the gradient hooks by parameter name; raise `CaptureError` for one that a stage cannot call."""
    own = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    found = {name: tuple((p._backward_hooks or {}).values()) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name}: got a gradient hook that runs after accumulation, expected none: sums of gradients "
                "that are not finished differ between schedules. Remove it, and apply what it does to the gradients "
                "that the step returns; or use register_hook, which sees the gradient of every microbatch."
            )
        if found[name] and is_dtensor(parameter):
            raise CaptureError(
                f"parameter {name}: got a gradient hook on a DTensor, expected none: a stage has only local tensors, "
                "and would call it with one of these. Apply what it does to the gradients that the step returns."
            )
        for hook in found[name]:
            if any(id(one) in own for one in _parts(hook)):
                raise CaptureError(
                    f"parameter {name}: got the gradient hook {getattr(hook, '__qualname__', hook)!r}, which holds a "
                    "parameter, buffer or module of the model, expected one that uses only the gradient: it would see "
                    "the tensors that the model held when the pipeline was built. Apply what it does to the gradients "
                    "that the step returns."
                )
    return {name: hooks for name, hooks in found.items() if hooks}


def require_exact_hooks(hooks: Hooks, summed: frozenset[str]) -> None:
    """Raise `CaptureError` if a hook is on a parameter in `summed`: no stage has its full gradient of a microbatch."""
    for name in sorted(hooks.keys() & summed):
        raise CaptureError(
            f"parameter {name}: got a gradient hook and tied={{{name!r}: 'sum'}}, expected one or the other: with "
            "'sum', no stage has the whole gradient of a microbatch. Remove 'sum', or the hook."
        )


def _parts(hook: Any) -> Iterator[Any]:
    """Yield what a hook visibly holds, its object, and the modules and tensors in the globals that it names."""
    for one in visible(hook):
        yield one
        if isinstance(one, FunctionType):
            yield from [part for part in named_globals(one).values() if isinstance(part, nn.Module | Tensor)]


def require_own_buffers(model: nn.Module, captured: Captured) -> None:
    """Raise `CaptureError` if the captured copy of `model` reads a buffer of the original that a forward changes."""
    observed, sources = observe(captured), captured.sources
    written = frozenset().union(*observed.written.values())
    changed = {
        source.name
        for value, source in sources.items()
        if isinstance(source, Buffer) and (observed.storage[value] in written or value in captured.reassigned)
    }
    buffers = {id(buffer): name for name, buffer in model.named_buffers() if name in changed}
    for source in sources.values():
        if isinstance(source, Constant) and id(source.tensor) in buffers:
            raise original_state_error(f"buffer {buffers[id(source.tensor)]}")
