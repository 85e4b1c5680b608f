# SPDX-License-Identifier: Apache-2.0
"""Capture what a front end makes of a model: a function `(model, inputs) -> module`, from a module to a module.

Problem. A graph of operators keeps what was computed. It loses the backward of a custom `autograd.Function`, activation
checkpointing, backward hooks, tensor hooks, and state that the forward assigns to its modules; torch.fx also loses
autocast, grad modes, and random numbers that do not depend on an input. None of them says so.

Idea. Record the model itself first, then what the front end makes of it, with the same recorder. What is in the first
record and not in the second was lost: it is refused by name. By then, what models do only on their first call has
happened, so the front end sees a model that has settled.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import UnflattenedModule

from fpipe.errors import CaptureError, PipelineError
from fpipe.record.captured import NAMED, BatchLeaf, Buffer, Captured, FrontEnd
from fpipe.record.front_ends.folding import fold_module
from fpipe.record.model.places import blame, module_place
from fpipe.record.model.state import holding_attributes, is_torchs
from fpipe.record.model.walk import CACHED, Walk
from fpipe.record.objective import Objective
from fpipe.record.questions import refuse_questions
from fpipe.record.trace.fake_model import FakeModel
from fpipe.record.trace.frames import all_frames
from fpipe.record.trace.front_end import assemble_capture
from fpipe.record.trace.record import ATTACHING
from fpipe.record.trace.recorder import Recorder
from fpipe.record.trace.settling import SettledRun, Settling
from fpipe.record.variant import Casts
from fpipe.tensors.torch_private import is_dtensor
from fpipe.tensors.tree import Structure, flatten

GRAPH_REPAIR = 'Rewrite that part, or choose front_end="trace", which runs the model.'


def capture_through(
    front_end: FrontEnd,
    model: nn.Module,
    objective: Objective,
    leaves: Sequence[Tensor],
    opaque: Collection[str] = (),
    whole: Collection[str] = (),
) -> Captured:
    """Capture what `front_end` makes of `model`, and its loss, for one microbatch; see `CaptureFunction`.

    `opaque`, `whole`: as in `trace_model`; `whole` concerns the modules of what the front end makes.
    Raise `CaptureError`, naming the module, for what the front end would lose.
    """
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise CaptureError(
                f"parameter {name}: got a DTensor, expected a plain tensor: a graph loses how it is placed. Choose "
                'front_end="trace", which records the model itself.'
            )
    original = FakeModel(model, replace(objective, loss=None, ask=refuse_questions), leaves, opaque, {})
    before = Settling(original).run(refuse_questions)
    _require_stateless(original, before)
    made = _translate(front_end, original, before.recorder, objective)
    translated = FakeModel(
        model, replace(objective, ask=refuse_questions), leaves, opaque, dict.fromkeys(whole, NAMED), made
    )
    settling = Settling(translated)
    try:
        after = settling.run(objective.ask)
    except CaptureError as error:
        for lost in _lost(original, before.recorder):
            raise lost from error  # which may be why
        raise
    _require_kept(original, before, after)
    captured = assemble_capture(translated, settling, after)
    kinds = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    calls = [(call.path.partition("@")[0], call) for call in captured.calls]  # unflatten calls the second call l@1
    return replace(
        captured,
        calls=tuple([call._replace(path=path, kind=kinds.get(path, call.kind)) for path, call in calls]),
        moved=captured.moved | before.changed_attributes,
    )


def _translate(front_end: FrontEnd, original: FakeModel, record: Recorder, objective: Objective) -> nn.Module:
    """Return the module that a front end makes of the recorded model."""
    model, name = original.skeleton, getattr(front_end, "__name__", type(front_end).__name__)
    sources = original.sources()
    batch = [tensor for source, tensor in sources.values() if isinstance(source, BatchLeaf)]
    fakes = {value: tensor for value, (_, tensor) in sources.items()}
    run, made = replace(objective, loss=None, ask=refuse_questions), list[Any]()
    try:
        # The objective enters autocast around the model, and this thread's random numbers are the user's.
        with original.seat(fakes), torch.random.fork_rng(devices=[]):
            run(lambda *args, **kwargs: made.append(front_end(model, kwargs or args)), batch)
        found = made[0]
        if isinstance(found, UnflattenedModule):
            found.check_input_constraints = False  # it would read fake tensors of its own
        if isinstance(found, fx.GraphModule):
            return fold_module(found, model)
    except PipelineError:
        raise
    except Exception as error:
        for lost in _lost(original, record):
            raise lost from error
        said = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].rstrip("\n.")
        where = _module_being_read(error, model) or blame(error.__traceback__, model, "the model")
        raise CaptureError(
            f"{where}: the front end {name} could not read it: {said}. Expected control flow and shapes that do not "
            f"depend on data. {GRAPH_REPAIR}"
        ) from error
    if not isinstance(found, nn.Module):
        raise CaptureError(
            f"front end {name}: got {type(found).__name__}, expected a module, which is called like the model and has "
            "its names of parameters and buffers. Return one."
        )
    return found


def _module_being_read(error: Exception, model: nn.Module) -> str:
    """Return the place of the first module whose `forward` is the innermost one that dynamo was reading, if any."""
    for frame in reversed(getattr(error, "real_stack", None) or []):
        for name, module in model.named_modules():
            code = type(module).forward.__code__
            if (code.co_filename, code.co_name) == (frame.filename, frame.name) and frame.lineno in {
                line for _, _, line in code.co_lines()
            }:
                return module_place(name, module)
    return ""


# ------------------------------------------------------------------------------------------------------ what was lost


def _require_stateless(original: FakeModel, run: SettledRun) -> None:
    """Raise `CaptureError` for Python state that every run changes: a step runs no Python that would change it."""
    model = original.skeleton
    caches = Walk()  # torch's own modules have no other state
    caches.seen.update({id(module): module for module in model.modules()})
    caches.follow([vars(module) for module in model.modules() if is_torchs(module)])
    carried = {id(module._buffers) for module in model.modules()}  # if the graph keeps them
    held = {id(one.container) for one in run.written if not isinstance(one.container, CACHED)}
    changed = held - carried - caches.containers.keys()
    if changed:
        tables = [module_place(path, module) for path, module in model.named_modules() if id(vars(module)) in changed]
        where = next(iter([*tables, *holding_attributes(model, changed)]), "the model")
        raise CaptureError(
            f"{where}: got a forward that changes Python state, expected one that a graph of operators describes "
            'fully: the change would be lost. Return the value, or choose front_end="trace", where modules run as they '
            "are."
        )


def _require_kept(original: FakeModel, before: SettledRun, after: SettledRun) -> None:
    """Raise `CaptureError` for what the record of a model has, and that of what a front end made of it has not."""
    for lost in _lost(original, before.recorder, after.recorder):
        raise lost
    expected, got = map(_returned, (before.computed.outputs, after.computed.outputs))
    if got != expected:
        raise CaptureError(
            f"the model: got a graph that returns {got}, expected {expected}, as the model does. {GRAPH_REPAIR}"
        )


def _returned(outputs: Any) -> tuple[list[tuple[Any, ...]], Structure]:
    """Return what is to be equal of outputs: shape, strides, dtype and grad of each tensor, and the tree."""
    tensors, structure = flatten(outputs, opaque=True)
    strides = [[stride for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1] for t in tensors]
    return [(list(t.shape), s, t.dtype, t.requires_grad) for t, s in zip(tensors, strides, strict=True)], structure


def _lost(original: FakeModel, before: Recorder, after: Recorder | None = None) -> Iterator[CaptureError]:
    """Yield an error for each trait that one record has and the other has less often, or not at all.

    If there is no other, only for traits that no graph keeps.
    """
    casts = original.objective.casts
    found, kept = [*_python_traits(before)], Counter[str]()
    if after is not None:
        found += _graph_traits(before, casts)
        kept.update(trait for trait, _ in (*_python_traits(after), *_graph_traits(after, casts)))
    for trait, count in Counter(trait for trait, _ in found).items():
        if count > kept[trait]:
            path = next(path for one, path in found if one == trait)
            yield CaptureError(
                f"{module_place(path, original.skeleton.get_submodule(path))}: got {trait}, expected a forward that a "
                "graph of operators describes fully; it would be lost. "
                'Remove it, or choose front_end="trace", where modules run as they are.'
            )


def _python_traits(recorder: Recorder) -> Iterator[tuple[str, str]]:
    """Yield what only Python code does in a recorded run, as text, each with the path of the module that does it."""
    for frame in all_frames(recorder.record.frames):
        if frame.checkpoint or frame.sealed:
            yield "activation checkpointing" if frame.checkpoint else frame.sealed, frame.path
    for unit, facts in recorder.record.facts.items():
        function = facts.invocation.function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            yield f"the custom autograd function {owner.__name__}", unit.path
        if function in ATTACHING:
            hooks = [getattr(leaf, "__qualname__", repr(leaf)) for leaf in facts.invocation.leaves if callable(leaf)]
            yield f"the tensor hook {hooks[0]}" if hooks else f"a call of {function.__name__}", unit.path


def _graph_traits(recorder: Recorder, casts: Casts) -> Iterator[tuple[str, str]]:
    """Yield what a graph can keep, but may have lost, likewise; `casts`: autocast around the model."""
    tensors = recorder.values.tensors
    for unit, facts in recorder.record.facts.items():
        modes = facts.modes
        if modes.grad != modes.ambient and any(tensors[value].requires_grad for value in unit.reads):
            yield f"gradients that are switched {'on' if modes.grad else 'off'}", unit.path
        if modes.autocast != casts and any(tensors[value].is_floating_point() for value in unit.makes):
            yield f"autocast to {[dtype for _, dtype in modes.autocast]}", unit.path
    yield from [("random numbers that do not depend on an input", one.path) for one in recorder.record.draws.found]
    # A graph may write to a buffer once where the model assigned to it twice.
    yield from dict([*_changed_buffers(recorder)]).items()


def _changed_buffers(recorder: Recorder) -> Iterator[tuple[str, str]]:
    values, assigned = recorder.values, recorder.reassignments.next_values
    buffers = {values.storage[value]: source for value, source in values.sources.items() if isinstance(source, Buffer)}
    next_of = {new: values.sources[old] for old, new in assigned.items()}
    for unit, facts in recorder.record.facts.items():
        changed = [buffers[memory] for memory in facts.written & buffers.keys()]
        for buffer in (*changed, *[next_of[value] for value in unit.makes if value in next_of]):
            yield f"a change of the buffer {buffer[0]!r}", unit.path
