# SPDX-License-Identifier: Apache-2.0
"""Norms over all gradients of a model, wherever they are.

Problem. A process holds the gradients of its own stages. A sum of squares per rank, added up over ranks, is off in the
last bit, since rounding depends on the order of additions: the first clipped step already differs from one device.
`torch.nn.utils.clip_grad_norm_` on each rank is worse. It scales by the norm of that rank's share, so a tied
parameter is scaled by another factor on each of its ranks, which drift apart.

Idea. What torch does on one device: take the norm of each gradient, then the norm of these norms in the model's order
of parameters. Each norm is computed by the one process that owns the parameter, and all processes get all of them.

Invariant: every rank gets the same bits, those of one device, whatever the ranks, cuts and schedule. One small message
of host memory and one collective of a number per gradient; the host does not wait for the device.

Runs in every step, after the backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fpipe.errors import InputError
from fpipe.network.agreement import Field
from fpipe.network.fingerprint import digest
from fpipe.pipelines.handshake import call_together
from fpipe.pipelines.inputs import State
from fpipe.pipelines.norm_table import NormTable, list_gradients
from fpipe.pipelines.pipeline import Pipeline
from fpipe.tensors.arguments import require_dense
from fpipe.tensors.names import accept_trees
from fpipe.tensors.placed import local_part, require_same_placement, whole_tensor, without_partial
from fpipe.tensors.torch_private import foreach_norm, is_dtensor
from fpipe.tensors.tree import stored_values
from fpipe.training.groups import as_patterns, select_names

KEPT_TABLES = 32
SPREAD = 1e-3  # of the norms of equal gradients, which other kernels may round otherwise


@accept_trees("grads")
def norm(pipe: Pipeline, grads: State, order: float = 2.0, names: str | Iterable[str] = "*") -> Tensor:
    """Return the norm of all gradients of the model, a tensor without dimensions, on every rank.

    The bits are those of `torch.nn.utils.get_total_norm` on one device, for the gradients of the whole model in the
    order of `model.named_parameters()`; if they are sharded, for the DTensors of the whole model. (If the model's
    modules are also split, torch rounds the norms of unsplit parameters once more.)

    - `grads`: this process's gradients by name, as the step returned them. Parameters without one are left out.
    - `order`: of the norm, such as 2, 1 or `float("inf")`. For sparse gradients, which torch rejects, it must be above
      0; the norm is that of the stored numbers.
    - `names`: a pattern or patterns; only matching parameters count. A star matches any text, including dots.

    Under torch.distributed every rank must call this, with the same `order` and `names`. Raise `InputError` for
    gradients that are not this pipeline's, or for a pattern that matches no parameter of the model; `TransportError`,
    on every rank, if ranks differ or one of them refuses its arguments.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(2, 2))
    >>> _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (torch.ones(2, 2),))
    >>> bool(fpipe.norm(pipe, grads) == torch.nn.utils.get_total_norm(grads.values()))
    True
    >>> fpipe.norm(pipe, grads, order=float("inf"), names="1.bias")
    tensor(1.)
    """
    with call_together(norm, {"pipe": pipe, "order": order, "names": names}):
        return compute_total(pipe, choose_gradients(pipe, grads, names), order, f"names={names!r}")


@accept_trees("grads")
def all_finite(pipe: Pipeline, grads: State) -> Tensor:
    """Return whether no gradient of the model is infinite or nan: a boolean tensor, the same on every rank.

    Under torch.distributed every rank must call this. Raise as `norm` does.

    >>> import torch, fpipe
    >>> from schedules import gpipe
    >>> model = torch.nn.Linear(2, 1)
    >>> pipe = fpipe.pipeline(model, example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(1, 2))
    >>> fpipe.all_finite(pipe, {"weight": torch.ones(1, 2), "bias": torch.full((1,), torch.inf)})
    tensor(False)
    """
    with call_together(all_finite, {"pipe": pipe}):
        require_gradients_of(pipe, grads)
        ends = [end for grad in grads.values() for end in _find_ends(local_part(grad))]
        finite = torch.stack(ends).isfinite().all() if ends else torch.tensor(True, device=pipe.device)
        pipe.ranks.agree()
        finite = agree_over_meshes(finite, grads.values())
        return pipe.ranks.gather_vectors(finite.to(pipe.device)[None]).all()


def choose_gradients(pipe: Pipeline, grads: State, names: str | Iterable[str]) -> State:
    """Return the gradients that the patterns in `names` select; raise `InputError` as `norm` does."""
    require_gradients_of(pipe, grads)
    chosen = select_names(as_patterns(names), pipe.names)
    return {name: grad for name, grad in grads.items() if name in chosen}


def compute_total(pipe: Pipeline, chosen: State, order: float, *arguments: str) -> Tensor:
    """Return the norm of the chosen gradients; called inside of a call of all ranks, which agree on the arguments."""
    order = float(order)
    _require_order(order, pipe.copies.shards, chosen)
    shards = _find_shards(pipe, {name: chosen[name] for name in pipe.owned if name in chosen})
    norms = [_compute_norms(one, order) for one in shards.values()]
    table = _agree_on_table(pipe, shards, chosen, (f"order={order}", *arguments))
    rows = torch.cat([table.row(one, pipe.device) for one in norms])
    return table.combine(pipe.ranks.gather_vectors(rows), order)


def _find_shards(pipe: Pipeline, grads: State) -> dict[tuple[int, int], State]:
    """Return the tensors of the gradients that count on this process, by the numbers of their part and of their shard.

    They are plain. Only without a mesh around the pipeline are those that the model's modules have split DTensors, and
    the processes of these combine the norms. Empty shards are left out, and all but the first of several equal tensors.
    """
    copies, held = pipe.copies, pipe.holdings
    if copies.mesh is None and copies.shards == 1:
        return {(0, 0): grads}
    complete = {name: without_partial(grad) for name, grad in grads.items()}
    plain = {name: local_part(grad) for name, grad in complete.items() if held.counts(name)}
    found = {copies.shard_of(copy): held.locals(plain, copy) for copy in copies.here[: copies.shards]}
    return {(copies.part, k): {name: one for name, one in own.items() if one.numel()} for k, own in found.items()}


def _require_order(order: float, shards: int, grads: State) -> None:
    why = "sharded" if shards > 1 else "sparse" if any(grad.is_sparse for grad in grads.values()) else ""
    if why and not order > 0:
        raise InputError(f"order: got {order}, expected one above 0: gradients are {why}. Pass 2.0, or another.")


def require_gradients_of(pipe: Pipeline, grads: State) -> None:
    """Raise `InputError`, naming the leaf, unless these are gradients of this process's parameters."""
    if not isinstance(grads, Mapping):
        raise InputError(
            f"grads: got {type(grads).__name__}, expected a dict by name. Pass the gradients that the step returned."
        )
    params, placed = pipe.training.params, pipe.holdings.placed
    for name, grad in grads.items():
        if name not in params:
            raise InputError(
                f"grads[{name!r}]: got a name that is none of this process's parameters, expected some of "
                f"{list(params)[:8]}. Pass the gradients that a step of this pipeline returned."
            )
        shape = placed[name].shape if name in placed else params[name].shape
        if not isinstance(grad, Tensor) or grad.shape != shape or is_dtensor(grad) is not (name in placed):
            got = f"shape {list(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
            kind = "DTensor" if name in placed else "tensor"
            raise InputError(
                f"grads[{name!r}]: got {got}, expected a {kind} of shape {list(shape)}. Pass the gradients that a step "
                "of this pipeline returned."
            )
        require_dense(f"grads[{name!r}]", grad._values() if grad.is_sparse else grad, params[name].device)
        if is_dtensor(grad) and grad.device_mesh != placed[name].mesh:
            require_same_placement(f"grads[{name!r}]", grad, pipe.holdings.placed_gradients.get(name))


