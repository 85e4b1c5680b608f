# SPDX-License-Identifier: Apache-2.0
"""The recorded functions of a stage are pure and keep little; a stage that cannot be recorded is left to autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fpipe
from fpipe.stages.autograd import Autograd
from fpipe.stages.graph.simplification import LARGEST_CONSTANT
from fpipe.stages.recorded import Recorded
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_h1
from tests.common import written_layers
from tests.common.cases import WIDTH, mse
from tests.common.sizes import by_night
from tests.common.written_layers import gelu


@pytest.mark.parametrize("s", [0, 1])
def test_the_input_half_keeps_as_little_as_possible(s):
    """Of linear layers it keeps only the inputs and the gradients of the outputs, also in the first stage."""
    pipe, model, inputs, _ = written_layers.build(lambda m, x: gelu(m, gelu(m, x)), "graph")
    stage, x = pipe.stages[s], inputs[0][:2]
    params, _ = pipe.init(model)
    outputs, _, residuals = stage.forward(stage.leaves(params), (), (x,), 0)
    kept = stage.backward_input(residuals, (torch.randn_like(outputs[0]),))[1]
    assert not residuals, "the residuals of the forward are released"
    assert sum(tensor.numel() for tensor in kept) == 4 * x.numel()
    stage.backward_weight(kept)
    assert not kept


def test_recorded_functions_are_pure():
    """They return the same twice and change no argument; both halves together equal the whole backward."""
    pipe, model, inputs, _ = written_layers.build(gelu, "graph")
    stage, x = pipe.stages[1], inputs[0][:2]
    leaves = stage.leaves(pipe.init(model)[0])
    before = [tensor.clone() for tensor in (*leaves, x)]
    forward = [stage.forward(leaves, (), (x,), 0) for _ in range(2)]
    assert same_bits(forward[0][0][0], forward[1][0][0])
    assert same_bits(forward[0][0][0], stage.evaluate(leaves, (), (x,), 0)[0][0])
    cotangent = torch.randn_like(x)
    outgoing, grads = stage.backward(forward[0][2], (cotangent,))
    half, deferred = stage.backward_input(forward[1][2], (cotangent,))
    assert all(map(same_bits, (*outgoing, *grads), (*half, *stage.backward_weight(deferred))))
    assert all(map(same_bits, (*leaves, x), before))


def test_a_stage_that_reads_values_is_left_to_autograd():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x) if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reading())
    how, x = one_f_one_b(ranks=2, microbatches=2), torch.randn(4, WIDTH)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=x,
        loss=mse,
        schedule=how,
        cuts=["1"],
        recording=fpipe.Recording(unsplittable=[Reading]),
        gradients=fpipe.Gradients(backward="graph"),
    )
    assert [type(stage.functions) for stage in pipe.stages] == [Recorded, Autograd]
    assert "  backward    by autograd: it reads the values of tensors" in str(pipe)
    assert str(pipe).count("  backward  ") == 1
    fpipe.verify(pipe, model, (x,), x)


def test_operators_that_modes_do_not_see_are_left_to_autograd():
    def hidden(module, x):
        with torch.utils._python_dispatch._disable_current_modes():
            y = x * 2
        return functional.linear(y, module.weight, module.bias)

    pipe, *_ = written_layers.build(hidden, "graph")
    assert "by autograd" in pipe.stages[1].functions.remark


def test_an_unknown_backward_is_refused():
    with pytest.raises(fpipe.InputError, match="backward: got 'graphs', expected one of autograd, graph, "):
        written_layers.build(gelu, "graphs")


def test_only_small_constants_are_kept():
    """Such as the one with which a backward begins, but not tensors of the size of a value."""
    for rows, count in ((2, 1), (2 * LARGEST_CONSTANT, 0)):
        x = torch.randn(rows, WIDTH)
        pipe = fpipe.pipeline(
            nn.Sequential(nn.Linear(WIDTH, WIDTH)),
            example=(x,),
            loss=lambda out: (out * torch.ones_like(out)).sum(),
            schedule=one_f_one_b(ranks=1, microbatches=1),
            gradients=fpipe.Gradients(backward="graph"),
        )
        known = pipe.stages[0].functions.forward.__globals__.values()
        assert sum(isinstance(one, torch.Tensor) and one.numel() > 1 for one in known) == count


class Conjugate(nn.Module):
    """Makes a view that conjugates when it is read, which crosses a cut after it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        turned = torch.fft.fft(self.a(x)).conj()
        return self.b(x) + turned.real


@pytest.mark.parametrize("backward", ["graph", "autograd"])
def test_a_conjugate_view_crosses_a_cut(backward):
    model, x = Conjugate(), torch.randn(4, WIDTH)
    pipe = fpipe.pipeline(
        model,
        example=(x,),
        targets=x,
        loss=mse,
        schedule=one_f_one_b(2, 2),
        cuts=["b"],
        gradients=fpipe.Gradients(backward=backward),
    )
    assert fpipe.verify(pipe, model, (x,), x).eager


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_step_under_saved_tensor_hooks_or_anomaly_detection_runs_under_autograd():
    """Its bits are those of other steps; what the hooks do to a saved tensor counts."""
    pipe, model, inputs, targets = written_layers.build(gelu, "graph")
    step, state, packed = fpipe.value_and_grad(pipe), pipe.init(model), []
    _, grads = step(*state, inputs, targets)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one, lambda one: one):
        _, hooked = step(*state, inputs, targets)
    assert packed
    assert all(same_bits(one, hooked[name]) for name, one in grads.items())
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan values"):
        step({name: one * torch.nan for name, one in state[0].items()}, state[1], inputs, targets)


class Recurrent(nn.Module):
    def __init__(self, mixed):
        super().__init__()
        self.layer, self.mixed = nn.GRU(WIDTH, WIDTH, batch_first=True), mixed

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return self.layer(x)[0].float()


@by_night
@pytest.mark.parametrize("mixed", [False, True])
def test_a_stage_whose_calls_unroll_is_left_to_autograd_unless_backwards_are_split(mixed):
    """A recurrent layer unrolls under autocast, which casts in each step of its loop."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurrent(mixed)), torch.randn(2, 160, WIDTH)
    pipes = [
        fpipe.pipeline(model, example=(x,), targets=x, loss=mse, schedule=how(2, 2), cuts=["1"])
        for how in (one_f_one_b, zb_h1)
    ]
    found = [[type(stage.functions) for stage in pipe.stages] for pipe in pipes]
    assert found == [[Recorded, Autograd if mixed else Recorded], [Recorded, Recorded]]
    assert ("torch calls consist of hundreds of operators" in str(pipes[0])) is mixed
