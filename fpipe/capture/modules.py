# SPDX-License-Identifier: Apache-2.0
"""Front end: modules or functions in order, which run as they are. One unit per part.

`[a, b, c]` means what `nn.Sequential(a, b, c)` means: each part is called with what the one before it returned, the
first with the inputs, the loss with what the last returned. Whatever pytree a part returns is taken apart into tensors;
what is no tensor must be the same for every microbatch. A tensor that a part returns untouched stays the same value, so
it goes straight to its next user.

Parts keep everything that a graph would lose: custom autograd functions, checkpointing, hooks, autocast. They run on a
copy without tensors of its own (on meta), with the step's parameters and buffers in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from fpipe.capture.contract import Batch, Buffer, Captured, Parameter, Source, Tensors, Unit, Value
from fpipe.capture.fake import fake, fake_mode, skeleton
from fpipe.capture.guards import plain_state, require_unchanged, watched_parts
from fpipe.capture.losses import Objective, call_model, scaled_loss
from fpipe.capture.observation import Watch, memory
from fpipe.errors import CaptureError, InputError, PipelineError
from fpipe.tree import Structure, flatten, names, require_same


class Chain(nn.Module):
    """Parts in order as one module: the model that a list of parts stands for."""

    def __init__(self, parts: Sequence[Callable[..., Any]] | nn.Sequential) -> None:
        super().__init__()
        # not named_children(), which lists a module that is used twice only once
        named = parts._modules.items() if isinstance(parts, nn.Sequential) else enumerate(parts)
        self.parts: dict[str, Callable[..., Any]] = {str(name): part for name, part in named}
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call one part after the other."""
        first, *rest = self.parts.values()
        value = first(*args, **kwargs)
        for part in rest:
            value = part(value)
        return value


