# SPDX-License-Identifier: Apache-2.0
"""An execution inside transforms of torch.func gives what plain executions give, bit for bit, or is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import forward_only, gpipe, lower, one_f_one_b, zb_h1

SCHEDULES = (gpipe(2, 3), one_f_one_b(2, 3), zb_h1(2, 3))
X, Y = torch.randn(6, 3), torch.randn(6, 1)


def hidden(params, inputs):
    return torch.tanh(inputs[0] @ params["w"] + params["b"])


def error(params, inputs):
    h, y = inputs
    return ((h @ params[0] - y) ** 2).mean(), h.detach().sum()


STAGES = fpipe.connect_stages([hidden, error])


def functions(how):
    """Return a function from parameters and inputs to results, of stages that are functions; and parameters."""
    program = lower(how, STAGES.graph)
    params = [{"w": torch.randn(3, 3), "b": torch.randn(3)}, [torch.randn(3, 1)]]
    return lambda params, x=X: fpipe.execute(program, STAGES, params, [(), ()], (x,), Y), params


def module(how):
    """Return the same for the stages of a module with a buffer, whose weights are in both stages."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[2].weight = model[0].weight
    record = fpipe.capture(model, example=(X[:2],), targets=Y[:2], loss=functional.mse_loss)
    stages = fpipe.cut(record, at="2")
    params, buffers = stages.init(model)
    program = lower(how, stages.graph)
    return lambda params, x=X: fpipe.execute(program, stages, params, buffers, (x,), Y), params


KINDS = {"functions": functions, "module": module}


def leaves(tree):
    """Return the tensors of parameters or gradients in order."""
    return [leaf for one in tree for leaf in (one.values() if isinstance(one, dict) else one)]


def require_same(got, want):
    assert len(got) == len(want)
    assert all(map(same_bits, got, want))


@given(st.sampled_from([*KINDS]), st.sampled_from(SCHEDULES))
def test_gradients_of_the_loss_are_those_that_the_execution_returns(kind, how):
    execute, params = KINDS[kind](how)
    out, grads = execute(params)
    loss, pull = vjp(lambda params: execute(params)[0].loss, params)
    assert same_bits(loss, out.loss)
    require_same(leaves(pull(torch.tensor(1.0))[0]), leaves(grads))
    require_same(leaves(pull(torch.tensor(4.0))[0]), [4 * one for one in leaves(grads)])
    require_same(leaves(jacrev(lambda params: execute(params)[0].loss)(params)), leaves(grads))

    def both(params):
        done, grads = execute(params)
        return done.loss, ([one for one in done.aux if one is not None], done.buffers, grads)

    again, (value, (aux, buffers, inner)) = grad_and_value(both, has_aux=True)(params)
    require_same([value, *leaves(again), *leaves(inner)], [out.loss, *leaves(grads), *leaves(grads)])
    require_same(aux, [one for one in out.aux if one is not None])
    require_same(leaves(buffers), leaves(out.buffers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_over_parameters_and_batches_executes_each(kind):
    execute, params = KINDS[kind](SCHEDULES[1])
    sets = [torch.utils._pytree.tree_map(lambda one, k=k: one * k, params) for k in (1.0, 2.0, -1.0)]
    stacked = torch.utils._pytree.tree_map(lambda *ones: torch.stack(ones), *sets)
    batches = torch.randn(3, *X.shape)

    def run(params, x):
        return execute(params, x)[0].loss

    wanted = [execute(one, x) for one, x in zip(sets, batches, strict=True)]
    require_same([*vmap(run)(stacked, batches)], [out.loss for out, _ in wanted])
    require_same([*vmap(run, in_dims=(None, 0))(params, batches)], [run(params, x) for x in batches])
    require_same([*vmap(run, in_dims=(None, 1))(params, batches.movedim(0, 1))], [run(params, x) for x in batches])
    found = leaves(vmap(grad(run))(stacked, batches))
    require_same(found, [torch.stack(ones) for ones in zip(*[leaves(grads) for _, grads in wanted], strict=True)])
    summed = leaves(grad(lambda params: vmap(run)(params, batches).sum())(stacked))
    require_same(summed, found)


def test_a_map_over_seeds_draws_for_each():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    record = fpipe.capture(model, example=(X[:2],), targets=Y[:2], loss=functional.mse_loss)
    stages = fpipe.cut(record, at="1")
    params, buffers = stages.init(model)
    program = lower(one_f_one_b(2, 3), stages.graph)

    def run(seed):
        return fpipe.execute(program, stages, params, buffers, (X,), Y, seed=seed)[0].loss

    losses = vmap(run)(torch.tensor([3, 4, 3]))
    require_same([*losses], [run(3), run(4), run(3)])
    assert losses[0] != losses[1]


def test_outputs_can_be_mapped():
    execute, params = functions(forward_only(2, 3))
    batches = torch.randn(2, *X.shape)
    (found, _), *_ = vmap(lambda x: execute(params, x)[0].outputs)(batches)
    require_same([*found], [execute(params, x)[0].outputs[0][0] for x in batches])


REFUSED = {
    "forward mode": (lambda run, params: jvp(run, (params,), (params,)), "execute: got forward-mode"),
    "second derivatives": (
        lambda run, params: grad(lambda one: grad(run)(one)[1][0].sum())(params),
        r"params\[0\]\['b'\]: got a tensor inside 2 gradients of torch.func, expected one",
    ),
    "hessians": (lambda run, params: hessian(run)(params), "execute: got forward-mode"),
    "inputs": (
        lambda run, params: grad(lambda x: run(params, x))(X),
        r"inputs\[0\]: got a tensor inside 1 gradient of torch.func, expected none",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch, at the first jvp
@pytest.mark.parametrize("what", REFUSED)
def test_other_derivatives_are_refused(what):
    differentiate, words = REFUSED[what]
    execute, params = functions(gpipe(2, 3))
    with pytest.raises(fpipe.InputError, match=words):
        differentiate(lambda params, x=X: execute(params, x)[0].loss, params)


def test_gradients_of_outputs_are_refused():
    execute, params = functions(forward_only(2, 3))
    with pytest.raises(fpipe.InputError, match="program: got one of forwards only inside a gradient"):
        grad(lambda params: execute(params)[0].outputs[0][0].sum())(params)


def test_a_transport_takes_no_transforms():
    _, params = functions(gpipe(2, 3))
    stacked = torch.utils._pytree.tree_map(lambda one: torch.stack([one, one]), params)
    program, ranks = lower(gpipe(2, 3), STAGES.graph), fpipe.processes(ranks=2)
    run = vmap(lambda params: fpipe.execute(program, STAGES, params, [(), ()], (X,), Y, transport=ranks)[0].loss)
    with pytest.raises(fpipe.InputError, match="inside a transform"):
        run(stacked)
