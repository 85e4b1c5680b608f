# SPDX-License-Identifier: Apache-2.0
"""The places at which a random model can be cut."""

from __future__ import annotations

import copy
from collections import Counter

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.common.random_models.description import Description
from tests.common.random_models.models import case_of


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
