# SPDX-License-Identifier: Apache-2.0
"""Front end: `torch.fx`. Trace the model symbolically, then run its graph and record it like a model.

Problem. fx traces with proxies, which have neither shape nor value: sizes, and whatever is computed from them, are
graph nodes just like tensors. And it cannot see anything that is not a call on a proxy: grad modes, autocast, Python's
in-place operators (`x += 1` becomes `x = x + 1`), random numbers that do not depend on an input.

Idea. Run the graph on fake tensors as `fpipe.capture.trace.front_end` runs a model. Sizes then become numbers; only
torch calls remain, and calls of torch's own modules, which run as is. Every node records whether gradients were enabled
when it was traced, fpipe's proxies support the in-place operators, and everything else is refused by name.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor, nn

from fpipe.capture.guards import guard, refuse_autocast, refuse_hooks
from fpipe.capture.module_state import plain_state, require_unchanged
from fpipe.capture.places import blame, current_place, places
from fpipe.capture.trace.front_end import trace_model
from fpipe.capture.trace.recorder import Recorder
from fpipe.errors import CaptureError, PipelineError
from fpipe.ir.captured import Captured
from fpipe.ir.objective import Objective, call_model
from fpipe.model.stateless import on_meta, skeleton
from fpipe.patching import current, replace
from fpipe.tensors.tree import Structure, flatten, flatten_all
from fpipe.torch_private import TorchDispatchMode

FX_REPAIR = 'Take it out of the model, or choose capture="trace", which runs the model with its shapes.'


def fx(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture `model` and its loss for one microbatch; see `FrontEnd`."""
    refuse_hooks(model)
    inputs, *_ = objective.batch.unflatten(list(leaves))
    root = _Root(skeleton(model, on_meta), flatten(inputs)[1])
    graph = _symbolic(root)
    return trace_model(model, objective, leaves, via=lambda bare, recorder: _Replay(root.around(bare), graph, recorder))


class _Root(nn.Module):
    """A model as a module that takes and returns flat leaves; fx stores the constants that it finds as attributes."""

    def __init__(self, model: nn.Module, inputs: Structure) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *leaves: Any) -> list[Any]:
        """Return the leaves of the outputs."""
        found, self.outputs = flatten_all(call_model(self.model, self.inputs.unflatten(leaves)))
        return found

    def around(self, model: nn.Module) -> _Root:
        """Return a `_Root` with the same constants around another copy of the model."""
        other = _Root(model, self.inputs)
        for name, value in vars(self).items():
            if not name.startswith("_modules"):
                object.__setattr__(other, name, value)
        return other


# --------------------------------------------------------------------------------------------------------- the tracing


def _symbolic(root: _Root) -> torch.fx.Graph:
    model = root.model
    try:
        with ExitStack() as stack:
            stack.enter_context(guard(model))
            stack.enter_context(refuse_autocast(model))
            stack.enter_context(_allow_in_place())
            stack.enter_context(_NoChance(model))
            _ProxyTracer(len(root.inputs.names)).trace(root)  # do what the model does only on its first call
            state, versions = plain_state(model), _tensor_versions(model)
            graph = _ProxyTracer(len(root.inputs.names)).trace(root)
            require_unchanged(state, plain_state(model), "the new value would be lost")
    except PipelineError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{blame(error.__traceback__, model)}: torch.fx could not trace it: {error}. Expected a forward without "
            f"control flow, and sizes that only torch functions use: proxies have neither shape nor value. {FX_REPAIR}"
        ) from error
    if _tensor_versions(model) != versions:
        raise CaptureError(
            "the model: got an in-place change of one of its tensors that does not depend on an input, expected one "
            f"that fx can see: it would happen only once, at capture. {FX_REPAIR}"
        )
    return graph


