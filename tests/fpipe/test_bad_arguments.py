# SPDX-License-Identifier: Apache-2.0
"""What users pass is checked before anything runs; errors name the argument, what it is and what was expected."""

import collections
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fpipe
from schedules import B, F, gpipe, linear, one_f_one_b, schedule
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.layers import linears
from tests.common.options import grouped
from tests.common.running import build
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

MODEL, X, Y = linears(nn.ReLU, nn.Tanh, nn.GELU), torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def pipeline(**changes):
    """A pipeline of two ranks, with something changed."""
    given = {
        "model": MODEL,
        "example": (X,),
        "targets": Y,
        "loss": mse,
        "schedule": one_f_one_b(ranks=2, microbatches=2),
        "cuts": ["4"],
    }
    given |= changes
    return fpipe.pipeline(given.pop("model"), **grouped(given))


@schedule(placement=linear)
def backwards_first(rank, ranks, microbatches):
    for i in range(microbatches):
        yield B(rank, i)
        yield F(rank, i)


@schedule(placement=linear)
def crossed(rank, ranks, microbatches):
    """The last rank runs both forwards first; the first wants a backward before its second forward."""
    order = (
        [F(rank, 0), F(rank, 1), B(rank, 1), B(rank, 0)] if rank else [F(rank, 0), B(rank, 0), F(rank, 1), B(rank, 1)]
    )
    yield from order


@schedule(placement=linear)
def endless(rank, ranks, microbatches):
    for i in itertools.count():
        yield F(rank, i)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, out, target):
        return mse(out, target) * self.weight


