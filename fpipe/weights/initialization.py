# SPDX-License-Identifier: Apache-2.0
"""Use a function to initialize the leaves that a process holds; all others stay on the meta device.

Problem. A model too big for any machine is built on meta, where tensors have shapes but no values. Each process must
initialize its share of the values and no more, and all shares must make up one model, whatever the ranks and cuts.

Idea. Leaves are initialized in groups that depend only on the model: those of one module, and of the modules that share
a leaf with it. In a copy of the model on meta, blanks with memory replace the leaves of one group, and the function is
called for the modules that can reach them, children first, as by `nn.Module.apply`. Every call starts with generators
seeded from seed, module and group. So a value can't depend on what else this process holds.

Invariant. Uninitialized memory is never exposed. Blanks are nan, or zero in a dtype without nan; a leaf that is never
written, or that still has a nan, is refused.

Runs when `pipe.initialise` is called, or `pipe.init` with `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fpipe.errors import InputError
from fpipe.record.model.skeleton import on_meta, skeleton
from fpipe.tensors import random
from fpipe.tensors.effects import EffectsMode, storage_id, written_memory
from fpipe.tensors.spec import Spec
from fpipe.tensors.tree import first_names
from fpipe.weights.state import require_leaf

Initializer: TypeAlias = Callable[[nn.Module], object]


def reset_parameters(module: nn.Module) -> None:
    """Initialize one of torch's modules as its constructor does; do nothing if it has no `reset_parameters`."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def initialize(model: nn.Module, held: Collection[str], initializer: Initializer, seed: int) -> dict[str, Tensor]:
    """Return the `held` leaves of a model, which may be fake, with the values that `initializer` gives them.

    Raises `InputError` for leaves that it does not fill, and if it draws from any generator but the default.
    """
    run = _Initialization(model, initializer, seed)
    groups = [group for group in _group_leaves(run.aliases) if set(held).intersection(group)]
    made: dict[str, Tensor] = {}
    with random.preserve_generators(run.devices), torch.no_grad():
        for group in groups:
            made.update({name: value for name, value in run.fill(group).items() if name in held})
    _require_all(held, made, model)
    return {name: made[name] for name in held}


