# SPDX-License-Identifier: Apache-2.0
"""Any model, cut anywhere, under any schedule, computes what one device computes, bit for bit."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.random_models import case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import run, run_reference
from tests.common.sizes import few

SEED = 5


def run_loop(description, rows, microbatches):
    """What a plain loop computes; of a model whose own backward fails, nothing is expected."""
    case = case_of(description)
    model, inputs, targets = case.make(rows)
    try:
        return loop(model, case.loss, inputs, targets, microbatches)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise


def require_exact_at_random_cuts(description, data, capture, names):
    """Cut it at some of `names`, and compare it with everything that it must be equal to."""
    microbatches = data.draw(st.integers(1, 3))
    rows = 3 * microbatches - data.draw(st.sampled_from([0, 0, 1]))
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=5)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules_of(len(cuts) + 1, microbatches))
    evenly = data.draw(st.sampled_from([False, False, False, True]))
    case, want = case_of(description), run_loop(description, rows, microbatches)
    built = build_unless_refused(description, case, how, rows, None if evenly else cuts, capture=capture)
    if built is None:
        return
    got = run(*built, seed=SEED if case.random else None)
    assert_same(got, run_reference(*built, seed=SEED if case.random else None))
    if not case.random:
        assert_same(got, want)


@settings(max_examples=few(16))
@given(descriptions(), st.data())
def test_any_model_is_exact_wherever_it_is_cut(description, data):
    require_exact_at_random_cuts(description, data, "trace", places(description))


@settings(max_examples=few(6))
@given(descriptions(sequence=True), st.data())
def test_any_sequence_of_parts_is_exact(description, data):
    names = [f"{k}" for k in range(2, len(description.parts) + 2)]
    require_exact_at_random_cuts(description, data, data.draw(st.sampled_from(["modules", "trace"])), names)


@settings(max_examples=few(4))
@given(descriptions(graph=True), st.data())
def test_any_graph_of_operators_is_exact(description, data):
    capture = data.draw(st.sampled_from(["fx", "export", "dynamo"]))
    require_exact_at_random_cuts(description, data, capture, [name for name in places(description) if "@" not in name])
