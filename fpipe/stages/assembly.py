# SPDX-License-Identifier: Apache-2.0
"""From a captured model and a partition to stages and the graph that schedules see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from fpipe.autodiff.autograd import Autograd
from fpipe.autodiff.backends import Way
from fpipe.autodiff.graph.joint_graph import Examples
from fpipe.autodiff.interface import Functions, Wiring
from fpipe.autodiff.recorded import Recorded
from fpipe.autodiff.skipping import skipping
from fpipe.cutting.routing import Layout, Routes, layouts
from fpipe.ir.captured import BatchLeaf, Buffer, Captured, Constant, Function, Hook, Parameter, Value
from fpipe.ir.observation import observe
from fpipe.runtime.executor import Port
from fpipe.stages.metadata import Metadata, infer, is_asking, made_by
from fpipe.stages.stage import Stage
from fpipe.stages.ties import sends
from fpipe.stages.uncut import uncut
from fpipe.tensors.spec import OptionalSpec, Spec
from fpipe.tensors.tree import require_transparent
from schedules import Graph, Placement, linear


@dataclass(frozen=True, eq=False)
class Assembly:
    """A model cut into stages.

    `uncut()` makes `whole`. `graph` is what schedules see. `devices` are those on which random numbers are drawn,
    `undecided` those on which they may be, depending on data. `layouts` say which values the stages read, make, get and
    give.
    """

    captured: Captured
    stages: tuple[Stage, ...]
    uncut: Callable[[], Stage]
    graph: Graph
    devices: tuple[torch.device, ...]
    undecided: tuple[torch.device, ...]
    layouts: tuple[Layout, ...]

    @cached_property
    def whole(self) -> Stage:
        """The uncut model as a single stage, as the reference for the stages: it computes the same.

        Made at its first use: it costs as much as the stages, and a pipeline that only runs never needs it.
        """
        return self.uncut()

    @cached_property
    def parameters(self) -> Mapping[str, Spec]:
        """The spec of every parameter, by name."""
        return self._specs(Parameter)

    @cached_property
    def buffers(self) -> Mapping[str, Spec]:
        """The spec of every buffer, by name."""
        return self._specs(Buffer)

    def _specs(self, kind: type[Parameter | Buffer]) -> Mapping[str, Spec]:
        fakes = self.captured.fakes
        return {s.name: Spec.of(fakes[v]) for v, s in self.captured.sources.items() if isinstance(s, kind)}


def differentiated(assembly: Assembly, way: Way, held: Collection[int]) -> Assembly:
    """Return the assembly with the functions of this process's stages, `held`, converted by `way`."""
    stages = [
        replace(stage, functions=_made(way, assembly.captured, layout, stage)) if stage.index in held else stage
        for stage, layout in zip(assembly.stages, assembly.layouts, strict=True)
    ]
    return replace(assembly, stages=tuple(stages))


def _made(way: Way, captured: Captured, layout: Layout, stage: Stage) -> Functions:
    eager, fakes = cast("Autograd", stage.functions), captured.fakes
    pulled = [spec for port in stage.pulled_by for spec in port.specs]
    optional = any(isinstance(spec, OptionalSpec) for spec in pulled)
    if optional and len(pulled) + (stage.wiring.loss is not None) > 1:
        return replace(eager, remark="by autograd: data decide which cotangents it receives")
    with captured.mode:
        arriving = tuple([spec.allocate() for port in stage.gets for spec in port.specs])
        cotangents = tuple([spec.allocate() for port in stage.pulled_by for spec in port.specs])
    params, buffers, constants, batch = (
        tuple([fakes[value] for value in values])
        for values in (layout.parameters, layout.buffers, layout.constants, layout.batch)
    )
    examples = Examples(params, buffers, constants, (*batch, *arriving), cotangents, captured.mode)
    found = way(eager, examples)
    return skipping(found, stage.wiring) if optional and isinstance(found, Recorded) else found


