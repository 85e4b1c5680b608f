# SPDX-License-Identifier: Apache-2.0
"""Models that a graph of operators would change: they keep objects, share lists, have hooks, run under autocast."""

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.common.cases import WIDTH
from tests.common.layers import Tripled

# ---------------------------------------------- Residual blocks that do something that a graph of operators would lose


class Negated(torch.autograd.Function):
    """A function whose backward is not that of a graph of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Block(nn.Module):
    """Two linears with a function in between, and a residual connection."""

    def __init__(self, middle=None):
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle

    def forward(self, x):
        h = self.a(x)
        h = torch.tanh(h) if self.middle is None else self.middle(self, h)
        return x + self.b(h)


class Stack(nn.Module):
    """Blocks that run one after the other; `around` calls each of them."""

    block = Block

    def __init__(self, middle=None, around=None, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList([self.block(middle) if middle else self.block() for _ in range(depth)])
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(self, block, x)
        return x


def mixed(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.a(x).float().sin()


def stopped(module, x):
    with torch.no_grad():
        scale = module.a(x).abs().mean()
    return x * scale


def hooked(module, x):
    h = torch.sin(x)
    h.register_hook(lambda grad: grad * 0.5)
    return h * 1.5


def packed(module, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: (t * 2).float()):
        return torch.sin(x) * x


def vmapped(module, x):
    return torch.func.vmap(lambda row: row * row.sum())(x)


def replaced(module, x):
    y = x * 2
    y.data = y.data.cos()
    return y


def differentiated(module, x):
    y = x.detach().requires_grad_()
    return x + torch.autograd.grad((module.a(y) ** 2).sum(), y, create_graph=True)[0]


class Noted:
    """Stores a value in an attribute, for others to read."""

    def __call__(self, module, x):
        module.note = x.mean()
        return torch.sin(x)


def checkpointed(root, block, x):
    return checkpoint(block, x, use_reentrant=False)


def enclosed(root, block, x):
    return checkpoint(lambda: block(x) * x, use_reentrant=False)


def branching(module, x):
    return torch.tanh(x) if x.sum() > 0 else -x


# ------- Models that a graph of operators would change: they keep objects, share lists, have hooks, run under autocast


class WithNotes(Stack):
    """The root adds what its blocks have left in attributes."""

    def __init__(self):
        super().__init__(Noted())

    def forward(self, x):
        x = super().forward(x)
        return x + sum(block.note for block in self.blocks)


class Autocast(nn.Module):
    """Autocast around everything: no module boundary is outside of it."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.stack(x).float()


class Masked(Stack):
    """A mask computed in the root's forward, by functions that hold tensors."""

    def forward(self, x):
        allowed = x > -1

        def both(row):
            return allowed[row] & (x[row] < 1)

        mask = torch.vmap(both)(torch.arange(len(x)))
        return super().forward(x).masked_fill(~mask, 0.5)


@dataclass
class State:
    """What travels between blocks."""

    h: Tensor
    mask: Tensor
    count: int = 0
    extra: Tensor | None = None


class Keeping(Block):
    """Fills a cache at its first call."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.arange(WIDTH) / WIDTH
        return super().forward(x * self.kept)


class Caches(Stack):
    block = Keeping


class Travelling(nn.Module):
    """A dataclass with a mask, an integer and nothing in it; one block's output is used far behind."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def step(self, block, state):
        h = block(state.h).masked_fill(state.mask, 0.5)
        return State(h, state.mask, state.count + 1, h if state.count == 0 else state.extra)

    def forward(self, x):
        state = State(x, x > 0.3)
        for block in self.blocks:
            state = self.step(block, state)
        return state.h * state.count + state.extra


class Remembering:
    """An object that blocks write into and read from, as caches do."""

    def __init__(self):
        self.seen = []


class Cached(nn.Module):
    """Blocks that get an object; what is in it is used behind."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Noting() for _ in range(4)])

    def forward(self, x):
        memory = Remembering()
        for block in self.blocks:
            x = block(x, memory)
        return x + memory.seen[0] * memory.seen[-1]


class Noting(Block):
    """Writes into the object that it gets."""

    def forward(self, x, memory):
        h = super().forward(x)
        memory.seen.append(h.sin())
        return h


class Sinking(Block):
    """Leaves a tensor in a list that it shares with others, and reads one from there."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        h = super().forward(x) + self.shared[0]
        self.shared.append(h.sin())
        return h


