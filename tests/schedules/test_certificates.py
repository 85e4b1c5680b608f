# SPDX-License-Identifier: Apache-2.0
"""A certificate is accepted by one file on its own, and only if all that it claims holds."""

import ast
import json
import math
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import schedules
from schedules import (
    Certificate,
    Costs,
    Link,
    PipelineError,
    Sizes,
    certificate,
    certify,
    check,
    lower,
    simulate,
)
from schedules.certification import _order, _runs
from schedules.checking.rules import count_versions
from schedules.testing import collective_orders, costs, mutants
from schedules.testing.mutants import mutant_programs
from tests.common.routes import by_threes
from tests.common.sizes import few

CHECKER = Path(certificate.__file__)
PLANS = collective_orders().filter(lambda plan: len(plan[0].placement.routes) < 3)
SIZED = {
    (2, 4): ("gpipe", "interleaved_1f1b", "hanayo", "v_half", "v_min", "breadth_first", "kfkb", "gis"),
    (3, 5): ("zb_h1", "zb_h2", "forward_only", "eager_1f1b", "zb_auto", "one_f_one_b"),
    (3, 6): ("dualpipe_v",),
    (2, 6): ("interleaved_zero_bubble", "zb_v"),
    (4, 4): ("chimera",),
    (4, 8): ("dualpipe",),
}
COVERED = [
    *[getattr(schedules, name)(*size) for size, names in SIZED.items() for name in names],
    schedules.recompute(schedules.one_f_one_b(3, 4)),
    schedules.seq_1f1b(2, 4, slices=2),
    schedules.split_backward(schedules.seq_1f1b(3, 3, slices=3)),
    schedules.pipedream(3, 5),
    schedules.pipedream_2bw(2, 7, accumulate=3),
    schedules.update_weights(schedules.zb_h1(3, 4)),
    schedules.update_weights(schedules.dualpipe(2, 4)),
    schedules.shard(schedules.interleaved_1f1b(2, 4), limit=1),
    schedules.update_weights(schedules.reduce_gradients(schedules.shard(schedules.dualpipe(2, 4), limit=2))),
    schedules.reduce_gradients(schedules.shard(schedules.zb_v(2, 4), limit=2)),
    schedules.offload(schedules.one_f_one_b(4, 6)),
    schedules.offload(schedules.seq_1f1b(4, 4, slices=2)),
    schedules.offload(schedules.recompute(schedules.interleaved_1f1b(2, 6))),
]
SLOW = Costs(
    F=1.5, B=2.25, W=0.5, OVERLAP_F=1, G=0.5, comm=Link(latency=0.25, bandwidth=2, bytes=1, slow=(((0, 1), 3),))
)
SIZES = Sizes(activation=3.5, inputs=0.5, residual=1)
WEIGHTS = Sizes(activation=3.5, inputs=0.5, residual=1, weight=1.25, gathered=2)


@pytest.mark.parametrize("how", COVERED, ids=repr)
def test_every_family_is_certified_and_the_claims_are_those_of_the_simulation(how):
    for cost in (Costs(), SLOW):
        found, timeline = certify(how, cost, SIZES), simulate(how, cost, sizes=SIZES)
        assert math.isclose(found.makespan, timeline.makespan)
        assert found.bound <= found.makespan
        assert list(map(float, found.peaks)) == pytest.approx(timeline.peak_memory)
        assert Certificate.parse(found.text) == found


SKIPS = frozenset({(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)})


@pytest.mark.parametrize(
    "how",
    [schedules.zb_h1(4, 6), schedules.recompute(schedules.one_f_one_b(4, 6)), schedules.dualpipe(4, 8)],
    ids=["zb_h1", "recomputed", "dualpipe"],
)
def test_values_that_skip_stages_are_certified(how):
    program = lower(how, schedules.dag(4, SKIPS))
    found, timeline = certify(program, SLOW, SIZES), simulate(how, SLOW, program.graph, sizes=SIZES)
    assert math.isclose(found.makespan, timeline.makespan)
    assert found.bound <= found.makespan
    document = json.loads(found.text)
    for what in ("values", "cotangents"):
        for edge in document[what]:
            less = {**document, what: [one for one in document[what] if one != edge]}
            with pytest.raises(schedules.TableError):
                Certificate.parse(json.dumps(less))


@settings(max_examples=few(30))
@given(st.sampled_from(COVERED), st.data())
def test_times_are_exact_for_drawn_costs(how, data):
    cost = data.draw(costs())
    assume(not cost.jitter)
    found = certify(how, cost)
    assert math.isclose(found.makespan, simulate(how, cost).makespan, abs_tol=1e-9)
    assert found.bound <= found.makespan


