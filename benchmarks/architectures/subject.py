# SPDX-License-Identifier: Apache-2.0
"""A subject of the experiment: a tiny random model of an architecture, a batch that it takes, and a loss."""

from __future__ import annotations

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
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def attention(self) -> tuple[int | None, ...]:
        """Heads, heads of keys and values, and the size of a head, as far as the configuration says."""
        config = self.model.config.get_text_config()
        fields = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
        heads, groups, head, wide = (_number(config, field) for field in fields)
        return heads, groups, wide // heads if head is None and heads and wide else head

    @property
    def tokens(self) -> int:
        """The length of the text; 0 without one."""
        text = self.batch.get("input_ids")
        return 0 if text is None else text.shape[1]

    @property
    def unpadded(self) -> Batch | None:
        """The batch with a mask of ones, if it has one with zeros."""
        mask = self.batch.get("attention_mask")
        return None if mask is None or bool(mask.all()) else {**self.batch, "attention_mask": torch.ones_like(mask)}

    def without(self, name: str) -> Subject:
        """The same without an argument."""
        return self._replace(batch={key: value for key, value in self.batch.items() if key != name})


def _number(config: Any, field: str) -> int | None:
    """A field, if it is there and a single number."""
    try:
        found = getattr(config, field, None)
    except Exception:  # it varies across layers
        return None
    return found if isinstance(found, int) else None


def loss_of(outputs: Any) -> Tensor:
    """The loss that the model computed itself; if none, a sum of mean squares of all floating-point outputs."""
    own = outputs.get("loss") if isinstance(outputs, dict) else None
    if own is not None:
        return own.sum()
    finite = (leaf.masked_fill(~leaf.isfinite(), 0.0) for leaf in leaves(outputs))  # scores of what is masked are not
    return sum((leaf.square().mean() for leaf in finite), start=torch.zeros(()))


def leaves(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of a tree of outputs that depend on parameters."""
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
    """The model of this type, made small in the first way that works; raises `UntriedError`."""
    errors = []
    for way in WAYS:
        try:
            batch = _batch(_model(kind, names, dropout, way))
            return Subject(_model(kind, names, dropout, way), batch)  # anew: a step may leave something behind
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
    """The first batch that the model takes."""
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
    """The class of this name; some are not exported, and stand next to the class of their configuration."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    return getattr(import_module(config.__module__.replace(".configuration_", ".modeling_")), name)


def _step(model: nn.Module, batch: Batch) -> None:
    """One eager step; raises if it fails, or trains nothing."""
    half = tree_map(lambda leaf: leaf.chunk(2)[0] if isinstance(leaf, Tensor) else leaf, batch)
    value = loss_of(model(**half))
    if not torch.isfinite(value):
        raise ValueError(f"the loss is {value.item()}")
    value.backward()
    model.zero_grad(set_to_none=True)


def said(error: BaseException) -> str:
    """The message in a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300]
