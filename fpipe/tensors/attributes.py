# SPDX-License-Identifier: Apache-2.0
"""Python attributes that users set on parameters and buffers.

Stages get tensors without them. A forward that reads one is refused; attributes that nothing reads don't matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from fpipe.errors import CaptureError
from fpipe.patching import replace
from fpipe.torch_private import FakeTensor

MARKS: Final = "_original_attributes"
"""The attribute in which a fake tensor keeps the names of those of its original."""


def marks(tensor: Tensor) -> frozenset[str]:
    """Return the names of the attributes that users have set on a tensor, or on the original of a fake one."""
    known: frozenset[str] = vars(tensor).get(MARKS, frozenset())
    return known if isinstance(tensor, FakeTensor) else frozenset(vars(tensor))


def as_parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor as an `nn.Parameter`, with its marks."""
    made = nn.Parameter(tensor, requires_grad)
    if isinstance(made, FakeTensor) and MARKS in vars(tensor):
        vars(made)[MARKS] = vars(tensor)[MARKS]
    return made


@contextmanager
def refuse_marks() -> Iterator[None]:
    """Raise `CaptureError` inside if anyone reads an attribute that the original of a fake tensor has."""

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
