# SPDX-License-Identifier: Apache-2.0
"""Make a skeleton: a copy of the user's model with its tensors replaced, for a capture without side effects.

Capturing a `skeleton` changes neither the user's tensors nor the modules' state, works for a model on the meta device,
and lets the user free the model. Shared tensors stay shared. Models that cannot be captured this way are refused here.

A stage puts its own tensors into the skeleton. All others are `Absent`: they have no memory but report the original's
device, because a model may read the device of its first parameter on any stage.

Problem. `copy.deepcopy` does not copy functions. A hook that closes over `self` would still use the original model: a
capture would see its buffers as constants, and what the hook collects would be lost.

Idea. Copy such a function with empty cells. Once the model has been copied, fill the cells with copies of their
original contents, made with the same memo. Functions that hold no part of the model are shared.

Runs when a pipeline is built, when a plan is made, and in `pipe.initialise`: whenever a model is copied.
"""

from __future__ import annotations

import copy
import dis
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fpipe.errors import CaptureError, InputError
from fpipe.record.model.walk import Walk, codes, held, named_globals, visible
from fpipe.tensors.fake import as_parameter
from fpipe.tensors.placed import local_part
from fpipe.tensors.torch_private import disabled_torch_function, mark_as_parameter, process_groups

Module = TypeVar("Module", bound=nn.Module)


def skeleton(model: Module, replace: Callable[[Tensor], Tensor]) -> Module:
    """Return a deep copy of `model` with `replace(tensor)` for every parameter and buffer; shared ones stay shared.

    Process groups are not copied. Raise `CaptureError` if the model cannot be copied.
    """
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = replace(tensor)
        memo[id(tensor)] = _parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    held = [value for module in model.modules() for value in vars(module).values()]
    empty = [one for one in held if type(one) in (dict, OrderedDict, set) and not one]  # most are for hooks
    memo.update((id(one), type(one)()) for one in empty)
    computed = [one for one in held if isinstance(one, Tensor) and one.grad_fn is not None]  # forwards recompute them
    memo.update((id(one), on_meta(one)) for one in computed)
    sparse = [one for one in held if isinstance(one, Tensor) and one.layout is not torch.strided]
    memo.update((id(one), one.clone()) for one in sparse)  # deepcopy cannot copy these
    groups = process_groups() if torch.distributed.is_available() else ()
    memo.update((id(group), group) for group in groups)  # deepcopy cannot copy these, either
    functions = FunctionCopies(model)
    memo.update(functions.made)
    try:
        made = copy.deepcopy(model, memo)
        functions.fill(memo)
        return made
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__}: a copy without its tensors could not be made ({error}), expected a module that "
            "copy.deepcopy can copy. Give the attribute that cannot be copied a __deepcopy__, or set it after building "
            "the pipeline."
        ) from error


class PartSearch(Walk):
    """A walk that looks for parts of a model: its modules and tensors; `found` once it has met one."""

    LEAVES = tuple(kind for kind in Walk.LEAVES if kind is not Tensor)

    def __init__(self, parts: Collection[int]) -> None:
        super().__init__()
        self.parts, self.found = parts, False

    def visit(self, one: Any) -> Iterable[Any]:
        """Return what an object holds, which for a function is what it closes over; nothing once a part is found."""
        self.found = self.found or id(one) in self.parts
        return () if self.found else held(one)