@settings(max_examples=few(120))
@given(PLANS, costs(), st.sampled_from([Sizes(), WEIGHTS]))
def test_any_correct_program_is_certified(plan, cost, sizes):
    how, graph = plan
    assume(not cost.jitter)
    program = lower(how, graph)
    found, timeline = certify(program, cost, sizes), simulate(how, cost, graph, sizes)
    assert math.isclose(found.makespan, timeline.makespan, abs_tol=1e-9)
    assert found.bound <= found.makespan
    if any(action.kind == "U" for rank in range(how.ranks) for action in how.actions(rank)):
        assert all(peak <= most + 1e-9 for peak, most in zip(found.peaks, timeline.peak_memory, strict=True))
    elif sizes is WEIGHTS:
        assert list(map(float, found.peaks)) == pytest.approx(timeline.peak_memory)
    assert Certificate.parse(found.text) == found
    kept = [count_versions(how, rank) for rank in range(how.ranks)]
    for s, row in enumerate(json.loads(found.text)["versions"]):
        assert [most for most, _ in row] == [kept[rank][s] for rank in how.placement.replicas(s)][: len(row)]


def test_a_bound_is_no_more_than_what_the_best_order_takes():
    cost = Costs(F=1, B=2)
    for how in (schedules.zb_h2(2, 2), schedules.zb_h1(3, 3), schedules.zb_v(2, 2)):
        problem = schedules.Problem(cost, how.placement, how.microbatches, split=True)
        best = schedules.search(problem, seconds=5, tries=40, seed=1).schedule
        assert certify(how, cost).bound <= simulate(best, cost).makespan


# ------------------------------------------------------------------------------------------------- nothing false


@dataclass(frozen=True)
class Edited:
    """A certificate whose programs are replaced, with claims and an order that fit them as far as there are any."""

    document: dict

    @classmethod
    def of(cls, found, program):
        document = json.loads(found.text)
        ranks = range(program.schedule.ranks)
        actions = [[*program.actions(rank)] for rank in ranks]
        document["programs"] = [" ".join(map(str, row)) for row in actions]
        try:
            document["order"] = [*_runs(_order(program, actions))]
            document |= certificate.Job(document).claims(document["order"])
        except (PipelineError, certificate.RefusedError, KeyError):
            pass
        return cls(document)

    def is_accepted(self):
        try:
            certificate.verify(json.dumps(self.document))
        except certificate.RefusedError:
            return False
        return True


def is_correct(program):
    try:
        check(program)
    except PipelineError:
        return False
    return True


@settings(max_examples=few(240))
@given(st.sampled_from(COVERED).map(lambda how: (how, None)) | PLANS, st.data())
def test_no_planted_fault_is_accepted(plan, data):
    how, graph = plan
    if data.draw(st.booleans()):
        program = data.draw(mutant_programs(lower(how, graph)))
    else:
        edited = data.draw(mutants(how))
        assume(is_correct(edited) or not data.draw(st.booleans()))
        try:
            program = lower(edited, graph)
            [*program.actions(0)]
        except PipelineError:
            return
    try:
        accepted = Edited.of(certify(lower(how, graph)), program).is_accepted()
    except PipelineError:  # the edited schedule cannot be lowered
        return
    assert not accepted or is_correct(program)


def leaves(value, path=()):
    """Every path to a leaf of a JSON document."""
    if isinstance(value, dict | list) and value:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, (*path, key))
    else:
        yield path


CLAIMS = certificate.CLAIMED
VALUES = [0, 1, 2, 7, -1, 10**12, "0", "1", "5/2", "1/0", "0F0", "", None, True, False, [], {}, "1e9", 1.5]
OTHER = st.sampled_from(VALUES)


@settings(max_examples=few(600))
@given(st.sampled_from([*map(certify, COVERED)]), st.data())
def test_an_altered_certificate_is_refused_unless_it_is_true(found, data):
    document = json.loads(found.text)
    *inner, last = data.draw(st.sampled_from([*leaves(document)]))
    holder = document
    for key in inner:
        holder = holder[key]
    before = holder[last]
    holder[last] = data.draw(OTHER)
    assume(holder[last] != before)
    edited = Edited(document)
    if edited.is_accepted():
        assert (*inner, last)[0] not in (*CLAIMS, "programs", "order", "microbatches", "routes")
        _, claims = certificate.verify(json.dumps(document))
        assert claims == {name: document[name] for name in CLAIMS}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected certificate 2"),
        ('{"certificate": 1}', "expected certificate 2"),
        ("1e400", "got the number"),
        ("NaN", "got the number"),
        ("9" * 5000, "got the number"),
        ('{"certificate": 2, "certificate": 2}', "a key twice"),
    ],
)
def test_what_is_no_certificate_is_refused(text, words):
    with pytest.raises(certificate.RefusedError, match=words):
        certificate.verify(text)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("microbatches", 10**8 + 1, "microbatches and slices: got"),
        ("microbatches", 9 * 10**7, "got 90000000, expected as many as the programs have actions for"),
        ("slices", 0, "microbatches: got 8"),
        ("slices", 2, "rank 0, position 0: got 0F0,"),
        ("declared", [0], "declared: got 1, expected none, or 8"),
        ("routes", [[5, 1]], "expected one or two lists of as many ranks"),
        ("values", [[1, 0]], r"values: got \[1, 0\], expected stages s < t"),
        ("makespan", "26", "makespan: got 26, expected 25"),
        ("values", [[0, 1], [0, 1]], "each pair once, in ascending order"),
        ("order", [[0, 1]], r"order: got \d+ actions left out, expected all of them"),
        ("order", [[0, 99]], "order: got"),
        ("order", [[0, 3], [0, 9]], "rank 0, position"),
        ("programs", ["0F0", "nonsense"], "microbatches: got 8"),
        ("programs", ["nonsense " * 99, "0F0"], "rank 0, position 0: got nonsense"),
        ("costs", {}, "costs: got {}, expected the keys"),
        ("slow", [[0, 1]], "expected a list of 3"),
        ("slow", [[0, 1, "9" * 41]], "slow: got"),
        ("slow", [[0, 1, "1/0"]], "slow: got"),
        ("factors", ["1"], "factors: got 1"),
        ("backward", 1, "backward: got 1, expected true or false"),
    ],
)
def test_a_certificate_that_makes_no_sense_is_refused_by_name(name, value, words):
    document = json.loads(certify(schedules.zb_h1(2, 8), Costs(F=1, B=2)).text)
    document[name] = value
    with pytest.raises(certificate.RefusedError, match=words):
        certificate.verify(json.dumps(document))


