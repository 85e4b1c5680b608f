# SPDX-License-Identifier: Apache-2.0
"""Random models whose backward has Python in it: hooks of all kinds, custom functions, statistics kept in buffers.

A layer is a linear, a *gadget* that puts code into the backward, and a tanh. A gadget gets its layer and a value, and
returns one. Gadgets of modules are set up once, when the layer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH = 4

# --------------------------------------------------------------------------------------------------- custom functions


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 * ctx.factor), None


class Clipped(torch.autograd.Function):
    """Its backward depends on what the forward saved, and on the weight of a module."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        own = weight * grad.sum() if ctx.needs_input_grad[1] else None
        return grad.clamp(-1, 1) * x.cos() * weight.abs().mean(), own


class Counted(torch.autograd.Function):
    """Counts its backwards in the layer's Python state, which nobody reads."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.calls.append(1)
        return grad, None


class Noting(torch.autograd.Function):
    """Keeps the largest gradient in a buffer."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.most.copy_(torch.maximum(ctx.most, grad.abs().amax()))
        return grad, None


class ByAttribute(torch.autograd.Function):
    """Its backward reads an attribute of the layer that the forward sets."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.size = x.detach().norm()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.layer.size, None


class Branching(torch.autograd.Function):
    """Its backward branches on data."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.sum() > 0 else grad * 0.5