def as_module(model: nn.Module | Sequence[Callable[..., Any]]) -> nn.Module:
    """A model as a module: a list of parts becomes a `Chain`, with the names that nn.Sequential would give."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple) or not model or not all(callable(part) for part in model):
        raise InputError(
            f"model: got {type(model).__name__}{' without parts' if model in ([], ()) else ''}, expected a module, or "
            "a list of modules and functions. Put a single function into a list."
        )
    return Chain(model)


def modules(model: nn.Module, objective: Objective, leaves: Sequence[Tensor]) -> Captured:
    """Capture a `Chain` of parts for one microbatch; see `FrontEnd`."""
    if isinstance(model, nn.Sequential):
        model = Chain(model)
    if not isinstance(model, Chain):
        raise CaptureError(
            f"model: got {type(model).__name__}, expected a list of modules or functions, or an nn.Sequential. Hand "
            "the "
            'parts in in order, or use capture="export".'
        )
    device = leaves[0].device if leaves else torch.device("cpu")
    return _Recorder(model, device, leaves).record(objective)


class _Recorder:
    """Runs the parts once on fake tensors and writes down units and values."""

    def __init__(self, model: Chain, device: torch.device, leaves: Sequence[Tensor]) -> None:
        self.mode: FakeTensorMode = fake_mode()
        self.chain = skeleton(
            model, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        )
        self.trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self.sources: dict[Value, Source] = {}
        self.fakes: dict[Value, Tensor] = {}
        self.values: dict[int, Value] = {}
        self.units: list[Unit] = []
        self.state: dict[str, Value] = {}
        for tensors, kind, source in (
            (dict(model.named_parameters()), "parameters", Parameter),
            (dict(model.named_buffers()), "buffers", Buffer),
        ):
            first = {n: self._add(fake(self.mode, t, device), source(n)) for n, t in tensors.items()}
            self.state |= {name: first[known] for name, known in names(model, kind).items()}
        self.leaves = [fake(self.mode, leaf, device) for leaf in leaves]
        for leaf, tensor in enumerate(self.leaves):
            self._add(tensor, Batch(leaf))

    def _add(self, tensor: Tensor, source: Source | None = None) -> Value:
        """The value of `tensor`; a tensor that was seen before keeps its value."""
        value = self.values.setdefault(id(tensor), len(self.fakes))
        self.fakes[value] = tensor
        if source is not None:
            self.sources[value] = source
        return value

    def record(self, objective: Objective) -> Captured:
        """Run part after part, then the loss."""
        loss, batch, microbatches = objective.loss, objective.batch, objective.microbatches
        inputs, targets = batch.unflatten(self.leaves)
        value: Any = inputs
        for index, (name, part) in enumerate(self.chain.parts.items()):
            call = part if index else lambda tree, part=part: call_model(part, tree)
            value = self._part(name, part, call, value)
        tensors, structure = flatten(value)
        outputs = tuple(self.values[id(tensor)] for tensor in tensors)
        made: Value | None = None
        if loss is not None:
            total = self._part(
                "loss", None, lambda both: scaled_loss(loss, both[0], both[1], microbatches), (value, targets)
            )
            made = self.values[id(total)]
        sources = {value: self.fakes[value] for value in self.sources}
        return Captured(tuple(self.units), self.sources, made, outputs, structure, sources, self.mode, self.trainable)

    def _part(self, name: str, part: object, call: Callable[[Any], Any], tree: Any) -> Any:
        tensors, structure = flatten(tree)
        module, state = nn.Module(), {}
        if isinstance(part, nn.Module):
            module = part
            state = {n.removeprefix(f"{name}."): v for n, v in self.state.items() if n.startswith(f"{name}.")}
        reads = tuple(dict.fromkeys([*state.values(), *[self.values[id(tensor)] for tensor in tensors]]))
        unit = _Part(name, module, state, reads, tuple(self.values[id(tensor)] for tensor in tensors), structure, call)
        with self.mode, torch.no_grad(), watched_parts(module, name), Watch() as watch:
            out = self._run(unit)
            held = plain_state(module, name)
            again = self._run(unit)
            require_unchanged(held, plain_state(module, name), "each microbatch would see another value")
        returned, unit.returns = flatten(out)
        require_same(f"part {name}, returned", flatten(again)[1], unit.returns)
        for tensor in returned:
            if memory(tensor) in watch.written:  # returned as it came, but modified in place: a new value
                self.values.pop(id(tensor), None)
        known = set(self.values)
        unit.picks = tuple(k for k, tensor in enumerate(returned) if id(tensor) not in known)
        makes = tuple(self._add(returned[k]) for k in unit.picks)
        does = " ".join(type(inner).__name__ for inner in module.modules())
        self.units.append(Unit(name, reads, makes, unit.call, unit.scope, does))
        return out

    def _run(self, part: _Part) -> Any:
        try:
            return part.run(self.fakes)
        except PipelineError:
            raise
        except Exception as error:
            raise CaptureError(
                f"part {part.name}: got {type(error).__name__}: {error}, expected a part that runs on fake tensors, "
                "which have shapes but no values. Repair it, or take what depends on values out of the model."
            ) from error


class _Part:
    """How to call one part with values."""

    returns: Structure
    picks: tuple[int, ...]

    def __init__(
        self,
        name: str,
        module: nn.Module,
        state: Mapping[str, Value],
        reads: tuple[Value, ...],
        inputs: tuple[Value, ...],
        structure: Structure,
        function: Callable[[Any], Any],
    ) -> None:
        self.name, self.module, self.state, self.reads = name, module, state, reads
        self.inputs, self.structure, self.function = inputs, structure, function

    def run(self, values: Mapping[Value, Tensor]) -> Any:
        """Call the part with the tensors of these values in place."""
        tree = self.structure.unflatten([values[value] for value in self.inputs])
        with self._placed(values):
            return self.function(tree)

    def call(self, *tensors: Tensor) -> Tensors:
        """What the part makes of the tensors that it reads."""
        values = dict(zip(self.reads, tensors, strict=True))
        returned, structure = flatten(self.run(values))
        if any(isinstance(t, FakeTensor) for t in returned) and not any(isinstance(t, FakeTensor) for t in tensors):
            raise InputError(
                f"part {self.name}: got a result computed with a tensor that was made during capture and kept (by a "
                "cache, say), expected one with values. Call the model once before building the pipeline, or make it "
                "in __init__."
            )
        require_same(f"part {self.name}, returned", structure, self.returns)
        return tuple(returned[k] for k in self.picks)

    def scope(self, *tensors: Tensor) -> Any:
        """The part's own parameters in place, as a checkpoint's second forward expects them."""
        return self._placed(dict(zip(self.reads, tensors, strict=True)))

    @contextmanager
    def _placed(self, values: Mapping[Value, Tensor]) -> Iterator[None]:
        state = {name: values[value] for name, value in self.state.items()}
        with _reparametrize_module(self.module, state):
            yield
