# SPDX-License-Identifier: Apache-2.0
"""A script for one device, with the lines changed that make its model a drop-in module, computes the same bits."""

import pytest
import torch

import fpipe
from fpipe.drop_in.pipelined import draw_seed
from fpipe.tensors.tree import same_bits
from tests.common.drop_in import batches, make, net
from tests.common.scripts import RUNS, require_same_training, run_script
from tests.common.sizes import sampled


@sampled(1)
@pytest.mark.parametrize(("name", "schedule"), RUNS)
def test_changed_scripts_compute_the_same_bits(name, schedule):
    assert require_same_training(name, schedule) == run_script(name)["model"].state_dict().keys()


def test_dropout_is_that_of_the_reference():
    model = make(net(dropout=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    reference = fpipe.reference(model.pipe)
    for x, y in batches(20):
        state = torch.get_rng_state()
        loss = model(x, targets=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_rng_state(state)
        out, grads = reference(params, buffers, (x,), y, seed=draw_seed())
        params, buffers = {n: p.add(grads[n], alpha=-0.1) for n, p in params.items()}, out.buffers
        assert same_bits(loss.detach(), out.loss)
    for name, value in model.state_dict().items():
        assert same_bits({**params, **buffers}[name], value), name
