# SPDX-License-Identifier: Apache-2.0
"""The Python state of modules, besides tensors and submodules, compared before and after a run.

Runs when a pipeline is built, and when a new kind of batch first comes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fpipe.errors import CaptureError
from fpipe.record.capture.places import module_place
from fpipe.tensors.tree import Structure, flatten


def plain_state(model: nn.Module, prefix: str = "") -> dict[str, Structure]:
    """Return the structure of each attribute of the user's modules, by its place; of buffers, the names only.

    Parameters, submodules, backward hooks and the training flag are left out.
    """
    return {
        f"{module_place(path, module)}, attribute {name!r}": flatten(value, opaque=True)[1]
        for path, module in model.named_modules(prefix=prefix)
        if not is_torchs(module)
        for name, value in (*vars(module).items(), ("_buffers", dict.fromkeys(module._buffers)))
        if name not in ("_parameters", "_modules", "_backward_hooks", "training")
    }


def require_unchanged(before: Mapping[str, Structure], after: Mapping[str, Structure], lost: str) -> None:
    """Raise `CaptureError`, naming the attribute, if a run changed the state of modules; `lost` says what is lost."""
    for where in {**before, **after}:
        if where not in before or where not in after or not _is_same(before[where], after[where]):
            raise CaptureError(
                f"{where}: got a forward that changes it, expected one without state of its own but buffers: {lost}. "
                "Make it a buffer that is changed in place, or fill it before the pipeline is built."
            )


def _is_same(a: Structure, b: Structure) -> bool:
    if a.spec != b.spec or len(a.constants) != len(b.constants):
        return False
    pairs = zip(a.constants, b.constants, strict=True)
    return all(i == j and is_no_change(old, new) for (i, old), (j, new) in pairs)


def is_no_change(old: object, new: object) -> bool:
    """Return whether an assignment leaves a module unchanged; in-place operators assign the same tensor again."""
    return old is new or (type(old) is type(new) and isinstance(old, bool | int | float | str) and old == new)


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, whose only Python state is caches."""
    return type(module).__module__.startswith("torch.nn.")
