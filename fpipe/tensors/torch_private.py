# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that fpipe uses.

Problem. fpipe reaches into torch where no public name exists, and torch may drop such a name in any release. The error
would be an `AttributeError` in the middle of a step.

Idea. Each name is listed here. Importing fpipe looks every name up and raises one `ImportError` that lists those that
are missing. Those of `LATE` packages, which take longer to import than torch, are looked up before the first capture.
The rest of fpipe imports private names from this module. Two kinds stay where they are used, because a function around
them would only obscure: private attributes of torch's objects (`ATTRIBUTES`), and operators whose names begin with an
underscore (`OPERATORS`).

Differences between versions of torch are handled here, too.

The first fake tensor imports `torch._dynamo`, so captures call `import_tracer` before they make one. If a data loader
forked its workers during that import, by another thread, each worker would find modules half imported, and wait
forever for a thread that it does not have. So a fork waits until the import has ended.

Runs when fpipe is imported; its functions run where they are used.
"""

# ruff: noqa: E402 (the names are looked up before anything is imported by them)

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from importlib import import_module
from operator import attrgetter
from threading import RLock
from types import CellType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "active_fake_mode",
    "compute_elementwise_output_strides",
    "in_kernel_invocation_manager",
    "no_dispatch",
    "suggest_memory_format",
    "torch_pytree",
]

TESTED: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that were tested: 2.13 with all tests, the others with those of `make versions`."""
VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])
GENERATOR: Final = "_checkpoint_without_reentrant_generator" + ("" if VERSION < (2, 14) else "_impl")
"""The generator that `checkpoint` runs around the function. Since torch 2.14, torch does not use the old name."""

SETTINGS: Final = (
    *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled", "cudnn_sdp_enabled", "deterministic_algorithms"),
    *("flash_sdp_enabled", "fp32_precision_getter", "math_sdp_enabled", "mem_efficient_sdp_enabled"),
    *("mkldnn_deterministic", "mkldnn_enabled", "nnpack_enabled"),
)
"""The settings that choose kernels, by the names of their getters."""

Names: TypeAlias = Mapping[str, Sequence[str]]
"""Names in torch, by the class or module that has them."""

NAMES: Final[Names] = {
    "torch": (
        *("_check_tensor_all_with", "_foreach_add_", "_foreach_norm", "_is_all_true", "_native_multi_head_attention"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "_transformer_encoder_layer_fwd"),
    ),
    "torch._C": (
        *("DisableTorchFunction", "TensorBase", "_AutoDispatchBelowAutograd", "_disabled_torch_function_impl"),
        *("_dispatch_keys", "_get_default_device", "_get_obj_in_tls", "_is_key_in_tls", "_len_torch_dispatch_stack"),
        *("_set_grad_enabled", "_set_warn_deprecated_on_mutable_data_ptr", "_stash_obj_in_tls"),
        *[f"_get_{setting}" for setting in SETTINGS],
    ),
    "torch._C._autograd": ("_top_saved_tensors_default_hooks",),
    "torch._C._functorch": (
        *("get_unwrapped", "is_functorch_wrapped_tensor", "is_gradtrackingtensor", "maybe_current_level"),
    ),
    "torch._C._nn": ("gelu",),
    "torch._dynamo.eval_frame": ("_callback_from_stance",),
    "torch._dynamo.variables.builder.VariableBuilder": ("_type_dispatch",),
    "torch._functorch.apis": ("vmap_impl",),
    "torch._functorch.eager_transforms": ("grad_and_value_impl", "grad_impl"),
    "torch._guards": ("active_fake_mode",),
    "torch._meta_registrations": ("_create_grouped_mm_output_tensor",),
    "torch._ops": ("OpOverload",),
    "torch._prims_common": ("compute_elementwise_output_strides", "suggest_memory_format"),
    "torch._subclasses": ("FakeTensor",),
    "torch._subclasses.fake_tensor": (
        *("DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"),
        "in_kernel_invocation_manager",
    ),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.function": ("BackwardCFunction", "_SingleLevelFunction"),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch.distributed.ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor",),
    "torch.distributed.distributed_c10d": ("_object_to_tensor", "_world"),
    "torch.distributed.distributed_c10d._World": ("group_count", "pg_to_tag", "tags_to_pg"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "TensorMeta"),
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
    "torch.nn.modules.activation": ("_is_make_fx_tracing",),
    "torch.nn.utils.clip_grad._get_total_norm": ("__closure__",),
    "torch.utils": ("_pytree",),
    "torch.utils._foreach_utils": ("_group_tensors_by_device_and_dtype",),
    "torch.utils._mode_utils": ("no_dispatch",),
    "torch.utils._python_dispatch": (
        *("TorchDispatchMode", "_disable_current_modes", "_get_current_dispatch_mode"),
        "_get_current_dispatch_mode_stack",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": ("_should_skip_dynamo",),
    "torch.utils.checkpoint": (GENERATOR, "_checkpoint_hook"),
}

