# SPDX-License-Identifier: Apache-2.0
"""What is passed to a step with more than values is right, or refused by the name of the leaf."""

import pytest
import torch
from torch import nn
from torch._C import _functorch
from torch.autograd import forward_ad

import fpipe
from schedules import forward_only, one_f_one_b
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.running import build, run
from tests.common.sizes import covering, sampled
from tests.common.zoo import ZOO

HOW = one_f_one_b(ranks=2, microbatches=2)


@pytest.fixture(scope="module")
def built():
    return build(ZOO["mlp"], HOW, 4)


def step(built, params, inputs=None):
    pipe, _, given, targets = built
    return fpipe.value_and_grad(pipe)(params, {}, given if inputs is None else inputs, targets)


def test_a_frozen_parameter_that_requires_a_gradient_is_refused():
    model = ZOO["mlp"].make(4)[0]
    model[2].requires_grad_(False)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=nn.functional.mse_loss, schedule=HOW, stages=2)
    params, buffers = pipe.init(model)
    params["2.bias"].requires_grad_()
    with pytest.raises(fpipe.InputError, match=r"params\['2.bias'\]: got requires_grad=True, expected False"):
        fpipe.value_and_grad(pipe)(params, buffers, (x,), y)


def test_parameters_need_not_require_a_gradient(built):
    """As a function of parameters returns them, all or some; and what `init` made, detached."""
    pipe, model, *_ = built
    params, want = pipe.init(model)[0], run(*built)
    plain = {name: p.detach().clone() for name, p in params.items()}
    for given in (plain, {**params, "0.weight": plain["0.weight"]}, {n: p.detach() for n, p in params.items()}):
        out, grads = step(built, given)
        assert torch.equal(out.loss, want.loss)
        assert grads.keys() == want.grads.keys()
        assert all(torch.equal(grads[name], want.grads[name]) for name in grads)


def set_data(params, value):
    params["2.weight"].data = value(params["2.weight"].data)


def put(params, value):
    params["2.weight"] = value(params["2.weight"].detach().clone())


@torch.inference_mode()
def make_in_inference_mode(params):
    params["2.weight"] = params["2.weight"].detach().clone()


def halved(grad):
    return grad / 2


# Between two steps: the same tensors, changed in place, or others in their place.
CHANGES = {
    "other shape": (
        lambda params: set_data(params, lambda p: p[:1].clone()),
        "got float32\\[1, .*expected flo",
    ),
    "other dtype": (lambda params: set_data(params, torch.Tensor.double), "got float64"),
    "missing": (lambda params: params.pop("2.weight"), "missing \\['2.weight'\\], unexpected \\[\\].*pipe.init"),
    "another name": (
        lambda params: params.update(other=params.pop("2.weight")),
        "missing .*, unexpected \\['other'\\]",
    ),
    "one more": (lambda params: params.update(other=params["2.weight"]), "unexpected \\['other'\\]"),
    "no tensor": (lambda params: put(params, repr), "got str, expected a tensor"),
    "no values": (lambda params: put(params, lambda p: p.to("meta")), "got a tensor on the meta device.*initialise"),
    "sparse": (lambda params: put(params, torch.Tensor.to_sparse), "got a tensor of layout torch.sparse"),
    "sparse and trained": (
        lambda params: put(params, lambda p: p.detach().to_sparse().requires_grad_()),
        "got a tensor of layout torch.sparse",
    ),
    "nested": (lambda params: put(params, lambda p: torch.nested.nested_tensor([*p])), "got a nested tensor"),
}
FLAGS = {  # which only a training step asks about
    "frozen": (
        lambda params: params["2.weight"].requires_grad_(False),
        "'2.weight'.*got requires_grad=False, expected True.*rebuilt",
    ),
    "all frozen": (lambda params: [p.requires_grad_(False) for p in params.values()], "'0.weight'.*requires_grad=Fal"),
    "a frozen module": (
        lambda params: put(params, lambda p: nn.Parameter(p, requires_grad=False)),
        "'2.weight'.*got requires_grad=False, expected True",
    ),
    "hook": (lambda params: params["2.weight"].register_hook(halved), "got a hook on its gradient, halved, expected n"),
    "late hook": (
        lambda params: params["2.weight"].register_post_accumulate_grad_hook(halved),
        "got a hook on its gradient, halved, expected none",
    ),
    "made in inference mode": (
        make_in_inference_mode,
        "'2.weight'.*got a tensor that was made in torch.inference",
    ),
}


