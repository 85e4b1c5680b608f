# SPDX-License-Identifier: Apache-2.0
"""What a step must know beforehand: sums to go on from, the scale of the loss, and the total weight.

Held against a plain loop over all microbatches of all steps, which uses nothing of fpipe.
"""

from itertools import product

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fpipe
from schedules import dualpipe, one_f_one_b, zb_h1, zb_v
from tests.common.cases import BACKWARDS, mse
from tests.common.comparison import Result, assert_same
from tests.common.loops import loop
from tests.common.running import build
from tests.common.sizes import by_day, covering, in_turn, sampled
from tests.common.zoo import ZOO

HOW = {"one_f_one_b": one_f_one_b(2, 4), "zb_h1": zb_h1(2, 4), "zb_v": zb_v(2, 4)}
STEPS, ROWS = 3, 8
CASES = ["mlp", "gpt", "one_weight", "normalised", "unet", "unused", "several", "own_loss", "mixed_precision"]


def slice_step(tree, k):
    """Step `k` of a batch for all steps."""
    return optree.tree_map(lambda one: one.chunk(STEPS)[k] if isinstance(one, Tensor) else one, tree)


def accumulate(pipe, model, inputs, targets, **options):
    """The gradients and buffers after all steps, each of which goes on from the sums of the last."""
    step, (params, buffers), grads = fpipe.value_and_grad(pipe), pipe.init(model), None
    for k in range(STEPS):
        out, grads = step(params, buffers, slice_step(inputs, k), slice_step(targets, k), onto=grads, **options)
        buffers = out.buffers
    return Result(None, None, grads, buffers)


@sampled(2)
@pytest.mark.parametrize(("name", "way"), in_turn(by_day(CASES, 2), product(HOW, BACKWARDS)), ids=str)
def test_steps_go_on_from_earlier_sums(name, way):
    how, backward = way
    case, microbatches = ZOO[name], HOW[how].microbatches
    model, inputs, targets = case.make(STEPS * ROWS)
    pipe = fpipe.pipeline(
        model,
        example=slice_step(inputs, 0),
        targets=slice_step(targets, 0),
        loss=case.loss,
        schedule=HOW[how],
        cuts=case.at(HOW[how].stages),
        gradients=fpipe.Gradients(backward=backward),
    )
    got = accumulate(pipe, model, inputs, targets, total=STEPS * microbatches)
    wanted = loop(model, case.loss, inputs, targets, STEPS * microbatches)
    assert_same(got, wanted._replace(loss=None, outputs=None))


def mlp_step(how=HOW["zb_h1"]):
    """A step of a small model, its parameters and buffers, and a batch."""
    pipe, model, inputs, targets = build(ZOO["mlp"], how, ROWS, capture="trace")
    return fpipe.value_and_grad(pipe), pipe.init(model), inputs, targets


def test_a_step_adds_to_the_memory_that_it_is_passed():
    step, state, inputs, targets = mlp_step()
    _, grads = step(*state, inputs, targets)
    where = {name: grad.data_ptr() for name, grad in grads.items()}
    _, sums = step(*state, inputs, targets, onto=grads)
    assert {name: grad.data_ptr() for name, grad in sums.items()} == where


