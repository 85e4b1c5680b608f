# SPDX-License-Identifier: Apache-2.0
"""The front ends, users' own among them: what they take, what they deliver, and what they refuse."""

import itertools

import pytest
import torch
from torch import nn

import fpipe
from fpipe.record.captured import BatchLeaf, Buffer, Constant, Parameter
from fpipe.record.validity import observe
from schedules import gpipe, one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import build, require_exact, run, run_reference
from tests.common.sizes import by_day, sampled
from tests.common.unusual_models import Negated
from tests.common.zoo import EXPORTS_LESS, ZOO

CASES = [(name, front) for name, case in ZOO.items() for front in case.fronts if name != "recurrent"]
GRAPHS = ["export", "fx", "dynamo"]
FRONTS = ["trace", "modules", *GRAPHS]
TWO = one_f_one_b(ranks=2, microbatches=2)


def capture_case(name, capture="export"):
    pipe, model, *_ = build(ZOO[name], gpipe(ranks=1, microbatches=2), 4, capture=capture)
    return pipe.training.assembly.captured, model


@sampled(2)
@pytest.mark.parametrize(("name", "capture"), by_day(CASES, 8))
def test_units_are_in_order_with_sources_in_the_model(name, capture):
    found, model = capture_case(name, capture)
    known = set(found.sources)
    for unit in found.units:
        assert set(unit.reads) <= known, "everything is made before it is read"
        assert not known & set(unit.makes), "and made once"
        known |= set(unit.makes)
    assert {found.loss, *found.outputs} <= known
    kinds = [(type(source), source[0]) for source in found.sources.values() if not isinstance(source, Constant)]
    assert len(kinds) == len(set(kinds)), "a tied parameter is one value"
    assert {name for kind, name in kinds if kind is Parameter} == {name for name, _ in model.named_parameters()}
    assert {name for kind, name in kinds if kind is Buffer} == {name for name, _ in model.named_buffers()}
    assert found.trainable == {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(found.fakes) == set(found.sources)
    assert any(kind is BatchLeaf for kind, _ in kinds)


@sampled(1)
@pytest.mark.parametrize("capture", FRONTS[:-1] if EXPORTS_LESS else FRONTS)
def test_writes_and_draws_are_recorded(capture):
    found, _ = capture_case("normalised", capture)
    seen = observe(found)
    names = {
        source.name
        for value, source in found.sources.items()
        if isinstance(source, Buffer) and any(seen.storage[value] in memory for memory in seen.written.values())
    }
    assert names == {
        *(f"{k}.{what}" for k in (1, 5) for what in ("running_mean", "running_var", "num_batches_tracked")),
        "3.mean",
        "3.count",
    }
    assert not seen.random
    found, _ = capture_case("dropping", capture)
    seen = observe(found)
    assert len({keyed.label for keyed in seen.random.values()}) == len(seen.random)
    assert {unit.path.split(".")[0] for unit in seen.random} == {"1", "3", "5"}


def test_labels_do_not_depend_on_where_a_model_is_embedded_in_the_list_of_units():
    """The key of a random operation is its path and ordinal there, so a layer before it changes nothing."""
    seen = observe(capture_case("dropping")[0])
    paths = sorted(unit.path for unit in seen.random)
    assert paths == ["1", "3.0", "3.2", "5", "5", "5", "5"]


def test_parts_may_be_functions():
    parts = [nn.Linear(WIDTH, WIDTH), torch.tanh, lambda x: {"x": x, "none": None}, lambda tree: tree["x"] * 2]
    parts += [nn.Linear(WIDTH, WIDTH)]
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    how = one_f_one_b(ranks=3, microbatches=2)
    pipe = fpipe.pipeline(
        parts,
        example=(x,),
        targets=y,
        loss=mse,
        schedule=how,
        cuts=["2", "4"],
        recording=fpipe.Recording(front_end="modules"),
    )
    params, buffers = pipe.init(parts)
    assert list(params) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    step, grads = fpipe.value_and_grad(pipe)(params, buffers, (x,), y)
    model = nn.Sequential(parts[0], nn.Tanh(), Double(), parts[4])
    want = loop(model, mse, (x,), y, 2)
    assert_same(
        want._replace(grads=grads, loss=step.loss),
        want._replace(grads={name.replace("3.", "4."): grad for name, grad in want.grads.items()}),
    )


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_several_arguments_go_to_the_first_part():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, scale=None, *, flag=False):
            return self.linear(x) * scale if flag else x

    parts = nn.Sequential(Two(), nn.Linear(WIDTH, WIDTH))
    x, scale = torch.randn(4, WIDTH), torch.randn(4, 1)
    how = TWO
    inputs = {"x": x, "scale": scale, "flag": True}
    pipe = fpipe.pipeline(
        parts,
        example=inputs,
        targets=x,
        loss=mse,
        schedule=how,
        cuts=["1"],
        recording=fpipe.Recording(front_end="modules"),
    )
    step, grads = fpipe.value_and_grad(pipe)(*pipe.init(parts), inputs, x)
    reference, wanted = fpipe.reference(pipe)(dict(parts.named_parameters()), {}, inputs, x)
    assert torch.equal(step.loss, reference.loss)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)
    eager = mse(parts[1](parts[0](x, scale, flag=True)), x)
    assert torch.allclose(step.loss, eager)