def primes(most):
    """The prime numbers up to one."""
    return [n for n in range(2, most) if all(n % k for k in range(2, math.isqrt(n) + 1))]


HUGE = {
    "actions": {"microbatches": 999_999_999},
    "units": {"microbatches": 50_000_000, "slices": 50_000_000},
    "runs": {"order": [[0, 999_999_999]]},
    "ranks": {"programs": [""] * 200_000},
    "stages": {"routes": [[0] * 200_000]},
    "edges": {"values": [[s, 7] for s in range(7)], "routes": [[0] * 8], "programs": ["0F0 " * 7 + "0F0"]},
    "denominators": {"slow": [[0, k, f"1/{prime}"] for k, prime in enumerate(primes(2000))]},
    "nesting": {"programs": [[[[[["0F0"] * 200_000]]]]]},
    "a number": {"makespan": "9" * 1_000_000},
    "a word": {"programs": ["9" * 1_000_000, "F" * 1_000_000]},
}


@pytest.mark.parametrize("claim", HUGE)
def test_a_huge_certificate_is_refused_in_little_memory(claim):
    document = json.loads(certify(schedules.zb_h1(2, 8), Costs(F=1, B=2)).text)
    text = json.dumps(document | HUGE[claim])
    tracemalloc.start()
    with pytest.raises(certificate.RefusedError) as caught:
        certificate.verify(text)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 * 2**20
    assert len(str(caught.value)) < 500


def test_a_file_of_a_billion_actions_is_refused_unread(tmp_path, capsys):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(5 * 10**9)
    assert certificate.main([str(path)]) == 1
    assert "expected a file of at most 134217728 bytes" in capsys.readouterr().err


def test_a_certificate_of_another_program_is_refused():
    one, other = (json.loads(certify(how(2, 4)).text) for how in (schedules.gpipe, schedules.one_f_one_b))
    for name in ("programs", "order"):
        with pytest.raises(certificate.RefusedError):
            certificate.verify(json.dumps({**one, name: other[name]}))
    certificate.verify(json.dumps(one))


def test_costs_that_are_drawn_are_not_certified():
    with pytest.raises(PipelineError, match=r"certify: got costs with jitter=0\.5, expected costs that are not random"):
        certify(schedules.gpipe(2, 2), Costs(jitter=0.5))
    with pytest.raises(PipelineError, match=r"certify: got a placement with 3 routes, expected one or two"):
        certify(by_threes(2, 3))


# ---------------------------------------------------------------------------------------------------- a file on its own


def test_the_checker_is_one_short_file_of_the_standard_library():
    text = CHECKER.read_text()
    assert text.count("\n") <= 500
    tree = ast.parse(text)
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_copy_of_the_file_checks_a_certificate(tmp_path):
    copy, saved = tmp_path / "alone.py", tmp_path / "plan.json"
    shutil.copy(CHECKER, copy)
    found = certify(schedules.dualpipe_v(4, 8))
    found.save(saved)
    assert Certificate.read(saved) == found

    def run(*words):
        done = subprocess.run([sys.executable, "-I", copy, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = run(saved)
    assert code == 0
    assert said == f"accepted: 4 ranks, 8 microbatches, time {found.makespan}\n"
    saved.write_text(found.text.replace(f'"makespan": "{found.makespan}"', '"makespan": "1"'))
    assert run(saved) == (1, f"refused: makespan: got 1, expected {found.makespan}.\n")
    assert run()[0] == 2
    assert run(tmp_path / "absent")[0] == 1
    with pytest.raises(schedules.TableError, match="makespan: got 1"):
        Certificate.read(saved)
