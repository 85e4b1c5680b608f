# SPDX-License-Identifier: Apache-2.0
"""Layers with a carry, as pure functions, and the loop over slices that they are compared with."""

import torch

import fpipe

WIDTH, ROWS, TOKENS = 4, 6, 8


def attend(params, inputs):
    """Causal attention; the carry has the keys and values of all earlier tokens."""
    x, carry = inputs
    q, k, v = (x @ params[name] for name in "qkv")
    if carry is not None:
        k, v = torch.cat([carry["k"], k], 1), torch.cat([carry["v"], v], 1)
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~mask, -1e9)
    return x + scores.softmax(-1) @ v, {"k": k, "v": v}


def recur(params, inputs):
    """A recurrent layer; the carry is its state."""
    x, state = inputs
    found, state = [], x.new_zeros(x.shape[0], WIDTH) if state is None else state
    for t in range(x.shape[1]):
        state = torch.tanh(x[:, t] @ params["w"] + state @ params["u"])
        found.append(state)
    return torch.stack(found, 1), state


def project(params, inputs):
    """A layer without a carry: tokens know nothing of each other."""
    (x,) = inputs
    return torch.tanh(x @ params["w"])


def error(params, inputs):
    h, y = inputs
    return ((h @ params["o"] - y) ** 2).mean()


LAYERS = {attend: "qkv", recur: "wu", project: "w"}


def make(layers):
    torch.manual_seed(0)
    params = [{name: torch.randn(WIDTH, WIDTH) / 2 for name in LAYERS[one]} for one in layers]
    params.append({"o": torch.randn(WIDTH, 1)})
    return params, torch.randn(ROWS, TOKENS, WIDTH), torch.randn(ROWS, TOKENS, 1)


def leaves(carry):
    return list(carry.values()) if isinstance(carry, dict) else [] if carry is None else [carry]


def detach(carry):
    """The same carry as a new leaf, at which the backward of its slice ends."""
    if isinstance(carry, dict):
        return {name: one.detach().requires_grad_() for name, one in carry.items()}
    return None if carry is None else carry.detach().requires_grad_()


def loop(layers, params, x, y, microbatches, slices):
    """One device: slices forward in order, backward from the last one."""
    params = [{name: one.clone().requires_grad_() for name, one in tree.items()} for tree in params]
    total, count = 0, microbatches * slices
    for rows, wanted in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        left, tape = [None] * len(layers), []
        for h, target in zip(rows.tensor_split(slices, 1), wanted.tensor_split(slices, 1), strict=True):
            taken = [detach(one) for one in left]
            for s, layer in enumerate(layers):
                if layer is project:
                    h = layer(params[s], (h,))
                else:
                    h, left[s] = layer(params[s], (h, taken[s]))
            tape.append((error(params[-1], (h, target)), taken, list(left)))
            total = total + tape[-1][0].detach() / count
        back = []
        for value, taken, given in reversed(tape):
            made = [one for carry in given for one in leaves(carry)] if back else []
            torch.autograd.backward([value, *made], [torch.tensor(1 / count), *back])
            back = [one.grad for carry in taken for one in leaves(carry)]
    return total, [{name: one.grad for name, one in tree.items()} for tree in params]


def stages_of(layers):
    return fpipe.connect_stages([*[fpipe.stage(one, carries=one is not project) for one in layers], error])
