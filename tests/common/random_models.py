# SPDX-License-Identifier: Apache-2.0
"""Random models: nested parts of many kinds, skips, ties, several inputs and outputs, drawn as a description.

A description is a tree of `Leaf`, `Again` and `Nest`, from which a module is built; Hypothesis shrinks it, and it
prints as the code that makes it. Every part of the module is called with a tensor and with the batch, a dict, and
returns a tensor or a tree that contains one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.common.cases import WIDTH, WORDS, Case, mse
from tests.common.layers import Tripled

# ----------------- The kinds of layers in random models, each of which computes something else between its two linears


class Kind(NamedTuple):
    """A kind of layer.

    - `middle(layer, h, batch)` computes the value between the two linears; `add(layer)` adds what else the layer has.
    - `random`: it draws random numbers. `sealed`: no cut may be inside it.
    - `graph`: a graph of operators preserves its behavior.
    """

    middle: Callable[..., Tensor]
    add: Callable[[nn.Module], None] = lambda layer: None
    random: bool = False
    sealed: bool = False
    graph: bool = True


def sliced(layer, h, batch):
    h[:, 0] = 0
    return h


def viewed(layer, h, batch):
    h.view(-1)[::2].mul_(0.5)
    return h


def averaged(layer, h, batch):
    layer.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    layer.count += 1
    return h * (1 - layer.mean / layer.count)  # so the backward reads what the forward has made of the buffers


def stopped(layer, h, batch):
    with torch.no_grad():
        scale = layer.c(h).abs().mean(-1, keepdim=True)
    return h * scale


def cast(layer, h, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = layer.c(h)
    return h.float()


def kept_low(layer, h, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer.c(h).sin()


def hooked(layer, h, batch):
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h * 1.5


def packed(layer, h, batch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: (t * 2).float()):
        return torch.sin(h) * h


def noted(layer, h, batch):
    layer.note = h.mean()
    return torch.sin(h)


def fourier(layer, h, batch):
    return torch.fft.ifft(torch.fft.fft(h.float()) * layer.filter.conj()).real


def spared(layer, h, batch):
    layer.c(h)
    return h.cos()


def numbered(layer, h, batch):
    assert batch["nothing"] is None
    return h * batch["scale"] * (h.shape[-1] / 3) if batch["flag"] else h


def linear(layer):
    layer.c = nn.Linear(WIDTH, WIDTH)


def words(layer):
    layer.words = nn.Embedding(WORDS, WIDTH)


def dropping_part(layer):
    layer.c = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())
    layer.c.sealed = True


def scaling(layer):
    layer.a.register_forward_hook(lambda module, args, out: out * 1.25)
    layer.a.sealed = True


def average(layer):
    layer.register_buffer("mean", torch.zeros(WIDTH))
    layer.register_buffer("count", torch.zeros((), dtype=torch.int64))


def spare(layer):
    linear(layer)
    layer.spare = nn.Parameter(torch.randn(3))
    layer.register_buffer("idle", torch.randn(2))


def of_type(dtype):
    def change(layer):
        layer.b.to(dtype)

    return change


KINDS: dict[str, Kind] = {
    "plain": Kind(lambda layer, h, batch: torch.tanh(h)),
    "relu_": Kind(lambda layer, h, batch: h.relu_()),
    "mul_": Kind(lambda layer, h, batch: h.mul_(2).add_(1)),
    "sliced": Kind(sliced),
    "viewed": Kind(viewed),
    "pieces": Kind(lambda layer, h, batch: torch.cat(h.chunk(2, -1)[::-1], -1)),
    "turned": Kind(lambda layer, h, batch: h.t().contiguous().t()),
    "expanded": Kind(lambda layer, h, batch: h.sum(-1, keepdim=True).expand(-1, WIDTH)),
    "dropout": Kind(lambda layer, h, batch: functional.dropout(h, 0.3, layer.training), random=True),
    "dropping": Kind(
        lambda layer, h, batch: layer.c(h), lambda layer: setattr(layer, "c", nn.Dropout(0.4)), random=True
    ),
    "noise": Kind(lambda layer, h, batch: h + torch.rand_like(h) * torch.randn(h.shape[-1]), random=True),
    "norm": Kind(lambda layer, h, batch: layer.c(h), lambda layer: setattr(layer, "c", nn.BatchNorm1d(WIDTH))),
    "average": Kind(averaged, average),
    "masked": Kind(lambda layer, h, batch: h.masked_fill(batch["mask"][:, None], 0.5)),
    "words": Kind(lambda layer, h, batch: h + layer.words(batch["ids"]), words),
    "picked": Kind(lambda layer, h, batch: h * layer.words(h.argmax(-1)), words),
    "double": Kind(lambda layer, h, batch: h.double(), of_type(torch.float64)),
    "low": Kind(lambda layer, h, batch: h.bfloat16(), of_type(torch.bfloat16)),
    "kept low": Kind(kept_low, lambda layer: (linear(layer), of_type(torch.bfloat16)(layer)), graph=False),
    "fourier": Kind(
        fourier, lambda layer: setattr(layer, "filter", nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)))
    ),
    "stopped": Kind(stopped, linear, graph=False),
    "detached": Kind(lambda layer, h, batch: h.detach() * h),
    "cast": Kind(cast, linear, graph=False),
    "custom": Kind(lambda layer, h, batch: Tripled.apply(h), graph=False),
    "checkpointed": Kind(lambda layer, h, batch: checkpoint(torch.sin, h, use_reentrant=False), graph=False),
    "part checkpointed": Kind(lambda layer, h, batch: checkpoint(layer.c, h, use_reentrant=False), linear, graph=False),
    "dropout checkpointed": Kind(
        lambda layer, h, batch: checkpoint(layer.c, h, use_reentrant=False), dropping_part, random=True, graph=False
    ),
    "hooked": Kind(hooked, graph=False),
    "module hooks": Kind(
        lambda layer, h, batch: h.sin(),
        scaling,
        graph=False,
    ),
    "packed": Kind(packed, sealed=True, graph=False),
    "vmapped": Kind(lambda layer, h, batch: torch.func.vmap(lambda row: row * row.sum())(h), graph=False),
    "vmapped weights": Kind(lambda layer, h, batch: torch.vmap(layer.c)(h), linear, sealed=True, graph=False),
    "constant": Kind(
        lambda layer, h, batch: h * layer.weights, lambda layer: setattr(layer, "weights", torch.linspace(0, 1, WIDTH))
    ),
    "gain": Kind(
        lambda layer, h, batch: h * layer.gain, lambda layer: setattr(layer, "gain", nn.Parameter(torch.tensor(1.5)))
    ),
    "outside": Kind(lambda layer, h, batch: functional.linear(h, layer.b.weight)),
    "spare": Kind(spared, spare),
    "noted": Kind(noted, graph=False),
    "numbers": Kind(numbered),
}


# --------------------------------------------- The description of a random model: a tree of `Leaf`, `Again` and `Nest`

NESTS = (
    "plain",
    "residual",
    "keyword",
    "tree",
    "object",
    "method",
    "twice",
    "checkpoint",
    "autocast",
    "no_grad",
    "eval",
)

SEALED_NESTS = ("checkpoint",)

GRAPH_NESTS = ("plain", "residual", "keyword", "tree")


@dataclass(frozen=True)
class Leaf:
    """A layer, which may be frozen or have a low-rank adapter; `feeds` number earlier values that go into it, too."""

    kind: str
    feeds: tuple[int, ...] = ()
    frozen: bool = False
    adapted: bool = False


@dataclass(frozen=True)
class Again:
    """Another call of layer number `which`."""

    which: int
    feeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nest:
    """Parts that run one after the other."""

    kind: str
    parts: tuple[Part, ...]
    feeds: tuple[int, ...] = ()


Part = Leaf | Again | Nest


@dataclass(frozen=True)
class Description:
    """A model: its parts, its ties (`b` of one layer with `a` of another), its outputs and inputs.

    - `returns`: a tensor, a tree, or the loss. `keywords`: inputs are keyword arguments.
    - `sequence`: it is an `nn.Sequential`, through which all values are passed on.
    """

    parts: tuple[Part, ...]
    ties: tuple[tuple[int, int], ...] = ()
    returns: str = "tensor"
    keywords: bool = False
    sequence: bool = False

    @property
    def leaves(self) -> list[Leaf]:
        return [part for part in self.walk() if isinstance(part, Leaf)]

    def walk(self) -> Iterator[Part]:
        todo = list(self.parts)
        while todo:
            part = todo.pop()
            yield part
            todo += part.parts if isinstance(part, Nest) else ()

    @property
    def random(self) -> bool:
        return any(KINDS[leaf.kind].random for leaf in self.leaves)

    @property
    def graph(self) -> bool:
        """Return whether front ends that make graphs can capture it."""
        nests = [part.kind for part in self.walk() if isinstance(part, Nest)]
        return all(KINDS[leaf.kind].graph for leaf in self.leaves) and all(kind in GRAPH_NESTS for kind in nests)

    def has(self, *kinds: str) -> bool:
        return any(part.kind in kinds for part in self.walk() if not isinstance(part, Again))

    @property
    def repeats(self) -> bool:
        """Return whether a module runs, or a parameter is used, more than once."""
        return bool(self.ties) or self.has("twice", "outside") or any(isinstance(p, Again) for p in self.walk())


# ---------------------------------------------------------------------------------------- The layers of a random model


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """Two linears with a function of its kind in between, and a residual connection."""

    def __init__(self, leaf: Leaf):
        super().__init__()
        self.kind = KINDS[leaf.kind]
        self.a, self.b = Adapted() if leaf.adapted else nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind.add(self)
        self.sealed = self.kind.sealed
        if leaf.frozen:
            self.requires_grad_(False)

    def forward(self, x, batch):
        h = self.kind.middle(self, self.a(x), batch)
        return x + self.b(h).to(x.dtype)


# -------------------------------- The nested parts of a random model, each of which calls its own parts in its own way


class Opaque:
    """A dict in which no tree library looks for tensors."""

    def __init__(self, batch):
        self.batch = batch

    def __getitem__(self, key):
        return self.batch[key]


def combine(values: list[Tensor], feeds: tuple[int, ...]) -> Tensor:
    """Return the last value, combined with the earlier ones that `feeds` number."""
    total = values[-1]
    for feed in feeds:
        value = values[feed % len(values)]
        total = total * value.tanh() if feed % 2 else total + value
    return total


class Body(nn.Module):
    """A sequence of parts, called in one of the ways of `NESTS`."""

    def __init__(self, nest: Nest, layers: list[Layer]):
        super().__init__()
        self.kind, self.feeds = nest.kind, [part.feeds for part in nest.parts]
        self.parts = nn.ModuleList([module_of(part, layers) for part in nest.parts])
        around = nest.kind in ("method", "object") and any(part.sealed for part in self.parts)  # whole or not at all
        self.sealed = nest.kind in SEALED_NESTS or around
        if self.kind == "eval":
            self.eval()

    def run(self, x, batch):
        values = [x]
        for part, feeds in zip(self.parts, self.feeds, strict=True):
            values.append(self.call(part, combine(values, feeds), batch))
        return values[-1], values[len(values) // 2]

    def call(self, part, x, batch):
        if self.kind == "keyword":
            return tensor_of(part(batch=batch, x=x))
        return tensor_of(part.forward(x, batch) if self.kind == "method" else part(x, batch))

    def forward(self, x, batch):
        if self.kind == "residual":
            return x + self.run(x, batch)[0]
        if self.kind == "tree":
            y, aside = self.run(x, batch)
            return {"y": y, "more": (aside, None, 3), "mask": batch["mask"], "positive": y > 0}
        if self.kind == "object":
            return self.run(x, Opaque(batch))[0]
        if self.kind == "twice":
            return self.run(self.run(x, batch)[0].tanh(), batch)[0]
        if self.kind == "checkpoint":
            return checkpoint(self.run, x, batch, use_reentrant=False)[0]
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.run(x, batch)[0].float()
        if self.kind == "no_grad":
            with torch.no_grad():
                scale = self.run(x, batch)[0].abs().mean(-1, keepdim=True)
            return x / (1 + scale)
        return self.run(x, batch)[0]


def tensor_of(out: Any) -> Tensor:
    """Return the output of a part as one tensor."""
    if not isinstance(out, dict):
        return out
    aside, nothing, number = out["more"]
    assert nothing is None
    return torch.where(out["positive"] | out["mask"][:, None], out["y"], aside * number)


def module_of(part: Part, layers: list[Layer]) -> nn.Module:
    """Return the module of a part; a new layer is appended to `layers`."""
    if isinstance(part, Again) and layers:
        return layers[part.which % len(layers)]
    if isinstance(part, Nest):
        return Body(part, layers)
    layers.append(Layer(part if isinstance(part, Leaf) else Leaf("plain")))
    return layers[-1]


# ------------------------------------------------------------------- Whole random models, and the cases that tests run


def tie(description: Description, layers: list[Layer]) -> None:
    for i, j in description.ties:
        to, owner = layers[i % len(layers)].b, layers[j % len(layers)].a
        if to.weight.dtype == torch.float32 and isinstance(owner, nn.Linear):
            to.weight = owner.weight


def notes_of(model: nn.Module) -> list[Tensor]:
    """Return the tensors that layers have left in attributes, in order."""
    return [module.note for module in model.modules() if isinstance(module, Layer) and hasattr(module, "note")]


class Net(nn.Module):
    """A model whose forward calls its body directly, unlike an `nn.Sequential`."""

    def __init__(self, description: Description):
        super().__init__()
        layers: list[Layer] = []
        self.body, self.returns = Body(Nest("plain", description.parts), layers), description.returns
        tie(description, layers)

    def forward(self, x, mask, ids, scale=1.0, nothing=None, flag=True, labels=None):
        batch = {"mask": mask, "ids": ids, "scale": scale, "nothing": nothing, "flag": flag}
        y, aside = self.body.run(x, batch)
        for note in notes_of(self):
            y = y + note
        if self.returns == "tensor":
            return y
        out = {"y": y, "more": [aside, None, 3, ids], "mean": y.mean()}
        return {**out, "loss": mse(y, labels)} if self.returns == "loss" else out


class Enter(nn.Module):
    """The first part of an `nn.Sequential`: puts all inputs into one tree."""

    def forward(self, inputs):
        x, mask, ids = inputs
        return [x], {"mask": mask, "ids": ids, "scale": 0.5, "nothing": None, "flag": True}


class PassOn(nn.Module):
    """Calls a part with the values that it needs, and passes the whole tree on."""

    def __init__(self, part: Part, layers: list[Layer]):
        super().__init__()
        self.feeds, self.part = part.feeds, module_of(part, layers)

    def forward(self, tree):
        values, batch = tree
        return [*values, tensor_of(self.part(combine(values, self.feeds), batch))], batch


class Leave(nn.Module):
    """The last part of an `nn.Sequential`: returns the last value."""

    def forward(self, tree):
        return tree[0][-1] * 2


def model_of(description: Description) -> nn.Module:
    """Return the model of a description."""
    if not description.sequence:
        return Net(description)
    layers: list[Layer] = []
    model = nn.Sequential(Enter(), *[PassOn(part, layers) for part in description.parts], Leave())
    tie(description, layers)
    return model


def batch_of(description: Description) -> Callable[[int], tuple[Any, Any]]:
    """Return a function that makes inputs and targets with a given number of rows."""

    def batch(rows: int) -> tuple[Any, Any]:
        x, y = torch.randn(2, rows, WIDTH)
        inputs = {"x": x, "mask": torch.rand(rows) > 0.7, "ids": torch.randint(WORDS, (rows,))}
        if description.returns == "loss":
            return {**inputs, "labels": y}, None
        if description.sequence:
            return (tuple(inputs.values()),), y
        return ({"scale": 0.5, "flag": True, **inputs} if description.keywords else tuple(inputs.values())), y

    return batch


def loss_of(description: Description) -> Callable[..., Tensor]:
    """Return the loss for the model's outputs."""
    if description.returns == "loss":
        return lambda out: out["loss"]
    if description.returns == "tree":
        return lambda out, y: mse(out["y"], y) + out["more"][0].square().mean()
    return mse


