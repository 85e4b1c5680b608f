# SPDX-License-Identifier: Apache-2.0
"""A step that fails in any action says in which, leaves nothing behind, and the next one is right; in one process."""

import pytest
import torch
from torch import nn

import fpipe
from fpipe.stages.backends import splits
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_v
from tests.common.sizes import covering, sampled

MICROBATCHES = 2


class Trap:
    """Raises when it has been stepped on often enough."""

    def __init__(self):
        self.left = -1

    def step(self, *_):
        self.left -= 1
        if not self.left:
            raise KeyError("on purpose")


TRAPS = {place: Trap() for place in ("action", "stage", "hook", "loss", "join")}


def step_on(place):
    TRAPS[place].step()


class Trapped(nn.Module):
    """A layer with dropout, a buffer, and traps in its forward and in its backward."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        step_on("stage")
        y = nn.functional.dropout(self.norm(self.inner(x)), 0.5)
        if y.requires_grad:
            y.register_hook(lambda grad: step_on("hook"))
        return y


def loss(outputs, targets):
    step_on("loss")
    return (outputs - targets).square().mean()


def join(parts):
    step_on("join")
    return torch.cat(list(parts))


def build(how):
    torch.manual_seed(0)
    model = nn.Sequential(*[Trapped() for _ in range(how.stages)])
    x, y = torch.randn(2, 2 * MICROBATCHES, 4)
    cuts, whole = [str(s) for s in range(1, how.stages)], [*map(str, range(how.stages)), "loss"]
    return (
        model,
        x,
        y,
        fpipe.pipeline(
            model,
            example=(x,),
            targets=y,
            loss=loss,
            schedule=how,
            cuts=cuts,
            recording=fpipe.Recording(whole=whole),
            microbatching=fpipe.Microbatching(output_dims=join),
        ),
    )


def times(how, place):
    """How often a step comes to a place: never in the model, if it is recorded, as where backwards are split."""
    if splits(how) and place in ("stage", "hook", "loss"):
        return 0
    actions = [action for rank in range(how.ranks) for action in how.actions(rank)]
    kinds = {"stage": "F", "hook": "BI", "action": "FBIW"}.get(place, "")
    return {"join": 1, "loss": MICROBATCHES}.get(place, sum(action.kind in kinds for action in actions))


@sampled(1)
@covering(schedule=[zb_v, one_f_one_b], place=[*TRAPS])
def test_the_next_step_is_right(schedule, place):
    model, x, y, pipe = build(schedule(2, MICROBATCHES))
    state, step = pipe.init(model), fpipe.value_and_grad(pipe, outputs=True, record=lambda span: step_on("action"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = [*model.parameters(), *model.buffers()]
    drawn = torch.get_rng_state()
    good, grads = step(*state, (x,), y, seed=3)
    for left in range(1, times(pipe.schedule, place) + 1):
        TRAPS[place].left = left
        with pytest.raises(KeyError, match="on purpose"):
            step(*state, (x,), y, seed=3)
        found, again = step(*state, (x,), y, seed=3)
        assert same_bits(found.loss, good.loss)
        assert all(same_bits(again[name], grads[name]) for name in grads)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(a is b for a, b in zip(held, [*model.parameters(), *model.buffers()], strict=True))
    assert all(same_bits(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_error_names_rank_and_action():
    model, x, y, pipe = build(one_f_one_b(2, MICROBATCHES))
    TRAPS["loss"].left = 2
    with pytest.raises(KeyError) as raised:
        fpipe.value_and_grad(pipe)(*pipe.init(model), (x,), y, seed=3)
    assert raised.value.__notes__ == ["rank 1, position 5, 1F1"]
