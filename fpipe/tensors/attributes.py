# SPDX-License-Identifier: Apache-2.0
"""Python attributes that users set on parameters and buffers.

Stages get tensors without them. A forward that reads one is refused; attributes that nothing reads don't matter.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.tensors.patching import replace
from fpipe.tensors.torch_private import FakeTensor

MARKS: Final = "_original_attributes"
"""The attribute of a fake tensor that holds the names of its original's attributes."""


def marks(tensor: Tensor) -> frozenset[str]:
    """Return the names of the attributes that users set on a tensor or, for a fake tensor, on its original."""
    known: frozenset[str] = vars(tensor).get(MARKS, frozenset())
    return known if isinstance(tensor, FakeTensor) else frozenset(vars(tensor))


def as_parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor as an `nn.Parameter`; a fake tensor keeps its marks."""
    made = nn.Parameter(tensor, requires_grad)
    if isinstance(made, FakeTensor) and MARKS in vars(tensor):
        vars(made)[MARKS] = vars(tensor)[MARKS]
    return made


@contextmanager
def refuse_marks() -> Iterator[None]:
    """Raise `CaptureError`, inside this context, on reads of attributes that users set on a fake tensor's original."""

    def missing(tensor: Any, name: str) -> Any:
        if name in vars(tensor).get(MARKS, ()):
            raise CaptureError(
                f"a parameter or buffer of shape {list(tensor.shape)}: got a forward that reads its attribute "
                f"{name!r}, expected one that reads its values only: stages get tensors without attributes of their "
                "own. Keep it in an attribute of the module."
            )
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    with replace(FakeTensor, "__getattr__", missing):
        yield
