# SPDX-License-Identifier: Apache-2.0
"""Modules in `unsplittable` that pick elements by their values compute what one device does, in both backwards."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, split_backward, zb_v
from tests.common.cases import mse
from tests.common.loops import loop
from tests.common.sizes import covering

HOWS = {"1F1B": one_f_one_b(ranks=2, microbatches=3), "ZB-V": zb_v(ranks=1, microbatches=3)}


class Router(nn.Module):
    """Two experts, of which each row of the input is given to one."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def routed(self, x):
        return self.gate(x).argmax(-1)


class ByWhere(Router):
    def forward(self, x):
        chosen, out = self.routed(x), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            out.index_add_(0, rows, expert(x[rows]))
        return out


class ByMask(Router):
    def forward(self, x):
        chosen, out = self.routed(x), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            out[chosen == k] = expert(x[chosen == k])
        return out


class ByNonzero(Router):
    def forward(self, x):
        rows, out = (self.routed(x) == 0).nonzero().squeeze(1), x
        return out.index_add(0, rows, self.experts[0](x[rows])) + self.experts[1](x)


class ByArgwhere(ByNonzero):
    def forward(self, x):
        rows = torch.argwhere(self.routed(x) == 0).squeeze(1)
        return x.index_add(0, rows, self.experts[0](x[rows])) + self.experts[1](x)


class MaskedMean(Router):
    def forward(self, x):
        y = self.experts[0](x)
        return self.experts[1](x) * y[y > 0].mean()


class SelectedMean(MaskedMean):
    def forward(self, x):
        y = self.experts[0](x)
        return self.experts[1](x) * (torch.masked_select(y, y > 0).mean() + y.masked_select(y < 0).mean())


def balanced(inner):
    """A model whose every expert gets rows in every microbatch, so that eager has no gradient that is `None`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), inner(), nn.Linear(4, 4))


@covering(
    inner=[ByWhere, ByMask, ByNonzero, ByArgwhere, MaskedMean, SelectedMean], how=HOWS, backward=["autograd", "graph"]
)
def test_elements_are_picked_by_value_as_on_one_device(inner, how, backward):
    model, example, targets = balanced(inner), torch.ones(12, 4), torch.zeros(12, 4)
    pipe = fpipe.pipeline(
        model, example=(example,), targets=targets, loss=mse, schedule=how, cuts=["2"], unsplittable=["1"],
        backward=backward,
    )  # fmt: skip
    step, params = fpipe.value_and_grad(pipe, outputs=True), pipe.init(model)
    for _ in range(2):
        x, y = torch.randn(12, 4), torch.randn(12, 4)
        got, grads = step(*params, (x,), y)
        want = loop(model, mse, (x,), y, 3)
        assert same_bits(got.loss, want.loss)
        assert same_bits(got.outputs, want.outputs)
        assert all(same_bits(grads[name], want.grads[name]) for name in want.grads)


def test_a_stage_that_picks_by_value_is_not_recorded():
    pipe = fpipe.pipeline(
        balanced(MaskedMean), example=(torch.ones(4, 4),), loss=torch.mean, unsplittable=["1"], cuts=["2"],
        schedule=split_backward(one_f_one_b(ranks=2, microbatches=2)), backward="graph",
    )  # fmt: skip
    assert [stage.functions.remark for stage in pipe.stages] == [
        "by autograd: it reads the values of tensors",
        "as a graph",
    ]


class Clamping(nn.Module):
    """Turns images into rows of channels, and asks about them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        x = self.inner(x)
        return x if torch.isfinite(x).all() else x.clamp(-1, 1)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rows = nn.Conv2d(3, 32, 1), nn.Sequential(Clamping(), Clamping())

    def forward(self, x):
        return self.rows(self.conv(x).flatten(2).permute(0, 2, 1))


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_gradients_of_images_have_the_layout_of_one_device(backward):
    """The gradient of a convolution's bias shows in its last bits how its cotangent was laid out."""
    torch.manual_seed(0)
    model, x, y = Images(), torch.randn(4, 3, 9, 9), torch.randn(4, 81, 32)
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["rows"], "unsplittable": [Clamping]}
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, backward=backward, **options)
    fpipe.verify(pipe, model, (x,), y)


