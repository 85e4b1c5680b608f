# SPDX-License-Identifier: Apache-2.0
"""Front ends of your own, and graphs made by hand.

A front end is a function `(model, inputs) -> module`, passed as `fpipe.Recording(front_end=...)`. It returns a
module that is called like the model and has the model's names, which fpipe then records like any other; see `FrontEnd`.
What it loses of the model is refused by name.

>>> import torch
>>> from torch import nn
>>> import fpipe
>>> from schedules import gpipe
>>> def exported(model, inputs):
...     return torch.export.export(model, inputs).module()
>>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
>>> x, y = torch.randn(6, 4), torch.randn(6, 4)
>>> how = {"loss": nn.functional.mse_loss, "schedule": gpipe(ranks=2, microbatches=3), "cuts": ["1"]}
>>> pipe = fpipe.pipeline(model, example=(x,), targets=y, recording=fpipe.Recording(front_end=exported), **how)
>>> fpipe.verify(pipe, model, (x,), y).eager  # how many tensors equal those of the model, run eagerly
4

A model that is data already needs no tracer. Then `capture` is a function `(model, objective, leaves) -> Captured`. It
describes the computation of one microbatch as *units* and the *values* between them; see `CaptureFunction` and
`Captured`. fpipe checks what it returns, and raises `CaptureError` if that is not valid.

Here is one for chains of layers. Each layer is a unit that takes its weight and returns one tensor.

>>> def layers(model, objective, leaves):
...     mode, device = fake_mode(), torch.device("cpu")
...     weights = [(Parameter(name), weight) for name, weight in model.named_parameters()]
...     batch = [(BatchLeaf(k), leaf) for k, leaf in enumerate(leaves)]
...     sources = dict(enumerate([*batch, *weights]))  # value -> its source, and a tensor
...     units, last = [], 0  # the value of the input
...     for layer, weight in enumerate(range(len(batch), len(sources))):
...         made = len(sources) + layer
...         units.append(Unit(str(layer), (last, weight), (made,), lambda x, w: (nn.functional.linear(x, w),)))
...         last = made
...     def loss(output, *leaves):  # a part of the step's: objective divides it by the number of microbatches
...         return (objective(lambda x: output, leaves)[0],)
...     units.append(Unit("loss", (last, *range(len(batch))), (last + 1,), loss))
...     return Captured(
...         units=tuple(units),
...         sources={value: source for value, (source, _) in sources.items()},
...         loss=last + 1,
...         outputs=(last,),
...         structure=flatten(leaves[0])[1],
...         fakes={value: fake(mode, tensor, device) for value, (_, tensor) in sources.items()},
...         mode=mode,
...         trainable=frozenset(name for name, _ in model.named_parameters()),
...     )
>>> pipe = fpipe.pipeline(model, example=(x,), targets=y, recording=fpipe.Recording(front_end=layers), **how)
>>> fpipe.verify(pipe, model, (x,), y).eager
4

Runs when a pipeline is built.
"""

from fpipe.record.captured import (
    BatchLeaf,
    Buffer,
    Call,
    Captured,
    CaptureFunction,
    Constant,
    FrontEnd,
    Function,
    Labels,
    Observed,
    Parameter,
    Unit,
    Value,
)
from fpipe.record.objective import Objective
from fpipe.tensors.fake import fake, fake_mode
from fpipe.tensors.tree import Structure, flatten

__all__ = [
    "BatchLeaf",
    "Buffer",
    "Call",
    "CaptureFunction",
    "Captured",
    "Constant",
    "FrontEnd",
    "Function",
    "Labels",
    "Objective",
    "Observed",
    "Parameter",
    "Structure",
    "Unit",
    "Value",
    "fake",
    "fake_mode",
    "flatten",
]