class Optional(nn.Module):
    """Without the flag, the second layer is not used, and has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        x = self.first(x)
        return self.second(x) if both else x * 2


@sampled(2)
@pytest.mark.parametrize("flags", [(0, 1), (1, 0), (0, 0), (0, 1, 0), (1, 0, 1)])
def test_sums_of_parameters_that_some_steps_do_not_use(flags):
    model, batches = Optional(), torch.randn(len(flags), 4, 4)
    example = (batches[0], True)
    pipe = fpipe.pipeline(model, example=example, loss=torch.mean, schedule=one_f_one_b(1, 2))
    step, state, grads = fpipe.value_and_grad(pipe), pipe.init(model), None
    for x, flag in zip(batches, flags, strict=True):
        _, grads = step(*state, (x, bool(flag)), onto=grads, total=2 * len(flags))
        for part in x.chunk(2):
            (model(part, bool(flag)).mean() / (2 * len(flags))).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(Result(None, None, grads, {}), Result(None, None, wanted, {}))


def count(inputs, targets):
    return (targets != -100).sum()


def test_a_mean_over_tokens_is_exact_over_several_steps():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    ids, targets = torch.randint(9, (STEPS * ROWS, 6)), torch.randint(9, (STEPS * ROWS, 6))
    targets[torch.rand(targets.shape) < 0.3] = -100

    def loss(outputs, wanted):
        return functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten())

    pipe = fpipe.pipeline(
        model,
        example=(ids[:ROWS],),
        targets=targets[:ROWS],
        loss=loss,
        schedule=zb_h1(2, 4),
        cuts=["1"],
        microbatching=fpipe.Microbatching(weight=count),
    )
    got = accumulate(pipe, model, (ids,), targets, total=int(count(None, targets)))
    wanted = loop(model, loss, (ids,), targets, STEPS * 4, weight=count)
    assert_same(got, wanted._replace(loss=None, outputs=None))


@pytest.mark.parametrize(("way", "scale"), in_turn(by_day(product(HOW, BACKWARDS), 3), [1024.0, 3.7, 0.3]), ids=str)
def test_the_backward_starts_from_the_scale(way, scale):
    how, backward = way
    case, how = ZOO["tied_sequence"], HOW[how]
    pipe, model, inputs, targets = build(case, how, ROWS, capture="trace", backward=backward)
    out, grads = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets, scale=scale)
    plain, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    other = fpipe.reference(pipe)(*pipe.init(model), inputs, targets, scale=scale)[1]
    assert torch.equal(out.loss, plain.loss)
    for i in range(how.microbatches):
        x, y = inputs[0].chunk(how.microbatches)[i], targets.chunk(how.microbatches)[i]
        (case.loss(model(x), y) / how.microbatches * scale).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert_same(Result(None, None, grads, {}), Result(None, None, wanted, {}))
    assert_same(Result(None, None, other, {}), Result(None, None, wanted, {}))


def test_scaled_gradients_of_half_precision_do_not_underflow():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    x = torch.randn(4, 8, dtype=torch.half)

    def loss(outputs):
        return outputs.float().mean() * 1e-7

    pipe = fpipe.pipeline(model, example=(x,), loss=loss, schedule=one_f_one_b(2, 2), cuts=["1"])
    step, state = fpipe.value_and_grad(pipe), pipe.init(model)
    assert not any(grad.any() for grad in step(*state, (x,))[1].values())
    assert all(grad.any() for grad in step(*state, (x,), scale=2.0**16)[1].values())


SUMS = {
    "an unknown name": (lambda w: {"7.weight": w}, r"onto: got gradients of \['7.weight'\], expected only trainable"),
    "another shape": (lambda w: {"0.weight": w[:1]}, r"onto\['0.weight'\]: got float32\[1, 4\], expected"),
    "another dtype": (lambda w: {"0.weight": w.double()}, r"onto\['0.weight'\]: got float64\[4, 4\], expected"),
    "no values": (lambda w: {"0.weight": w.to("meta")}, r"onto\['0.weight'\]: got a tensor on the meta device"),
    "a flag": (lambda w: {"0.weight": w.clone().requires_grad_()}, r"float32\[4, 4\] that requires a gradient"),
    "one row": (lambda w: {"0.weight": w[:1].expand(4, 4)}, r"onto\['0.weight'\]: got memory that it shares with"),
    "one for two": (lambda w: {"0.weight": w, "2.weight": w}, r"memory that it shares with onto\['2.weight'\]"),
    "a list": (lambda w: [w], "onto: got list, expected a dict"),
    "a parameter": (None, r"onto\['0.weight'\]: got memory that it shares with params\['0.weight'\]"),
    "a number": (lambda w: {"0.weight": 1.0}, r"onto\['0.weight'\]: got float, expected a tensor"),
}
NUMBERS = {
    "scale=0": ({"scale": 0}, "scale: got 0, expected a finite number above 0"),
    "scale=inf": ({"scale": float("inf")}, "scale: got inf"),
    "scale=True": ({"scale": True}, "scale: got True"),
    "scale=tensor": ({"scale": torch.ones(())}, r"scale: got tensor\(1.\).*Pass a float"),
    "total=0": ({"total": 0}, "total: got 0, expected a finite number above 0"),
    "total=text": ({"total": "8"}, "total: got '8'"),
    "total=3": ({"total": 3}, "total: got 3, expected at least 4, the weight of the microbatches of this step"),
}


@sampled(2)
@pytest.mark.parametrize("what", SUMS)
def test_sums_that_a_step_cannot_add_to_are_refused(what):
    step, state, inputs, targets = mlp_step()
    make, message = SUMS[what]
    grads = step(*state, inputs, targets)[1]
    before = {name: grad.clone() for name, grad in grads.items()}
    sums = {"0.weight": state[0]["0.weight"].detach()} if make is None else make(grads["0.weight"])
    with pytest.raises(fpipe.InputError, match=message):
        step(*state, inputs, targets, onto=sums)
    assert all(torch.equal(grads[name], before[name]) for name in before)


@sampled(2)
@covering(use=[fpipe.value_and_grad, fpipe.reference], what=[*NUMBERS])
def test_numbers_that_a_step_cannot_use_are_refused(use, what):
    pipe, model, inputs, targets = build(ZOO["mlp"], HOW["zb_h1"], ROWS, capture="trace")
    given, message = NUMBERS[what]
    with pytest.raises(fpipe.InputError, match=message):
        use(pipe)(*pipe.init(model), inputs, targets, **given)


def test_replicas_go_on_from_earlier_sums_once():
    step, state, inputs, targets = mlp_step(dualpipe(2, 4))
    once = step(*state, inputs, targets)[1]
    zeros = {name: torch.full_like(grad, -0.0) for name, grad in once.items()}
    assert_same(Result(None, None, step(*state, inputs, targets, onto=zeros)[1], {}), Result(None, None, once, {}))


def test_the_total_changes_what_losses_are_divided_by():
    case = ZOO["mlp"]
    pipe, model, inputs, targets = build(case, HOW["one_f_one_b"], ROWS, capture="trace")
    out, _ = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets, total=12)
    parts = zip(inputs[0].chunk(4), targets.chunk(4), strict=True)
    losses = [mse(model(x), y) / 12 for x, y in parts]
    assert torch.equal(out.loss, ((losses[0] + losses[1]) + losses[2]) + losses[3])


def precise_loop(model, loss, inputs, targets, microbatches):
    """Gradients in float32: each microbatch's, as it is computed in low precision, is added to them."""
    sums = {}
    for x, y in zip(inputs[0].chunk(microbatches), targets.chunk(microbatches), strict=True):
        model.zero_grad()
        (loss(model(x), y) / microbatches).backward()
        for name, p in model.named_parameters():
            sums[name] = p.grad.float() if name not in sums else sums[name] + p.grad.float()
    return sums


