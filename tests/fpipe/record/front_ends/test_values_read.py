# SPDX-License-Identifier: Apache-2.0
"""Models and losses that read values: if named in `unsplittable`, they compute what one device does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, split_backward, zb_v
from tests.common.cases import BACKWARDS, WIDTH, mse
from tests.common.loops import loop
from tests.common.running import require_eager, staged
from tests.common.sizes import covering, in_turn, sampled

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


@sampled(2)
@covering(inner=[ByWhere, ByMask, ByNonzero, ByArgwhere, MaskedMean, SelectedMean], schedule=HOWS, backward=BACKWARDS)
def test_elements_are_picked_by_value_as_on_one_device(inner, schedule, backward):
    options = {"schedule": schedule, "cuts": ["2"], "unsplittable": ["1"], "backward": backward}
    model = balanced(inner)
    pipe = staged(model, (torch.ones(12, 4),), torch.zeros(12, 4), **options)
    step, params = fpipe.value_and_grad(pipe, outputs=True), pipe.init(model)
    for _ in range(2):
        x, y = torch.randn(12, 4), torch.randn(12, 4)
        got, grads = step(*params, (x,), y)
        want = loop(model, mse, (x,), y, 3)
        assert same_bits(got.loss, want.loss)
        assert same_bits(got.outputs, want.outputs)
        assert all(same_bits(grads[name], want.grads[name]) for name in want.grads)


def test_a_stage_that_picks_by_value_is_not_recorded():
    how = split_backward(one_f_one_b(ranks=2, microbatches=2))
    options = {"schedule": how, "cuts": ["2"], "unsplittable": ["1"], "backward": "graph"}
    pipe = staged(balanced(MaskedMean), (torch.ones(4, 4),), **options)
    assert [stage.functions.remark for stage in pipe.stages] == [
        "by autograd: it reads the values of tensors",
        "as a graph",
    ]


class Positive(nn.Module):
    """Returns as many elements as are positive."""

    def forward(self, x):
        return x[x > 0]


def mean_of_rest(rest):
    """A mean, whose divisor is recorded."""
    return rest.sum() / len(rest)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_shape_that_depends_on_data_is_refused_outside_of_the_module_that_reads_values(backward):
    model, x = nn.Sequential(nn.Linear(4, 4), Positive()), torch.randn(12, 4)
    pipe = staged(model, (x,), loss=mean_of_rest, unsplittable=["1"], backward=backward)
    with pytest.raises(
        fpipe.InputError, match=r"module 1: got a tensor of shape \[\d+\], expected \[0\] as at capture"
    ):
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,))


class Clamping(nn.Module):
    """Turns images into rows of channels, and asks about them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        x = self.inner(x)
        return x if torch.isfinite(x).all() else x.clamp(-1, 1)


class Images(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv, self.rows = nn.Conv2d(3, 32, 1), nn.Sequential(kind(), kind())

    def forward(self, x):
        return self.rows(self.conv(x).flatten(2).permute(0, 2, 1))


class Finite(Clamping):
    """The same around a residual, which keeps the layout of images: a clamp lays out its gradient as its input."""

    def forward(self, x):
        x = x + self.inner(x)
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x


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


class Columns(nn.Module):
    """Picks columns by their values, as many as there may be."""

    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x):
        mask = x.sum(0) > x.sum(0).mean()
        return x + self.pick(x, mask)


PICKS = {
    "columns": lambda x, mask: x[:, mask].sum(1, keepdim=True),
    "with others": lambda x, mask: x[0, ..., mask].sum() + x[:1, None, mask].mean(),
    "in two dimensions": lambda x, mask: x[None, x > mask].sum(),
    "masked_select": lambda x, mask: torch.masked_select(x, mask).sum(),
}


