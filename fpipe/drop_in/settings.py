# SPDX-License-Identifier: Apache-2.0
"""Settings of the modules that a script may change, and the pipelines for each of them.

Problem. A script freezes a layer, keeps BatchNorm in eval mode, or lowers a dropout rate. A pipeline is built for one
such setting; another takes a capture.

Idea. A setting is a value that can be compared: which parameters are frozen, and the mode and plain attributes of every
module. If it changes, on any rank, all ranks get the pipeline for the new one, from a cache or by rebuilding.

Runs when the module is made, in every step to compare, and when a setting is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from fpipe.api import ValueAndGrad, evaluate, value_and_grad
from fpipe.errors import InputError
from fpipe.inference.predictions import predict
from fpipe.pipelines.pipeline import Pipeline
from fpipe.pipelines.results import Step
from fpipe.record.model.skeleton import on_meta, skeleton
from fpipe.record.model.walk import is_users

KEPT_PIPELINES = 8
PLAIN_TYPES = (bool, int, float, str, type(None))

Attributes: TypeAlias = tuple[tuple[str, Any], ...]


class Setting(NamedTuple):
    """The setting of all modules, in order.

    - `frozen`: the parameters that require no gradient.
    - `modes`: whether each module is in train mode.
    - `modules`: the class and the plain attributes of each, functions among them.
    """

    frozen: frozenset[str]
    modes: tuple[bool, ...]
    modules: tuple[tuple[type, Attributes], ...]


def read_setting(module: nn.Module, root: nn.Module) -> Setting:
    """Return the setting of `module` and its submodules; `root` has the attributes of the model itself."""
    frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
    first, *others = list(module.modules())
    modes = (first.training, *[one.training for one in others])
    return Setting(frozen, modes, tuple([(type(one), tuple(_plain_attributes(one))) for one in (root, *others)]))


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name != "training" and _is_plain(value):
            yield name, value


def _is_plain(value: object) -> bool:
    """Return whether a value holds no part of a model: plain types, functions of libraries, and without closures."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    if type(value) is partial:  # such as the `torch.utils.checkpoint.checkpoint` that transformers sets
        return all(map(_is_plain, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, (*PLAIN_TYPES, BuiltinFunctionType)) or (
        isinstance(value, FunctionType) and not (value.__closure__ and is_users(value))
    )


@dataclass(frozen=True, eq=False)
class Functions:
    """The functions of one pipeline, each made when it is first needed."""

    pipe: Pipeline

    @cached_property
    def step(self) -> ValueAndGrad:
        """The function of a training step."""
        return value_and_grad(self.pipe)

    @cached_property
    def evaluation(self) -> Callable[..., Step]:
        """The function that computes the loss in eval mode."""
        return evaluate(self.pipe)

    @cached_property
    def prediction(self) -> Callable[..., Any]:
        """The function that computes outputs in eval mode."""
        return predict(self.pipe)


class Pipelines:
    """The pipelines of a model, one per setting that was used lately.

    `setting` is the current one, and `current` has the functions of its pipeline.
    """

    def __init__(self, pipe: Pipeline, setting: Setting) -> None:
        self.current, self.setting = Functions(pipe), setting
        first = self.current

        @lru_cache(maxsize=KEPT_PIPELINES)
        def build(wanted: Setting) -> Functions:
            return first if wanted == setting else Functions(pipe.rebuilt(apply_setting(pipe.model, wanted)))

        self._build = build

    def __deepcopy__(self, memo: object) -> Pipelines:
        """Return a value with the same pipelines, for the copy of a module."""
        return self

    def close(self) -> None:
        """Close all pipelines, and drop those of other settings."""
        self.current.pipe.close()
        self._build.cache_clear()

    def is_current(self, mine: Setting) -> bool:
        """Return whether this process's part of a setting is that of the current pipeline."""
        held = self.current.pipe.training.params
        return mine == self.setting._replace(frozen=self.setting.frozen.intersection(held))

    def follow(self, mine: Setting) -> None:
        """Make the pipeline for the setting of all ranks the current one; every rank must call this."""
        ranks = self.current.pipe.ranks
        with ranks.enter_call("a changed model"):
            require_same_modules(self.setting, mine)
            texts = ranks.exchange_text(json.dumps(sorted(mine.frozen)))
        setting = mine._replace(frozen=frozenset(name for text in texts for name in json.loads(text)))
        self.current, self.setting = self._build(setting), setting


def require_same_modules(known: Setting, mine: Setting) -> None:
    """Raise `InputError` if modules were added, removed, or replaced by others of another class."""
    before, now = ([kind.__name__ for kind, _ in one.modules] for one in (known, mine))
    if before == now:
        return
    where = next(
        (k for k, pair in enumerate(zip(before, now, strict=False)) if len(set(pair)) > 1), min(len(before), len(now))
    )
    got, expected = (kinds[where] if where < len(kinds) else "none" for kinds in (now, before))
    raise InputError(
        f"module {where} of the model, in the order of modules(): got {got}, expected {expected}, as when it was made. "
        "Change the model before fpipe.Pipelined(model, ...)."
    )


def apply_setting(model: nn.Module, setting: Setting) -> nn.Module:
    """Return a copy of the model on the meta device with this setting."""
    made = skeleton(model, on_meta)
    for name, p in made.named_parameters():
        p.requires_grad_(name not in setting.frozen)
    for module, training, (_, attributes) in zip(made.modules(), setting.modes, setting.modules, strict=True):
        vars(module).update(attributes, training=training)
    return made
