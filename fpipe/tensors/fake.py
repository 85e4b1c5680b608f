# SPDX-License-Identifier: Apache-2.0
"""The fake tensor mode of captures, in which operators return metadata and compute nothing.

Users set Python attributes on parameters and buffers. Stages get tensors without them, so a forward that reads one is
refused; attributes that nothing reads don't matter. A fake tensor keeps their names, its *marks*.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Final, cast

import optree
import torch
from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.tensors.effects import Effects, Observer, is_collective, require_same_draws, storage_id
from fpipe.tensors.fake_cache import ResultCache, is_plain
from fpipe.tensors.layouts import apply_layout, aten, rule_of
from fpipe.tensors.patching import replace
from fpipe.tensors.placed import Placed, holder_classes, local_part
from fpipe.tensors.torch_private import (
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    Uncompiled,
    compiled_place,
    grouped_mm_output,
    import_tracer,
    in_kernel_invocation_manager,
    is_dtensor,
    set_warn_deprecated_on_mutable_data_ptr,
)

MARKS: Final = "_original_attributes"
"""The attribute of a fake tensor that holds the names of its original's attributes."""
DEVICE = torch.ops.prim.device.default
READS = (aten._local_scalar_dense.default, aten.equal.default)
"""Operators that return a value."""


def _contents(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a live tensor's values until they are written: memory, part of it, and version."""
    part = tensor.storage_offset(), tensor.shape, tensor.stride()
    return storage_id(tensor), *part, None if tensor.is_inference() else tensor._version


def _is_mixed(tensor: Tensor, weight: Tensor | None) -> bool:
    """Return whether a norm has half-precision inputs and float32 weights; its statistics are then float32 too."""
    return weight is not None and weight.dtype is torch.float32 and tensor.dtype in (torch.bfloat16, torch.float16)


def _alignments(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return CTC's loss per sequence and its log alphas, assuming the longest possible lengths."""
    time, *batch, _classes = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty((*batch, time, 2 * targets.shape[-1] + 1))


# Fake kernels of operators with data-dependent shapes, in outputs that only the operator's own backward uses.
SHAPED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten._ctc_loss.Tensor: _alignments,
        aten._ctc_loss_backward.Tensor: lambda grad, log_probs, *_, **__: torch.empty_like(log_probs),
    }
)

MATRIX_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""Operators whose kernels refuse matrices of two dtypes; their fake kernels do not."""


def _require_one_dtype(matrices: Any) -> None:
    first, *others = [one.dtype for one in matrices if isinstance(one, Tensor)]
    for other in others:
        if other != first:
            raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {first} and {other}")


INDEX_PUTS = frozenset({aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})

META_KERNELS = frozenset(
    {
        *(aten.view.default, aten.detach.default, aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.unsqueeze.default, aten.expand.default, aten.select.int, aten.slice.Tensor, aten._unsafe_view.default),
        *(aten.unbind.int, aten.stack.default, aten.cat.default, aten.clone.default),
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.sum.dim_IntList, aten.mean.dim),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsqrt.default),
        *(aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.neg.default, aten.where.self),
        *(aten.exp.default, aten.sqrt.default, aten.sin.default, aten.cos.default),
        *(aten.relu.default, aten.threshold_backward.default, aten.tanh.default, aten.tanh_backward.default),
        *(aten.sigmoid.default, aten.sigmoid_backward.default, aten.slice_backward.default),
        *(aten.mse_loss.default, aten.mse_loss_backward.default),
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
"""Operators whose meta kernel returns the same metadata as every device's kernel.