class Leaving(Block):
    """Leaves a tensor in a list, and reads none."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        h = super().forward(x)
        self.shared.append(h.sin())
        return h


def leaving():
    model = Sharing()
    model.blocks = nn.ModuleList([Leaving(model.shared) for _ in range(4)])
    return model


class Sharing(nn.Module):
    """Blocks that speak to each other through a list."""

    def __init__(self):
        super().__init__()
        self.shared = []
        self.blocks = nn.ModuleList([Sinking(self.shared) for _ in range(4)])

    def forward(self, x):
        self.shared[:] = [x.cos()]
        for block in self.blocks:
            x = block(x)
        return x + self.shared[1] * self.shared[-1]


class Numbered(Block):
    """Gets an object, counts in it, and uses the number."""

    def forward(self, x, counter):
        counter.append(None)
        return super().forward(x) * len(counter)


class Counted(nn.Module):
    """An object without tensors that every call changes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Numbered() for _ in range(4)])

    def forward(self, x):
        class Counter(list):
            """No tree."""

        counter = Counter()
        for block in self.blocks:
            x = block(x, counter)
        return x


class Indirect(nn.Module):
    """Methods other than forward, and a module called twice."""

    def __init__(self):
        super().__init__()
        self.encoder, self.blocks = Block(), nn.ModuleList([Block(), Block(), Block()])

    def encode(self, x):
        return self.encoder.forward(x) * 2

    def forward(self, x):
        h = self.encode(x)
        for block in (*self.blocks, self.blocks[0]):
            h = block(x=h)
        return h


def hooks():
    """Forward hooks that change what comes out, and one on the way back."""
    model = Stack()
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 1.25)
    model.blocks[2].a.register_forward_pre_hook(lambda module, args: (args[0] - 0.5,))
    model.blocks[3].b.register_full_backward_hook(halved)
    return model


def halved(module, incoming, outgoing):
    return (incoming[0] * 0.5,)


def backward_hook():
    model = Stack()
    model.blocks[1].register_full_backward_hook(halved)
    return model


collector: ContextVar[list[Tensor] | None] = ContextVar("collector", default=None)


def collecting(module, args, out):
    into = collector.get()
    if into is not None:
        into.append(out)


class Gathering(Stack):
    """Installs hooks at its first call that give to whoever gathers; those of inner linears are used at the end."""

    installed = False

    def forward(self, x):
        if not self.installed:
            for block in self.blocks:
                block.a.register_forward_hook(collecting)
                block.b.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
            self.installed = True
        gathered: list[Tensor] = []
        token = collector.set(gathered)
        try:
            x = super().forward(x)
        finally:
            collector.reset(token)
        return x + sum(gathered) / len(gathered)


class Switch(nn.Module):
    """Draws by `draw` for positive data only, which the capture does not see."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        return self.draw(self.linear(x)) if x.sum() > 0 else self.linear(x)


AT = ("blocks.1", "blocks.2", "blocks.3")


INSIDE = ("blocks.0.b", "blocks.1.b", "blocks.2.b")


MODELS = {
    "custom function in a block": (lambda: Stack(lambda m, x: Tripled.apply(x)), AT, INSIDE),
    "custom function around": (lambda: Stack(around=lambda m, b, x: Tripled.apply(b(x))), AT, INSIDE),
    "checkpoint": (lambda: Stack(around=checkpointed), AT),
    "checkpointed closure": (lambda: Stack(around=enclosed), AT),
    "vmap over a closure": (Masked, AT, INSIDE),
    "checkpoint inside": (lambda: Stack(lambda m, x: checkpoint(torch.sin, x, use_reentrant=False)), AT, INSIDE),
    "saved-tensor hooks": (lambda: Stack(packed), AT),
    "tensor hook": (lambda: Stack(hooked), AT, INSIDE),
    "module hooks": (hooks, AT, INSIDE),
    "autocast in a block": (lambda: Stack(mixed), AT, INSIDE),
    "autocast around all": (Autocast, tuple(f"stack.{c}" for c in AT), tuple(f"stack.{c}" for c in INSIDE)),
    "no_grad": (lambda: Stack(stopped), AT, INSIDE),
    "vmap": (lambda: Stack(vmapped), AT, INSIDE),
    "assignments to .data": (lambda: Stack(replaced), AT),
    "gradients in the forward": (lambda: Stack(differentiated), AT),
    "attributes": (WithNotes, AT, INSIDE),
    "caches": (Caches, AT, INSIDE),
    "vmap with a weight": (lambda: Stack(lambda m, x: torch.vmap(m.a)(x)), AT),
    "dataclass": (Travelling, AT, INSIDE),
    "object": (Cached, AT, INSIDE),
    "a list": (Sharing, AT, INSIDE),
    "left in a list": (leaving, AT, INSIDE),
    "counter": (Counted, AT, INSIDE),
    "methods": (Indirect, ("blocks.0", "blocks.1", "blocks.2"), ("blocks.0.b", "blocks.1.b", "blocks.2.b")),
}
