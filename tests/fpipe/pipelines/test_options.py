# SPDX-License-Identifier: Apache-2.0
"""What belongs together among the arguments of a pipeline, as values and, until the next version, one by one."""

import pytest
import torch
from torch import nn

import fpipe
from schedules import one_f_one_b
from tests.common.cases import mse

HOW = one_f_one_b(ranks=2, microbatches=2)
FIELDS = {
    "microbatching": {"batch_dims": ((0, None), 0), "output_dims": None, "weight": lambda inputs, targets: 1.0},
    "place": {"device": "cpu", "rows": "whole"},
    "recording": {"front_end": "export", "unsplittable": "first", "plans": 3},
    "gradients": {"backward": "autograd", "tied": "sum"},
}
KINDS = {
    "microbatching": fpipe.Microbatching,
    "place": fpipe.Place,
    "recording": fpipe.Recording,
    "gradients": fpipe.Gradients,
}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.second(self.first(x) * scale)


def build(**options):
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    return fpipe.pipeline(Scaled(), example=(x, torch.ones(4)), targets=y, loss=mse, schedule=HOW, **options)


def test_fields_as_keywords_build_the_same_pipeline_and_say_what_to_write():
    values = {name: KINDS[name](**fields) for name, fields in FIELDS.items()}
    loose = {name: one for fields in FIELDS.values() for name, one in fields.items()}
    loose["capture"] = loose.pop("front_end")
    wanted = build(**values)
    with pytest.warns(FutureWarning, match=r"gradients=fpipe.Gradients\(backward=.autograd., tied=.sum.\)") as caught:
        pipe = build(**loose)
    assert str(pipe) == str(wanted)
    assert caught[0].filename == __file__
    assert "front_end='export'" in str(caught[0].message)
    for one in (pipe, wanted):
        batching = one.captures.batchings[True]
        assert (batching.weight, one.memo.most, one.planner.output_dims) == (FIELDS["microbatching"]["weight"], 3, None)
        assert one.planner.backend is None


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_beside_its_value_is_refused(name):
    field, one = next(iter(FIELDS[name].items()))
    with pytest.raises(fpipe.InputError, match=rf"{field}: got it besides {name}, expected it in that\. Write {name}="):
        build(**{field: one, name: KINDS[name]()})


def test_functions_take_only_the_values_that_they_use():
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    with pytest.warns(FutureWarning, match="profile: got backward as keywords"):
        profile = fpipe.profile(model, (x,), loss=torch.mean, backward="autograd", seconds=0)
    assert profile.backward == "by autograd"
    with pytest.warns(FutureWarning, match="capture: got unsplittable"):
        fpipe.capture(model, example=(x,), loss=torch.mean, unsplittable="")
    with pytest.raises(TypeError, match="rows"):
        fpipe.capture(model, example=(x,), loss=torch.mean, rows="own")
    with pytest.warns(FutureWarning, match="profile: got batch_dims"):
        fpipe.plan(model, (x,), ranks=1, loss=torch.mean, microbatches=2, seconds=1, batch_dims=0)


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        ("microbatching", "reduce", "median", "reduce: got 'median', expected one of"),
        ("microbatching", "weight", 3, "weight: got 3, expected a function of 2 arguments"),
        ("place", "rows", "mine", "rows: got 'mine', expected one of"),
        ("place", "pp", 1, "pp: got 1, expected a text"),
        ("recording", "plans", 0, "plans: got 0, expected an integer of 1 or more"),
        ("gradients", "tied", 4, "tied: got 4"),
    ],
)
def test_wrong_fields_are_refused(kind, field, value, words):
    with pytest.raises(fpipe.InputError, match=words):
        build(**{kind: KINDS[kind](**{field: value})})


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_of_value_is_refused(name):
    with pytest.raises(fpipe.InputError, match=rf"{name}: got .*expected a {KINDS[name].__name__}\. Write fpipe\."):
        build(**{name: {"pp": 2}})
