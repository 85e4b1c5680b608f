# SPDX-License-Identifier: Apache-2.0
"""Capture without computing: the user's modules run on fake tensors only, and on a copy of themselves.

A `skeleton` is the user's model with a fake tensor in the place of every parameter and buffer. Capturing it touches
neither the user's tensors nor the modules' state, works for a model on the meta device, and lets the user throw the
model away. Shared tensors stay shared.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor, nn
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn.parameter import is_lazy

from fpipe.capture.memo import Memo, plain
from fpipe.capture.observation import Effects
from fpipe.errors import CaptureError

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default


def _rows(args: Any) -> torch.memory_format:
    return torch.contiguous_format


def _images(tensor: Tensor) -> torch.memory_format:
    """How a norm of images lays out what it returns."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else suggest_memory_format(tensor)


# In which format is what an operation returns (the first of it), given its arguments.
LAID_OUT: Mapping[Any, Callable[[Any], torch.memory_format]] = MappingProxyType(
    {
        aten.native_batch_norm.default: lambda args: _images(args[0]),
        aten.native_batch_norm_backward.default: lambda args: _images(args[1]),
        aten.native_layer_norm_backward.default: _rows,
        aten._log_softmax_backward_data.default: _rows,
        aten.mse_loss_backward.default: _rows,
    }
)

KERNELS = frozenset(
    {
        *(aten.view.default, aten.detach.default, aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.unsqueeze.default, aten.expand.default, aten.select.int, aten.slice.Tensor, aten._unsafe_view.default),
        *(aten.unbind.int, aten.stack.default, aten.cat.default, aten.clone.default),
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.sum.dim_IntList, aten.mean.dim),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsqrt.default),
        *(aten.gelu.default, aten.gelu_backward.default, aten.silu.default, aten.silu_backward.default),
        *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten.embedding.default, aten.embedding_dense_backward.default),
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
"""What kernels for meta say as every device's do; torch goes another way, which is for symbolic sizes too."""

CASTING = frozenset({aten.native_layer_norm.default})
"""Those of them that some devices compute in float32 whatever they are given, and return so; others do not."""

Module = TypeVar("Module", bound=nn.Module)


def fake_mode() -> Fakes:
    """A mode in which operations compute metadata only. Constants of the model are taken in as they appear."""
    return Fakes()


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Torch's own mode; but where its fake kernel is not like the real one, the fake is made here.

    It refuses grouped matrix multiplication, which mixtures of experts use, of other dtypes than bfloat16; and it says
    wrongly how some results are laid out in memory, which a bias gradient shows in its last bits.

    - `memo`: what operations returned. `states`: by device, what is in a fake there.
    - `effects`: who is told of the operations that are called; not of those that they consist of.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.memo = Memo(self, self.made)
        self.states: dict[torch.device, dict[str, Any]] = {}
        self.effects: Effects | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # asked for most often
            return args[0].device
        kwargs = kwargs or {}
        effects, self.effects = self.effects, None
        if effects is None:
            return self._result(func, types, args, kwargs)
        try:
            effects.called(func, args, kwargs)
            out = self._result(func, types, args, kwargs)
            effects.returned(func, args, kwargs, out)
            return out
        finally:
            self.effects = effects

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        torchs = super().__torch_dispatch__
        return self.memo.result(func, args, kwargs, lambda: torchs(func, types, args, kwargs))

    @contextmanager
    def watched(self, effects: Effects) -> Iterator[None]:
        """The mode, in which `effects` are noted; what torch.compile has made runs as it was written."""
        with torch.compiler.set_stance("force_eager"), self:
            self.effects = effects
            try:
                yield
            finally:
                self.effects = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operation returns, as fakes."""
        kwargs = kwargs or {}
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return self._grouped(*args, **kwargs)
        device = self._home(func, args, kwargs) if func in KERNELS else None
        if device is None:
            out: Any = super().dispatch(func, types, args, kwargs)
        else:
            out = self._kernel(func, args, kwargs, device)
        return self._laid_out(out, LAID_OUT[func](args)) if func in LAID_OUT else out

    def made(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """A fake of what a tensor on meta says; the first on a device by torch, the next like it."""
        if device not in self.states:
            self.states[device] = vars(FakeTensor(self, torch.empty(0, device="meta"), device))
        new: Any = Tensor._make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(new)  # as torch does
        vars(new).update(self.states[device])
        return cast("FakeTensor", new)

    def _home(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """The device of all tensors among the arguments, if they are plain fakes of this mode."""
        if func in CASTING and args[0].dtype not in (torch.float32, torch.float64):
            return None
        leaves: Any = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        devices = {one.device for one in tensors} if all(plain(one, self) for one in tensors) else set()
        return devices.pop() if len(devices) == 1 else None

    def _kernel(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """What an operation's kernel for meta returns, as fakes on a device."""
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self.made(out, device)
        return type(out)(None if one is None else self.made(one, device) for one in out)

    def _grouped(self, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        with self:
            return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)  # type: ignore[no-untyped-call]

    def _laid_out(self, out: Any, memory_format: torch.memory_format) -> Any:
        """The results of an operation, the first of them laid out like this."""
        if out is None:
            return None
        if isinstance(out, tuple):
            return (self._laid_out(out[0], memory_format), *out[1:])
        with self:
            return out.contiguous(memory_format=memory_format)


def fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """A fake of a plain tensor; one on meta becomes a fake on `device`."""
    home = device if tensor.device.type == "meta" else tensor.device
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return mode.made(meta, home) if isinstance(mode, Fakes) else FakeTensor(mode, meta, home)


def skeleton(model: Module, replace: Callable[[Tensor], Tensor]) -> Module:
    """A deep copy of `model` with `replace(tensor)` for every parameter and buffer, shared where they were shared."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = replace(tensor)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    tables = [value for module in model.modules() for value in vars(module).values()]  # most are for hooks, and empty
    memo.update((id(one), type(one)()) for one in tables if type(one) in (dict, OrderedDict, set) and not one)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__}: a copy without its tensors could not be made ({error}), expected a module that "
            "copy.deepcopy can copy. Give the attribute that cannot be copied a __deepcopy__, or set it after building "
            "the pipeline."
        ) from error


def require_plain_tensors(model: nn.Module) -> None:
    """Raise `CaptureError` for parameters and buffers without a shape, and for two that share memory."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise CaptureError(
                f"{name}: got a lazy parameter without a shape, expected one that has it. Call the model once first."
            )
        if tensor.device.type == "meta" or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        start = tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = start + extent * tensor.element_size()
        home = seen.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other_start, other_end, other in home:
            if start < other_end and other_start < end:
                raise CaptureError(
                    f"{name}: got memory that {other} lies in too, expected memory of its own: ranks would hold two "
                    "copies that drift apart. Use the same parameter twice, or clone one of them."
                )
        home.append((start, end, name))


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on meta in the place of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def require_registered(model: nn.Module) -> None:
    """Raise `CaptureError` for a tensor on meta that is neither parameter nor buffer: nobody can give it a value.

    But for modules with hooks before their forward, which compute such tensors anew (`torch.nn.utils.spectral_norm`).
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
    """All submodules in eval mode inside; as they were outside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