class Two(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def images():
    return torch.randn(4, 3, 9, 9), torch.randn(4, 81, 32)


def captions():
    mask = torch.tensor([[True, False, True], [False, True, True], [True, True, False], [False, True, True]])
    return torch.randint(8, (4, 3)), mask, torch.randn(4, 2, 3)


def rows():
    """The second microbatch goes the other way."""
    x = torch.rand(8, WIDTH)
    x[4:] *= 100
    return x, torch.rand(8, WIDTH)


EXACT = {  # the model, its batch, and the cut; the last of two tensors are the targets
    "the layout of a bias's gradient": (lambda: Images(Clamping), images, "rows"),
    "a check of all values passes": (lambda: Images(Finite), images, "rows.1"),
    "values written through a mask": (Telling, captions, "head"),
    "a loop that may end early": (
        lambda: nn.Sequential(nn.Linear(4, 4), Spelling(), nn.Linear(4, 4)),
        lambda: (torch.randn(4, 4),),
        "2",
    ),
    **{f"picks {name}": (lambda pick=pick: Two(Columns(pick)), rows, "b") for name, pick in PICKS.items()},
}


@sampled(2)
@pytest.mark.parametrize(("what", "backward"), in_turn(EXACT, BACKWARDS))
def test_modules_that_read_values_are_exact(what, backward):
    torch.manual_seed(0)
    make, batch, cut = EXACT[what]
    model, leaves = make(), batch()
    inputs, targets = (leaves[:1], leaves[1]) if len(leaves) == 2 else (leaves, None)
    reading = [type(module) for module in model.modules() if isinstance(module, Clamping | Spelling | Columns)]
    require_eager(model, inputs, targets, cuts=[cut], unsplittable=reading, backward=backward)


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


@sampled(2)
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
    options = {"cuts": [cut], "microbatches": 4, "unsplittable": [Deciding], "backward": backward}
    if exact:
        require_eager(model, (x,), **options)
    else:
        with pytest.raises(fpipe.PipelineError, match=r"a read of 'factor', which module \S+ sets after branching"):
            require_eager(model, (x,), **options)


# ---------------------------------------------------------------------------------------------- losses, distributions


def branching(outputs, targets):
    each = (outputs - targets).square()
    return each.sum() if each.mean() > 1 else each.mean()


class Branching(nn.Module):
    def forward(self, outputs, targets):
        return branching(outputs, targets)


@sampled(2)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize(
    ("loss", "named"),
    [(branching, "loss"), (Branching(), "loss"), (Branching(), Branching)],
    ids=["function", "name", "class"],
)
def test_a_loss_named_in_unsplittable_may_read_values(loss, named, backward):
    model, (x, y) = Two(), rows()
    pipe = require_eager(model, (x,), y, cuts=["b"], loss=loss, unsplittable=[named], backward=backward)
    step, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y)
    halves = [branching(model(x), y) for x, y in zip(x.chunk(2), y.chunk(2), strict=True)]
    assert torch.equal(step.loss, sum(half / 2 for half in halves))


class Stretched(nn.Module):
    """Stretches the beginning of each row, as long as the batch says, and writes it over another beginning."""

    def forward(self, x, lengths, wanted):
        out = torch.zeros_like(x)
        for k, (row, given, length) in enumerate(zip(x, lengths, wanted, strict=True)):
            part = row[:given]
            if part.numel() and length > 0:
                out[k, :length] = functional.interpolate(part[None, None], size=length)[0, 0]
        return out


class Stretching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.stretched, self.b = nn.Linear(6, 6), Stretched(), nn.Linear(6, 6)

    def forward(self, x, mask, other):
        return self.b(self.stretched(self.a(x), mask.sum(-1), other.sum(-1)))


@pytest.mark.parametrize("unsplittable", [[], [Stretched]], ids=["recorded", "whole"])
def test_slices_are_bounded_by_numbers_from_the_batch(unsplittable):
    x, ones = torch.randn(6, 6), torch.ones(6, 6).long()
    require_eager(Stretching(), (x, ones.triu(), ones.triu().flip(0)), cuts=["b"], unsplittable=unsplittable)


class Sampled(nn.Module):
    """Samples by a reparametrized normal distribution, whose arguments are looked at."""

    def forward(self, x):
        return torch.distributions.Normal(x, functional.softplus(x) + 0.1).rsample()


def density(x):
    return torch.distributions.Normal(x.mean(1, keepdim=True), x.square()).log_prob(x).clamp(-9)


@sampled(2)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("between", [Sampled(), density], ids=["in a module", "in the model itself"])
def test_distributions_check_their_arguments_in_every_step(between, backward, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # dynamo turns it off for good
    model, (x, y) = Two(between), rows()
    pipe = staged(model, (x,), y, cuts=["b"], backward=backward)
    assert fpipe.verify(pipe, model, (x,), y, seed=1).reference
    params, buffers = pipe.init(model)
    params["a.bias"] = torch.full((WIDTH,), torch.nan)
    with pytest.raises(ValueError, match="xpected"):
        fpipe.value_and_grad(pipe)(params, buffers, (x,), y, seed=1)


class Looking(nn.Module):
    """Looks itself up by its address, which a copy has not."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, x):
        return x * self.known[id(self)]


@pytest.mark.parametrize(
    ("between", "loss", "message"),
    [
        (nn.Identity(), branching, r"unsplittable=\['loss'\]"),
        (Columns(PICKS["columns"]), mse, r"module between \(Columns\).*unsplittable"),
    ],
)
def test_what_reads_values_is_refused_with_the_repair(between, loss, message):
    x, y = rows()
    with pytest.raises(fpipe.CaptureError, match=message):
        staged(Two(between), (x,), y, cuts=["b"], loss=loss)


def test_an_error_that_has_nothing_to_do_with_values_is_not_blamed_on_control_flow():
    between, (x, y) = Looking(), rows()
    between.known[id(between)] = 2.0
    with pytest.raises(fpipe.CaptureError, match=r"module between \(Looking\): got KeyError.*through self") as caught:
        staged(Two(between), (x,), y, cuts=["b"])
    assert "ontrol flow" not in str(caught.value)