def case_of(description: Description) -> Case:
    """Return a case, as those of the zoo, for the helpers that run cases."""
    return Case(
        lambda: model_of(description),
        batch_of(description),
        loss_of(description),
        ("", "", ""),
        random=description.random,
    )


# ------------------------------------------------------------------ Strategies that draw descriptions of random models

feeds = st.lists(st.integers(0, 9), max_size=2).map(tuple)


def leaves(kinds) -> st.SearchStrategy[Part]:
    rarely = st.sampled_from([False, False, False, True])
    new = st.builds(Leaf, st.sampled_from(kinds), feeds, rarely, rarely)
    return st.one_of(new, new, new, new, st.builds(Again, st.integers(0, 9), feeds))


def parts(kinds, nests) -> st.SearchStrategy[Part]:
    """Return a strategy for parts of these kinds, at most three levels deep."""
    found = leaves(kinds)
    for _ in range(2):
        some = st.lists(found, min_size=1, max_size=3).map(tuple)
        found = leaves(kinds) | st.builds(Nest, st.sampled_from(nests), some, feeds)
    return found


@st.composite
def descriptions(draw, graph: bool = False, sequence: bool = False) -> Description:
    """Draw a model; with `graph` one that any front end takes, with `sequence` an `nn.Sequential`."""
    kinds = [name for name, kind in KINDS.items() if kind.graph or not graph]
    kinds = [name for name in kinds if name != "noted"] if sequence else kinds
    some = draw(st.lists(parts(kinds, GRAPH_NESTS if graph else NESTS), min_size=2, max_size=4).map(tuple))
    return Description(
        some,
        draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)),
        "tensor" if sequence else draw(st.sampled_from(["tensor", "tree", "loss"])),
        draw(st.booleans()),
        sequence,
    )


# ----------------------------------------------------------------------- The places at which a random model can be cut


class Calls(TorchFunctionMode):
    """Count the torch calls that return tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, Tensor)
        return out


def places(description: Description) -> list[str]:
    """Return the names of the module calls at which a stage may begin, in execution order, one for each place."""
    model, inputs, _ = case_of(description).make(3)
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    sealed = tuple(f"{name}." for name, module in modules.items() if getattr(module, "sealed", False))
    found: dict[int, str] = {}
    times: Counter[str] = Counter()
    inside: list[str] = []
    with Calls() as calls:

        def enter(name):
            def hook(*_):
                number, times[name] = times[name], times[name] + 1
                if calls.count and not any(f"{other}." in sealed for other in inside):
                    found.setdefault(calls.count, f"{name}@{number}" if number else name)
                inside.append(name)

            return hook

        for name, module in modules.items():
            module.register_forward_pre_hook(enter(name), prepend=True)
            module.register_forward_hook(lambda *_: inside.pop() and None)
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return [found[place] for place in sorted(found)]