torch itself takes another path for them, which also handles symbolic sizes.
"""

CASTING_KERNELS = frozenset({aten.native_layer_norm.default})
"""Those of `META_KERNELS` that some devices, but not all, compute and return in float32 whatever the input dtype."""

KINDS_OF_TENSORS: Final = frozenset(("_is_buffer", "persistent", "_is_param"))
"""The attributes that torch sets on a tensor to say that it is a buffer, or a parameter of another class."""


def fake_mode() -> Fakes:
    """Return a mode in which operators compute metadata only; it converts real tensors, such as constants, on use."""
    return Fakes()


class Fakes(Uncompiled, FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's fake tensor mode, corrected where its fake kernels differ from the real ones.

    torch's mode refuses grouped matrix multiplication, which mixtures of experts use, for dtypes other than bfloat16.
    It also gets the memory layout of some results wrong, which changes the last bits of a bias gradient.

    - `results`: the cache of operator results.
    - `states`: by device, the attributes that a fake tensor there has, other than the mode.
    - `holders`: the classes of tensors that hold a local tensor, of which operators are called in turn.
    - `effects`: records the operators called, but not those that they decompose into; `None` to record nothing.
    - `answer_read(func, *tensors)`: returns an assumed result of an operator that reads values; `None` to assume none.
    - `true_counts`: by contents, masks with a known number of true elements: that many values were assigned there.
    """

    def __init__(self) -> None:
        import_tracer()
        super().__init__(allow_non_fake_inputs=True)
        self.holders = holder_classes()
        self.cache_enabled = False  # torch's own cache is one for all modes, and never forgets a shape
        self.results = ResultCache(self, Fakes.make)
        self.states: dict[torch.device, dict[str, Any]] = {}
        self.effects: Effects | None = None
        self.answer_read: Callable[..., Any] | None = None
        self.true_counts: dict[tuple[object, ...], tuple[Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:  # the most frequent call
            return args[0].device
        kwargs = kwargs or {}
        if any(kind in self.holders for kind in types):
            require_same_draws(func, args, kwargs)
            return NotImplemented  # it calls operators on local tensors
        effects, self.effects = self.effects, None
        if effects is None:
            return self._result(func, types, args, kwargs)
        try:
            effects.note_call(func, args, kwargs)
            out = self._result(func, types, args, kwargs)
            effects.note_return(func, args, kwargs, out)
            return out
        finally:
            self.effects = effects

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        torchs = super().__torch_dispatch__
        if is_collective(func):
            with preserve_python_generator():
                return torchs(func, types, args, kwargs)

        def run() -> Any:
            with DisableTorchFunction():  # calls that torch makes to create fake tensors are not the model's
                return torchs(func, types, args, kwargs)

        return self.results.result(func, args, kwargs, run)

    @contextmanager
    def note(self, effects: Effects, observer: Observer) -> Iterator[None]:
        """Enter the mode, record operators in `effects`, and call `observer` with each.

        Code compiled by torch.compile runs as plain Python.
        """
        with (
            replace(*compiled_place(), lambda callback: None),
            self,
            note_effects(self, effects),
            effects.observe(observer),
        ):
            yield

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operator as fake tensors."""
        kwargs = kwargs or {}
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return self._grouped_mm(*args, **kwargs)
        if func in MATRIX_PRODUCTS:
            _require_one_dtype(args)
        if func in SHAPED:
            with self:
                return SHAPED[func](*args, **kwargs)
        if func in READS and self.answer_read is not None:
            return self.answer_read(func, *args)
        if func is aten.nonzero.default and (self.answer_read is not None or self.true_counts):
            return self._nonzero(args[0])
        if func in INDEX_PUTS:
            self._note_true_count(*args[:3])
        device = self._home(func, args, kwargs) if func in META_KERNELS else None
        if device is None:
            out: Any = super().dispatch(func, types, args, kwargs)
        else:
            out = self._kernel(func, args, kwargs, device)
        if func is aten.native_batch_norm.default and _is_mixed(*args[:2]):
            with self:
                out = out[0], *[one.float() for one in out[1:]]
        rule = rule_of(func, args)
        if rule is None:
            return out
        with self:
            return apply_layout(rule, args, out)

    def _nonzero(self, tensor: Tensor) -> Any:
        """Return fake indices of the nonzero elements.

        Raise `DynamicOutputShapeException` if their number is neither known nor assumed.
        """
        if (known := self.true_counts.get(_contents(tensor))) is not None:
            with self:
                return tensor.new_empty((known[1], tensor.dim()), dtype=torch.int64)
        try:
            return super().dispatch(aten.nonzero.default, (), (tensor,))
        except DynamicOutputShapeException:
            if self.answer_read is None:
                raise
            return self.answer_read(aten.nonzero.default, tensor)

    def _note_true_count(self, tensor: Tensor, indices: list[Tensor | None], values: Tensor) -> None:
        """Record how many elements of a mask are true, if each is assigned one value; the gradient selects as many."""
        mask, *others = indices
        if mask is None or mask.dtype not in (torch.bool, torch.uint8) or any(one is not None for one in others):
            return
        if values.dim() == tensor.dim() - mask.dim() + 1 and len(values) > 1:  # else one value is broadcast
            self.true_counts[_contents(mask)] = mask, len(values)

    def make(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on `device` with the metadata of `meta`.

        torch makes the first one on each device; the others copy its attributes.
        """
        if device not in self.states:
            attributes = vars(FakeTensor(self, torch.empty(0, device="meta"), device))
            self.states[device] = {name: value for name, value in attributes.items() if value is not self}
        new: Any = Tensor._make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=device)
        set_warn_deprecated_on_mutable_data_ptr(new)  # as torch does
        vars(new).update(self.states[device], fake_mode=self)
        return cast("FakeTensor", new)

    def _home(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device that all tensor arguments share; `None` if there is none, or some are not plain fakes."""
        if func in CASTING_KERNELS and args[0].dtype not in (torch.float32, torch.float64):
            return None
        leaves: Any = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        devices = {one.device for one in tensors} if all(is_plain(one, self) for one in tensors) else set()
        return devices.pop() if len(devices) == 1 else None

    def _kernel(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self.make(out, device)
        return type(out)(None if one is None else self.make(one, device) for one in out)

    def _grouped_mm(self, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        with self:
            return grouped_mm_output(a, b, offs, out_dtype)


@contextmanager
def note_effects(mode: FakeTensorMode, effects: Effects) -> Iterator[None]:
    """Record in `effects` the operators that run under `mode` inside this context; no-op unless it is a `Fakes`."""
    if not isinstance(mode, Fakes):
        yield
        return
    before, mode.effects = mode.effects, effects
    try:
        yield
    finally:
        mode.effects = before


def fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor with a tensor's metadata and marks, on the same device; for one on meta, on `device`.

    For a DTensor, return one whose local tensor is fake.
    """
    if is_dtensor(tensor):
        return Placed.of(tensor).place(fake(mode, local_part(tensor), device))
    home = device if tensor.device.type == "meta" else tensor.device
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = mode.make(meta, home) if isinstance(mode, Fakes) else FakeTensor(mode, meta, home)
    vars(made).update({name: one for name, one in vars(tensor).items() if name in KINDS_OF_TENSORS})
    if found := marks(tensor):
        vars(made)[MARKS] = found
    return made


def marks(tensor: Tensor) -> frozenset[str]:
    """Return the names of the attributes that users set on a tensor or, for a fake tensor, on its original."""
    known: frozenset[str] = vars(tensor).get(MARKS, frozenset())
    return known if isinstance(tensor, FakeTensor) else frozenset(vars(tensor)) - KINDS_OF_TENSORS


def as_parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor as an `nn.Parameter`; a fake tensor keeps its marks."""
    with tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext():  # without it, torch looks for a mode
        made = nn.Parameter(tensor, requires_grad)
    if isinstance(made, FakeTensor) and MARKS in vars(tensor):
        vars(made)[MARKS] = vars(tensor)[MARKS]
    return made


@contextmanager
def refuse_marks() -> Iterator[None]:
    """Raise `CaptureError`, inside this context, on reads of attributes that users set on a fake tensor's original."""

    def missing(tensor: Any, name: str) -> Any:
        if name in vars(tensor).get(MARKS, ()):
            raise CaptureError(
                f"a parameter or buffer of shape {list(tensor.shape)}: got a forward that reads its attribute "
                f"{name!r}, expected one that reads only its values: stages get tensors without such attributes. Keep "
                "it in an attribute of the module."
            )
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    with replace(FakeTensor, "__getattr__", missing):
        yield


@contextmanager
def preserve_python_generator() -> Iterator[None]:
    """Restore Python's random generator on exit: torch draws a number from it for every fake handle."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