def assemble(
    captured: Captured, partition: Sequence[int], outputs: bool, placement: Placement, summed: frozenset[str]
) -> Assembly:
    """Build the stages; with `outputs`, the model's outputs leave the pipeline as the loss does.

    `summed` are the parameters whose gradients are summed over stages.
    """
    if outputs:
        require_transparent("outputs", captured.structure)
    loss = () if captured.loss is None else (captured.loss,)
    results = (*loss, *captured.outputs) if outputs else loss
    observed = observe(captured)
    found = layouts(captured, observed, partition, results, summed)
    functions = [captured.fuse(one.units, observed.random, one.inputs, made_by(one)) for one in found]
    stages = _stages(captured, found, functions, placement)
    devices = dict.fromkeys(device for keyed in observed.random.values() for device in keyed.devices)

    def whole() -> Stage:
        again, layout, function = uncut(captured, observed, results, found, functions, summed)
        (stage,) = _stages(again, [layout], [function], linear(ranks=1))
        return stage

    return Assembly(captured, stages, whole, _graph(stages), tuple(devices), observed.undecided, found)


def _stages(
    captured: Captured, found: Sequence[Layout], functions: Sequence[Function], placement: Placement
) -> tuple[Stage, ...]:
    builder = _Builder(captured, found, infer(captured, found, functions), placement)
    return tuple(builder.stage(s, function) for s, function in enumerate(functions))


def _graph(stages: Sequence[Stage]) -> Graph:
    return Graph(
        len(stages),
        values=frozenset((s.index, port.peer) for s in stages for port in s.gives),
        cotangents=frozenset((s.index, port.peer) for s in stages for port in s.pulled_by),
        gradients=frozenset((s.index, port.peer) for s in stages for port in s.shares),
    )