def _agree_on_table(
    pipe: Pipeline, shards: Mapping[tuple[int, int], State], grads: State, arguments: Sequence[str]
) -> NormTable:
    """Return where the norms of all processes go, once all ranks have agreed on the arguments of the call.

    Every rank learns the digests of all ranks' lists of gradients. If these were seen before, so were the lists.
    """
    listed = json.dumps([(*at, list_gradients(own.items())) for at, own in shards.items()])
    known = pipe.norm_tables
    notes = tuple(pipe.ranks.agree(lambda: [Field.of("arguments", arguments)], note=digest([listed])))
    if notes in known:
        known[notes] = known.pop(notes)  # the most recently used one
    else:
        rows = pipe.ranks.exchange_text(listed, "which gradients there are")
        if len(known) >= KEPT_TABLES:
            del known[next(iter(known))]
        _require_equal_tensors(pipe, grads)
        known[notes] = NormTable.of([one for row in rows for one in json.loads(row)], pipe.names, pipe.device)
    return known[notes]


def _require_equal_tensors(pipe: Pipeline, grads: State) -> None:
    """Raise `InputError`, on every rank, for plain gradients that differ along dimensions that fpipe has no name for.

    They count once. Checked when there are such gradients as in no call before, since it waits for the device.
    """
    copies, held = pipe.copies, pipe.holdings
    if copies.mesh is None or copies.mesh.size() == pipe.schedule.ranks * copies.count:
        return
    norms = {name: float(local_part(grad).detach().norm()) for name, grad in grads.items() if name not in held.split}
    found: dict[tuple[int, str], list[float]] = {}
    for text in pipe.ranks.exchange_text(json.dumps([copies.here[0], norms]), "norms of gradients"):
        copy, mine = json.loads(text)
        for name, one in mine.items():
            found.setdefault((copy, name), []).append(one)
    for (_, name), same in found.items():
        if max(same) - min(same) > SPREAD * max(same):
            raise InputError(
                f"grads[{name!r}]: got plain tensors of norms {sorted(set(same))} on processes that hold the same "
                "stages of one copy, expected equal tensors, which count once. Reduce them over the other dimensions "
                "of the mesh first; or, if each process has different parameters, such as experts, make them DTensors."
            )