class _Proxy(torch.fx.Proxy):
    """A proxy that supports in-place operators, and refuses assignments to attributes of tensors."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name):
            raise TypeError(f"an assignment to the attribute {name!r} of a tensor cannot be traced")
        super().__setattr__(name, value)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


IN_PLACE_OPERATORS = "add and floordiv lshift mod mul matmul or pow rshift sub truediv xor"
IN_PLACE = tuple(getattr(operator, f"i{name}") for name in IN_PLACE_OPERATORS.split())
for _function in IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class _ProxyTracer(torch.fx.Tracer):
    """A tracer of a `_Root` of `count` tensors; its nodes record whether gradients were enabled."""

    proxy_buffer_attributes = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return the root itself, and a proxy for each of its tensors."""
        return root_fn, [self.root, *[self.create_proxy("placeholder", f"leaf{k}", (), {}) for k in range(self.count)]]

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """Return a `_Proxy`."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Return a node that records whether gradients are enabled."""
        node = super().create_node(*args, **kwargs)
        node.meta["grad"] = torch.is_grad_enabled()
        return node


@contextmanager
def _allow_in_place() -> Iterator[None]:
    """Allow `self.buffer += x` inside this context: skip the assignment of the buffer to itself."""
    assign: Any = current(nn.Module, "__setattr__")

    def assigning(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, _Proxy) and value.node.target in IN_PLACE:
            old = getattr(module, name, None)
            if isinstance(old, _Proxy) and old.node is value.node.args[0]:
                return
        assign(module, name, value)

    with replace(nn.Module, "__setattr__", assigning):
        yield


class _NoChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses random numbers drawn while fx traces: every microbatch would get the same ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places(model)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{current_place(self.places)}: got random numbers ({func}) that do not depend on an input, expected "
                f"none: fx would draw them only once, at capture. Write torch.rand_like(x) and the like. {FX_REPAIR}"
            )
        return func(*args, **(kwargs or {}))


def _tensor_versions(model: nn.Module) -> list[int]:
    """Return the version counter of each tensor that the model's modules hold."""
    held = [flatten(value, opaque=True)[0] for module in model.modules() for value in vars(module).values()]
    return [tensor._version for tensors in held for tensor in tensors]


# ------------------------------------------------------------------------------------------------------------- the run


class _Replay(torch.fx.Interpreter):
    """A traced model as a function; it runs node by node, and tells the recorder which module each node belongs to."""

    def __init__(self, root: _Root, graph: torch.fx.Graph, recorder: Recorder) -> None:
        super().__init__(root, graph=graph)
        self.extra_traceback = False
        self.outputs, self.recorder = root.outputs, recorder
        self.running: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        leaves, _ = flatten_all((args, kwargs))
        made = self.run(*[leaf for leaf in leaves if isinstance(leaf, Tensor)], enable_io_processing=False)
        return optree.tree_unflatten(self.outputs, made)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node in the grad mode that it was traced in."""
        self._enter(n)
        try:
            with torch.set_grad_enabled(n.meta["grad"]):
                return super().run_node(n)
        except PipelineError:
            raise
        except Exception as error:
            self._refuse(error)

    def _enter(self, node: torch.fx.Node) -> None:
        """Notify the recorder of calls that end or begin before `node`; it sees calls of torch's modules itself."""
        if node.op in ("placeholder", "get_attr"):
            return
        stack = dict(node.meta.get("nn_module_stack") or {})
        if node.op == "call_module":
            stack.popitem()
        common = 0
        for ours, theirs in zip(self.running, stack, strict=False):
            if ours != theirs:
                break
            common += 1
        for _ in self.running[common:]:
            self.recorder.end_call()
        for path, kind in list(stack.values())[common:]:
            self.recorder.begin_call(path.removeprefix("model").removeprefix("."), kind)
        self.running = list(stack)

    def _refuse(self, error: Exception) -> NoReturn:
        raise CaptureError(
            f"{self.recorder.stack.where}: got {type(error).__name__}: {error}, expected a forward that runs on fake "
            "tensors, which have shapes but no values. Take control flow and shapes that depend on data out of the "
            "model."
        ) from error