class _Builder:
    """Turns layouts and metadata into stages."""

    def __init__(self, captured: Captured, found: Sequence[Layout], metadata: Metadata, placement: Placement) -> None:
        self.captured, self.found, self.metadata, self.placement = captured, found, metadata, placement

    def stage(self, s: int, function: Function) -> Stage:
        """Return stage `s`, with its function."""
        layout, sources, metadata = self.found[s], self.captured.sources, self.metadata
        pulls, pulled_by = metadata.pulls(s, layout), metadata.pulled_by(layout)
        wiring = self._wiring(s, pulls, pulled_by)
        shares = self._shares(s)
        shared_by = {p: these[s] for p in range(len(self.found)) if s in (these := self._shares(p))}
        return Stage(
            index=s,
            parameters=self._names(layout.parameters),
            buffers=self._names(layout.buffers),
            unused=self._unused() if s == 0 else (),
            batch=tuple(x.leaf for x in (sources[v] for v in layout.batch) if isinstance(x, BatchLeaf)),
            results=tuple(metadata.specs[value] for value in layout.results),
            gets=self._ports(layout.gets),
            gives=self._ports(layout.gives),
            pulls=tuple(Port(p, tuple(metadata.cotangents[s, v] for v in values)) for p, values in pulls.items()),
            pulled_by=tuple(
                Port(t, tuple(metadata.cotangents[t, v] for v in values)) for t, values in pulled_by.items()
            ),
            shares=tuple(Port(t, tuple(metadata.totals[s, v] for v in values)) for t, values in shares.items()),
            shared_by=tuple(Port(p, tuple(metadata.totals[p, v] for v in values)) for p, values in shared_by.items()),
            shared_names={peer: self._names(values) for peer, values in shares.items()},
            grads=self._names(metadata.grads[s]),
            totals=tuple(metadata.totals[s, v] for v in metadata.grads[s]),
            wiring=wiring,
            functions=self._functions(s, function, wiring),
        )

    def _functions(self, s: int, function: Function, wiring: Wiring) -> Functions:
        layout, metadata = self.found[s], self.metadata
        sources = [self.captured.sources[value] for value in layout.constants]
        constants = tuple([source.tensor for source in sources if isinstance(source, Constant)])
        undeferred = {k: why for k, v in enumerate(metadata.grads[s]) if (why := metadata.undeferred[s].get(v))}
        return Autograd(function, wiring, constants, undeferred, s in metadata.varying, *self._hooks(s))

    def _hooks(self, s: int) -> tuple[str, Mapping[int, tuple[Hook, ...]]]:
        """Return why a stage is not recorded, and the hooks on gradients of the parameters that it owns."""
        layout, owned = self.found[s], self.metadata.grads[s]
        names = {k: self.captured.sources[v].name for k, v in enumerate(layout.parameters) if v in owned}  # type: ignore[union-attr]
        hooks = {k: self.captured.hooks[name] for k, name in names.items() if name in self.captured.hooks}
        return self.metadata.unrecordable[s] or ("gradients have hooks" if hooks else ""), hooks

    def _wiring(self, s: int, pulls: Routes, pulled_by: Routes) -> Wiring:
        layout, metadata = self.found[s], self.metadata
        argument = {value: k for k, value in enumerate(layout.inputs)}
        made = made_by(layout)
        roots = [v for values in pulled_by.values() for v in values]
        passed = tuple(dict.fromkeys(v for v in (*layout.leaving, *roots) if v in argument))
        value = {v: k for k, v in enumerate((*made, *passed))}
        previous = [v for values in pulls.values() for v in values]
        received = [v for values in layout.gets.values() for v in values]
        leaves = (*previous, *metadata.grads[s])
        loss = self.captured.loss
        differentiated = tuple(argument[v] for v in received if v in metadata.differentiable)
        casts = s in metadata.casting or s in metadata.varying  # an untaken branch may
        inner = casts or is_asking(self.captured)
        return Wiring(
            parameters=len(layout.parameters),
            buffers=len(layout.buffers),
            trained=frozenset(argument[v] for v in layout.parameters if v in metadata.differentiable),
            differentiated=differentiated,
            inner=differentiated if inner else (),
            modified=tuple(argument[v] for v in layout.inputs if v in layout.modified),
            reassigned=tuple((layout.buffers.index(b), value[new]) for b, new in layout.reassigned.items()),
            passed=tuple(argument[v] for v in passed),
            outputs=tuple((value[v], metadata.specs[v]) for v in layout.leaving),
            loss=value[loss] if loss in layout.results and loss in metadata.differentiable else None,
            roots=tuple(value[v] for v in roots),
            leaves=tuple(argument[v] for v in leaves),
            cotangents=tuple(metadata.cotangents[s, v] for v in previous),
        )

    def _shares(self, s: int) -> dict[int, tuple[Value, ...]]:
        """Return, per other stage, the parameters whose gradient stage `s` must send to it."""
        rows = {
            t: tuple(v for v in values if v in self.metadata.grads[s] and self._lacks(s, t, v))
            for t, values in self.found[s].shares.items()
        }
        return {t: values for t, values in rows.items() if values}

    def _lacks(self, s: int, t: int, parameter: Value) -> bool:
        """Return whether stage `t` must be sent the gradient of stage `s`: not if its rank has it or gets it anyway."""
        holders = [u for u, layout in enumerate(self.found) if parameter in layout.parameters]
        return sends(self.placement, s, t, holders)

    def _ports(self, routes: Routes) -> tuple[Port, ...]:
        return tuple(Port(peer, tuple(self.metadata.specs[v] for v in values)) for peer, values in routes.items())

    def _names(self, values: Iterable[Value]) -> tuple[str, ...]:
        sources = (self.captured.sources[value] for value in values)
        return tuple(source.name for source in sources if isinstance(source, Parameter | Buffer))

    def _unused(self) -> tuple[str, ...]:
        """Return the names of parameters and buffers that no stage reads; the first stage holds them."""
        read = {value for layout in self.found for value in (*layout.parameters, *layout.buffers)}
        return self._names(value for value in self.captured.sources if value not in read)
