# SPDX-License-Identifier: Apache-2.0
"""What is assumed of values that fake tensors do not have: false, and zero.

Only for modules that never run but as themselves: which way they take on fake tensors tells the shapes of what they
return, and nothing else; on real ones they go the right way.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

ASSUMED: Mapping[Any, Any] = MappingProxyType(
    {Tensor.__bool__: False, Tensor.item: 0, Tensor.__int__: 0, Tensor.__float__: 0.0}
)


class Assuming(TorchFunctionMode):
    """Answers from `ASSUMED` where a fake tensor has no value."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func not in ASSUMED:
                raise
            return ASSUMED[func]