ATTRIBUTES: Final[Names] = {
    "torch.Tensor": (
        *("_backward_hooks", "_indices", "_is_view", "_make_subclass", "_post_accumulate_grad_hooks", "_values"),
        "_version",
    ),
    "torch.UntypedStorage": ("_cdata",),
    "torch._subclasses.fake_tensor.FakeTensor": ("_has_symbolic_sizes_strides",),
    "torch.autograd.Function._backward_cls": ("_forward_cls",),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.nn.Module()": (
        *("_backward_hooks", "_backward_pre_hooks", "_buffers", "_compiled_call_impl", "_forward_hooks"),
        *("_forward_pre_hooks", "_modules", "_non_persistent_buffers_set", "_parameters"),
    ),
    "torch.nn.MultiheadAttention": ("_reset_parameters",),
    "torch.ops.aten.add.Tensor": ("_op", "_schema"),
}
"""Private attributes of torch's objects. `Module()` stands for an instance."""

OPERATORS: Final = (
    *("_ctc_loss", "_ctc_loss_backward", "_grouped_mm", "_index_put_impl_", "_local_scalar_dense", "_log_softmax"),
    *("_log_softmax_backward_data", "_prelu_kernel_backward", "_softmax", "_softmax_backward_data", "_to_copy"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "_unsafe_view",
)
"""Operators of `torch.ops.aten` whose shapes, strides or gradients fpipe knows."""


LATE: Final = ("torch._dynamo.", "torch.distributed.tensor.", "torch.distributed._functional_collectives.")
"""The packages that are imported before the first capture, by `import_tracer`, and not with fpipe."""


class PatchedName(NamedTuple):
    """A name that a capture replaces for its thread: the class or module that holds it, and the name there."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """The object that the name refers to now."""
        return getattr(self.owner, self.name)


def look_up(path: str) -> Any:
    """Return what a dotted path in torch refers to; `Module()` stands for a new instance.

    Import modules that are not imported yet, such as `torch._prims_common`.
    """
    holder, _, name = path.removeprefix("torch.").rpartition(".")
    if holder.endswith("()"):
        return getattr(attrgetter(holder.removesuffix("()"))(torch)(), name)
    try:
        return attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return getattr(import_module(f"torch.{holder}"), name)


def require_names(names: Names, late: bool = False) -> None:
    """Raise `ImportError` if this version of torch lacks one of `names`: in `LATE` packages, or in all others."""
    missing = []
    for path in [f"{holder}.{name}" for holder, listed in names.items() for name in listed]:
        try:
            if path.startswith(LATE) is late:
                look_up(path)
        except (AttributeError, ImportError):
            missing.append(path)
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks private names that fpipe needs: {', '.join(missing)}. Install a version "
            f"of torch that fpipe was tested with: {', '.join(TESTED)}."
        )


require_names({**NAMES, **ATTRIBUTES, "torch.ops.aten": OPERATORS})


# --------------------------------------------------------------------------------------------------------------- names

from torch._functorch import apis, eager_transforms
from torch._guards import active_fake_mode
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.autograd import forward_ad, graph
from torch.nn.modules import activation
from torch.utils import _pytree as torch_pytree
from torch.utils import checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

# tensors without values
FAKE_ERRORS: Final = fake_tensor.__name__
"""The module of the errors that fake tensors raise."""
grouped_mm_output: Any = _create_grouped_mm_output_tensor
set_warn_deprecated_on_mutable_data_ptr: Any = torch._C._set_warn_deprecated_on_mutable_data_ptr
dispatch_keys: Any = torch._C._dispatch_keys
default_device: Callable[[], str] = torch._C._get_default_device
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

PARAMETER_MARK: Final = "_is_param"
"""The attribute that makes a tensor of another class an instance of `nn.Parameter`."""

# modes
without_modes: Any = _disable_current_modes
current_dispatch_mode: Any = _get_current_dispatch_mode
list_dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
DisableTorchFunction: Any = torch._C.DisableTorchFunction


class Uncompiled:
    """A base of dispatch modes in which nothing is compiled, so that torch need not make sure for each operator.

    torch's wrapper that makes sure takes longer than many a fake operator. Derive from this before torch's mode.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: torch leaves `__torch_dispatch__` as it is."""
        return False


set_grad_enabled: Any = torch._C._set_grad_enabled
gelu: Any = torch._C._nn.gelu
PACK: Any = torch._pack_padded_sequence
PAD: Any = torch._pad_packed_sequence
"""The functions that pack padded sequences, step by step, and that pad them again."""

# what a capture replaces
has_thread_local: Callable[[str], bool] = torch._C._is_key_in_tls
get_thread_local: Callable[[str], Any] = torch._C._get_obj_in_tls
FAKE_TENSOR: Final = PatchedName(torch._subclasses, "FakeTensor")
TENSOR_CHECK: Final = PatchedName(torch, "_check_tensor_all_with")
ARGUMENT_CHECK: Final = PatchedName(torch, "_is_all_true")
APPLY: Final = (
    PatchedName(torch.autograd.function._SingleLevelFunction, "apply")
    if VERSION < (2, 14)
    else PatchedName(torch.autograd.Function, "apply")
)
"""What `apply` of a custom autograd function calls; before torch 2.14 also where user code has kept that method."""
NODE_INIT: Final = PatchedName(torch.autograd.function.BackwardCFunction, "__init__")
"""What any call of a custom autograd function calls first, with its context, whose class names the function."""
FUSED_ATTENTION: Final = PatchedName(torch, "_native_multi_head_attention")
PICKLE: Final = PatchedName(torch.distributed.distributed_c10d, "_object_to_tensor")
"""What the functions of torch.distributed that exchange Python objects call first."""
IS_TRACING: Final = PatchedName(activation, "_is_make_fx_tracing")
CHECKPOINT: Final = PatchedName(checkpoint, GENERATOR)
INNER_TRANSFORMS: Final = (
    PatchedName(apis, "vmap_impl"),
    PatchedName(eager_transforms, "grad_impl"),
    PatchedName(eager_transforms, "grad_and_value_impl"),
)
"""The functions that torch.func's transforms call, for those that cannot be replaced under their public names."""
fused_encoder_layer: Any = torch._transformer_encoder_layer_fwd
CheckpointHook: Any = checkpoint._checkpoint_hook
CheckpointInputs: Any = getattr(checkpoint, "_NoopSaveInputs", None)
"""The autograd function with which `checkpoint` saves its arguments, before torch 2.13."""
FUNCTORCH: Final = "torch._functorch"
"""The package of the operators that torch.func leaves in graphs."""

# autograd
TENSOR_METHODS: Final = vars(torch._C.TensorBase)
run_backward: Callable[..., tuple[Any, ...]] = graph._engine_run_backward
bypass_autograd: Any = torch._C._AutoDispatchBelowAutograd
saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
foreach_add_: Any = torch._foreach_add_
foreach_norm: Any = torch._foreach_norm


# packages that are imported late
_IMPORTING: Final = RLock()
os.register_at_fork(before=_IMPORTING.acquire, after_in_parent=_IMPORTING.release, after_in_child=_IMPORTING.release)


@cache
def import_tracer() -> None:
    """Import what captures need beyond `import torch`; later calls are free.

    Call it before anything of torch is replaced. Raise `ImportError` if a private name is missing. Forks wait for it.
    """
    with _IMPORTING:
        require_names({**NAMES, **ATTRIBUTES}, late=True)
        from torch._dynamo.variables.builder import VariableBuilder

        VariableBuilder._type_dispatch()  # a table of types, made once: later it might get the stand-in of fake tensors


def compiled_place() -> PatchedName:
    """Return what code compiled by `torch.compile` asks when it is called: `None` makes it run as plain Python."""
    import torch._dynamo.eval_frame

    return PatchedName(torch._dynamo.eval_frame, "_callback_from_stance")


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Return the DTensor that `local` is part of, without a graph; `shape` and `stride` are those of the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    with DisableTorchFunction():  # DTensor.from_local does the same, but a recorder would see it
        return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def strided_shard(dim: int, factor: int) -> Placement:
    """Return the placement of rows that are split again, by `factor` parts of another dimension of the mesh."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=factor)


def total_norm_cell() -> CellType:
    """Return the cell that holds what torch runs for the norm of gradients, under whatever name it was imported."""
    wrapper: Any = torch.nn.utils.clip_grad._get_total_norm
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    return cell


def set_thread_local(key: str, value: Any) -> None:
    """Store a value for this thread; torch passes it to the threads in which it runs a backward for this one."""
    if VERSION < (2, 12):  # torch takes the caller's reference there, and drops it when the value is replaced
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def setting_getter(name: str) -> Callable[..., Any]:
    """Return the function of torch that gets one of the settings that choose kernels, such as `cudnn_enabled`."""
    found: Callable[..., Any] = getattr(torch._C, f"_get_{name}")
    return found


def read_checkpoint(
    function: Any, *given: Any, **named: Any
) -> tuple[Any, Sequence[Any], dict[str, Any], dict[str, Any]]:
    """Return the checkpointed function, its arguments, and the settings, from the arguments of `GENERATOR`."""
    if VERSION < (2, 14):
        settings = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
        count = len(settings)
        return function, given[count:], named, dict(zip(settings, given[:count], strict=True))
    args, kwargs = given
    return function, args, kwargs, named


def begin_checkpoint(generator: Iterator[None]) -> None:
    """Let `GENERATOR` install its hooks; what older versions save the arguments with is nobody's to see."""
    with nullcontext() if CheckpointInputs is None else DisableTorchFunction():
        next(generator)


def mark_as_parameter(tensor: Tensor) -> None:
    """Make a tensor an instance of `nn.Parameter`, in the way that torch marks tensors of other classes."""
    setattr(tensor, PARAMETER_MARK, True)


def order_dtypes(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.dtype]:
    """Return distinct dtypes in the order in which torch's functions on many tensors go through groups of tensors.

    `dtypes` are in the order in which tensors of them first come. It is the order of a hash table of torch's.
    """
    tensors: list[Tensor | None] = [torch.empty(0, dtype=dtype, device=device) for dtype in dtypes]
    return [dtype for _, dtype in _group_tensors_by_device_and_dtype([tensors])] if tensors else []


def count_gradients(tensor: Tensor) -> int:
    """Return how many gradients of torch.func around the caller differentiate with respect to a tensor."""
    functorch, count = torch._C._functorch, 0
    while functorch.is_functorch_wrapped_tensor(tensor):
        count += functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad
        tensor = functorch.get_unwrapped(tensor)
    return count


def has_dual_level() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def process_groups() -> Iterable[Any]:
    """Return every process group of this process that has not been destroyed."""
    groups: Iterable[Any] = torch.distributed.distributed_c10d._world.pg_map
    return groups


def as_group(argument: Any) -> Any:
    """Return the process group that an argument of an operator holds or names; `None` for other arguments."""
    if isinstance(argument, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(argument)
    return next((group for group in process_groups() if argument in (group, group.group_name)), None)


def destroy_group(group: Any) -> None:
    """Destroy a process group in this process, and the empty list that torch would keep under its tag for ever."""
    world: Any = torch.distributed.distributed_c10d._world
    tag = world.pg_to_tag.get(group)
    torch.distributed.destroy_process_group(group)
    if not world.tags_to_pg.get(tag, [group]):
        del world.tags_to_pg[tag]


def has_gloo(group: Any) -> bool:
    """Return whether Gloo moves the host's tensors in a process group, perhaps besides another backend."""
    try:
        name: str = group._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        return False
    return name == "gloo"


def renew_store() -> None:
    """Let torch create process groups over a new connection to the store of the job."""
    table: Any = torch.distributed.distributed_c10d._world.pg_map
    backend, store = table[torch.distributed.group.WORLD]
    table[torch.distributed.group.WORLD] = backend, store.clone()


def count_groups() -> int:
    """Return how many process groups this process has created by its count, from which torch names the next one."""
    count: int = torch.distributed.distributed_c10d._world.group_count
    return count


def name_groups_from(count: int) -> None:
    """Let torch name the next process group by this number."""
    torch.distributed.distributed_c10d._world.group_count = count


def post_all_gather(rows: Tensor, data: Tensor, group: Any) -> Any:
    """Post an all-gather of `data` into `rows`, under the name that it has in this version; return its work."""
    gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
    return gather(rows, data, group=group, async_op=True)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of a process group's backend for `device`."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def device_types(group: Any) -> list[torch.device]:
    """Return the kinds of devices whose tensors a process group moves."""
    return list(group._device_types)


def list_compilers() -> list[str]:
    """Return the names of the backends of torch.compile."""
    names: list[str] = torch._dynamo.list_backends(exclude_tags=())
    return names


def find_compiler(name: str) -> Any:
    """Return the backend of torch.compile with this name."""
    return torch._dynamo.lookup_backend(name)


def find_imported(module: str, name: str) -> Any:
    """Return the class `name` of a module if somebody has imported it; else `()`, of which nothing is an instance.

    `torch.distributed.tensor` takes .7 s to import, and a process that never captures has no use for it.
    """
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor."""
    return isinstance(value, find_imported("torch.distributed.tensor", "DTensor"))


def unfinished_class() -> Any:
    """Return the class of the tensors that a collective still computes; `()` if nobody has imported it."""
    return find_imported("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def finish_collective(tensor: Tensor) -> Tensor:
    """Return a tensor after waiting for the collective that computes it, if there is one."""
    waited: Any = tensor
    return waited.trigger_wait() if isinstance(tensor, unfinished_class()) else tensor
