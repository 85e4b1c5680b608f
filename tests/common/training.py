# SPDX-License-Identifier: Apache-2.0
"""Training runs of fpipe, and the plain loops in one process that they must equal, which use nothing of fpipe.

A plain loop draws dropout numbers as a pipeline does, from the seed of the step, the microbatch and the path of the
module. Everything else is what anyone would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fpipe
from schedules import Schedule
from tests.common.comparison import require_part, require_same_slots
from tests.common.generators import seeded
from tests.common.sizes import NIGHTLY

# ----------------- Models that are trained, and plain loops that train them in one process: these use nothing of fpipe

MICROBATCHES, STEPS, LIMIT = 4, 20 if NIGHTLY else 10, 0.1
LARGE = 2.0**26
"""A scale with which float16 overflows."""


@dataclass(frozen=True)
class Trained:
    """A model to train: `batch(generator)` makes (inputs, targets); `group` is a pattern of parameters by name."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, Any]]
    loss: Callable[..., Tensor]
    group: str

    def make(self) -> tuple[nn.Module, list[tuple[Any, Any]]]:
        """The model and the batches of all steps, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = self.build()
        generator = seeded(2)
        return model, [self.batch(generator) for _ in range(STEPS)]


class Layer(nn.Module):
    """A linear with batch normalization and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)).relu())


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2)).relu()