@sampled(2)
@pytest.mark.parametrize("capture", FRONTS)
def test_one_module_may_be_in_two_places(capture):
    """As two parts of a sequence: one set of parameters, called twice."""
    shared = nn.Linear(WIDTH, WIDTH)
    case = Case(
        lambda: nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(WIDTH, WIDTH)), rows_of(), mse, ("1", "2", "3")
    )
    model, inputs, targets = case.make(6)
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=mse,
        schedule=one_f_one_b(ranks=2, microbatches=3),
        cuts=["3" if capture in GRAPHS else "2"],
        recording=fpipe.Recording(front_end=capture),
    )
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, 3))


def fickle_parts(count):
    return [nn.Linear(WIDTH, WIDTH), lambda x: {"x": x * 2, "count": count()}, lambda tree: tree["x"]]


FICKLE = {"schedule": gpipe(ranks=2, microbatches=2), "cuts": ["1"], "loss": mse}


def test_a_part_s_constants_may_not_depend_on_the_call():
    calls, x = [], torch.randn(4, WIDTH)
    parts = fickle_parts(lambda: calls.append(1) or len(calls))
    with pytest.raises(fpipe.CutError, match=r"module 1: .* Python state .*got \[1\] returned, expected \[2\]"):
        fpipe.pipeline(parts, example=(x,), targets=x, **grouped({"whole": "1", **FICKLE}))