def _compute_norms(grads: State, order: float) -> list[Tensor]:
    """Return the norm of each gradient; those of one dtype go together, which chooses the kernel on an accelerator."""
    kinds = {name: (grad.dtype, is_dtensor(grad)) for name, grad in grads.items()}
    found: dict[str, Tensor] = {}
    for kind in dict.fromkeys(kinds.values()):
        same = {name: _find_numbers(grad) for name, grad in grads.items() if kinds[name] == kind}
        found.update(zip(same, foreach_norm(list(same.values()), order), strict=True))
    return [whole_tensor(found[name]) for name in grads]


def _find_numbers(grad: Tensor) -> Tensor:
    """Return the tensor whose norm is that of a gradient; a sparse one without entries has the norm of a 0."""
    values = stored_values(grad.detach())
    return values if values.numel() or not grad.is_sparse else values.new_zeros(1)


def agree_over_meshes(finite: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """Return whether `finite` is true on all processes that hold parts of the gradients; these must all call this."""
    for mesh in dict.fromkeys(grad.device_mesh for grad in grads if is_dtensor(grad)):
        from torch.distributed.tensor import DTensor, Partial

        wrong = DTensor.from_local((~finite).float(), mesh, [Partial()] * mesh.ndim, run_check=False)
        finite = wrong.full_tensor() == 0
    return finite


def _find_ends(grad: Tensor) -> tuple[Tensor, ...]:
    """Return the least and the greatest number of a gradient; both are nan if one number is."""
    values = stored_values(grad.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    return tuple(end.double() for end in torch.aminmax(values)) if values.numel() else ()
