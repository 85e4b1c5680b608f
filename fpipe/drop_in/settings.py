# SPDX-License-Identifier: Apache-2.0
"""Follow what a script changes in a drop-in module: a pipeline for each setting of its modules.

Problem. A script freezes a layer, keeps BatchNorm in eval mode, registers a hook, or changes a config. A pipeline is
recorded for one such setting; another takes a capture.

Idea. A pipeline watches the model that it was built from, and refuses to run after a change. Here, the module that the
script sees is watched in the same way. If it has changed, on any rank, all ranks take the pipeline for which it is
unchanged: one of those used lately, or a new one, built from the module as it is now. What the script changes in its
own model, or in objects that this one holds, can't be followed, and is refused.

Invariant: what `fpipe.pipeline` refuses is followed or refused here, since the same watch sees it.

Runs when the module is made, in every step to compare, and when a setting is new.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, zip_longest
from typing import Any, Final
from weakref import WeakMethod

from torch import Tensor, nn

from fpipe.api import ValueAndGrad, evaluate, value_and_grad
from fpipe.audits.audit import Audit
from fpipe.errors import InputError
from fpipe.inference.predictions import predict
from fpipe.pipelines.loss_weights import Weight
from fpipe.pipelines.merge import MergeTrees
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step
from fpipe.record.model.skeleton import on_meta, share_state, skeleton
from fpipe.record.reads.namespaces import ModelState
from fpipe.record.reads.watch import Twin, Watch, Watcher
from fpipe.tensors.fake import as_parameter
from fpipe.tensors.spec import Spec

KEPT_PIPELINES: Final = 8
MAKE_NEW: Final = "make a new fpipe.Pipelined"
CHANGE_HERE: Final = "change it in the fpipe.Pipelined, which follows it"


@dataclass(frozen=True, eq=False)
class Functions:
    """The pipeline for one setting, and its functions, each made when it is first needed.

    - `aux`, `audit`: as in `fpipe.value_and_grad`.
    - `twin`: the module that the script sees, watched for this setting. `is_stale`: whether it has changed already.
    - `watches`: the last watch in train mode, and in eval mode, each with those that it was made from.
    """

    pipe: Pipeline
    aux: bool | MergeTrees
    audit: Audit | None
    twin: Twin
    is_stale: bool = False
    watches: dict[bool, tuple[list[Watch], Watch]] = field(default_factory=dict)

    @cached_property
    def step(self) -> ValueAndGrad:
        """The function of a training step."""
        return value_and_grad(self.pipe, aux=self.aux, audit=self.audit)

    @cached_property
    def evaluation(self) -> Callable[..., Step]:
        """The function that computes the loss in eval mode."""
        return evaluate(self.pipe, outputs=False, aux=self.aux)

    @cached_property
    def prediction(self) -> Callable[..., Any]:
        """The function that computes outputs in eval mode."""
        return predict(self.pipe)

    def fits(self, training: bool) -> bool:
        """Return whether the module is as this pipeline was built for, as far as counts in train or eval mode."""
        kinds = self.pipe.memo.batches.items()
        originals = [one.plan.watch for (variant, _), one in kinds if variant.training or not training]
        known, watch = self.watches.get(training, ([], Watch()))
        if known != originals:
            watch = self.twin.watch_all(originals, training)
            self.watches[training] = originals, watch
        return not self.is_stale and watch.has_same_model()

    def reads(self, name: str) -> bool:
        """Return whether the model's own module reads an attribute of this name, even if it does not have it."""
        first = next(iter(self.twin.watch(self.pipe.training.watch).modules), None)
        return first is not None and name in first.expected.plain