def test_a_part_that_returns_another_constant_in_a_step_is_an_error():
    """What is no tensor was read at capture."""
    ticks, x = itertools.count(), torch.randn(4, WIDTH)
    parts = fickle_parts(lambda: next(ticks) // 50)
    pipe = fpipe.pipeline(parts, example=(x,), targets=x, **grouped({"whole": "1", **FICKLE}))
    state = pipe.init(parts)

    def train():
        for _ in range(50):
            fpipe.value_and_grad(pipe)(*state, (x,), x)

    with pytest.raises(fpipe.InputError, match=r"module 1: got \[1\] among what it returned, expected \[0\]"):
        train()


@sampled(1)
@pytest.mark.parametrize("capture", FRONTS)
def test_autocast_around_the_step_applies_to_model_and_loss(capture):
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    case = Case(lambda: parts, rows_of(), mse, ("", "1", ""))
    pipe, model, inputs, targets = build(case, TWO, 4, capture=capture)
    plain = run(pipe, model, inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(pipe, model, inputs, targets)
        assert_same(got, run_reference(pipe, model, inputs, targets))
        assert fpipe.verify(pipe, model, inputs, targets).eager
    assert not torch.equal(got.loss, plain.loss)


@pytest.mark.parametrize("capture", FRONTS)
def test_seeding_inside_the_model_is_exact_or_refused(capture):
    """A model that seeds by itself draws what it did, or is refused; and the user's state survives."""

    class Seeding(nn.Module):
        def forward(self, x):
            torch.manual_seed(3)
            return x + torch.rand_like(x)

    case = Case(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Seeding(), nn.Linear(WIDTH, WIDTH)),
        rows_of(),
        mse,
        ("", "1", ""),
    )
    before = torch.get_rng_state()
    try:
        built = build(case, TWO, 4, capture=capture)
        assert_same(run(*built, seed=1), run_reference(*built, seed=1))
    except fpipe.CaptureError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_run_as_python_under_two_front_ends():
    from fpipe.record.front_ends.registry import CAPTURES, find_capture, is_eager

    assert [name for name in CAPTURES if is_eager(find_capture(name, ("head",)))] == ["trace", "modules"]


def test_leaves_are_identified_whatever_their_order():
    """torch's trees keep the order of a dict, fpipe's sort it."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, z, a):
            return {"z": self.b(self.a(z) - a), "a": [a, {"y": z * 2, "b": 3}]}

    def batch(rows):
        targets = {"w": torch.randn(rows, WIDTH), "c": torch.randn(rows, WIDTH)}
        return {"z": torch.randn(rows, WIDTH), "a": torch.randn(rows, WIDTH)}, targets

    def loss(outputs, targets):
        return mse(outputs["z"], targets["w"]) + (outputs["a"][1]["y"] * targets["c"]).mean() * outputs["a"][1]["b"]

    require_exact(Case(Named, batch, loss, ("", "b", "")), TWO, capture="dynamo")


# ------------------------------------------------------------------------------------------------------- users' own


def exported(model, inputs):
    """Return a flat graph, whose nodes know the modules that they come from."""
    return torch.export.export(model, inputs, strict=False).module()


def unflattened(model, inputs):
    """Return torch's own modules, one for each of the model's."""
    return torch.export.unflatten(torch.export.export(model, inputs, strict=False))


def symbolic(model, inputs):
    return torch.fx.symbolic_trace(model)


def same(model, inputs):
    return model


@sampled(1)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own unflatten asks
@pytest.mark.parametrize("name", ["normalised", "tied_sequence", "dropping", "mlp"])
@pytest.mark.parametrize("front_end", [exported, unflattened, same])
def test_what_a_front_end_returns_is_recorded_and_cut_at_the_names_of_the_model(front_end, name):
    require_exact(ZOO[name], one_f_one_b(ranks=4, microbatches=3), capture=front_end)


class Layer(nn.Module):
    """A linear layer with something done to what it returns."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x):
        return self.then(self.linear(x))


def third(then):
    return Case(lambda: nn.Sequential(*map(Layer, [torch.tanh, torch.tanh, then])), rows_of(), mse, ("", "1", ""))


def nested(x):
    """A region in a region, which torch.export forgets."""
    with torch.autocast("cpu", torch.bfloat16):
        h = x @ x.t()
        with torch.no_grad():
            g = h * 2
        h = h + g
    return h.float() @ x


def negated(x):
    return Negated.apply(x)


@pytest.mark.parametrize(("front_end", "then"), [(symbolic, torch.sigmoid), (same, negated)])
def test_cuts_lie_at_modules_and_what_a_front_end_keeps_is_not_refused(front_end, then):
    require_exact(third(then), TWO, capture=front_end)


@pytest.mark.parametrize(
    ("then", "message"),
    [(negated, "the custom autograd function Negated"), (nested, "gradients that are switched off")],
)
def test_what_a_front_end_loses_is_refused_by_name(then, message):
    with pytest.raises(fpipe.CaptureError, match=rf"module 2 \(Layer\): got {message}"):
        build(third(then), TWO, 4, capture=exported)


def failing(model, inputs):
    raise ValueError("no such model")


NEITHER = r"\(model, inputs\) -> module, or a graph made by hand, a function"
WRONG = {
    "no module": (lambda model, inputs: (model, inputs), fpipe.CaptureError, "got tuple, expected a module"),
    "other names": (
        lambda model, inputs: nn.ModuleDict({"other": model}),
        fpipe.CaptureError,
        "parameter other.0.linear.weight: got one that the model does not have",
    ),
    "another result": (
        lambda model, inputs: model[:2],
        fpipe.CaptureError,
        "the model: got a graph that returns|changes",
    ),
    "an error": (failing, fpipe.CaptureError, "the front end failing could not read it: no such model"),
    "one argument": (lambda model: model, fpipe.InputError, NEITHER),
    "any arguments": (lambda *given: given, fpipe.InputError, NEITHER),
    "two or three arguments": (lambda a, b, c=3: a, fpipe.InputError, NEITHER),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_front_ends_are_told_what_is_wrong(what):
    front_end, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        build(third(lambda x: x[:, :2]), one_f_one_b(ranks=1, microbatches=2), 4, capture=front_end)
