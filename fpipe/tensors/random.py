# SPDX-License-Identifier: Apache-2.0
"""Keyed randomness: what a random operation draws depends only on its key.

Problem. Dropout draws from a generator whose state depends on everything drawn before. So a pipeline, which runs
operations in another order and in several processes, draws different numbers than one device.

Idea. As in JAX, randomness is a function of a key. Here the key is (seed, microbatch, call path of the operation in
the uncut model and its ordinal there): nothing in it depends on cuts, schedule or ranks. Before each random operation
the device's default generator is seeded with the key, and after the step the user's generator state is restored.

In a module that branches on data, it is not known in advance which operations run. So one key covers the module's call:
the generator is seeded when the call begins, and all operations in it draw in turn.

Runs when a pipeline is built and in every step: labels are computed once; keys, and what is drawn, in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch

from fpipe.errors import InputError


def key(seed: int, microbatch: int) -> int:
    """Return the key of one microbatch of one step: 63 bits, of which the CPU's generator uses the lower 32."""
    return _hash(f"{seed}/{microbatch}")


def label(path: str, ordinal: int) -> int:
    """Return the label of a random operation: 63 bits.

    It depends on the call path of the operation's module in the uncut model, and the operation's ordinal there.
    """
    return _hash(f"{path}#{ordinal}")


def stream_label(path: str, call: int) -> int:
    """Return the label for all draws of one call of a module, from the module's path and the call's number.

    It differs from the `label` of every random operation.
    """
    return _hash(f"{path}#call {call}")


class Unseeded(int):
    """The key of a step without a seed, which must not draw random numbers."""


def reseed(key: int, label: int, device: torch.device) -> None:
    """Seed the default generator of `device`: the next random operation there depends only on `key` and `label`."""
    generator(device).manual_seed(key ^ label)


def generator(device: torch.device) -> torch.Generator:
    """Return the default generator of `device`, from which operations draw unless given another.

    Raise `InputError` unless `device` is a CPU or CUDA device.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    raise InputError(
        f"got a random operation on device {device}, expected cpu or cuda. Move the model there, or make it "
        "deterministic (dropout 0)."
    )


def state_of(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator of `device`."""
    return generator(device).get_state()


def restore(state: torch.Tensor, device: torch.device) -> None:
    """Set the default generator of `device` to this state."""
    generator(device).set_state(state)


def is_fresh(device: torch.device) -> bool:
    """Return whether nothing has been drawn from the default generator of `device` since it was seeded."""
    current = generator(device)
    fresh = torch.Generator(device).manual_seed(current.initial_seed())
    return torch.equal(current.get_state(), fresh.get_state())


def states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the states of the default generators of `devices`."""
    return [generator(device).get_state() for device in devices]


@contextmanager
def repeat_draws(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set the default generators of `devices` to these states inside this context; restore the current ones on exit."""
    with preserve_generators(devices):
        for device, state in zip(devices, states, strict=True):
            generator(device).set_state(state)
        yield


@contextmanager
def preserve_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of the default generators of `devices` on exit."""
    states = [(generator(device), generator(device).get_state()) for device in devices]
    try:
        yield
    finally:
        for owner, state in states:
            owner.set_state(state)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
