# SPDX-License-Identifier: Apache-2.0
"""Every case runs in some job, and those of the day are among those of the night."""

import pytest

from tests.distributed import selection
from tests.distributed.cases import CASES

SIZES = (2, 4, 8)


def test_every_case_runs_by_night():
    assert {name for size in SIZES for name in selection.names(size, nightly=True)} == CASES.keys() - selection.ALONE


@pytest.mark.parametrize("size", SIZES)
def test_what_runs_by_day_runs_by_night_in_the_same_job(size):
    day, night = (selection.names(size, nightly=nightly) for nightly in (False, True))
    assert set(day) <= set(night)
    assert size == 8 or day[-1] == night[-1] == selection.LAST


def test_a_case_is_left_for_the_night_only_by_name():
    day = {name for size in SIZES for name in selection.names(size, nightly=False)}
    assert day == CASES.keys() - selection.NEEDS_NIGHT - selection.ALONE


def test_the_cases_that_are_named_exist():
    named = [found for found in vars(selection).values() if isinstance(found, set)]
    assert set().union(*named) <= CASES.keys() | {model for model, _ in selection.ZOO_CASES.values()}