def whole(model):
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", [*CHANGES, *FLAGS])
def test_every_step_refuses_parameters_that_do_not_fit(built, what):
    pipe, model, inputs, targets = built
    change, words = (CHANGES | FLAGS)[what]
    functions = [(fpipe.value_and_grad, True), (fpipe.reference, False), (fpipe.evaluate, True)]
    for make, is_own in functions if what in CHANGES else functions[:1]:
        params, function = pipe.init(model)[0] if is_own else whole(model), make(pipe)
        function(params, {}, inputs, targets)
        change(params)
        with pytest.raises(fpipe.InputError, match=f"params.*{words}"):
            function(params, {}, inputs, targets)


BUFFER_CHANGES = {
    "missing": (lambda buffers: {}, "missing .*1.running_mean"),
    "other dtype": (
        lambda buffers: {**buffers, "1.num_batches_tracked": torch.tensor(0.0)},
        r"\['1.num_batches_tracked'\]: got float32\[\], expected int64\[\]",
    ),
    "a list": (lambda buffers: [*buffers.values()], r"missing .*, unexpected \['0', '1', '2'\]"),
}


@pytest.mark.parametrize("what", BUFFER_CHANGES)
def test_every_step_refuses_buffers_that_do_not_fit(what):
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), rows_of(), mse, ("", "1", ""))
    pipe, model, inputs, targets = build(case, HOW, 4)
    change, words = BUFFER_CHANGES[what]
    state = pipe.init(model)
    for make in (fpipe.value_and_grad, fpipe.evaluate):
        with pytest.raises(fpipe.InputError, match=f"buffers.*{words}"):
            make(pipe)(state[0], change(state[1]), inputs, targets)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when it loads its forward formulas
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # as of torch 2.15
@pytest.mark.parametrize("where", ["params['0.weight']", "inputs[0]"])
def test_tangents_are_refused(built, where):
    pipe, model, inputs, _ = built
    params = pipe.init(model)[0]
    with forward_ad.dual_level():
        if where == "inputs[0]":
            inputs = (forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])),)
        else:
            params["0.weight"] = forward_ad.make_dual(params["0.weight"], torch.ones_like(params["0.weight"]))
        with pytest.raises(fpipe.InputError, match=r"got a dual tensor of forward-mode.*\.primal") as caught:
            step(built, params, inputs)
        assert str(caught.value).startswith(where)


def test_transforms_of_torch_func_are_refused(built):
    pipe, model, *_ = built
    with pytest.raises(fpipe.InputError, match=r"params\['0.weight'\]: got a tensor inside a transform of torch.func"):
        torch.func.grad(lambda params: step(built, params)[0].loss)(pipe.init(model)[0])


def test_private_names_of_torch_mean_what_they_did():
    assert forward_ad._current_level == -1
    assert _functorch.maybe_current_level() is None
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0
    torch.func.grad(lambda x: [_functorch.is_functorch_wrapped_tensor(x) or 1 / 0, x.sum()][1])(torch.ones(2))
    hooked = torch.ones(2, requires_grad=True)
    assert hooked._backward_hooks is hooked._post_accumulate_grad_hooks is None
    hooked.register_hook(print)
    hooked.register_post_accumulate_grad_hook(print)
    assert len(hooked._backward_hooks) == len(hooked._post_accumulate_grad_hooks) == 1


# ------------------------------------------------------------------------------------------------- what trains nothing


def pipeline(loss, model=None, how=HOW, **options):
    x = torch.ones(4, 4)
    return fpipe.pipeline(
        model or nn.Linear(4, 4), example=(x,), loss=loss, schedule=how, stages=how.ranks, **grouped(options)
    )