def list_leaves(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each by its first name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def list_aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every leaf, by its first name."""
    found: dict[str, list[str]] = {}
    for alias, first in (first_names(model, "parameters") | first_names(model, "buffers")).items():
        found.setdefault(first, []).append(alias)
    return found


def _group_leaves(known: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the groups of leaves: those of one module, and of all modules that share a leaf with it."""
    groups: dict[str, list[str]] = {}
    for name in known:
        owners = [_split_name(alias)[0] for alias in known[name]]
        joined = {id(groups[owner]): groups[owner] for owner in owners if owner in groups}
        group = [*(one for other in joined.values() for one in other), name]
        groups.update({_split_name(alias)[0]: group for one in group for alias in known[one]})
    return list({id(group): group for group in groups.values()}.values())


class _Initialization:
    """An initializer, and the copy of a model in which it fills one group of leaves at a time."""

    def __init__(self, model: nn.Module, initializer: Initializer, seed: int) -> None:
        self.initializer, self.key = initializer, random.key(seed, 0)
        self.specs = {name: Spec.of(leaf) for name, leaf in list_leaves(model).items()}
        self.aliases = list_aliases(model)
        devices = {torch.device("cpu"): None} | {spec.device: None for spec in self.specs.values()}
        self.devices = [device for device in devices if device.type in ("cpu", "cuda")]
        self.copy = skeleton(model, on_meta)
        self.order = {path: place for place, path in enumerate(_children_first(self.copy))}

    def fill(self, group: Sequence[str]) -> dict[str, Tensor]:
        """Return those leaves of a group that the initializer fills."""
        blanks, written = {name: _blank(self.specs[name]) for name in group}, set[int]()

        def note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())):
                raise InputError(
                    f"initialise: got {func} with its own generator, expected the default generator, which is seeded "
                    "from the seed and the module. Drop the generator argument."
                )
            written.update(written_memory(func, args, kwargs))

        with self._lend_blanks(blanks), EffectsMode() as watch, watch.effects.observe(note):
            for path in self._around(group):
                for device in self.devices:
                    random.reseed(self.key, random.label(f"initialise {path} for {group[0]}", 0), device)
                self._call(path)
            found = {name: self._find(name) for name in group}
        return {
            name: _take(name, leaf, self.specs[name])
            for name, leaf in found.items()
            if leaf is not None and _is_filled(leaf, blanks[name], written)
        }

    def _around(self, group: Sequence[str]) -> list[str]:
        """Return the modules from which the group's leaves can be reached, in the order of `nn.Module.apply`."""
        owners = [_split_name(alias)[0].split(".") for name in group for alias in self.aliases[name]]
        paths = {".".join(owner[:depth]) for owner in owners for depth in range(len(owner) + 1)}
        return sorted(paths & self.order.keys(), key=lambda path: self.order[path])

    def _call(self, path: str) -> None:
        module = self.copy.get_submodule(path)
        try:
            self.initializer(module)
        except Exception as error:
            error.add_note(
                f"while initializing {path or 'the model'} ({type(module).__name__}): all tensors are on the meta "
                "device but for those of one module at a time"
            )
            raise

    @contextmanager
    def _lend_blanks(self, blanks: Mapping[str, Tensor]) -> Iterator[None]:
        """Put the blanks into the copy; afterwards, restore what was there."""
        before = {name: self._find(name) for name in blanks}
        for name, blank in blanks.items():
            new = blank.detach()  # another tensor object: setting its .data must not change the blank
            self._put(name, nn.Parameter(new) if isinstance(before[name], nn.Parameter) else new)
        yield
        for name, leaf in before.items():
            self._put(name, leaf)

    def _put(self, name: str, leaf: Tensor | None) -> None:
        for owner, own in map(_split_name, self.aliases[name]):
            module = self.copy.get_submodule(owner)
            if isinstance(leaf, nn.Parameter):
                module._parameters[own] = leaf
            else:
                module._buffers[own] = leaf

    def _find(self, name: str) -> Tensor | None:
        owner, own = _split_name(name)
        module = self.copy.get_submodule(owner)
        return module._parameters.get(own, module._buffers.get(own))


def _split_name(name: str) -> tuple[str, str]:
    owner, _, own = name.rpartition(".")
    return owner, own


def _children_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of all modules, in the order of `nn.Module.apply`."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path


def _blank(spec: Spec) -> Tensor:
    blank = spec.empty()
    return blank.fill_(torch.nan) if blank.is_floating_point() or blank.is_complex() else blank.zero_()


def _is_filled(leaf: Tensor, blank: Tensor, written: Collection[int]) -> bool:
    touched = storage_id(leaf) != storage_id(blank) or storage_id(blank) in written
    return touched and not leaf.is_meta and not _has_nan(leaf)


def _has_nan(tensor: Tensor) -> bool:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.numel() or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return False
    return bool(tensor.amax().isnan())  # unlike isnan().any(), allocates no tensor of the same size


def _take(name: str, leaf: Tensor, spec: Spec) -> Tensor:
    """Return the leaf, detached, on the device and in the layout that the pipeline expects."""
    require_leaf("initialized", name, leaf, spec)
    same = leaf.device == spec.device and leaf.stride() == spec.empty(device="meta").stride()
    return leaf.detach() if same else spec.empty().copy_(leaf)


def _require_all(held: Collection[str], made: Collection[str], model: nn.Module) -> None:
    lacking = [
        f"{name} of {type(model.get_submodule(_split_name(name)[0])).__name__}" for name in held if name not in made
    ]
    if lacking:
        raise InputError(
            f"initialise: got no value, or nan, for {', '.join(lacking)}, expected the function to fill them: a model "
            "on meta lacks the values that its constructor computed. Pass a function that fills them, as in "
            "pipe.initialise(function, seed=0). For a Hugging Face model, pass model._init_weights."
        )
