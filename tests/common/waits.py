# SPDX-License-Identifier: Apache-2.0
"""Count where the host would wait for a device, on a CPU that plays one."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOME = Path(__file__).parents[2]
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}
READS |= {aten.masked_select.default, aten._unique2.default, aten.unique_dim.default}


class Clock:
    """A device that is behind its host: it reaches an event only when it is told to, or waited for."""

    def __init__(self):
        self.events, self.waits = [], 0

    def copy(self, tensors):
        self.events.append(Event(self))
        return [tensor.clone() for tensor in tensors], self.events[-1]


class Event:
    def __init__(self, clock):
        self.clock, self.reached = clock, False

    def query(self):
        return self.reached

    def synchronize(self):
        self.clock.waits += not self.reached
        self.reached = True


class HostWaits(TorchDispatchMode):
    """Inside, tensors that share memory with the marked ones, and what is computed from them, are on the device.

    `found` has the place of every operation that asks for the value of such a tensor.
    """

    def __init__(self, *marked):
        super().__init__()
        self.storages, self.kept, self.found = set(), [], []
        self.mark(marked)

    def mark(self, tree):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages.add(storage._cdata)
                self.kept.append(storage)  # so that no other gets its address

    def is_marked(self, tensor):
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self.storages

    def read(self, what):
        places = (f for f in traceback.extract_stack() if f.filename.startswith(str(HOME / "fpipe")))
        self.found.append((what, *(f"{Path(f.filename).name}, {f.name}" for f in places)))

    def __enter__(self):
        self.calls = Calls(self)
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        on_device = any(map(self.is_marked, tree_leaves((args, kwargs))))
        if on_device and func in READS:
            self.read(str(func))
        out = func(*args, **(kwargs or {}))
        if on_device:
            self.mark(out)
        return out


class Calls(TorchFunctionMode):
    """Calls that read a tensor without any operation, if it is on a CPU."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "cpu", "numpy") and args and self.waits.is_marked(args[0]):
            self.waits.read(func.__name__)
        return func(*args, **(kwargs or {}))
