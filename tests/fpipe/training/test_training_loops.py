# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of training have the bits of a plain loop: losses, norms, parameters, buffers, optimizer state.

Also where they were interrupted: twenty steps, saved twice and resumed on two other schedules.
"""

from functools import cache

import pytest

from schedules import gpipe, one_f_one_b, zb_h1, zb_v
from tests.common.sizes import by_night, in_turn, sampled
from tests.common.training import (
    MICROBATCHES,
    MODELS,
    require_same_history,
    train,
    train_alone,
    train_in_parts,
    train_low,
    train_low_alone,
    train_scaled,
    train_scaled_alone,
)

alone = cache(train_alone)


@sampled(1)
@pytest.mark.parametrize(("name", "schedule"), in_turn(MODELS, [one_f_one_b, zb_h1, zb_v]))
@pytest.mark.parametrize("ranks", [2])
def test_training_in_one_process_is_the_plain_loop(name, schedule, ranks):
    got, want = train(name, schedule(ranks, MICROBATCHES)), alone(name)
    require_same_history(got, want)
    assert got.params.keys() == want.params.keys()
    assert got.buffers.keys() == want.buffers.keys()
    assert got.state.keys() == want.state.keys()


def test_donating_changes_no_bits():
    require_same_history(train("gpt", one_f_one_b(2, MICROBATCHES), donate=True), alone("gpt"))


def test_a_scaled_loss_skips_and_grows_as_torch_alone():
    """Under autocast to float16, some steps overflow and are skipped."""
    require_same_history(train_scaled(zb_v(2, MICROBATCHES)), train_scaled_alone())


def test_parameters_in_bfloat16_follow_masters_in_float32():
    require_same_history(train_low(zb_h1(2, MICROBATCHES)), train_low_alone())


PARTS = {
    "mlp": (one_f_one_b(4, MICROBATCHES), zb_v(2, MICROBATCHES), gpipe(1, MICROBATCHES)),
    "gpt": (zb_h1(4, MICROBATCHES), one_f_one_b(2, MICROBATCHES), zb_v(2, MICROBATCHES)),
    "llama": (zb_v(2, MICROBATCHES), zb_h1(2, MICROBATCHES), one_f_one_b(4, MICROBATCHES)),
}


@sampled(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=by_night if name == "llama" else ()) for name in MODELS])
def test_an_interrupted_run_equals_a_plain_loop(name, tmp_path):
    found = train_in_parts(name, [(how, None) for how in PARTS[name]], tmp_path)
    require_same_history(found, train_alone(name))
