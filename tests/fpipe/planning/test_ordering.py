# SPDX-License-Identifier: Apache-2.0
"""A plan may get an order of its own: faster than those of the literature, within the memory, and saved with it."""

from math import inf

from fpipe.planning.candidates import FACTORIES, Candidate, Predictor, Room
from fpipe.planning.choosing import choose
from fpipe.planning.ordering import list_orderable, reorder
from fpipe.planning.plan import Plan
from schedules import check, one_f_one_b, recompute, zb_h1, zb_v
from tests.common.chain_profiles import chain_profile

PROFILE = chain_profile([3, 1, 4, 1, 5, 9, 2, 6])


def plan(caps, ordered):
    room = Room(caps, frozenset(range(1, len(PROFILE.blocks))))
    return choose(
        {6: PROFILE}, FACTORIES, 3, room, weights=1.0, seconds=60.0, report=lambda progress: None, ordered=ordered
    )


def test_an_order_of_its_own_makes_a_plan_faster_and_is_saved_with_it(tmp_path):
    memory = max(plan((inf,) * 3, ordered=False).predicted.memory)
    caps = (0.8 * memory,) * 3
    before, after = plan(caps, ordered=False), plan(caps, ordered=True)
    check(after.schedule)
    assert before.bound * (1 - 1e-9) <= after.predicted.seconds < before.predicted.seconds
    assert after.predicted.fits(caps)
    assert "an order of its own (" in str(after)
    after.save(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == after


def test_candidates_that_recompute_keep_their_order():
    predictor = Predictor(PROFILE, 1.0)
    plain = [Candidate.of(predictor, schedule, (4, 6)) for schedule in (one_f_one_b(3, 6), zb_h1(3, 6))]
    others = [
        Candidate.of(predictor, recompute(one_f_one_b(3, 6)), (4, 6)),
        Candidate.of(predictor, zb_v(3, 6), (1, 2, 4, 5, 6)),
    ]
    assert list(list_orderable([*plain, *others])) == [plain[0], others[1]]


def test_what_does_not_fit_or_has_no_time_keeps_its_order():
    candidate = Candidate.of(Predictor(PROFILE, 1.0), one_f_one_b(3, 6), (4, 6))
    assert reorder(candidate, Room((1.0,) * 3, frozenset())) is None
    assert reorder(candidate, Room((inf,) * 3, frozenset(), end=0.0)) is None
