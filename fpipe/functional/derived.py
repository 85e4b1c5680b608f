# SPDX-License-Identifier: Apache-2.0
"""Derive the functions of a stage from a pure forward on pytrees.

Idea. The stages of a model are recorded on fake tensors, forward and backward, and both halves of the backward come
from that joint graph. A user's function is one more thing that can be recorded: its leaves are the arguments, a
cotangent enters at each of its outputs, and the same two classes run the result (`Recorded`, or `Autograd` for what
can't be recorded).

Invariant: what is derived depends on the structure and the specs of the arguments only, and is remembered by these.

Runs when a function is first called with arguments of new shapes; then `Derived.forward` and its backward run in every
step.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from fpipe.errors import CaptureError, InputError
from fpipe.record.captured import Function, Tensors, current_casts
from fpipe.record.fakes.assumed_values import assume_values
from fpipe.stages.autograd import Autograd
from fpipe.stages.backends import AS_GRAPH, GraphRequest
from fpipe.stages.graph.joint import Joint, Node, Tape, note_on
from fpipe.stages.interface import ArgumentIndex, BufferIndex, OutputIndex, StageFunctions, Wiring
from fpipe.stages.metadata import ForwardWatch
from fpipe.tensors import random
from fpipe.tensors.arguments import require_primal
from fpipe.tensors.effects import Effects, storage_id
from fpipe.tensors.fake import fake_mode, note_effects
from fpipe.tensors.spec import Spec, resolve
from fpipe.tensors.torch_private import FakeTensorMode
from fpipe.tensors.tree import NAMESPACE, Tree, flatten_all

Read: TypeAlias = Callable[[Tree], Tree]
"""Selects a member of a tree."""
PURE, FULL = 2, 4
"""The numbers of arguments of the two forms of a forward."""
LABEL = random.label("stage", 0)
"""Seeds what a function draws, together with the key."""
HOST = torch.device("cpu")
PARAM, BUFFER, INPUT = range(3)


class TreeShape(NamedTuple):
    """A pytree without the values of its tensors: its structure, and for each leaf a spec or a constant.

    `constants`: those again, as text: 1, 1.0 and True are equal, and are not the same program.
    """

    structure: optree.PyTreeSpec
    leaves: tuple[Any, ...]
    constants: tuple[str, ...] = ()

    @classmethod
    def of(cls, tree: Tree) -> tuple[Tensors, TreeShape]:
        """Return the tensors of a tree, in order, and its shape."""
        leaves, structure = flatten_all(tree)
        tensors = tuple([one for one in leaves if isinstance(one, Tensor)])
        specs = tuple([Spec.of(one) if isinstance(one, Tensor) else one for one in leaves])
        return tensors, cls(structure, specs, tuple([repr(one) for one in leaves if not isinstance(one, Tensor)]))

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the tensors."""
        return tuple([one for one in self.leaves if isinstance(one, Spec)])

    def fill(self, values: Sequence[Any], others: bool = True) -> Tree:
        """Return the tree with `values` in place of its tensors; without `others`, with `None` for all other leaves."""
        given = iter(values)
        filled = [next(given) if isinstance(one, Spec) else one if others else None for one in self.leaves]
        return optree.tree_unflatten(self.structure, filled)


class DerivedFunctions(NamedTuple):
    """The functions that were derived for arguments of one shape.

    - `functions`: on flat tuples of tensors. `outputs`, `buffers`: the shapes of what the forward returns.
    - `roots`: for each tensor of the outputs, whether a cotangent enters there.
    - `draws`: the devices on which the forward draws random numbers.
    - `inputs`, `weights`: for each tensor of the inputs and of the parameters, whether it gets a cotangent or gradient.
    """

    functions: StageFunctions
    outputs: TreeShape
    buffers: TreeShape
    roots: tuple[bool, ...]
    inputs: tuple[bool, ...]
    weights: tuple[bool, ...]
    draws: tuple[torch.device, ...]


class DerivedState(NamedTuple):
    """The state that a forward leaves for its backward, or an input half for its weight half; and how to read it."""

    plan: DerivedFunctions
    params: TreeShape
    inputs: TreeShape
    state: Any


