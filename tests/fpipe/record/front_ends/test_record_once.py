# SPDX-License-Identifier: Apache-2.0
"""Steps run what a capture recorded, and get the bits and layouts of one device."""

from queue import SimpleQueue
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_h1
from tests.common.running import require_eager, staged
from tests.common.sizes import covering, sampled

HOW = one_f_one_b(ranks=2, microbatches=2)


class Covariance(nn.Module):
    def forward(self, x):
        return torch.cov(x.T)


class Tabled(nn.Module):
    """Reads a table that is kept as an array."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(4, 4), np.linspace(0, 1, 8)

    def forward(self, x):
        return self.inner(x) * torch.from_numpy(self.table)[:4].float()


class InPlace(nn.Module):
    """Adds in place to what a linear layer returns, which is a view if there are three dimensions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        y += x
        return y


class Chunked(nn.Module):
    """Computes sizes with torch.div, as Longformer does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        half = torch.div(x.size(1), 2, rounding_mode="trunc")
        y = self.inner(x).view(-1, half, 2)
        z = y.as_strided(size=(len(y), half * 2 - 1, 2), stride=(4, 1, 1)) + y.new_zeros((len(y), half + 1, 2))
        return torch.cat([z.flatten(1).split([half + 2, half])[0] if len(y) == half else z.flatten(1), x], 1)


class Positions(nn.Module):
    """Moves a buffer to where the input is, and keeps it, as CTRL does."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(4, 4), nn.Buffer(torch.arange(4.0), persistent=False)

    def forward(self, x):
        self.table = self.table.to(x.device)
        return self.inner(x) + self.table


def linears():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def nll(outputs, targets):
    return nn.functional.gaussian_nll_loss(outputs, targets, nn.functional.softplus(outputs))


MODELS = {
    "a guard inside torch.cov": (lambda: nn.Sequential(nn.Linear(4, 4), Covariance(), nn.Linear(4, 4)), (8, 4)),
    "an average by a counter": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), (8, 4)),
    "a table of numpy": (lambda: nn.Sequential(nn.Linear(4, 4), Tabled()), (8, 4)),
    "sizes that torch.div computes": (lambda: nn.Sequential(nn.Linear(4, 4), Chunked(), nn.Linear(10, 4)), (8, 4)),
    "a buffer that is assigned": (lambda: nn.Sequential(nn.Linear(4, 4), Positions()), (8, 4)),
    "a view changed in place": (lambda: nn.Sequential(InPlace(), InPlace()), (4, 3, 4)),
}


@sampled(2)
@covering(what=MODELS, capture=["trace", "modules"])
def test_what_needs_no_refusal_is_exact(what, capture):
    make, shape = what
    require_eager(make(), (torch.randn(shape),), capture=capture)


def test_a_guard_inside_a_loss_of_torch_checks_real_values():
    require_eager(linears(), (torch.randn(8, 4),), torch.randn(8, 4), loss=nll)


class Turning(nn.Module):
    """Feeds a convolution with channels last, as ConvNeXt does."""

    def __init__(self):
        super().__init__()
        self.inner, self.down = nn.Linear(40, 160), nn.Conv2d(160, 320, 2, stride=2)

    def forward(self, x):
        return self.down(self.inner(x).permute(0, 3, 1, 2)).mean((2, 3))


@sampled(2)
@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize("schedule", [HOW, zb_h1(ranks=2, microbatches=2)], ids=["1F1B", "ZB-H1"])
def test_gradients_have_the_layout_of_one_device(backward, schedule):
    model, x = nn.Sequential(nn.Linear(40, 40), Turning()), torch.randn(4, 4, 4, 40)
    pipe = staged(model, (x,), schedule=schedule, backward=backward)
    _, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,))
    for part in x.chunk(2):
        (model(part).square().mean() / 2).backward()
    for name, p in model.named_parameters():
        assert grads[name].stride() == p.grad.stride(), name
        assert same_bits(grads[name].norm(), p.grad.norm()), name
    model.zero_grad()
    assert fpipe.verify(pipe, model, (x,)).eager


def test_an_input_that_requires_a_gradient_is_refused():
    model, x = linears(), torch.randn(4, 4)
    pipe = staged(model, (x,))
    with pytest.raises(fpipe.InputError, match="got a tensor that requires a gradient"):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x.clone().requires_grad_(),))


class Printing(nn.Module):
    """Prints in every call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        print("called")
        return self.inner(x)


@sampled(2)
@pytest.mark.parametrize("whole", [(), "1", Printing])
@pytest.mark.parametrize("schedule", [HOW, zb_h1(ranks=2, microbatches=2)], ids=["1F1B", "ZB-H1"])
def test_a_module_named_in_whole_runs_as_python_in_every_step(capsys, caplog, whole, schedule):
    model, x = nn.Sequential(nn.Linear(4, 4), Printing()), torch.randn(4, 4)
    pipe = staged(model, (x,), schedule=schedule, whole=whole)
    assert ("as Python   1 (Printing): named in whole" in str(pipe)) is bool(whole)
    assert ("module 1 prints: this happens when the model is recorded" in caplog.text) is not bool(whole)
    assert capsys.readouterr().out
    fpipe.value_and_grad(pipe)(*pipe.init(model), (x,))
    assert capsys.readouterr().out.count("called") == (2 if whole else 0)
    assert fpipe.verify(pipe, model, (x,)).eager


def test_a_list_that_a_loss_or_a_hook_fills_is_named(caplog):
    seen, losses, x = [], [], torch.randn(4, 4)

    def loss(outputs):
        losses.append(1)
        return outputs.mean()

    model = linears()
    model[1].register_forward_hook(lambda module, args, out: seen.append(1))
    staged(model, (x,), loss=loss)
    assert "module 1 changes 'seen'; the loss changes 'losses': this happens when the model is recorded" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_code_compiled_by_torch_runs_as_a_whole():
    inner = torch.compile(nn.Linear(4, 4), backend="eager")
    pipe = require_eager(nn.Sequential(nn.Linear(4, 4), inner), (torch.randn(4, 4),))
    assert "as Python   1 (OptimizedModule): code compiled by torch.compile" in str(pipe)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_a_compiled_model_is_cut_at_the_modules_inside():
    pipe = require_eager(torch.compile(linears(), backend="eager"), (torch.randn(4, 4),), cuts=["_orig_mod.1"])
    assert [stage.parameters[0] for stage in pipe.stages] == ["_orig_mod.0.weight", "_orig_mod.1.weight"]
    assert "as Python" not in str(pipe)


class Elsewhere(nn.Module):
    """Has another thread ask about types, and make a class, while it is recorded."""

    seen = SimpleQueue()

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        thread = Thread(target=self.ask)
        thread.start()
        thread.join()
        return self.inner(x)

    def ask(self):
        class Meta(type):
            pass

        class Plain:
            pass

        self.seen.put(
            (type(int) is type, {type: 1}.get(type(int)), isinstance(int, type), Meta.__mro__[1:], type(Plain))
        )


def test_other_threads_see_the_built_in_type_while_a_model_is_recorded():
    staged(nn.Sequential(nn.Linear(4, 4), Elsewhere()), (torch.randn(4, 4),))
    assert Elsewhere.seen.qsize()
    assert Elsewhere.seen.get() == (True, 1, True, (type, object), type)