class Pipelines:
    """The pipelines of a drop-in module, one per setting that was used lately.

    - `root`: the module that holds what the script sees, with this process's tensors. `aux`, `audit`: of all functions.
    - `current`: the pipeline of the current setting; `kept`: all of them by number, the last used ones last.
    - `hooks`: those on gradients of the model's parameters. `leaves`: the names of the tensors here.
    - `users`: the user's own model, while it exists, and what it shared with others: a change there is refused.
    """

    def __init__(
        self, pipe: Pipeline, root: nn.Module, model: object, aux: bool | MergeTrees, audit: Audit | None
    ) -> None:
        self.root, self.aux, self.audit = root, aux, audit
        self.hooks, self.leaves = pipe.captures.hooks, _list_leaves(root)
        own = pipe.captures.watching
        self.shared = share_state(model) if isinstance(model, nn.Module) else nn.Module()
        states = (own.origin, ModelState.of(self.shared))
        self.users = tuple([Twin(Watcher(state, own.loss, repair=CHANGE_HERE)) for state in states])
        self._numbers = count()
        self.kept: dict[int, Functions] = {}
        self.current = self._keep(pipe)

    def __deepcopy__(self, memo: dict[int, object]) -> Pipelines:
        """Return a value with the same pipelines for the copy of a module, which it follows from now on."""
        made = object.__new__(Pipelines)
        vars(made).update(vars(self), root=copy.deepcopy(self.root, memo), kept={}, _numbers=count())
        made.current = made._keep(self.current.pipe)
        if not self.current.fits(self.root.training):
            made.kept.clear()
            made.current = replace(made.current, is_stale=True)
        return made

    def close(self) -> None:
        """Close all pipelines, and drop those of other settings."""
        self.current.pipe.close()
        self.kept.clear()

    def ready(self) -> Functions:
        """Return the functions of the current pipeline, whose steps watch this module."""
        pipe = self.current.pipe
        pipe.twins[:] = [self.current.twin, *self.users]
        pipe.rechecks.source = WeakMethod(self.complete)  # else the pipeline would keep this alive
        return self.current

    def follow(self) -> None:
        """Make the pipeline for the module as it is on all ranks the current one; every rank must call this."""
        ranks, training = self.current.pipe.ranks, self.root.training
        with ranks.enter_call("a changed model"):
            self._require_same_tree()
            frozen = [name for name, p in self.root.named_parameters() if not p.requires_grad]
            mine = {"fits": [number for number, one in self.kept.items() if one.fits(training)], "frozen": frozen}
            told = [json.loads(text) for text in ranks.exchange_text(json.dumps(mine))]
        known = next((k for k in reversed(self.kept) if all(k in one["fits"] for one in told)), None)
        if known is not None:
            self.kept[known] = self.current = self.kept.pop(known)
        else:
            self.current = self._build({name for one in told for name in one["frozen"]})

    def _build(self, frozen: set[str]) -> Functions:
        """Return the functions of a new pipeline; in eval mode, what only matters in training is as before."""
        before = self.current.pipe
        if self.root.training:
            return self._keep(before.rebuilt(self.complete(frozen)))
        flags = {name: p.requires_grad for name, p in before.model.named_parameters()}
        with _as_in_training(self.root, before.model, flags):
            return self._keep(before.rebuilt(self.complete({name for name, flag in flags.items() if not flag})))

    def weigh(self, weight: Weight) -> None:
        """Give the pipelines from now on this weight; every rank must call this."""
        self.kept.clear()
        self.current = self._keep(self.current.pipe.rebuild(self.complete(), weight))

    def _keep(self, pipe: Pipeline) -> Functions:
        state, loss = ModelState.of(self.root), pipe.captures.watching.loss
        made = Functions(pipe, self.aux, self.audit, Twin(Watcher(state, loss, repair=MAKE_NEW)))
        self.kept[next(self._numbers)] = made
        for number in list(self.kept)[:-KEPT_PIPELINES]:
            del self.kept[number]
        return made

    def complete(self, frozen: Collection[str] | None = None) -> nn.Module:
        """Return a copy of the module on the meta device, with the tensors of other processes, too."""
        made, whole = skeleton(self.root, on_meta), self.current.pipe.model
        absent: dict[int, Tensor] = {}
        for mine, model in zip(made.modules(), whole.modules(), strict=True):
            tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
                (mine._parameters, model._parameters),
                (mine._buffers, model._buffers),
            ]
            for table, full in tables:
                for name, leaf in full.items():
                    if leaf is not None and table[name] is None:
                        table[name] = absent.setdefault(id(leaf), _like(leaf))
        for name, p in made.named_parameters():
            p.requires_grad_(whole.get_parameter(name).requires_grad if frozen is None else name not in frozen)
            for hook in self.hooks.get(name, ()) if p.requires_grad else ():
                p.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def _require_same_tree(self) -> None:
        """Raise `InputError` if modules or tensors were added, removed, or replaced by others of another kind."""
        modules = zip_longest(self.root.named_modules(), self.current.pipe.model.named_modules())
        for k, pair in enumerate(modules):
            (name, got), (known, expected) = [(one[0], type(one[1]).__name__) if one else ("", "none") for one in pair]
            if (name, got) != (known, expected):
                raise InputError(
                    f"module {k} of the model, {name or known!r}: got {got}, expected {expected}, as when it was made. "
                    "Change the model before fpipe.Pipelined(model, ...)."
                )
        leaves = _list_leaves(self.root)
        for name in {**self.leaves, **leaves}:
            got, expected = leaves.get(name, "none"), self.leaves.get(name, "none")
            if got != expected:
                raise InputError(
                    f"{name}: got {got}, expected {expected}, as when the module was made. Change the model before "
                    "fpipe.Pipelined(model, ...)."
                )


def _like(leaf: Tensor) -> Tensor:
    """Return a meta tensor like a leaf of a model; a parameter for a parameter."""
    made = on_meta(leaf)
    return as_parameter(made, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else made


def _list_leaves(model: nn.Module) -> dict[str, str]:
    """Return what is at each name of a tensor, as text; tied ones say with which."""
    first: dict[int, str] = {}
    found = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, leaf in pairs:
            same = first.setdefault(id(leaf), name)
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "buffer"
            found[name] = f"the {kind} {same} of {Spec.of(leaf)}"
    return found


@contextmanager
def _as_in_training(root: nn.Module, model: nn.Module, flags: Mapping[str, bool]) -> Iterator[None]:
    """Give modules the modes of those of `model`, and parameters these flags, inside."""
    pairs = list(zip(root.modules(), model.modules(), strict=True))
    modes = [module.training for module, _ in pairs]
    before = {name: p.requires_grad for name, p in root.named_parameters()}
    try:
        for module, known in pairs:
            module.training = known.training
        for name, p in root.named_parameters():
            p.requires_grad_(flags[name])
        yield
    finally:
        for (module, _), mode in zip(pairs, modes, strict=True):
            module.training = mode
        for name, p in root.named_parameters():
            p.requires_grad_(before[name])
