# SPDX-License-Identifier: Apache-2.0
"""What is assumed of values that fake tensors do not have: false, and zero.

Only for modules that never run but as themselves: which way they take on fake tensors tells the shapes of what they
return, and nothing else; on real ones they go the right way. And of torch's own checks of all elements it is assumed
that they pass; they are part of what is played, and then made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import TorchFunctionMode

ASSUMED: Mapping[Any, Any] = MappingProxyType(
    {Tensor.__bool__: False, Tensor.item: 0, Tensor.__int__: 0, Tensor.__float__: 0.0}
)


check: Any = torch._check_tensor_all_with


def checked(error_type: Any, cond: Tensor, message: Any = None) -> None:
    """torch's check that all elements are true; a fake tensor passes."""
    if not isinstance(cond, FakeTensor):
        check(error_type, cond, message)


@contextmanager
def assuming() -> Iterator[None]:
    """What is run on fake tensors inside gets an answer where they have no value."""
    with patch.object(torch, "_check_tensor_all_with", checked), _Assuming():
        yield


class _Assuming(TorchFunctionMode):
    """Answers from `ASSUMED`."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func not in ASSUMED:
                raise
            return ASSUMED[func]
