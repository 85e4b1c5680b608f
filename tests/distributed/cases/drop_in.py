# SPDX-License-Identifier: Apache-2.0
"""The drop-in module, and scripts that use it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.scripts import SCHEDULES, SCRIPTS, require_same_training
from tests.distributed.cases.checks import gather, raises
from tests.distributed.cases.registry import CASES, case


def _script(name: str, schedule: str) -> Callable[[int, int], None]:
    def check(rank, size):
        with mock.patch.dict(os.environ, WORLD_SIZE=str(size)):  # as under torchrun
            names = gather(require_same_training(name, schedule))
        assert len(set().union(*names)) > max(map(len, names)), "every rank holds a part"

    return check


for _name, _schedule in itertools.product(SCRIPTS, SCHEDULES):
    CASES[f"a_script_that_can_{_name}_under_{_schedule}"] = _script(_name, _schedule)


@case
def drop_in_modules_follow_what_one_rank_sees(rank, size):
    """A frozen parameter is known to one rank only, and a hook; all build the same pipeline, or all refuse."""
    torch.manual_seed(3)
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 * size)]), torch.randn(8, 4)
    how = one_f_one_b(ranks=size, microbatches=4)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    model(x).backward()
    model.zero_grad()
    model.get_submodule("0").requires_grad_(False)  # on the other ranks, it has no parameters
    model(x).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    assert ("0.weight" in whole) is (rank == 0)
    assert all((grad is None) is (name in ("0.weight", "0.bias")) for name, grad in whole.items())
    plain = torch.cat([net(rows).detach() for rows in x.chunk(4)])  # kernels depend on the number of rows
    assert same_bits(model.eval()(x), plain)
    model.train()
    model.load_state_dict(net.state_dict())  # the names of other ranks are ignored
    with raises(RuntimeError, "Unexpected key(s)", "strange"):
        model.load_state_dict({**net.state_dict(), "strange": x})


@case
def a_drop_in_module_refused_on_one_rank(rank, size):
    net, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]), torch.ones(4, 4)
    how = one_f_one_b(ranks=size, microbatches=2)
    model = fpipe.Pipelined(net, loss=lambda out: out.square().mean(), example=(x,), schedule=how)
    torch.manual_seed(rank)
    if rank:
        next(model.parameters()).register_hook(print)
        with raises(fpipe.InputError, "got a hook on its gradient"):
            model(x)
    else:
        with raises(fpipe.TransportError, "got a hook on its gradient"):
            model(x)
    if rank:
        next(model.parameters())._backward_hooks.clear()
    model(x).backward()