class Merging(nn.Module):
    """Puts features of images in the places of words, as models of pictures and text do."""

    def __init__(self):
        super().__init__()
        self.words, self.images = nn.Embedding(8, 4), nn.Linear(3, 4)

    def forward(self, ids, mask, images):
        hidden = self.words(ids).clone()
        hidden[mask] = self.images(images).flatten(0, 1)
        return hidden


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.merge, self.head = Merging(), nn.Linear(4, 2)

    def forward(self, ids, mask, images):
        return self.head(self.merge(ids, mask, images))


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_values_written_through_a_mask_have_gradients(backward):
    torch.manual_seed(0)
    mask = torch.tensor([[True, False, True], [False, True, True], [True, True, False], [False, True, True]])
    model, batch = Telling(), (torch.randint(8, (4, 3)), mask, torch.randn(4, 2, 3))
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["head"], "backward": backward}
    pipe = fpipe.pipeline(model, example=batch, loss=lambda out: out.square().mean(), **options)
    fpipe.verify(pipe, model, batch)


class Finite(Clamping):
    """The same around a residual, which keeps the layout of the images."""

    def forward(self, x):
        x = x + self.inner(x)
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x


def test_a_check_that_all_values_are_finite_is_assumed_to_pass():
    """A clamp would lay out its gradient as its input."""
    torch.manual_seed(0)
    model, x, y = Images(), torch.randn(4, 3, 9, 9), torch.randn(4, 81, 32)
    model.rows = nn.Sequential(Finite(), Finite())
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["rows.1"], "unsplittable": [Finite]}
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=mse, **options)
    fpipe.verify(pipe, model, (x,), y)


class Spelling(nn.Module):
    """Takes a step after the other, and ends early once all rows are at their end."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        steps = []
        for _ in range(3):
            x = self.inner(x).tanh()
            steps.append(x)
            if (x.argmax(-1) == 4).all():
                break
        return torch.stack(steps, 1)


@pytest.mark.parametrize("backward", ["autograd", "graph"])
def test_a_loop_that_may_end_early_is_assumed_to_continue(backward):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Spelling(), nn.Linear(4, 4)), torch.randn(4, 4)
    options = {"schedule": one_f_one_b(ranks=2, microbatches=2), "cuts": ["2"], "unsplittable": [Spelling]}
    pipe = fpipe.pipeline(model, example=(x,), loss=lambda out: out.square().mean(), backward=backward, **options)
    fpipe.verify(pipe, model, (x,))


class Deciding(nn.Module):
    """Leaves a number that says which way it took."""

    def __init__(self):
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), 0.0

    def forward(self, x):
        x = self.inner(x)
        self.factor = 2.0 if x[0, 0] > 0 else 3.0
        return x


class Following(nn.Module):
    """Uses a number that another module has left."""

    def __init__(self, decides):
        super().__init__()
        self.decides = [decides]

    def forward(self, x):
        return x.tanh() * self.decides[0].factor


class Reading(nn.Module):
    """Reads it in the outermost forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Deciding(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).tanh()) * self.first.factor


def following(inside):
    decides = Deciding()
    pair = [decides, Following(decides)]
    return nn.Sequential(nn.Linear(4, 4), *([nn.Sequential(*pair)] if inside else pair), nn.Linear(4, 4))


@pytest.mark.parametrize("backward", ["autograd", "graph"])
@pytest.mark.parametrize(
    ("make", "cut", "exact"),
    [
        (lambda: following(inside=True), "2", True),
        (lambda: following(inside=True), "1.1", False),
        (lambda: following(inside=False), "2", False),
        (Reading, "last", False),
    ],
    ids=["in one module", "cut apart", "side by side", "in the model's own forward"],
)
def test_numbers_computed_from_data_are_those_of_the_step_or_refused(make, cut, exact, backward):
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 4)
    options = {"schedule": one_f_one_b(ranks=2, microbatches=4), "cuts": [cut], "unsplittable": [Deciding]}

    def verified():
        pipe = fpipe.pipeline(model, example=(x,), loss=lambda out: out.square().mean(), backward=backward, **options)
        return fpipe.verify(pipe, model, (x,))

    if exact:
        assert verified().eager
    else:
        with pytest.raises(fpipe.PipelineError, match=r"a read of 'factor', which module \S+ sets after branching"):
            verified()