class Twofold(torch.autograd.Function):
    """Two outputs, of which one is not used, and absent gradients."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * 2, x * 3, index

    @staticmethod
    def backward(ctx, first, second, _):
        total = None
        for grad, factor in ((first, 2), (second, 3)):
            if grad is not None:
                total = grad * factor if total is None else total + grad * factor
        return total


class Modern(torch.autograd.Function):
    @staticmethod
    def forward(x, power):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, grad):
        x, output = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1) + 0 * output, None


class Inward(torch.autograd.Function):
    """Runs a module again in its backward, as reversible blocks do."""

    @staticmethod
    def forward(ctx, x, module, *params):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.module(x), (x, *ctx.module.parameters()), grad)
        return grads[0], None, *grads[1:]


# -------------------------------------------------------------------------------------------------------------- gadgets


class Gadget(NamedTuple):
    """Code in a layer: `middle(layer, h)` in its forward, `add(layer)` once."""

    middle: Callable[[nn.Module, Tensor], Tensor] = lambda layer, h: h
    add: Callable[[nn.Module], Any] = lambda layer: None


def on(h: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """Return a value with a hook, if it has a gradient."""
    if h.requires_grad:
        h.register_hook(hook)
    return h


def note(layer: nn.Module, grad: Tensor) -> None:
    layer.most.copy_(torch.maximum(layer.most, grad.abs().amax()))


def recall(layer: nn.Module, h: Tensor) -> Tensor:
    layer.size = h.detach().norm()
    return h


def twice(layer: nn.Module, h: Tensor) -> Tensor:
    """The second hook sees what the first returned."""
    return on(on(h, lambda grad: grad * 0.5), lambda grad: grad + 1)


def removed(layer: nn.Module, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 100).remove()
    return h


def several(layer: nn.Module, h: Tensor) -> Tensor:
    first, second = h.sin(), h.cos()
    if h.requires_grad:
        register_multi_grad_hook((first, second), lambda grads: layer.seen.append(len(grads)))
    return first + second


def packed(layer: nn.Module, h: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor * 2):
        return h.sin()


def of_node(layer: nn.Module, h: Tensor) -> Tensor:
    h = h.exp()
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda inward, outward: tuple(g * 2 for g in inward))
    return h


def before_node(layer: nn.Module, h: Tensor) -> Tensor:
    h = h.exp()
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda outward: tuple(g * 2 for g in outward))
    return h


def retained(layer: nn.Module, h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.retain_grad()
    return h


def inside_checkpoint(layer: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(lambda x: on(x.sin(), lambda grad: grad * 0.5), h, use_reentrant=False)


def branching_hook(layer: nn.Module, h: Tensor) -> Tensor:
    return on(h, lambda grad: grad * 2 if grad.sum() > 0 else None)


def reversed_gradient(layer: nn.Module, h: Tensor) -> Tensor:
    return on(h.clone(), torch.neg)


def averaged(layer: nn.Module, h: Tensor) -> Tensor:
    """A statistic of the forward in a buffer, which the backward reads as the forward left it."""
    layer.most.mul_(0.9).add_(h.detach().abs().mean())
    return h * layer.most


def of_statistics(layer: nn.Module, h: Tensor) -> Tensor:
    layer.most = layer.most * 0.9 + h.detach().abs().mean()
    kept = layer.most.clone()
    return on(h * 1, lambda grad: grad * kept)


def once(layer: nn.Module, h: Tensor) -> Tensor:
    """A hook that removes itself in the backward."""
    if h.requires_grad:
        handles = []
        handles.append(h.register_hook(lambda grad: (handles[0].remove(), grad * 0.5)[1]))
    return h


def within(layer: nn.Module, h: Tensor) -> Tensor:
    """A hook that is there for as long as a block runs, and one that stays."""
    if not h.requires_grad:
        return h.sin()
    with h.register_hook(lambda grad: grad * 7):
        h = h.sin()
    return on(h, lambda grad: grad * 0.5)


def before_in_place(layer: nn.Module, h: Tensor) -> Tensor:
    """The hook is on the value before it is modified."""
    h = on(h * 1, lambda grad: grad * 0.5)
    return h.mul_(2)


def of_view(layer: nn.Module, h: Tensor) -> Tensor:
    on(h.view(-1)[::2], lambda grad: grad * 0.5)
    return on(h.view(-1), lambda grad: grad * 0.25).view_as(h)


def without_gradient(layer: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        factor = Scaled.apply(h, 0.1)
    return h + factor


def fanned(layer: nn.Module, h: Tensor) -> Tensor:
    """A hook sees the sum over all uses."""
    h = on(h * 1, lambda grad: grad.clamp(-0.1, 0.1))
    return h.sin() + h.cos() * h


def in_place(layer: nn.Module, h: Tensor) -> Tensor:
    return on(h * 1, lambda grad: grad.mul_(0.5))


GADGETS: dict[str, Gadget] = {
    "a tensor hook": Gadget(lambda layer, h: on(h, lambda grad: grad * 0.5)),
    "two tensor hooks": Gadget(twice),
    "a removed hook": Gadget(removed),
    "a hook that reads the forward's value": Gadget(lambda layer, h: on(h * 1, lambda grad: grad * h.detach().abs())),
    "a hook that reads a weight": Gadget(
        lambda layer, h: on(h, lambda grad: grad * layer.linear.weight.detach().norm())
    ),
    "a hook that looks on": Gadget(lambda layer, h: on(h, lambda grad: layer.seen.append(tuple(grad.shape)))),
    "a hook that logs a number": Gadget(lambda layer, h: on(h, lambda grad: layer.seen.append(float(grad.norm())))),
    "a hook that keeps gradients": Gadget(lambda layer, h: on(h, lambda grad: layer.seen.append(grad.detach()))),
    "a hook that notes in a buffer": Gadget(lambda layer, h: on(h, lambda grad: note(layer, grad))),
    "a hook that branches": Gadget(branching_hook),
    "a hook that reverses": Gadget(reversed_gradient),
    "a hook that writes": Gadget(in_place),
    "a multi-grad hook": Gadget(several),
    "a statistic of the forward": Gadget(averaged),
    "a hook that reads a statistic": Gadget(of_statistics),
    "a hook that removes itself": Gadget(once),
    "a hook for a while": Gadget(within),
    "a hook before a change in place": Gadget(before_in_place),
    "hooks on views": Gadget(of_view),
    "a function without gradient": Gadget(without_gradient),
    "a hook on a value of several uses": Gadget(fanned),
    "hooks on saved tensors": Gadget(packed),
    "a hook on a node": Gadget(of_node),
    "a hook before a node": Gadget(before_node),
    "a retained gradient": Gadget(retained),
    "a hook inside a checkpoint": Gadget(inside_checkpoint),
    "a scaled function": Gadget(lambda layer, h: Scaled.apply(h, 0.5)),
    "a function of a weight": Gadget(lambda layer, h: Clipped.apply(h, layer.linear.weight)),
    "a function that counts": Gadget(lambda layer, h: Counted.apply(h, layer)),
    "a function that notes in a buffer": Gadget(lambda layer, h: Noting.apply(h, layer.most)),
    "a function that reads an attribute": Gadget(lambda layer, h: ByAttribute.apply(h, layer)),
    "a function that branches": Gadget(lambda layer, h: Branching.apply(h)),
    "a function of two outputs": Gadget(lambda layer, h: Twofold.apply(h)[0]),
    "a function of two used outputs": Gadget(lambda layer, h: sum(Twofold.apply(h)[:2])),
    "a function with a setup": Gadget(lambda layer, h: Modern.apply(h, 2)),
    "a function that runs a module": Gadget(lambda layer, h: Inward.apply(h, layer.inner, *layer.inner.parameters())),
    "a backward hook": Gadget(
        add=lambda layer: layer.inner.register_full_backward_hook(lambda module, inward, outward: (inward[0] * 0.5,)),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a backward hook of a weight": Gadget(
        add=lambda layer: layer.inner.register_full_backward_hook(
            lambda module, inward, outward: (inward[0] * module.weight.detach().norm(),)
        ),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a backward hook that looks on": Gadget(
        add=lambda layer: layer.inner.register_full_backward_hook(lambda module, inward, outward: None),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a backward hook that logs a number": Gadget(
        add=lambda layer: layer.inner.register_full_backward_hook(
            lambda module, inward, outward: module.seen.append(outward[0].norm().item())
        ),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a backward hook that notes in a buffer": Gadget(
        add=lambda layer: layer.register_full_backward_hook(lambda module, inward, outward: note(module, outward[0])),
    ),
    "a backward hook that reads an attribute": Gadget(
        add=lambda layer: layer.register_full_backward_hook(
            lambda module, inward, outward: tuple(None if g is None else g * module.size for g in inward)
        ),
        middle=recall,
    ),
    "a hook before the backward": Gadget(
        add=lambda layer: layer.inner.register_full_backward_pre_hook(lambda module, outward: (outward[0] * 2,)),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a forward hook that hooks its output": Gadget(
        add=lambda layer: layer.inner.register_forward_hook(lambda module, args, out: on(out, lambda grad: grad * 0.5)),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a forward hook that wraps its output": Gadget(
        add=lambda layer: layer.inner.register_forward_hook(lambda module, args, out: Scaled.apply(out, 2.0)),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a hook before the forward": Gadget(
        add=lambda layer: layer.inner.register_forward_pre_hook(lambda module, args: (Branching.apply(args[0]),)),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a hook on all gradients of a layer": Gadget(
        add=lambda layer: layer.register_full_backward_hook(
            lambda module, inward, outward: tuple(None if g is None else g * 0.5 for g in inward)
        )
    ),
    "two backward hooks, the later one first": Gadget(
        add=lambda layer: [
            layer.inner.register_full_backward_hook(lambda module, inward, outward: (inward[0] + 1,)),
            layer.inner.register_full_backward_hook(lambda module, inward, outward: (inward[0] * 2,), prepend=True),
        ],
        middle=lambda layer, h: layer.inner(h),
    ),
    "hooks before and after": Gadget(
        add=lambda layer: [
            layer.inner.register_full_backward_pre_hook(lambda module, outward: (outward[0].clamp(-0.1, 0.1),)),
            layer.inner.register_forward_hook(lambda module, args, out: out * 2, prepend=True),
            layer.inner.register_full_backward_hook(lambda module, inward, outward: (inward[0] + outward[0].mean(),)),
        ],
        middle=lambda layer, h: layer.inner(h),
    ),
    "a forward hook that is always called": Gadget(
        add=lambda layer: layer.inner.register_forward_hook(
            lambda module, args, kwargs, out: on(out * 2, torch.neg), with_kwargs=True, always_call=True
        ),
        middle=lambda layer, h: layer.inner(h),
    ),
    "a backward hook that branches": Gadget(
        add=lambda layer: layer.inner.register_full_backward_hook(
            lambda module, inward, outward: (inward[0] * 2,) if outward[0].sum() > 0 else None
        ),
        middle=lambda layer, h: layer.inner(h) + layer.inner(h.sin()),
    ),
    "a hook on a bias": Gadget(add=lambda layer: layer.linear.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))),
    "a hook on a weight": Gadget(add=lambda layer: layer.linear.weight.register_hook(lambda grad: grad * 2)),
    "a hook on a weight that reads it": Gadget(
        add=lambda layer: layer.linear.weight.register_hook(lambda grad: grad + 0.1 * layer.linear.weight.detach())
    ),
    "a hook on a weight that notes": Gadget(
        add=lambda layer: layer.linear.weight.register_hook(lambda g: note(layer, g))
    ),
    "a hook after accumulation": Gadget(
        add=lambda layer: layer.linear.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    ),
}


class Layer(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner.seen = []
        self.register_buffer("most", torch.zeros(()))
        self.names, self.seen, self.calls, self.size = names, [], [], torch.ones(())
        for name in names:
            GADGETS[name].add(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for name in self.names:
            h = GADGETS[name].middle(self, h)
        return torch.tanh(h)


class Drawn(NamedTuple):
    """A drawn model: the gadgets of each layer, what is frozen, and whether the input stage has parameters."""

    layers: tuple[tuple[str, ...], ...]
    frozen: tuple[int, ...] = ()

    def make(self) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*map(Layer, self.layers))
        for k in self.frozen:
            model[k].requires_grad_(False)
        return model


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    """Two to four layers with at most two gadgets each, most of them trainable."""
    count = draw(st.integers(2, 4))
    gadgets = st.lists(st.sampled_from(sorted(GADGETS)), max_size=2).map(tuple)
    layers = tuple(draw(gadgets) for _ in range(count))
    frozen = draw(st.sampled_from([(), (), (), (0,), (count - 2,)]))
    return Drawn(layers, frozen)
