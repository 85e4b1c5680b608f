# SPDX-License-Identifier: Apache-2.0
"""Arguments of `fpipe.pipeline` that belong together, as frozen values; `Place` is with the meshes.

The functions that take them check the fields, so that an error on one rank reaches all. Until the next version, they
take the fields as keywords of their own, too.

Runs when a pipeline is built.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from fpipe.cutting.calls import Selector
from fpipe.errors import InputError
from fpipe.meshes.arguments import Place
from fpipe.pipelines.argument_checks import require_count, require_reduction
from fpipe.pipelines.leaf import split_evenly
from fpipe.pipelines.loss_weights import Weight
from fpipe.record.captured import CaptureFunction, FrontEnd
from fpipe.stages.backends import Backward
from fpipe.stages.ties import Tied
from fpipe.tensors.arguments import describe_argument, require_arguments

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


@dataclass(frozen=True, kw_only=True)
class Microbatching:
    """Options for splitting a batch into microbatches, and for combining their outputs and losses.

    - `batch_dims`: how tensors are split into microbatches: a dimension, along which `torch.tensor_split` splits them,
      `None` to give every microbatch the whole tensor, or a function `f(tensor, M)` that returns M tensors. Either one
      for all tensors, or a tree that is a prefix of `(example, targets)`, such as `((0, None), 0)`. Tensors that share
      an entry must have the same size in their dimension.
    - `output_dims`: how the outputs of microbatches are merged: a dimension to concatenate along (scalars are stacked),
      `None` to take the first microbatch's, or a function of the sequence of them. Either one for all, or a tree that
      is a prefix of the outputs.
    - `weight(inputs, targets)`: the weight of a microbatch, such as its number of rows or tokens. The loss of a step is
      then the sum of loss * (weight / total), so a mean per row or token is exact however the batch is split. Auxiliary
      losses that the model adds in its forward are scaled the same way. Under a schedule that cuts microbatches into
      slices, it is called for each slice.
    - `slice_dims`: under a schedule that cuts microbatches into slices, the dimension along which tensors are cut;
      those without it, and those of `None`, are the same for every slice. One for all, or a tree as for `batch_dims`.
    - `slice_lengths(length, slices)`: returns the lengths of the slices of a sequence; by default they are as even as
      can be. `fpipe.even_costs` makes slices of the same cost.
    - `reduce`: how losses of microbatches are combined. `"mean"`, for losses that are means: the sum of loss / M; if
      sizes differ, rows of smaller microbatches count for more, unless there is a `weight`. `"sum"`, for losses that
      are sums, as with `reduction="sum"`: the sum over all microbatches of all replicas and shards.

    >>> Microbatching(batch_dims=((0, None), 0)).reduce
    'mean'
    """

    batch_dims: Any = 0
    output_dims: Any = 0
    weight: Weight | None = None
    reduce: str = "mean"
    slice_dims: Any = 1
    slice_lengths: Callable[[int, int], Sequence[int]] = split_evenly

    def require(self) -> None:
        """Raise `InputError` for a field that can't be."""
        require_arguments(Microbatching.__init__, vars(self))
        require_reduction(self.reduce, self.weight)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Options for recording a model, and for modules that are never cut.

    - `front_end`: `"trace"`, `"export"`, `"dynamo"`, `"fx"`, `"modules"`, or your own function (`fpipe.front_ends`).
    - `unsplittable`: names, classes or patterns of modules inside whose calls no stage may begin. With the default
      front end, their control flow may depend on data if shapes do not; the same goes for the loss, named "loss".
    - `whole`: names, classes or patterns of modules that every step calls as Python, because their side effects matter:
      they print, count or log. They are unsplittable, too.
    - `plans`: the number of step plans that are kept for kinds of batches other than the example, in train and eval
      mode together. A new kind of batch is captured and planned, which takes about as long as building the pipeline,
      and replaces the least recently used step plan.

    >>> Recording(unsplittable="blocks.*.attention").front_end
    'trace'
    """

    front_end: str | FrontEnd | CaptureFunction = "trace"
    unsplittable: Selector | Iterable[Selector] = ()
    whole: Selector | Iterable[Selector] = ()
    plans: int = 32

    def require(self) -> None:
        """Raise `InputError` for a field that can't be."""
        require_arguments(Recording.__init__, vars(self))
        require_count("plans", self.plans)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Options for differentiating stages, and for combining gradients of a shared parameter.

    - `backward`: `"graph"`: stages are recorded once, then run operator by operator: the same bits with less Python.
      `"autograd"`: unsplit backwards by autograd, for every microbatch; if the schedule splits backwards, the same as
      `"graph"`. `"inductor"`, or another backend of `torch.compile`, by name or as a callable: recorded and compiled,
      which is close but not bit for bit. A recording always repeats what was recorded. If a stage can't be recorded, or
      runs faster without, autograd differentiates it, and its backward is not split (`print(pipe)` shows the reason).
      The same goes for all stages in a step with saved-tensor hooks or anomaly detection around it.
    - `tied`: `"exact"`: through cotangents sent in every microbatch, bit for bit as on one device. `"sum"`: the stages'
      own gradients are added once, at the end of the step. Or a dict from parameter name (any of its names) to one of
      these; parameters not in it are exact.

    >>> Gradients(tied={"embedding.weight": "sum"}).backward
    'graph'
    """

    backward: Backward = "graph"
    tied: Tied = "exact"

    def require(self) -> None:
        """Raise `InputError` for a field that can't be."""
        require_arguments(Gradients.__init__, vars(self))