@pytest.mark.parametrize("loss", [None, 3, "mse"])
def test_an_invalid_loss_is_refused(loss):
    with pytest.raises(fpipe.InputError, match=r"loss: got .*, expected a function loss\(outputs, targets\)"):
        pipeline(loss, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_a_schedule_without_a_backward_needs_no_loss():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    pipe = pipeline(None, model, forward_only(ranks=2, microbatches=2))
    rows = [model(part) for part in x.chunk(2)]  # kernels depend on the number of rows
    assert torch.equal(fpipe.evaluate(pipe)(*pipe.init(model), (x,)).outputs, torch.cat(rows))


def without_grad(outputs):
    with torch.no_grad():
        return outputs.mean()


@sampled(2)
@covering(
    loss={"detached": lambda outputs: outputs.detach().mean(), "zero": lambda _: torch.zeros(()), "off": without_grad},
    capture=["trace", "export"],
    backward=["autograd", "graph"],
)
def test_a_loss_that_trains_nothing_is_refused(loss, capture, backward):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(fpipe.CaptureError, match=r"loss: got one without a gradient for any parameter.*'0.bias', '0"):
        pipeline(loss, model, front_end=capture, backward=backward)
    model.requires_grad_(False)
    assert not pipeline(loss, model, front_end=capture, backward=backward).stages[0].grads


# -------------------------------------------------------------------------------------------------- what verify takes


def test_verify_refuses_to_compare_nan(built):
    pipe, model, inputs, targets = built
    with pytest.raises(fpipe.MismatchError, match=r"loss: got nan on both sides, expected numbers"):
        fpipe.verify(pipe, model, inputs, targets * float("nan"))


def test_verify_takes_parameters_in_training(built, monkeypatch):
    """An error that shows with other values only is found; the model keeps its own."""
    from fpipe.stages.stage import ModelStage

    pipe, model, inputs, targets = built
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params, buffers = pipe.init(model)
    with torch.no_grad():
        for p in params.values():
            p.mul_(2)
    right = ModelStage.complete
    monkeypatch.setattr(
        ModelStage,
        "complete",
        lambda self, total: tuple(t * (1 + (self.index == 1 and moved(pipe, total))) for t in right(self, total)),
    )

    def moved(pipe, total):
        return 0.5 if float(total[0].abs().max()) > limit else 0.0

    limit = float("inf")
    grads = step(built, pipe.init(model)[0])[1]
    limit = float(grads["4.weight"].abs().max())
    assert fpipe.verify(pipe, model, inputs, targets).eager
    with pytest.raises(fpipe.MismatchError, match="bits from the"):
        fpipe.verify(pipe, model, inputs, targets, params=params, buffers=buffers)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_verify_starts_from_given_values():
    pipe, model, inputs, targets = build(ZOO["normalised"], HOW, 4)
    params, buffers = pipe.init(model)
    stats = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moved = {name: (p.detach() * 3).requires_grad_() for name, p in params.items()}
    shifted = {name: b + 1 for name, b in buffers.items()}
    found = fpipe.verify(pipe, model, inputs, targets, params=moved, buffers=shifted)
    assert found == fpipe.verify(pipe, model, inputs, targets)
    assert all(torch.equal(buffer, stats[name]) for name, buffer in model.named_buffers())
    twice = fpipe.verify(pipe, model, inputs, targets, params=moved, steps=2)
    assert twice == (2 * found.reference, 2 * found.eager)
    with pytest.raises(fpipe.InputError, match="params: got 1 leaves"):
        fpipe.verify(pipe, model, inputs, targets, params={"0.weight": moved["0.weight"]})


class Tiring(nn.Module):
    """Does something else from its thirtieth call on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if next(self.calls) < 30 else self.linear(x) * 2


def test_several_steps_of_verify_find_a_model_that_changes_after_some_calls():
    from itertools import count

    Tiring.calls = count()
    model, x = nn.Sequential(Tiring(), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = fpipe.pipeline(
        model, example=(x,), loss=torch.mean, schedule=HOW, cuts=["1"], gradients=fpipe.Gradients(backward="graph")
    )
    assert fpipe.verify(pipe, model, (x,)).eager
    with pytest.raises(fpipe.MismatchError):
        fpipe.verify(pipe, model, (x,), steps=20)


def test_steps_of_verify_train(built):
    """The second step begins where the first has led."""
    pipe, model, inputs, targets = built
    seen = []
    from fpipe.verification import verify

    original = verify.make_reference_step

    def watching(*options):
        inner = original(*options)

        def stepping(params, *rest, **named):
            seen.append({name: p.detach().clone() for name, p in params.items()})
            return inner(params, *rest, **named)

        return stepping

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "make_reference_step", watching)
        fpipe.verify(pipe, model, inputs, targets, steps=2)
    grads = loop(model, ZOO["mlp"].loss, inputs, targets, 2).grads
    assert all(torch.equal(seen[1][n], seen[0][n] - grads[n] / 1024) for n in grads)
    assert_same(run(*built), loop(model, ZOO["mlp"].loss, inputs, targets, 2))
