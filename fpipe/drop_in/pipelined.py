# SPDX-License-Identifier: Apache-2.0
"""A pipeline as the model of a script for one device.

Problem. A training script has a model, a loss that it calls `backward` on, and an optimizer over `model.parameters()`.
It should train on many devices after one changed line.

Idea. The module holds this process's share of the tensors under the model's own names, in a copy of the model's tree.
Its forward runs the whole schedule and returns the loss; `loss.backward()` delivers the gradients to `.grad`.

Invariants. The same script on every rank makes the same calls. What a script can change on the module, the next forward
follows or refuses. Losses, gradients and buffers are those of a plain loop over the microbatches, bit for bit.

Runs in the place of the model, in every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce, wraps
from operator import add
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fpipe.api import pipeline, value_and_grad
from fpipe.audits.audit import Audit
from fpipe.drop_in.delivery import Delivery, attach_delivery, divided
from fpipe.drop_in.norms import watch_norms
from fpipe.drop_in.settings import Pipelines
from fpipe.drop_in.updates import watch_optimizers
from fpipe.errors import InputError
from fpipe.network.fingerprint import digest, digest_tensor
from fpipe.network.job import join_launched
from fpipe.pipelines.argument_checks import require_steps
from fpipe.pipelines.inputs import State
from fpipe.pipelines.loss_weights import Weight
from fpipe.pipelines.merge import MergeTrees
from fpipe.pipelines.modes import active_casts
from fpipe.pipelines.pipeline import Pipeline
from fpipe.record.objective import Loss
from fpipe.tensors.arguments import require_arguments
from fpipe.tensors.placed import require_plain
from fpipe.tensors.tree import flatten
from fpipe.training.clipping import clip
from fpipe.weights.initialization import list_aliases
from fpipe.weights.loading import ValueSource
from schedules import Schedule

CHANGED: Final = 1
ADDS: Final = 2
USED: Final = 4
DELIVERED: Final = 8
"""What ranks tell each other before a forward, as bits of one number."""
OWN_KEYWORDS = ("targets", "steps", "total", "scale", "seed")


class Pipelined(nn.Module):
    """A pipeline that is called, trained and saved like the model that it was made from.

    - `model`, `loss`, `example`, `targets`, `schedule` (or `plan`) and all further options are those of
      `fpipe.pipeline`.
    - `weights`: where the values come from, as for `pipe.init`; by default the model. It may be on the meta device if
      `weights` are given.
    - `aux`: as in `fpipe.value_and_grad`: whether this rank gets the `aux` of the loss, and how the values of
      microbatches are merged.
    - `audit`: as in `fpipe.value_and_grad`, of the steps in train mode.

    Under a launcher such as torchrun, each process is one rank and holds its share of the parameters and buffers, under
    the model's own names; without one, all ranks run in this process. The process group is initialized if it is not.

    **In train mode**, `model(*inputs, targets=y)` runs a whole step and returns the loss, on every rank. Inputs are all
    positional or all keyword, as in `example`. `loss.backward()` adds the gradients to `.grad`, once per loss.

    - `steps`: the number of losses whose gradients are accumulated and averaged. The loss that is returned is divided
      by `steps`.
    - `total`: the weight of all accumulated microbatches, if the pipeline has a `weight`.
    - `scale`: the cotangent that `backward` will get, if it is not a power of two (`(loss / 3).backward()`), or if
      float16 is used (`scaler.scale(loss).backward()`).
    - `seed`: for random numbers. By default it is drawn from torch's generator, which `torch.manual_seed` in the script
      seeds, once per step and only if the model draws.

    If the loss returns `(loss, aux)`, `model.last_aux` is the aux of the last forward that computed a loss: token
    counts, accuracies, or the outputs themselves.

    **In eval mode**, it returns the loss if targets are passed, otherwise the outputs, without a graph, on every rank.

    You may change the modules of this one: freeze parameters, set modes, hooks, configs and other attributes. The next
    forward builds a pipeline for the new setting, or reuses one. A change in the original `model`, in globals, or in
    what the loss reads raises an error.

    Raise `InputError`, before anything is sent and on every rank, for arguments that do not fit, gradients in the wrong
    state, or changes that can't be followed.

    >>> import torch, fpipe
    >>> from schedules import one_f_one_b
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
    >>> model = fpipe.Pipelined(net, loss=torch.nn.functional.mse_loss, example=(x,), targets=y,
    ...                         schedule=one_f_one_b(ranks=2, microbatches=3))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> loss = model(x, targets=y)
    >>> loss.backward()
    >>> norm = model.clip_grad_norm_(1.0)
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> model.eval()(x).shape
    torch.Size([6, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        example: tuple[Any, ...] | dict[str, Any],
        schedule: Schedule | None = None,
        targets: Any = None,
        weights: ValueSource | None = None,
        aux: bool | MergeTrees = True,
        audit: Audit | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        join_launched()
        require_arguments(value_and_grad, {"aux": aux, "audit": audit})
        pipe = pipeline(model, example=example, targets=targets, loss=loss, schedule=schedule, **options)
        with pipe.ranks.enter_call("Pipelined"):
            require_steps(pipe.schedule)
            require_plain("Pipelined", pipe.training.placed, "Use fpipe.pipeline and fpipe.value_and_grad.")
            _require_parameters_everywhere(pipe)
            _require_free_names(example)
            root = pipe.module(*pipe.init(model if weights is None else weights))
            starts = pipe.ranks.agree(note=_digest_start(model) if weights is None else 0)
        if len(starts) == len(pipe.ranks.processes):  # on a mesh, processes may hold other parts of a layer
            _warn_of_other_models({*starts} - {0})
        self.training = root.training
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[table] = vars(root)[table]  # not by `register_parameter`: a model may have a parameter `scale`
        self._pipelines = Pipelines(pipe, root, model, aux, audit)
        self._delivery: Delivery | None = None
        self._aux: Any = None
        self.register_load_state_dict_pre_hook(_add_tied_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_ignore_other_ranks)  # type: ignore[no-untyped-call]
        self._spare = (nn.Parameter(torch.empty(0, device=pipe.device)),)  # in a tuple, so that it has no name
        self._root = (root,)  # in a tuple, so that it is no submodule
        if pipe.schedule.ranks > 1:
            watch_norms(self)
            watch_optimizers(self, {spec.dtype for spec in pipe.training.assembly.parameters.values()})

    @property
    def pipe(self) -> Pipeline:
        """The pipeline of the current setting, for `fpipe.save`, `fpipe.verify` and the like."""
        return self._pipelines.current.pipe

    @property
    def last_aux(self) -> Any:
        """The `aux` that the loss of the last forward with a loss returned, as in `Step.aux`; otherwise `None`."""
        return self._aux

    def forward(
        self,
        *inputs: Any,
        targets: Any = None,
        steps: int = 1,
        total: float | None = None,
        scale: float | None = None,
        seed: int | None = None,
        **keywords: Any,
    ) -> Any:
        """Return the loss, or in eval mode without targets the outputs; see the class."""
        pipe = self.pipe
        with pipe.ranks.enter_call("the model"):
            batch = _join_inputs(inputs, keywords)
            whole = _find_total(pipe, (batch, targets), steps, total)
            notes = pipe.ranks.agree(note=self._check())
        _require_same_backwards(notes)
        if any(note & CHANGED for note in notes):
            self._pipelines.follow()
        if not self.training:
            return self._evaluate(batch, targets, seed)
        adds = any(note & ADDS for note in notes) and not any(note & USED for note in notes)
        return self._train(batch, targets, seed, whole, 1.0 if scale is None else scale, adds)

    def weigh(self, weight: Weight) -> None:
        """Weight the losses of microbatches from now on, like the argument `weight` of `fpipe.Microbatching`.

        It takes as long as a capture, and every rank must call it.
        """
        self._pipelines.weigh(weight)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients in place so that their norm over the whole model is at most `max_norm`; return the norm.

        The bits are those of `torch.nn.utils.clip_grad_norm_` for the whole model on one device; that function does the
        same for the parameters of this module. Every rank must call this.
        """
        grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        return clip(self.pipe, grads, max_norm, norm_type, donate=True)[1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of a forward without a backward."""
        super().zero_grad(set_to_none)
        if self._delivery is not None and self._delivery.is_overdue:
            self._delivery = None

    def close(self) -> None:
        """Close the pipelines of all settings, as `fpipe.Pipeline.close` does; parameters and buffers stay.

        A later forward raises `InputError`. Closing again does nothing.
        """
        self._pipelines.close()

    def extra_repr(self) -> str:
        """Return the schedule."""
        return repr(self.pipe.schedule)

    def __getattr__(self, name: str) -> Any:
        """Return a tensor or submodule, or else an attribute of the model, such as its `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_root" not in vars(self):
                raise
            root = vars(self)["_root"][0]
            value = getattr(root, name)
            is_method = self.pipe.schedule.ranks > 1 and isinstance(value, MethodType) and value.__self__ is root
            return _without_modules(value, root) if is_method else value

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this process's parameters; if none of a rank's requires a gradient, also an empty one that does.

        Torch's optimizers and `clip_grad_value_` reject an empty list, and other ranks have parameters to train.
        """
        yield from super().parameters(recurse)
        if recurse and self._is_share and not any(p.requires_grad for p in super().parameters()):
            (spare,) = self._spare
            spare.requires_grad_()
            spare.grad = torch.zeros_like(spare)
            yield spare

    @property
    def _is_share(self) -> bool:
        """True if other processes hold parts of the model."""
        return "_root" in vars(self) and len(self.pipe.ranks.ranks) < self.pipe.schedule.ranks

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tensor or submodule, an attribute of this module, or else one of the model, if it knows the name."""
        if name == "training" and "_root" in vars(self):
            vars(self._root[0])[name] = value
        if self._is_models(name) and not isinstance(value, nn.Parameter | nn.Module):
            setattr(self._root[0], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete what `__setattr__` sets."""
        if self._is_models(name):
            delattr(self._root[0], name)
        else:
            super().__delattr__(name)

    def _is_models(self, name: str) -> bool:
        """Return whether a name is that of a plain attribute of the model, or of one that its code looks for."""
        if "_root" not in vars(self) or name in vars(self) or hasattr(type(self), name):
            return False
        if any(name in vars(self)[table] for table in ("_parameters", "_buffers", "_modules")):
            return False
        return hasattr(self._root[0], name) or self._pipelines.current.reads(name)

    def _read_state(self) -> tuple[State, State]:
        params: State = dict(self.named_parameters())
        return params, dict(self.named_buffers())

    def _check(self) -> int:
        """Return what the other ranks must know; raise `InputError` if the module is not ready for a forward."""
        known = self._delivery
        found = 0 if self._pipelines.current.fits(self.training) else CHANGED
        found |= known is not None and known.is_done and DELIVERED
        if not self.training:
            _require_eval_mode(self)
            return found
        if not torch.is_grad_enabled():
            raise InputError(
                "the model: got a forward in train mode under no_grad, expected one that computes gradients. Call "
                "model.eval() first."
            )
        _require_no_hooks(dict(self.named_parameters()))
        if known is not None and known.is_overdue:
            raise InputError(
                "the model: got a forward although the loss of the last one had no backward, expected "
                "loss.backward() first: the last forward has added to what was in .grad. For a loss without gradients, "
                "call model.eval(); to drop these gradients, call model.zero_grad()."
            )
        adds = any(p.grad is not None and p.requires_grad for _, p in self.named_parameters())
        return found | (adds and ADDS) | (known is not None and known.is_used and USED)

    def _train(
        self, inputs: Any, targets: Any, seed: int | None, total: float | None, scale: float, adds: bool
    ) -> Tensor:
        pipe, (params, buffers) = self.pipe, self._read_state()
        if seed is None and pipe.training.generators:
            seed = draw_seed()
        old = {name: p.grad for name, p in params.items() if p.grad is not None and p.requires_grad}
        factor = 1.0 if self._delivery is None or not adds else self._delivery.factor
        with divided(old if adds else {}, factor) as onto:
            out, grads = self._pipelines.ready().step(
                params,
                buffers,
                inputs,
                targets,
                seed=seed,
                onto=onto if adds else None,
                scale=None if scale == 1 else scale,
                total=total,
            )
        _update_buffers(buffers, out.buffers)
        assert out.loss is not None, "the schedule has a backward"
        self._aux = out.aux
        if self._delivery is not None:
            self._delivery.drop()
        rounded = float(torch.tensor(scale, dtype=out.loss.dtype))
        self._delivery = Delivery(grads, params, rounded, factor, _uses_half(pipe))
        (self._delivery.borrow if adds else self._delivery.remember)(old)
        return attach_delivery(out.loss, self._delivery)

    def _evaluate(self, inputs: Any, targets: Any, seed: int | None) -> Any:
        params, buffers = self._read_state()
        functions = self._pipelines.ready()
        if targets is None:
            return merge_own_loss(self.pipe, inputs, functions.prediction(params, buffers, inputs, seed=seed))
        out = functions.evaluation(params, buffers, inputs, targets, seed=seed)
        self._aux = out.aux
        return out.loss


def merge_own_loss(pipe: Pipeline, inputs: Any, outputs: Any) -> Any:
    """Return outputs in which a loss that the model computes itself is one number, not one for each microbatch.

    That is what the pipeline's loss returns of them as it is, as `lambda outputs: outputs.loss` does.
    """
    batching, loss = pipe.captures.batchings[True], pipe.captures.loss
    leaves, structure = flatten(outputs)
    if loss is None or batching.has_targets or batching.slices > 1:
        return outputs
    marks: list[Any] = [object() for _ in leaves]
    try:
        number = marks.index(loss(structure.unflatten(marks)))
    except Exception:  # a loss that computes something of its own
        return outputs
    batch = batching.split_batch(inputs, None)
    parts = leaves[number].unbind()
    if batching.weight is None:
        terms = [one / batch.signature.divisor for one in parts]
    else:
        terms = [one * scale for one, scale in zip(parts, batch.scales, strict=True) if scale]
    leaves[number] = reduce(add, terms)
    return structure.unflatten(leaves)


def _require_parameters_everywhere(pipe: Pipeline) -> None:
    """Raise `InputError`, on every rank, if a rank holds no parameter: torch's optimizers refuse an empty list."""
    placement = pipe.schedule.placement
    for rank in range(pipe.schedule.ranks):
        here = [s for s in pipe.stages if rank in placement.replicas(s.index)]
        if not any((*s.parameters, *s.unused) for s in here):
            raise InputError(
                f"rank {rank}: got stages {[s.index for s in here]} without parameters, expected some on every rank: "
                "torch's optimizers reject an empty list. Choose other cuts=, or fewer ranks."
            )


def _digest_start(model: nn.Module) -> int:
    """Return a digest of the first values of each parameter and buffer; 0 if some have none."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    plain = {name: one.detach() for name, one in tensors.items() if type(one) in (nn.Parameter, Tensor)}
    if any(one.is_meta for one in plain.values()):
        return 0
    dense = {name: one for name, one in plain.items() if one.layout is torch.strided}
    return digest(f"{name}: {digest_tensor(one.reshape(-1)[:4])}" for name, one in dense.items())


def _warn_of_other_models(starts: Collection[int]) -> None:
    if len(starts) > 1:
        warnings.warn(
            "fpipe.Pipelined: got models with different values on the ranks, expected the same on all: each rank "
            "trains its own part of its own model. Call torch.manual_seed with the same number on every rank before "
            "the model and its batches are made, unless you load a checkpoint next.",
            UserWarning,
            stacklevel=3,
        )


def _require_free_names(example: Any) -> None:
    taken = [name for name in OWN_KEYWORDS if isinstance(example, dict) and name in example]
    if taken:
        raise InputError(
            f"example: got arguments named {taken}, expected other names than {list(OWN_KEYWORDS)}, which "
            "fpipe.Pipelined takes itself. Pass inputs by position, or use fpipe.pipeline."
        )


def _require_same_backwards(notes: Sequence[int]) -> None:
    """Raise `InputError`, on every rank, if only some ranks have called `backward` since the last forward."""
    ranks = [rank for rank, note in enumerate(notes) if note & DELIVERED]
    if 0 < len(ranks) < len(notes):
        raise InputError(
            f"the model: got loss.backward() of the last forward on ranks {ranks} of {len(notes)}, expected it on all "
            "ranks or none: the others have no gradients to update their parameters with. Call it on every rank, and "
            "restart from a checkpoint."
        )


def _join_inputs(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
    if inputs and keywords:
        raise InputError(
            f"the model: got {len(inputs)} positional arguments and {sorted(keywords)} by keyword, expected either. "
            "Pass them as in example=."
        )
    return keywords or inputs


def _find_total(pipe: Pipeline, batch: tuple[Any, Any], steps: int, total: float | None) -> float | None:
    """Return the weight of all accumulated microbatches, or `None` for those of this step; raise `InputError`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"steps: got {steps!r}, expected a whole number above 0. Pass how many losses are accumulated."
        )
    if steps == 1 or total is not None:
        if steps > 1:
            raise InputError(f"steps: got {steps} and total={total}, expected one of them. Pass total alone.")
        return total
    if pipe.captures.batchings[True].weight is not None:
        raise InputError(
            f"steps: got {steps} for a pipeline with a weight, expected total: the weights of later steps are unknown. "
            "Pass total=, the weight of all accumulated microbatches."
        )
    return steps * pipe.captures.batchings[True].of_batch(*batch).divisor


def _require_eval_mode(module: nn.Module) -> None:
    found = [name for name, one in module.named_modules() if one.training]
    if found:
        raise InputError(
            f"{found[0]}: got train mode inside a model in eval mode, expected eval mode everywhere. Call model.eval() "
            "last, or evaluate with the plain model."
        )


def _require_no_hooks(params: Mapping[str, Tensor]) -> None:
    """Raise `InputError` for hooks on gradients of parameters, which would get the sum over microbatches."""
    for name, p in params.items():
        if p._backward_hooks:
            hook = next(iter(p._backward_hooks.values()))
            raise InputError(
                f"{name}: got a hook on its gradient, {getattr(hook, '__qualname__', repr(hook))}, expected none: it "
                "would get the sum of all microbatches instead of each. Register it on the model before "
                "fpipe.Pipelined(model, ...), or change .grad after loss.backward()."
            )


def draw_seed() -> int:
    """Return a new seed from torch's default generator, as its data loaders do."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _uses_half(pipe: Pipeline) -> bool:
    dtypes = {p.dtype for p in pipe.model.parameters()} | {dtype for _, dtype in active_casts()}
    return torch.float16 in dtypes


def _update_buffers(held: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in new.items():
            if value is not held[name]:
                held[name].copy_(value)


def _without_modules(method: MethodType, root: nn.Module) -> Callable[..., Any]:
    """Return a method of the model that raises `InputError` once it needs modules, of which only some are here."""
    modules = {id(module) for module in root.modules()}

    def refuse(why: object) -> InputError:
        return InputError(
            f"{method.__name__}: got {why}, expected a method that does not run the model's modules or use its "
            "tensors: this process holds only a part of them. Call the fpipe.Pipelined itself; to generate tokens, "
            "call fpipe.generate(model.pipe, ...); to save weights, fpipe.export."
        )

    def require_none(module: nn.Module, args: Any) -> None:
        if id(module) in modules:
            raise refuse(f"a call of {type(module).__name__} in it")

    def require_no_state(*args: Any) -> None:
        raise refuse("a read of its state dict in it")

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        handle = register_module_forward_pre_hook(require_none)
        reads = root.register_state_dict_pre_hook(require_no_state)  # type: ignore[no-untyped-call]
        try:
            return method(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if "NoneType" not in str(error):
                raise
            raise refuse(f"the error {error}") from error
        finally:
            handle.remove()
            reads.remove()

    return call


def _add_tied_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add a tied tensor under its other names: a checkpoint has it once, and this rank may hold it under another."""
    for aliases in list_aliases(module.pipe.model).values():  # type: ignore[union-attr, arg-type]
        names = [prefix + alias for alias in aliases]
        given = [state[name] for name in names if name in state]
        state.update({name: given[0] for name in names if given and name not in state})


def _ignore_other_ranks(module: nn.Module, keys: Any) -> None:
    """Drop the names of tensors on other ranks from those that `load_state_dict` did not expect."""
    others = module.pipe.model.state_dict().keys()  # type: ignore[union-attr]
    keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if name not in others]