class Keeping(nn.Module):
    """A loss that keeps a sum in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, out, target):
        loss = mse(out, target)
        self.seen.add_(loss.detach())
        return loss


class Reentrant(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def penalty(out, x):
    """Of the gradient with respect to the input, through all stages."""
    return out.mean() + torch.autograd.grad(out.sum(), x, create_graph=True)[0].norm()


class Batch(collections.UserDict):
    """As tokenizers return it."""


ALONE = {"schedule": one_f_one_b(ranks=1, microbatches=2), "cuts": None}

BAD = {
    "a loss that keeps a sum": (
        {"loss": Keeping()},
        fpipe.CaptureError,
        ["module loss", "a loss that keeps nothing", "(loss, aux)"],
    ),
    "a reentrant checkpoint of a frozen input": (
        {"model": nn.Sequential(Reentrant(WIDTH, WIDTH)), **ALONE},
        fpipe.CaptureError,
        ["module 0: got a reentrant checkpoint", "['0.bias', '0.weight']", "use_reentrant=False"],
    ),
    "a gradient penalty": (
        {"loss": penalty, "targets": X},
        fpipe.CaptureError,
        ["the loss: got RuntimeError", "through all stages", "in the forward of the model"],
    ),
    "a mapping that is no dict": ({"example": Batch(x=X)}, fpipe.InputError, ["example: got Batch", "dict(batch)"]),
    "batch_dims without targets": (
        {"example": {"x": X}, "batch_dims": ({"x": 0},)},
        fpipe.InputError,
        ["batch_dims: got ({'x': 0},)", "a tree such as ({'x': 0}, 0)", "one for the targets"],
    ),
    "more stages than modules, the loss counted": (
        {"model": nn.Sequential(nn.Linear(WIDTH, WIDTH)), "cuts": None, "schedule": one_f_one_b(3, 3), "example": (X,)},
        fpipe.CutError,
        ["got 3, expected at most 2", "the loss among them", "fewer stages"],
    ),
    "fewer rows than microbatches": (
        {"example": (X[:1],), "targets": Y[:1]},
        fpipe.InputError,
        ["inputs[0]", "[1, 4]", "1 in dimension 0", "at least 2", "drop_last"],
    ),
    "targets of another size": (
        {"targets": Y[:3]},
        fpipe.InputError,
        ["targets: got 3 in dimension 0 of shape [3, 4], expected 4", "of inputs[0]", "batch_dims=((0, None), 0)"],
    ),
    "one row for all": (
        {"example": (X, torch.zeros(1, 4))},
        fpipe.InputError,
        ["inputs[1]: got 1 in dimension 0 of shape [1, 4], expected 4", "of inputs[0]", "(None)"],
    ),
    "offsets that are no rows": (
        {"example": {"x": X, "shift": torch.arange(8)}},
        fpipe.InputError,
        ["inputs['x']: got 4 in dimension 0", "expected 8", "of inputs['shift'], of shape [8]", "batch_dims="],
    ),
    "sizes that are said apart, but do not match": (
        {"targets": Y[:3], "batch_dims": (0, 0)},
        fpipe.InputError,
        ["targets: got 3 in dimension 0", "4 in dimension 0 of inputs[0]", "divisible by 2", "Pad"],
    ),
    "a dimension that is not there": (
        {"batch_dims": 2},
        fpipe.InputError,
        ["inputs[0]", "[4, 4]", "dimension 2", "2 dim"],
    ),
    "a sum of weighted means": (
        {"reduce": "sum", "weight": lambda x, y: len(y)},
        fpipe.InputError,
        ["'sum' besides a"],
    ),
    "another reduction": ({"reduce": "max"}, fpipe.InputError, ["reduce: got 'max'", "'mean', 'sum'"]),
    "batch_dims of another tree": ({"batch_dims": ((0, 1), 0)}, fpipe.InputError, ["batch_dims", "((0, 1), 0)"]),
    "a function of too few parts": (
        {"batch_dims": (lambda x, m: [x], 0)},
        fpipe.InputError,
        ["inputs[0]", "['float32[4, 4]']", "expected 2 tensors"],
    ),
    "a scalar in the batch": ({"example": (torch.tensor(1.0),)}, fpipe.InputError, ["inputs[0]", "shape []"]),
    "an empty batch": ({"example": (X[:0],)}, fpipe.InputError, ["inputs[0]", "[0, 4]"]),
    "a nested leaf": ({"targets": {"a": [Y, Y[:1]]}}, fpipe.InputError, ["targets['a'][1]", "[1, 4]", "inputs[0]"]),
    "no tuple": ({"example": X}, fpipe.InputError, ["example", "Tensor", "tuple", "(x,)"]),
    "a list": ({"example": [X]}, fpipe.InputError, ["example", "list", "tuple"]),
    "no schedule": ({"schedule": one_f_one_b}, fpipe.InputError, ["schedule", "Schedule", "one_f_one_b(ranks=4"]),
    "no such front end": ({"capture": "jit"}, fpipe.InputError, ["capture", "'jit'", "export", "modules"]),
    "an unknown name": ({"cuts": ["44"]}, fpipe.CutError, ["'44'", "Did you mean", "'4'"]),
    "too few cuts": ({"cuts": []}, fpipe.CutError, ["got 1 stages", "expected 2", "Pass 1 cuts"]),
    "too many cuts": ({"cuts": ["2", "4"]}, fpipe.CutError, ["got 3 stages", "expected 2"]),
    "cuts and stages": ({"stages": 2}, fpipe.CutError, ["both", "Drop stages"]),
    "other stages": ({"cuts": None, "stages": 3}, fpipe.CutError, ["got 3 stages", "expected 2"]),
    "a repeated name": (
        {"cuts": ["4", "4"], "schedule": gpipe(ranks=3, microbatches=2)},
        fpipe.CutError,
        ["'4' twice"],
    ),
    "names out of order": (
        {"cuts": ["4", "2"], "schedule": gpipe(ranks=3, microbatches=2)},
        fpipe.CutError,
        ["'2' after '4'", "order of execution", "Put '2' first"],
    ),
    "the first operation": ({"cuts": ["0"]}, fpipe.CutError, ["'0'", "no operation", "Drop one"]),
    "more stages than modules": (
        {"cuts": None, "schedule": gpipe(ranks=30, microbatches=2)},
        fpipe.CutError,
        ["got 30", "expected at most", "fewer stages"],
    ),
    "a loss that is no scalar": (
        {"loss": lambda out, t: (out - t).square()},
        fpipe.CaptureError,
        ["loss", "[2, 4]", "scalar", ".mean()"],
    ),
    "a loss that is no tensor": ({"loss": lambda out, t: 1.0}, fpipe.CaptureError, ["loss", "1.0", "scalar"]),
    "a loss of three values": ({"loss": lambda out, t: (out.mean(), out, t)}, fpipe.CaptureError, ["loss", "scalar"]),
    "an integer loss": ({"loss": lambda out, t: out.argmax()}, fpipe.CaptureError, ["loss", "int64", "floating-point"]),
    "a loss with parameters": (
        {"loss": Counter()},
        fpipe.CaptureError,
        ["loss", "['weight']", "Put them into the model"],
    ),
    "an uncopiable model": (
        {"model": nn.Sequential(nn.Linear(WIDTH, WIDTH)), "cuts": None, "schedule": gpipe(ranks=1, microbatches=2)},
        fpipe.CaptureError,
        ["Sequential", "copy.deepcopy"],
    ),
    "a backward before its forward": (
        {"schedule": backwards_first(ranks=2, microbatches=2)},
        fpipe.ScheduleError,
        ["rank 0, position 0", "0B0", "forward_before_backward"],
    ),
    "a schedule that waits in a circle": (
        {"schedule": crossed(ranks=2, microbatches=2)},
        fpipe.ScheduleError,
        ["rank"],
    ),
    "a schedule that never ends": (
        {"schedule": endless(ranks=2, microbatches=2)},
        fpipe.ScheduleError,
        ["rank 0, position 84", "comes after 84 actions", "[rule: finite]"],
    ),
    "a batch of another dtype than the model": (
        {"example": (X.double(),)},
        fpipe.CaptureError,
        ["module 0 (Linear)", "must have the same dtype", "torch.float64"],
    ),
    "a sparse example": ({"example": (X.to_sparse(),)}, fpipe.InputError, ["inputs[0]", "sparse_coo", "to_dense()"]),
    "a nested example": (
        {"example": (torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),)},
        fpipe.InputError,
        ["inputs[0]", "a nested tensor", "padded"],
    ),
    "a model that cannot be modules": (
        {"model": ZOO["skips"].build(), "capture": "modules"},
        fpipe.CaptureError,
        ["Skips", "nn.Sequential", 'capture="trace"'],
    ),
    "DataParallel": ({"model": nn.DataParallel(MODEL)}, fpipe.InputError, ["DataParallel", "plain module"]),
    "a wrapper inside": (
        {"model": nn.Sequential(MODEL, nn.DataParallel(nn.Linear(WIDTH, WIDTH)))},
        fpipe.InputError,
        ["model 1", "DataParallel"],
    ),
    "a wrapper among parts": (
        {"model": [nn.Linear(WIDTH, WIDTH), nn.DataParallel(nn.Linear(WIDTH, WIDTH))], "capture": "modules"},
        fpipe.InputError,
        ["DataParallel", "plain module"],
    ),
}


@sampled(16)
@pytest.mark.parametrize("what", BAD)
def test_invalid_arguments_of_pipeline_are_refused(what):
    changes, error, words = BAD[what]
    if what == "an uncopiable model":
        changes["model"].lock = __import__("threading").Lock()
    with pytest.raises(error) as caught:
        pipeline(**changes)
    message = str(caught.value)
    assert not [word for word in [*words, "expected"] if word not in message] or error is fpipe.ScheduleError, message
    assert not [word for word in words if word not in message], message
    assert isinstance(caught.value, fpipe.PipelineError)


def test_a_stage_may_begin_at_a_module_that_runs_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH))
    assert [stage.parameters for stage in pipeline(model=model, cuts=["1"]).stages] == [
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
    ]
    with pytest.raises(fpipe.CutError) as caught:
        pipeline(model=model, cuts=["1"], recording=fpipe.Recording(front_end="export"))
    assert "'1', a module that runs no operations itself" in str(caught.value)
    assert "runs next" in str(caught.value)


def test_a_cut_may_be_given_as_one_name():
    assert len(pipeline(cuts="4").stages) == 2


BATCH_CHANGES = {
    "another number of inputs": (((X, X), Y), ["inputs", "expected"]),
    "a dict for a tuple": (({"x": X}, Y), ["inputs: got nothing at [0], a tensor at ['x'], expected a tensor at [0]"]),
    "another number of rows than targets": (((X[:2],), Y), ["targets: got 4 in", "expected 2, as in", "inputs[0]"]),
    "no rows": (((X[:0],), Y[:0]), ["inputs[0]", "[0, 4]", "at least 1"]),
    "another width": (((X[:, :3],), Y), ["inputs[0]", "float32[4, 3]", "example has float32[4, 4]"]),
    "another number of dimensions": (((X[None],), Y), ["inputs[0]", "float32[1, 4, 4]", "another pipeline"]),
    "sparse": (((X.to_sparse(),), Y), ["inputs[0]", "sparse_coo", "to_dense()"]),
    "on meta": (((X.to("meta"),), Y), ["inputs[0]", "meta device", "Pass the batch"]),
    "another dtype": (((X.double(),), Y), ["inputs[0]", "float64[4, 4]", "float32[4, 4]"]),
    "targets of another shape": (((X,), Y[:2]), ["targets: got 2 in dimension 0 of shape [2, 4]", "meta"]),
    "targets of another dtype": (((X,), Y.long()), ["targets", "int64[4, 4]"]),
    "targets of another tree": (((X,), [Y]), ["targets", "expected"]),
    "no targets": (((X,), None), ["targets", "got nothing", "expected float32[4, 4]"]),
    "no inputs": ((None, Y), ["inputs[0]", "got nothing"]),
    "no tensor": (((X.tolist(),), Y), ["inputs", "expected"]),
}


@pytest.fixture(scope="module")
def normalised():
    case = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), rows_of(), mse, ("", "1", ""))
    return build(case, one_f_one_b(ranks=2, microbatches=2), 4)


def functions(pipe, model):
    """Every function that takes state and a batch, with the state that it takes."""
    whole = dict(model.named_parameters()), dict(model.named_buffers())
    yield fpipe.value_and_grad(pipe), pipe.init(model)
    yield fpipe.evaluate(pipe), pipe.init(model)
    yield fpipe.reference(pipe), whole


@pytest.mark.parametrize("what", BATCH_CHANGES)
def test_a_batch_unlike_the_example_is_refused(normalised, what):
    pipe, model, *_ = normalised
    batch, words = BATCH_CHANGES[what]
    for function, state in functions(pipe, model):
        if what == "no targets" and "evaluation" in function.__qualname__:
            continue
        with pytest.raises(fpipe.InputError) as caught:
            function(*state, *batch)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("capture", ["export", "modules"])
def test_dropout_without_a_seed_is_refused(capture):
    pipe, model, inputs, targets = build(ZOO["dropping"], one_f_one_b(ranks=2, microbatches=2), 4, capture=capture)
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        with pytest.raises(
            fpipe.InputError, match=r"seed: got none, expected an integer.*draws random numbers.*seed=step"
        ):
            function(*pipe.init(model), inputs, targets)


def test_dropout_needs_no_seed_in_evaluation():
    pipe, model, inputs, targets = build(ZOO["gpt_dropout"], one_f_one_b(ranks=2, microbatches=2), 4)
    assert fpipe.evaluate(pipe)(*pipe.init(model), inputs, targets).loss.isfinite()


def test_tensors_made_in_inference_mode_are_refused_by_training_steps(normalised):
    pipe, model, inputs, targets = normalised
    params, buffers = pipe.init(model)
    with torch.inference_mode():
        made = {"0.bias": params["0.bias"].clone()}, tuple(x.clone() for x in inputs)
    for step in (fpipe.value_and_grad(pipe), fpipe.reference(pipe)):
        for name, arguments in (
            ("params['0.bias']", ({**params, **made[0]}, buffers, inputs, targets)),
            ("inputs[0]", (params, buffers, made[1], targets)),
        ):
            with pytest.raises(fpipe.InputError, match="inference_mode") as caught:
                step(*arguments)
            assert str(caught.value).startswith(name)


def test_models_may_have_parameters_of_two_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x):
            return self.high(self.low(x).double())

    model = Mixed()
    pipe = fpipe.pipeline(model, example=(X,), loss=torch.mean, schedule=gpipe(2, 2), cuts=["high"])
    fpipe.verify(pipe, model, (X,))


def test_nothing_runs_before_everything_is_checked():
    """A bad batch is refused before any stage function is called."""
    pipe, model, inputs, targets = build(ZOO["mlp"], one_f_one_b(ranks=2, microbatches=2), 4)
    spans = []
    step = fpipe.value_and_grad(pipe, record=spans.append)
    params, buffers = pipe.init(model)
    for arguments in (
        (params, {"x": X}, inputs, targets),
        (params, buffers, inputs, targets.double()),
        (params, buffers, inputs, None),
    ):
        with pytest.raises(fpipe.InputError):
            step(*arguments)
    assert not spans