@dataclass(frozen=True, eq=False)
class Derived:
    """A pure forward, and what has been derived from it, by the shapes of its arguments.

    - `read`: selects what later stages read of the outputs; cotangents enter only there. `None` for all of it.
    - `passes`: the positions of inputs that it also returns, for a later stage: then the outputs are a pair. Autograd
      adds what the function contributes to their cotangents in the order in which it does on one device.
    """

    function: Callable[..., Any]
    name: str
    passes: tuple[int, ...] = ()
    read: tuple[Read, ...] | None = None
    plans: dict[tuple[TreeShape, TreeShape, TreeShape], DerivedFunctions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arity not in (PURE, FULL):
            raise InputError(
                f"stage {self.name!r}: got a function of {self.arity} arguments, expected forward(params, inputs) or "
                "forward(params, buffers, inputs, key). Write one of these."
            )

    @property
    def arity(self) -> int:
        """The number of arguments of the function; -1 for what is not a function."""
        try:
            return len(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            return -1

    def forward(
        self, params: Tree, buffers: Tree, inputs: tuple[Tree, ...], key: int
    ) -> tuple[Tree, Tree, DerivedState]:
        """Return the outputs, the new buffers, and what the backward needs."""
        (weights, of_params), (state, of_buffers), (given, of_inputs) = map(TreeShape.of, (params, buffers, inputs))
        for what, tensors in (("params", weights), ("buffers", state), ("inputs", given)):
            require_primal(f"stage {self.name!r}, {what}", dict(enumerate(tensors)))
        if current_casts():
            raise InputError(
                f"stage {self.name!r}: got autocast around it, expected none: operators that were recorded without it "
                "would run under it. Enter torch.autocast inside the function."
            )
        shapes = of_params, of_buffers, of_inputs
        if shapes not in self.plans:
            self.plans[shapes] = self._derive(*shapes)
        plan = self.plans[shapes]
        if plan.draws and isinstance(key, random.Unseeded):
            raise InputError(
                f"stage {self.name!r}: got no seed, expected one: it draws random numbers. Pass seed=step, a new one "
                "for each step."
            )
        functions = plan.functions
        with random.preserve_generators(plan.draws):
            outputs, new, kept = functions.forward(functions.leaves(weights), state, given, key)
        return plan.outputs.fill(outputs), plan.buffers.fill(new), DerivedState(plan, of_params, of_inputs, kept)

    def backward(self, kept: DerivedState, cotangents: Tree) -> tuple[tuple[Tree, ...], Tree]:
        """Return the cotangents of the inputs, and the gradients."""
        outgoing, grads = kept.plan.functions.backward(kept.state, self._entering(kept.plan, cotangents))
        return self._returned(kept, outgoing), _spread(kept.params, kept.plan.weights, grads)

    def backward_input(self, kept: DerivedState, cotangents: Tree) -> tuple[tuple[Tree, ...], DerivedState]:
        """Return the cotangents of the inputs, and what the weight half needs."""
        outgoing, deferred = kept.plan.functions.backward_input(kept.state, self._entering(kept.plan, cotangents))
        return self._returned(kept, outgoing), kept._replace(state=deferred)

    def backward_weight(self, kept: DerivedState) -> Tree:
        """Return the gradients."""
        return _spread(kept.params, kept.plan.weights, kept.plan.functions.backward_weight(kept.state))

    def _returned(self, kept: DerivedState, outgoing: Sequence[Tensor | None]) -> tuple[Tree, ...]:
        found: tuple[Tree, ...] = _spread(kept.inputs, kept.plan.inputs, outgoing)
        return found

    def _entering(self, plan: DerivedFunctions, cotangents: Tree) -> Tensors:
        """Return the cotangents that enter, zeros where there is none."""
        leaves, structure = optree.tree_flatten(cotangents, none_is_leaf=True, namespace="")
        if len(leaves) != len(plan.outputs.leaves):
            raise InputError(
                f"stage {self.name!r}, its backward: got cotangents {structure}, expected one for each leaf of the "
                f"outputs, {plan.outputs.structure}. Pass a tree like the outputs, with None for no cotangent."
            )
        pairs = [(one, spec) for one, spec in zip(leaves, plan.outputs.leaves, strict=True) if isinstance(spec, Spec)]
        rooted = [pair for pair, root in zip(pairs, plan.roots, strict=True) if root]
        for one, spec in rooted:
            if one is not None and (tuple(one.shape), one.dtype) != (spec.shape, spec.dtype):
                raise InputError(
                    f"stage {self.name!r}, its backward: got the cotangent {Spec.of(one)}, expected {spec}, like the "
                    "output. Pass one of its shape and dtype."
                )
        return tuple([spec.allocate().zero_() if one is None else one for one, spec in reversed(rooted)])

    # ------------------------------------------------------------------------------------------------------- recording

    def _call(self, shapes: Sequence[TreeShape], key: int, tensors: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """Call the function with these tensors in its arguments; return its outputs and new buffers."""
        given, trees = iter(tensors), list[Tree]()
        for shape in shapes:
            trees.append(shape.fill([next(given) for _ in shape.specs]))
        params, buffers, inputs = trees
        full = self.arity == FULL
        found = self.function(params, buffers, inputs, key) if full else (self.function(params, inputs), buffers)
        if not isinstance(found, tuple) or len(found) != PURE:
            raise InputError(
                f"stage {self.name!r}: got {'a tuple' if isinstance(found, tuple) else 'a single result'} from "
                "forward(params, buffers, inputs, key), expected the pair (outputs, buffers). Return both."
            )
        outputs, new = found
        return (outputs, tuple([inputs[k] for k in self.passes])) if self.passes else outputs, new

    def _derive(self, *shapes: TreeShape) -> DerivedFunctions:
        """Record the function on fake tensors; return what runs it."""
        mode = fake_mode()
        devices = {HOST, *[spec.device for shape in shapes for spec in shape.specs if spec.device.type == "cuda"]}
        with mode, torch.enable_grad(), random.preserve_generators(devices):
            leaves = [spec.allocate() for shape in shapes for spec in shape.specs]
            params, buffers, inputs = (len(shape.specs) for shape in shapes)
            kinds = [PARAM] * params + [BUFFER] * buffers + [INPUT] * inputs
            wanted = [k for k, one in enumerate(leaves) if kinds[k] != BUFFER and _is_differentiable(one)]
            for k in wanted:
                leaves[k].requires_grad_()
            watch, outputs, state, draws = self._look(mode, shapes, leaves)
            function = Function(lambda key, *tensors: self._flat(shapes, key, tensors, draws))
            count = len(outputs.specs)
            tape = Tape()
            arguments = tape.take(leaves)
            with note_on(tape), assume_values(mode):
                made = function.run(0, *leaves)
            forward = frozenset(tape.nodes)
            read = self._read(outputs)
            # Several outputs may be one input as it is. On one device, the terms of what was made last come first:
            # those of later readers, for whom it was passed on, then those of the outputs, in reverse. Roots add in
            # this order.
            roots = [OutputIndex(k) for k in reversed(range(count)) if made[k].requires_grad and k in read]
            entering = [Spec.of(made[k].detach()).allocate() for k in roots]
            cotangents = tape.take(entering)
            with note_on(tape), assume_values(mode):
                got = _differentiate([made[k] for k in roots], {k: leaves[k] for k in wanted}, entering)
            pulls = [ArgumentIndex(k) for k in got if kinds[k] == INPUT]
            trained = [ArgumentIndex(k) for k in got if kinds[k] == PARAM]
            wiring = _wire((params, buffers), wanted, outputs, roots, {k: got[k] for k in (*pulls, *trained)})
        # Outside of the fake mode, since compilers make constants.
        eager = Autograd(function, wiring, (), varying=watch.varying)
        reason = watch.unrecordable or ("it reads its key" if self._reads_key else "")
        if reason:
            functions: StageFunctions = replace(eager, remark=f"by autograd: {reason}")
        else:
            returned = made[:count], made[count:], [got[k] for k in pulls], [got[k] for k in trained]
            joint = _joint(tape, arguments, (params, buffers), cotangents, forward, returned)
            functions = GraphRequest(AS_GRAPH, (0,), needed=True, made={}).make(eager, joint, optional=False)
        return DerivedFunctions(
            functions,
            outputs,
            state,
            tuple(k in roots for k in range(count)),
            tuple(k in pulls for k in range(params + buffers, len(leaves))),
            tuple(k in trained for k in range(params)),
            draws,
        )

    def _look(
        self, mode: FakeTensorMode, shapes: Sequence[TreeShape], leaves: Sequence[Tensor]
    ) -> tuple[ForwardWatch, TreeShape, TreeShape, tuple[torch.device, ...]]:
        """Run the function once; return what it does, the shapes of what it returns, and where it draws."""
        effects = Effects()
        with assume_values(mode) as answers, ForwardWatch() as watch, note_effects(mode, effects):
            made, state = self._call(shapes, 0, [leaf.detach() for leaf in leaves])
        watch.note(answers)
        names = ("params", "buffers", "inputs")
        of = [(name, spec) for name, shape in zip(names, shapes, strict=True) for spec in shape.specs]
        for (name, spec), leaf in zip(of, leaves, strict=True):
            if storage_id(leaf) in effects.written:
                raise InputError(
                    f"stage {self.name!r}: got a function that modifies {spec} of its {name}, expected a pure one: the "
                    "caller and other microbatches also use its arguments. Compute a new tensor (clone it first), and "
                    "return it; for buffers, as the second result."
                )
        (tensors, outputs), (_, new) = TreeShape.of(made), TreeShape.of(state)
        if not tensors:
            raise InputError(
                f"stage {self.name!r}: got outputs without a tensor, {outputs.structure}, expected at least one. "
                "Return what later stages need, or the loss."
            )
        if new.structure != shapes[1].structure or _kinds(new) != _kinds(shapes[1]):
            raise InputError(
                f"stage {self.name!r}: got new buffers {new.structure} of {', '.join(map(str, new.specs))}, expected "
                f"{shapes[1].structure} of {', '.join(map(str, shapes[1].specs))}, like the old ones. Return buffers "
                "of the same structure, shapes and dtypes."
            )
        return watch, outputs, new, tuple(effects.drawn)

    def _read(self, outputs: TreeShape) -> frozenset[int]:
        """Return the numbers of the tensors of the outputs that later stages read."""
        numbers = range(len(outputs.specs))
        if self.read is None:
            return frozenset(numbers)
        tree = outputs.fill(numbers, others=False)
        found: Any = [select(tree) for select in self.read]
        return frozenset(optree.tree_leaves(found, namespace=NAMESPACE))

    def _flat(
        self, shapes: Sequence[TreeShape], key: int, tensors: Sequence[Tensor], draws: Sequence[torch.device]
    ) -> Tensors:
        """Return the tensors of the outputs, and of the new buffers."""
        for device in draws:
            random.reseed(key, LABEL, device)
        made, state = self._call(shapes, key, tensors)
        return (*TreeShape.of(made)[0], *TreeShape.of(state)[0])

    @property
    def _reads_key(self) -> bool:
        """True unless it is certain that the function does not read its key, which no recording could follow."""
        if self.arity == PURE:
            return False
        if not isinstance(self.function, FunctionType):
            return True
        code = self.function.__code__
        name = code.co_varnames[FULL - 1]
        return name in code.co_cellvars or any(
            step.opname.startswith("LOAD_") and step.argval == name for step in dis.get_instructions(code)
        )


def _wire(
    counts: tuple[int, int],
    wanted: Sequence[int],
    outputs: TreeShape,
    roots: Sequence[OutputIndex],
    got: Mapping[ArgumentIndex, Tensor],
) -> Wiring:
    """Return the roles of the tensors of a pure function.

    - `counts`: the numbers of tensors of the parameters and of the buffers. `wanted`: arguments to differentiate by.
    - `roots`: outputs at which cotangents enter. `got`: gradients, those of the inputs first.
    """
    params, buffers = counts
    count = len(outputs.specs)
    return Wiring(
        parameters=params,
        buffers=buffers,
        trained=frozenset(ArgumentIndex(k) for k in wanted if k < params),
        differentiated=tuple(ArgumentIndex(k) for k in wanted if k >= params),
        inner=(),
        modified=(),
        reassigned=tuple((BufferIndex(k), OutputIndex(count + k)) for k in range(buffers)),
        passed=(),
        outputs=tuple((OutputIndex(k), spec) for k, spec in enumerate(outputs.specs)),
        loss=None,
        roots=tuple(roots),
        leaves=tuple(got),
        cotangents=tuple(Spec.of(one) for k, one in got.items() if k >= params),
    )


def _kinds(shape: TreeShape) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(spec.shape, spec.dtype) for spec in shape.specs]


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differentiate(
    roots: Sequence[Tensor], leaves: Mapping[int, Tensor], cotangents: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return the gradients of the leaves that get one."""
    if not roots or not leaves:
        return {}
    found = torch.autograd.grad(roots, [*leaves.values()], cotangents, allow_unused=True)
    return {k: resolve(one) for k, one in zip(leaves, found, strict=True) if one is not None}


def _joint(
    tape: Tape,
    arguments: Sequence[Node],
    ends: tuple[int, int],
    cotangents: Sequence[Node],
    forward: frozenset[Node],
    returned: Sequence[Sequence[Tensor]],
) -> Joint | str:
    """Return what the tape has noted as a joint graph, or the reason why there is none."""
    try:
        groups = [tuple(map(tape.node_of, group)) for group in returned]
    except CaptureError as error:
        tape.fail(error)
    if tape.failure:
        return tape.failure
    for node in tape.nodes:
        if node.value is not None and node.value.requires_grad:
            node.value = node.value.detach()  # else it would keep autograd's graph
    params, buffers = ends
    first = tuple(arguments[:params]), tuple(arguments[params : params + buffers]), tuple(arguments[params + buffers :])
    return Joint(tuple(tape.nodes), *first, tape.key, tuple(cotangents), forward, *groups)


def _spread(shape: TreeShape, has: Sequence[bool], values: Sequence[Tensor | None]) -> Tree:
    """Return a tree of this shape with the values at those of its tensors that have one, and `None` at other leaves."""
    given = iter(values)
    return shape.fill([next(given, None) if one else None for one in has], others=False)
