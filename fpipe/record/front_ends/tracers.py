# SPDX-License-Identifier: Apache-2.0
"""Front ends: `torch.fx`, which calls the model with proxies, and `torch.export`.

Non-strict export runs the model's Python; strict export ("dynamo") reads its bytecode. Both make the training graph of
ATen operators, specialized to the microbatch's shapes and to train or eval mode.

Problem. The proxies of torch.fx have neither shape nor value: sizes, and whatever is computed from them, are nodes of
the graph just like tensors. And fx cannot see anything that is not a call on a proxy: grad modes, autocast, Python's
in-place operators (`x += 1` becomes `x = x + 1`), random numbers that do not depend on an input.

Idea. The recorder runs the graph, so sizes become numbers again. The tracer writes grad modes into the graph, and
fpipe's proxies support the in-place operators; everything else is missing in the record, and refused.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fpipe.record.fakes.eager_types import show_fakes
from fpipe.record.front_ends.folding import fold
from fpipe.record.objective import call_model
from fpipe.tensors.patching import current, replace
from fpipe.tensors.tree import Structure, flatten, flatten_all


def fx(model: nn.Module, inputs: Any) -> nn.Module:
    """Return what `torch.fx` makes of a model."""
    tracer = _ProxyTracer(flatten(inputs)[1])
    with _allow_in_place():
        graph = tracer.trace(model)
    return fold(
        graph,
        model,
        model,
        lambda args, kwargs: flatten(kwargs or args)[0],
        lambda leaves: optree.tree_unflatten(tracer.outputs, leaves),
    )


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
    """A tracer that calls a model with a tree of proxies; its graph switches gradients on and off as the model does.

    After the trace, `outputs` is the tree of what the model returned; the graph returns the leaves.
    """

    proxy_buffer_attributes = True

    def __init__(self, inputs: Structure) -> None:
        super().__init__()
        self.inputs, self.grad = inputs, torch.is_grad_enabled()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return a function that calls the model with proxies, and the model."""
        leaves = [self.create_proxy("placeholder", f"leaf{k}", (), {}) for k in range(len(self.inputs.names))]

        def run(model: nn.Module) -> list[Any]:
            found, self.outputs = flatten_all(call_model(model.forward, self.inputs.unflatten(leaves)))
            self._switch()
            return found

        return run, [self.root]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call of a module, which leaves gradients as it found them in the graph, too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self._switch()
            return out

        self._switch()
        return super().call_module(m, call, args, kwargs)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """Return a `_Proxy`."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Return a node, after one that switches gradients on or off if they were since the last one."""
        self._switch()
        return super().create_node(*args, **kwargs)

    def _switch(self) -> None:
        if torch.is_grad_enabled() != self.grad:
            self.grad = not self.grad
            super().create_node("call_function", torch.set_grad_enabled, (self.grad,), {})


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


def export_model(model: nn.Module, inputs: Any) -> nn.Module:
    """Return what non-strict `torch.export` makes of a model."""
    return _export(model, inputs, strict=False)


def dynamo(model: nn.Module, inputs: Any) -> nn.Module:
    """Return what strict `torch.export` makes of a model."""
    with warnings.catch_warnings(), show_fakes():
        # it warns about in-place changes of buffers, but they are in the graph
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        return _export(model, inputs, strict=True)


def _export(model: nn.Module, inputs: Any, strict: bool) -> nn.Module:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return torch.export.export(model, args, kwargs, strict=strict).module(check_guards=False)