class TiedGPT(nn.Module):
    """A small GPT whose head is its embedding."""

    def __init__(self, words: int = 17, width: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama() -> nn.Module:
    """A Llama whose heads share keys and values in pairs."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def padded(generator: torch.Generator) -> tuple[Any, Any]:
    """Sequences of 64 tokens, some of them padded at the end; nothing is to be predicted there."""
    ids = torch.randint(32, (2 * MICROBATCHES, 64), generator=generator)
    lengths = torch.randint(40, 65, (2 * MICROBATCHES, 1), generator=generator)
    mask = (torch.arange(64) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask}, torch.where(mask.bool(), ids.roll(-1, 1), -100)


def words(generator: torch.Generator) -> tuple[Any, Any]:
    ids = torch.randint(17, (2 * MICROBATCHES, 9), generator=generator)
    return (ids[:, :-1],), ids[:, 1:]


def rows(generator: torch.Generator) -> tuple[Any, Any]:
    return (torch.randn(3 * MICROBATCHES, 6, generator=generator),), torch.randn(
        3 * MICROBATCHES, 6, generator=generator
    )


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = {
    "mlp": Trained(lambda: nn.Sequential(*(Layer(6) for _ in range(8))), rows, functional.mse_loss, "*.bias"),
    "gpt": Trained(TiedGPT, words, cross_entropy, "*.bias"),
    "llama": Trained(llama, padded, cross_entropy, "*norm.weight"),
}


def rate(step: int) -> float:
    """A learning rate that warms up and decays."""
    return 0.02 * min(1, (step + 1) / 5) / (1 + step / 10)


@dataclass
class History:
    """What a training run computed: by step losses and norms; at the end parameters, buffers and optimizer state."""

    losses: list[Tensor]
    norms: list[Tensor]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]


@contextmanager
def drawing(model: nn.Module, seed: int, microbatch: int) -> Iterator[None]:
    """Before each dropout, seed torch's generator with the step's seed, the microbatch and the module's path."""

    def number(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1

    def seeding(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            torch.default_generator.manual_seed(number(f"{seed}/{microbatch}") ^ number(f"{path}#0"))

        return hook

    dropouts = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    handles = [module.register_forward_pre_hook(seeding(name)) for name, module in dropouts]
    yield
    for handle in handles:
        handle.remove()


def train_alone(name: str) -> History:
    """Train a model in a plain loop: microbatches, clipping, groups, a learning rate for each step."""
    one = MODELS[name]
    model, batches = one.make()
    named = dict(model.named_parameters())
    suffix = one.group.removeprefix("*")
    groups = [[p for name, p in named.items() if name.endswith(suffix) is mine] for mine in (False, True)]
    assert all(groups)
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    history = History([], [], {}, {}, {})
    for step, (inputs, targets) in enumerate(batches):
        total = None
        for i in range(MICROBATCHES):
            with drawing(model, step, i):
                out = model(**part(inputs, i)) if isinstance(inputs, dict) else model(*part(inputs, i))
            loss = one.loss(out, part(targets, i)) / MICROBATCHES
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        history.losses.append(total)
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    assert any(norm > LIMIT for norm in history.norms)
    history.params = {name: p.detach() for name, p in named.items()}
    history.buffers = dict(model.named_buffers())
    history.state = {name: optimizer.state[p] for name, p in named.items()}
    return history


def train_scaled_alone() -> History:
    """Train a GPT under autocast to float16 with torch's scaler, which skips steps; scales take the place of norms."""
    one = MODELS["gpt"]
    model, batches = one.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", LARGE, growth_interval=3)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        total = torch.zeros(())
        for i in range(MICROBATCHES):
            with torch.autocast("cpu", torch.float16):
                loss = one.loss(model(*part(inputs, i)), part(targets, i)) / MICROBATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.losses.append(total)
        history.norms.append(torch.tensor(scaler.get_scale()))
    assert len(set(map(float, history.norms))) > 3
    history.params = {name: p.detach() for name, p in model.named_parameters()}
    history.state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return history


def train_low_alone() -> History:
    """Train a GPT in bfloat16 with master copies in float32."""
    one = MODELS["gpt"]
    model, batches = one.make()
    model = model.to(torch.bfloat16)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        total = None
        for i in range(MICROBATCHES):
            loss = one.loss(model(*part(inputs, i)), part(targets, i)) / MICROBATCHES
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        history.losses.append(total)
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.float()
        optimizer.step()
        for name, p in model.named_parameters():
            p.data.copy_(masters[name].data)
        model.zero_grad()
    history.params = {name: p.detach() for name, p in model.named_parameters()}
    history.state = {name: {"master": p.detach(), **optimizer.state[p]} for name, p in masters.items()}
    return history


def part(tree: Any, i: int) -> Any:
    """Microbatch `i` of a tree of tensors."""
    if isinstance(tree, Tensor):
        return tree.chunk(MICROBATCHES)[i]
    if isinstance(tree, dict):
        return {key: part(one, i) for key, one in tree.items()}
    return tuple(part(one, i) for one in tree)


# ------------------------------------------------------ Training loops of fpipe, and their comparison with plain loops


def train(name: str, how: Schedule, donate: bool = False, group: dist.ProcessGroup | None = None) -> History:
    """Train a model as a pipeline: this process's share."""
    pipe = pipeline_of(name, how, group)
    params, buffers = pipe.init(MODELS[name].make()[0])
    history = History([], [], params, buffers, {name: {} for name in params})
    train_on(pipe, name, history, range(STEPS), donate)
    return history


def train_in_parts(
    name: str, parts: Sequence[tuple[Schedule, dist.ProcessGroup | None]], path: Path, saves: bool = True
) -> History:
    """Train as `train` does, but on one schedule after the other; each goes on from what the one before has saved.

    Where several pipelines train the same, one of them `saves`.
    """
    history, step = History([], [], {}, {}, {}), 0
    for k, (how, group) in enumerate(parts):
        pipe, end = pipeline_of(name, how, group), STEPS * (k + 1) // len(parts)
        if k == 0:
            params, buffers = pipe.init(MODELS[name].make()[0])
            state = {name: {} for name in params}
        else:
            params, buffers, state, step, _ = fpipe.load(pipe, path)
        if dist.is_initialized():
            dist.barrier()  # the save of one pipeline removes what another may still be reading
        history.params, history.buffers, history.state = params, buffers, state
        train_on(pipe, name, history, range(step, end))
        if saves or group is None:
            fpipe.save(pipe, path, params=history.params, buffers=history.buffers, state=history.state, step=end)
        if dist.is_initialized():
            dist.barrier()
    return history


def pipeline_of(name: str, how: Schedule, group: dist.ProcessGroup | None = None) -> fpipe.Pipeline:
    """Return the pipeline of a model."""
    one = MODELS[name]
    model, [(inputs, targets), *_] = one.make()
    return fpipe.pipeline(
        model, example=inputs, targets=targets, loss=one.loss, schedule=how, place=fpipe.Place(group=group)
    )


def train_on(pipe: fpipe.Pipeline, name: str, history: History, steps: Iterable[int], donate: bool = False) -> None:
    """Run these steps from where `history` ends, and add what they compute to it."""
    one = MODELS[name]
    batches, groups = one.make()[1], {one.group: {"weight_decay": 0.0}}
    _, update = fpipe.optimizer(torch.optim.AdamW, groups=groups, names=pipe.names, donate=donate)
    step, params, buffers, state = fpipe.value_and_grad(pipe), history.params, history.buffers, history.state
    for i in steps:
        out, grads = step(params, buffers, *batches[i], seed=i)
        buffers = out.buffers
        grads, norm = fpipe.clip(pipe, grads, LIMIT, donate=donate)
        params, state = update(grads, state, params, lr=rate(i))
        history.losses.append(out.loss)
        history.norms.append(norm)
    history.params, history.buffers, history.state = params, buffers, state


def train_scaled(how: Schedule, group: dist.ProcessGroup | None = None) -> History:
    """Train a GPT under autocast to float16 with a scale that all ranks share."""
    one = MODELS["gpt"]
    model, batches = one.make()
    pipe = fpipe.pipeline(
        model, example=batches[0][0], targets=batches[0][1], loss=one.loss, schedule=how, place=fpipe.Place(group=group)
    )
    params, buffers = pipe.init(model)
    init, update = fpipe.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    state, step, loss_scale = init(params), fpipe.value_and_grad(pipe), fpipe.LossScale(LARGE, interval=3)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        with torch.autocast("cpu", torch.float16):
            out, grads = step(params, buffers, inputs, targets, scale=loss_scale.scale)
        finite = fpipe.all_finite(pipe, grads)
        if finite:
            grads, _ = fpipe.clip(pipe, loss_scale.unscale(grads), LIMIT)
            params, state = update(grads, state, params)
        loss_scale = loss_scale.next(finite)
        history.losses.append(out.loss)
        history.norms.append(torch.tensor(loss_scale.scale))
    history.params, history.state = params, state
    return history


def train_low(how: Schedule, group: dist.ProcessGroup | None = None) -> History:
    """Train a GPT in bfloat16 with master copies in float32."""
    one = MODELS["gpt"]
    model, batches = one.make()
    model = model.to(torch.bfloat16)
    pipe = fpipe.pipeline(
        model, example=batches[0][0], targets=batches[0][1], loss=one.loss, schedule=how, place=fpipe.Place(group=group)
    )
    params, buffers = pipe.init(model)
    init, update = fpipe.masters(fpipe.optimizer(torch.optim.AdamW, lr=1e-3))
    state, step = init(params), fpipe.value_and_grad(pipe)
    history = History([], [], {}, {}, {})
    for inputs, targets in batches:
        out, grads = step(params, buffers, inputs, targets)
        grads, norm = fpipe.clip(pipe, grads, LIMIT)
        params, state = update(grads, state, params)
        history.losses.append(out.loss)
        history.norms.append(norm)
    history.params, history.state = params, state
    return history


def require_same_history(got: History, want: History) -> None:
    """Raise unless a process's share of a run has the bits of the whole run."""
    require_part([got.losses, got.norms, got.params, got.buffers], [want.losses, want.norms, want.params, want.buffers])
    require_same_slots(got.state, want.state)