@sampled(2)
@covering(how=[*HOW], backward=BACKWARDS)
def test_gradients_of_low_precision_are_added_in_float32(how, backward):
    case, how = ZOO["tied_sequence"], HOW[how]
    model, inputs, targets = case.make(ROWS)
    model = model.bfloat16()
    pipe = fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=case.loss,
        schedule=how,
        cuts=case.at(how.stages),
        gradients=fpipe.Gradients(backward=backward),
    )
    _, grads = fpipe.value_and_grad(pipe, sums=torch.float32)(*pipe.init(model), inputs, targets)
    _, other = fpipe.reference(pipe, sums=torch.float32)(*pipe.init(model), inputs, targets)
    wanted = precise_loop(model, case.loss, inputs, targets, how.microbatches)
    assert_same(Result(None, None, grads, {}), Result(None, None, wanted, {}))
    assert_same(Result(None, None, other, {}), Result(None, None, wanted, {}))
    _, plain = fpipe.value_and_grad(pipe)(*pipe.init(model), inputs, targets)
    assert any(not torch.equal(plain[name].float(), wanted[name]) for name in wanted)


def test_replicas_add_in_float32():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]).bfloat16()
    x, how = torch.randn(8, 4, dtype=torch.bfloat16), dualpipe(2, 4)
    pipe = fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=how, cuts=["1"])
    step, plain = fpipe.value_and_grad(pipe, sums=torch.float32), fpipe.reference(pipe, sums=torch.float32)
    state, got, wanted = pipe.init(model), None, None
    for _ in range(2):
        got = step(*state, (x,), onto=got)[1]
        wanted = plain(*state, (x,), onto=wanted)[1]
    assert {grad.dtype for grad in got.values()} == {torch.float32}
    assert_same(Result(None, None, got, {}), Result(None, None, wanted, {}))


@pytest.mark.parametrize("sums", [torch.int64, "float32"])
def test_a_dtype_in_which_nothing_can_be_added_is_refused(sums):
    pipe, *_ = build(ZOO["mlp"], HOW["zb_h1"], ROWS, capture="trace")
    for use in (fpipe.value_and_grad, fpipe.reference):
        with pytest.raises(fpipe.InputError, match=r"sums: got .*, expected a dtype"):
            use(pipe, sums=sums)
