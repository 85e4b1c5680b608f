# SPDX-License-Identifier: Apache-2.0
"""A test subject: a tiny random model of an architecture, a batch it accepts, and a loss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import torch
import transformers
from batches import Batch, candidates
from classes import PARTS
from configurations import WAYS, Way, tiny
from optree import tree_leaves, tree_map
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from unusual import unusual

MOST = 80_000_000


class UntriedError(Exception):
    """Not even a plain eager step works; the message says why."""


class Subject(NamedTuple):
    """A model in train mode, and keyword arguments for it."""

    model: nn.Module
    batch: Batch

    @property
    def parameters(self) -> int:
        """The number of trained scalars."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def attention(self) -> tuple[int | None, ...]:
        """The numbers of heads and of key and value heads, and the head size, if the configuration has them."""
        try:
            config = self.model.config.get_text_config()
        except ValueError:  # there are several
            return None, None, None
        fields = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
        heads, groups, head, wide = (_number(config, field) for field in fields)
        return heads, groups, wide // heads if head is None and heads and wide else head

    @property
    def tokens(self) -> int:
        """The length of the text, or 0 without text."""
        text = self.batch.get("input_ids")
        return 0 if text is None else text.shape[1]

    @property
    def unpadded(self) -> Batch | None:
        """The batch with a mask of ones, or `None` if its mask has no zeros."""
        mask = self.batch.get("attention_mask")
        return None if mask is None or bool(mask.all()) else {**self.batch, "attention_mask": torch.ones_like(mask)}

    def without(self, name: str) -> Subject:
        """Return the subject without one argument."""
        return self._replace(batch={key: value for key, value in self.batch.items() if key != name})


def _number(config: Any, field: str) -> int | None:
    """Return a field if it is there and a single integer, else `None`."""
    try:
        found = getattr(config, field, None)
    except Exception:  # it varies across layers
        return None
    return found if isinstance(found, int) else None


def loss_of(outputs: Any) -> Tensor:
    """Return the loss computed by the model itself, else a sum of mean squares of all floating-point outputs."""
    own = outputs.get("loss") if isinstance(outputs, dict) else None
    if own is not None:
        return own.sum()
    finite = (leaf.masked_fill(~leaf.isfinite(), 0.0) for leaf in leaves(outputs))  # masked scores are infinite
    return sum((leaf.square().mean() for leaf in finite), start=torch.zeros(()))


def leaves(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors in a tree of outputs that depend on parameters."""
    if isinstance(outputs, dict):
        outputs = dict(outputs)
    found = [leaf for leaf in _leaves(outputs) if isinstance(leaf, Tensor)]
    return [leaf for leaf in found if leaf.is_floating_point() and leaf.requires_grad]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _leaves(value)]
    return tree_leaves(tree)


def subject(kind: str, names: Sequence[str], dropout: float = 0.0) -> Subject:
    """Return the model of this type, made small in the first way that works. Raise `UntriedError` if none does."""
    errors = []
    for way in WAYS:
        try:
            batch = _batch(_model(kind, names, dropout, way))
            return Subject(_model(kind, names, dropout, way), batch)  # a new model: a step may leave state behind
        except Exception as error:
            errors.append(error)
    raise UntriedError(" || ".join(dict.fromkeys(map(said, errors)))) from errors[0]


def _model(kind: str, names: Sequence[str], dropout: float, way: Way) -> nn.Module:
    torch.manual_seed(0)
    whole = CONFIG_MAPPING[kind]
    config = tiny(_class(names[0], whole).config_class if kind in PARTS else whole, dropout, way)
    made = class_of(config, names)
    with torch.device("meta"):
        size = sum(p.numel() for p in made(config).parameters())
    if size > MOST:
        raise UntriedError(f"{size / 1e6:.0f} million parameters: it could not be made smaller")
    return made(config).train()


def _batch(model: nn.Module) -> Batch:
    """Return the first batch the model accepts. Raise `UntriedError` if there is none."""
    tried: list[Exception] = []
    for batch in chain(candidates(model), unusual(model)):
        try:
            _step(model, batch)
        except Exception as error:
            tried.append(error)
        else:
            return batch
    if not tried:
        raise UntriedError(f"no batch is known for {type(model).__name__}.forward")
    first = dict.fromkeys(said(error) for error in tried)
    raise UntriedError(f"no batch fits: {' | '.join(list(first)[:4])}") from tried[0]


def class_of(config: Any, names: Sequence[str]) -> type[nn.Module]:
    """Return the first class made from such a configuration that needs no inference session."""
    kinds = [_class(name, type(config)) for name in names]
    kinds = [kind for kind in kinds if "inference_session" not in signature(kind.forward).parameters] or kinds
    return next((kind for kind in kinds if kind.config_class is type(config)), kinds[0])


def _class(name: str, config: type) -> type[nn.Module]:
    """Return the class of this name; look up those not exported next to the class of their configuration."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    return getattr(import_module(config.__module__.replace(".configuration_", ".modeling_")), name)


def _step(model: nn.Module, batch: Batch) -> None:
    """Run one eager step. Raise if it fails, trains nothing, or has a loss that is not finite."""
    half = tree_map(lambda leaf: leaf.chunk(2)[0] if isinstance(leaf, Tensor) else leaf, batch)
    value = loss_of(model(**half))
    if not torch.isfinite(value):
        raise ValueError(f"the loss is {value.item()}")
    value.backward()
    model.zero_grad(set_to_none=True)


def said(error: BaseException) -> str:
    """Return the error's message in one line."""
    text = re.sub(r"/\S+/", "", " ".join(str(error).split())) or type(error).__name__  # without folders
    return f"{type(error).__name__}: {text}"[:300]
