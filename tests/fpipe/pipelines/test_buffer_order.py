# SPDX-License-Identifier: Apache-2.0
"""Buffers go from each microbatch to the next as on one device, or the pipeline is refused."""

import pytest

import fpipe
from schedules.files.csv import table
from tests.common.running import build, require_exact
from tests.common.zoo import ZOO


def test_a_stage_that_modifies_buffers_runs_its_microbatches_in_order():
    how = table(rows=("0F1,0F0,0B1,0B0", "1F0,1F1,1B0,1B1"))
    with pytest.raises(fpipe.CutError, match=r"stage 0: got modified buffers .* microbatches \[1, 0\], expected asc"):
        build(ZOO["normalised"], how, 4)


def test_the_backwards_of_a_stage_that_modifies_buffers_may_have_any_order():
    require_exact(ZOO["normalised"], table(rows=("0F0,0C1,0R1,0B1,0B0", "1F0,1F1,1B1,1B0")), order=[1, 0])


def test_a_stage_that_modifies_none_runs_its_microbatches_in_any_order():
    require_exact(ZOO["mlp"], table(rows=("0F1,0F0,0B1,0B0", "1F0,1F1,1B0,1B1")), order=[0, 1])
