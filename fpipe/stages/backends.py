# SPDX-License-Identifier: Apache-2.0
"""The backends that differentiate a stage, by the names that users pass.

- `"graph"`: forward and backward are recorded once, and from then on only torch's operators are called: the same bits
  with less Python. A stage always repeats what was recorded; Python side effects of modules (counting calls, printing)
  happen only while recording.
- `"autograd"`: by autograd, for every microbatch. Works for every model as it is. It has no halves: stages whose
  backwards are split are recorded.
- `"inductor"`, or any other backend of `torch.compile`, by name or as a callable: the same graphs, compiled. The
  results are close, but not the same bits.

A stage that can't be recorded is left to autograd; `print(pipe)` says why.

Runs when a pipeline is built (`backend_of`) and when a plan is made (`record_stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, TypeAlias, cast

from fpipe.errors import InputError
from fpipe.record.fakes.recurrent import RecurrentForward
from fpipe.stages.autograd import Autograd
from fpipe.stages.graph.codegen import PhaseFunction, generate_adding, generate_function
from fpipe.stages.graph.compiler import Compilation, Compiler
from fpipe.stages.graph.form import form_of
from fpipe.stages.graph.joint import Joint, Node
from fpipe.stages.graph.phases import Phase, divide
from fpipe.stages.interface import StageFunctions
from fpipe.stages.recorded import Recorded, skip_absent
from fpipe.tensors.effects import storage_id
from fpipe.tensors.torch_private import find_compiler, list_compilers
from schedules import Schedule
from schedules.checking.rules import kinds_of

AS_GRAPH_REMARK = "as a graph"
"""The remark on a stage whose recorded operators run one by one."""
Backward: TypeAlias = str | Compiler
Backend: TypeAlias = Callable[[Autograd, Joint], Recorded]
"""`backend(eager, joint)` returns the functions of a stage that compute the same as `eager`, from its joint graph."""


def backend_of(backward: Backward) -> Backend | None:
    """Return the backend to differentiate stages, `None` for autograd; raise `InputError` for an unknown name."""
    if backward == "autograd":
        return None
    if backward == "graph":
        return AS_GRAPH
    compiler, name = _compiler_of(backward), backward if isinstance(backward, str) else repr(backward)
    made = Compilation(compiler)
    return partial(record_stage, made.compile, made.compile_adding, f"as a graph, compiled by {name}")


def _compiler_of(backward: Backward) -> Compiler:
    if callable(backward):
        return backward
    known = ["autograd", "graph", *list_compilers()]
    if backward not in known:
        raise InputError(
            f"backward: got {backward!r}, expected one of {', '.join(known)}, or a callable that is a backend of "
            "torch.compile. Pass one of these."
        )
    return cast("Compiler", find_compiler(backward))


def needs_graphs(schedule: Schedule) -> bool:
    """Return whether a schedule splits backwards, or moves what forwards keep."""
    return splits(schedule) or "OFFLOAD" in kinds_of(schedule)


def splits(schedule: Schedule) -> bool:
    """Return whether a schedule splits backwards."""
    return "I" in kinds_of(schedule)


class GraphRequest(NamedTuple):
    """The stages that are recorded as graphs, and the backend that makes functions of a graph.

    - `needed`: whether the schedule needs graphs.
    - `made`: what was made of the first graph of each form, which is kept, too, and of what else matters.
    """

    backend: Backend
    stages: Collection[int]
    needed: bool
    made: dict[Hashable, tuple[Joint, Recorded]]

    @classmethod
    def of(cls, backend: Backend | None, stages: Collection[int], needed: bool) -> GraphRequest | None:
        """Return the request; `None` without a backend, unless the schedule needs graphs."""
        return None if backend is None and not needed else cls(backend or AS_GRAPH, stages, needed, {})

    def make(self, eager: Autograd, joint: Joint | str, optional: bool) -> StageFunctions:
        """Return the functions of a stage made from its joint graph; `eager`, with a remark, if that fails.

        `joint` may be the reason why there is no graph. `optional`: whether data decide if a cotangent comes.
        """
        reason = joint if isinstance(joint, str) else ""
        try:
            made = self._differentiate(eager, joint) if isinstance(joint, Joint) else None
        except Exception as error:  # whatever compilers reject, autograd can run
            made, reason = None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if made is None:
            return replace(eager, remark=f"by autograd: as a graph it raises {reason}")
        return skip_absent(made, eager.wiring) if optional else made

    def _differentiate(self, eager: Autograd, joint: Joint) -> Recorded:
        """Return the functions made of a graph, or of an earlier one of its form in a stage of the same wiring."""
        form = form_of(joint)
        if form is None:
            return self.backend(eager, joint)
        same = form, eager.wiring, len(eager.constants)
        if same not in self.made:
            self.made[same] = joint, self.backend(eager, joint)
        return replace(self.made[same][1], eager=eager)


def record_stage(
    run: Callable[[Phase], PhaseFunction],
    add: Callable[[Phase], PhaseFunction],
    remark: str,
    eager: Autograd,
    joint: Joint,
) -> Recorded:
    """Return the functions of a stage as phases of its joint graph.

    `run` turns a phase into a function; `add` turns it into a function that can also add its gradients to sums.
    """
    phases = divide(joint, eager.wiring)
    return Recorded(
        views=generate_function(phases.views),
        forward=run(phases.forward),
        makers={
            "evaluate": _once(run, phases.evaluation),
            "backward": _once(add, phases.backward),
            "backward_input": _once(run, phases.input),
            "backward_weight": _once(add, phases.weight),
        },
        undeferred=phases.early,
        below_autograd=run is generate_function
        and not any(isinstance(node.target, RecurrentForward) for node in joint.nodes),
        remark=remark,
        eager=eager,
        movable=_find_movable(joint, eager, phases.forward.gives[-1] or ()),
    )


def _once(make: Callable[[Phase], PhaseFunction], phase: Phase) -> Callable[[], PhaseFunction]:
    """Return a function that makes a phase's function at its first call, for all stages that share it."""
    return cache(partial(make, phase))


def _find_movable(joint: Joint, eager: Autograd, kept: Sequence[Node]) -> tuple[int, ...]:
    """Return the positions of what is in memory that a microbatch has of its own: made by the forward, or received."""
    first = len(joint.params) + len(joint.buffers) + len(eager.constants)
    given = [node for k, node in enumerate(joint.inputs, first) if k not in eager.wiring.differentiated]
    held = [node for node in kept if node.held is not None]
    stays = {
        storage_id(node.value) for node in (*joint.params, *joint.buffers, *given, *held) if node.value is not None
    }
    return tuple(k for k, node in enumerate(kept) if node.value is not None and storage_id(node.value) not in stays)


AS_GRAPH: Backend = partial(record_stage, generate_function, generate_adding, AS_GRAPH_REMARK)
"""The backend that runs recorded operators one by one."""