OPTIONS: Final = (Microbatching, Recording, Gradients, Place)
RENAMED: Final[Mapping[str, str]] = {"capture": "front_end"}
"""Fields that had another name as keywords."""


def accept_fields(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Return a function that takes the fields of its options as keywords, too, with a warning that shows the repair."""

    @wraps(function)
    def call(*args: _Given.args, **given: _Given.kwargs) -> _Returned:
        return function(*args, **gather_fields(function, given))

    return call


def gather_fields(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords for a function with fields of its options in these; warn if there were any.

    Raise `InputError` for a field beside the value that it belongs into.
    """
    own = inspect.signature(function).parameters
    kinds = {name: type(one.default) for name, one in own.items() if isinstance(one.default, OPTIONS)}
    homes = {field.name: name for name, kind in kinds.items() for field in fields(kind)}
    homes |= {old: homes[new] for old, new in RENAMED.items() if new in homes}
    loose = {name: value for name, value in given.items() if name in homes and name not in own}
    if not loose:
        return dict(given)
    options: dict[str, dict[str, Any]] = {}
    for name, value in loose.items():
        options.setdefault(homes[name], {})[RENAMED.get(name, name)] = value
    twice = next((name for name in loose if homes[name] in given), None)
    said = ", ".join(_spell(name, kinds[name], values) for name, values in options.items())
    if twice is not None:
        raise InputError(f"{twice}: got it besides {homes[twice]}, expected it in that. Write {said}.")
    warnings.warn(
        f"{function.__name__}: got {', '.join(loose)} as keywords, which are fields now; the next version will reject "
        f"them. Write {said}.",
        FutureWarning,
        stacklevel=1 + sum(1 for _ in _frames_of_ours()),
    )
    made = {name: kinds[name](**values) for name, values in options.items()}
    return {**{name: value for name, value in given.items() if name not in loose}, **made}


def _spell(name: str, kind: type, values: Mapping[str, Any]) -> str:
    """Return a keyword with a value in it as code."""
    shown = ", ".join(f"{key}={getattr(one, '__name__', describe_argument(one))}" for key, one in values.items())
    return f"{name}=fpipe.{kind.__name__}({shown})"


def _frames_of_ours() -> Iterator[None]:
    """Yield once for each frame of this package above the caller's, up to the first of another."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fpipe":
        yield
        frame = frame.f_back  # type: ignore[assignment]
