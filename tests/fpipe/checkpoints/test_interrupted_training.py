# SPDX-License-Identifier: Apache-2.0
"""Whole training loops, with clipping, groups and a learning rate for each step, equal a plain loop when interrupted.

Twenty steps, saved twice and resumed on two other schedules, against a plain loop that uses nothing of fpipe.
"""

import pytest

from schedules import gpipe, one_f_one_b, zb_h1, zb_v
from tests.common.sizes import by_night
from tests.common.training import MICROBATCHES, MODELS, require_same_history, train_alone, train_in_parts

PARTS = {
    "mlp": (one_f_one_b(4, MICROBATCHES), zb_v(2, MICROBATCHES), gpipe(1, MICROBATCHES)),
    "gpt": (zb_h1(4, MICROBATCHES), one_f_one_b(2, MICROBATCHES), zb_v(2, MICROBATCHES)),
    "llama": (zb_v(2, MICROBATCHES), zb_h1(2, MICROBATCHES), one_f_one_b(4, MICROBATCHES)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=by_night if name == "llama" else ()) for name in MODELS])
def test_an_interrupted_run_equals_a_plain_loop(name, tmp_path):
    found = train_in_parts(name, [(how, None) for how in PARTS[name]], tmp_path)
    require_same_history(found, train_alone(name))