def share_state(model: nn.Module) -> nn.Module:
    """Return modules with the plain attributes of those of `model`, the same objects, but none that hold a part of it.

    They keep alive the configs, lists and functions that a script may still change when the model itself is gone.
    """
    parts = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    made: dict[int, nn.Module] = {}
    searches: dict[int, PartSearch] = {}

    def is_apart(value: object) -> bool:
        if id(value) not in parts and not held(value):  # nearly always
            return True
        if id(value) not in searches:
            searches[id(value)] = PartSearch(parts)
            searches[id(value)].follow([value])
        return not searches[id(value)].found

    def share(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            made[id(module)] = new = type(module).__new__(type(module))
            tables: dict[str, dict[str, Any]] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
            plain = {name: one for name, one in vars(module).items() if name not in tables and is_apart(one)}
            vars(new).update(plain, **tables)
            new._modules.update({name: one and share(one) for name, one in module._modules.items()})
        return made[id(module)]

    return share(model)


class Absent(Tensor):
    """A meta tensor that reports the device `home`."""

    home: torch.device
    __torch_function__ = disabled_torch_function

    @classmethod
    def like(cls, tensor: Tensor) -> Absent:
        """Return an absent tensor with the metadata and the device of `tensor`."""
        made: Absent = Tensor._make_subclass(cls, on_meta(tensor))
        made.home = tensor.device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the tensor that it replaces."""
        return self.home


def absent(tensor: Tensor) -> Tensor:
    """Return an absent tensor like `tensor`; an absent parameter if that is a parameter."""
    made = Absent.like(tensor)
    return _parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    if not isinstance(tensor, Absent):
        return as_parameter(tensor, requires_grad)
    mark_as_parameter(tensor)
    return tensor.requires_grad_(requires_grad)


def require_home(model: nn.Module, home: torch.device) -> None:
    """Raise `InputError` if a parameter or buffer is on another device than the pipeline's, the CPU or meta."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type not in ("cpu", "meta") and tensor.device != home:
            raise InputError(
                f"{name}: got a tensor of the model on {tensor.device}, expected one on {home}, where the pipeline is, "
                "or on the CPU or meta, from which pipe.init puts each rank's share there. Move the batch to the "
                "model, or the model to the batch."
            )


def require_plain_tensors(model: nn.Module) -> None:
    """Raise `CaptureError` if a parameter or buffer is lazy or sparse, or shares memory with another."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise CaptureError(
                f"{name}: got a lazy parameter without a shape, expected one that has it. Call the model once first."
            )
        tensor = local_part(tensor)
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name}: got a tensor of layout {tensor.layout}, expected one of layout {torch.strided}: ranks hold, "
                "send and load dense ones. Register its indices and values, and make it from them in the forward; or, "
                "if it never changes, keep it in a plain attribute."
            )
        if hasattr(tensor, "__tensor_flatten__"):
            raise CaptureError(
                f"{name}: got a tensor of class {type(tensor).__name__}, which holds other tensors, expected a plain "
                "one: ranks hold, send and load tensors by their memory, and this one has no memory itself. Register "
                "the tensors that it holds, as buffers if they are frozen, and make the weight from them in the "
                "forward."
            )
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        start = tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = start + extent * tensor.element_size()
        home = seen.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other_start, other_end, other in home:
            if start < other_end and other_start < end:
                raise CaptureError(
                    f"{name}: got memory that {other} shares, expected separate memory: ranks would hold two "
                    "copies that drift apart. Use the same parameter twice, or clone one of them."
                )
        home.append((start, end, name))


def on_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of `tensor`; for a DTensor, of its local tensor."""
    tensor = local_part(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def require_registered(model: nn.Module) -> None:
    """Raise `CaptureError` if an attribute is a meta tensor but neither parameter nor buffer: it can never be filled.

    Skip modules with forward pre-hooks, which recompute such tensors (`torch.nn.utils.spectral_norm`).
    """
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for path, module in model.named_modules():
        if module._forward_pre_hooks:
            continue
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in known:
                raise CaptureError(
                    f"{path or 'model'}: got the attribute {name}, a tensor on the meta device that is neither "
                    "parameter nor buffer, expected values: it has lost what the constructor computed. Use "
                    "register_buffer, with persistent=False if it need not be saved, so that it can be filled."
                )


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put all submodules in eval mode inside; restore their modes on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class FunctionCopies:
    """Copies of the functions that a model reaches and that hold parts of it: `made`, by the original's id."""

    def __init__(self, model: nn.Module) -> None:
        walk = Walk()
        walk.follow([model])
        own = {id(one) for one in walk.containers.values()}
        walk.enter()
        tensors = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
        for function in walk.functions:
            _require_no_globals(function, tensors)
        self.parts = tensors | own
        self.cells: dict[int, tuple[CellType, CellType]] = {}
        self.found = [one for one in walk.functions if self._holds_part(one)]
        self.made: dict[int, Any] = {id(one): self._copy(one) for one in self.found}

    def fill(self, memo: dict[int, Any]) -> None:
        """Fill cells and defaults with copies of the originals', made with the `memo` used for the model."""
        for old, new in self.cells.values():
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
        for function in self.found:
            made = self.made[id(function)]
            made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
            made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)

    def _copy(self, function: FunctionType) -> FunctionType:
        """Return a copy of the function without defaults; cells that hold a part of the model are empty in it."""
        cells = tuple([self._cell(cell) for cell in function.__closure__ or ()])
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        vars(made).update(vars(function))
        return made

    def _cell(self, cell: CellType) -> CellType:
        """Return the cell or, if it holds a part, an empty one, the same for all functions that share the cell."""
        return self.cells.setdefault(id(cell), (cell, CellType()))[1] if self._holds_part(cell) else cell

    def _holds_part(self, holder: Any) -> bool:
        """Return whether a function or cell holds a part of the model, directly or through containers and functions."""
        return any(id(one) in self.parts or id(getattr(one, "__dict__", None)) in self.parts for one in visible(holder))


def _require_no_globals(function: FunctionType, parts: Collection[int]) -> None:
    """Raise `CaptureError` if a function uses a global that is a part of the model."""
    for name in [name for name, one in named_globals(function).items() if id(one) in parts]:
        steps = (step for code in codes(function.__code__) for step in dis.get_instructions(code))
        if any(step.opname == "LOAD_GLOBAL" and step.argval == name for step in steps):
            raise CaptureError(
                f"{function.__qualname__}: got the global {name!r}, which is a part of the model, expected none: "
                "stages run a copy of the model, and this would use the original. Use the arguments (a hook's first "
                "is the module), or a method or a function inside one, which are copied with the model."
            )
