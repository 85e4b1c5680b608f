# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument of the public functions is refused, at once, with an error that says how to repair it."""

import io
import math

import pytest

import schedules
from schedules import (
    Action,
    B,
    Costs,
    F,
    Graph,
    Link,
    Placement,
    Sizes,
    chain,
    check,
    drawing,
    families,
    files,
    gpipe,
    linear,
    lower,
    one_f_one_b,
    spans,
    testing,
)
from schedules.playing.rows import edit
from tests.common.wrong_calls import Known, complain, find_problem

S = one_f_one_b(ranks=2, microbatches=2)
TIMELINE = list(spans(S, Costs()))
SIZES = {"ranks": 2, "microbatches": 4}
NEVER = (0, -1, 10**30)
NAN = math.nan


def list_nothing(rank, ranks, microbatches):
    return []


def numbers(*names):
    return dict.fromkeys(names, ((), (1, "x"), -1, NAN, math.inf, 10**400))


FACTORIES = [
    Known(
        one,
        SIZES | ({"chunks": 2} if "chunks" in one.signature.parameters else {}),
        {"k": NEVER[:2], **dict.fromkeys(("ranks", "microbatches", "waves", "chunks", "slices"), NEVER)},
    )
    for one in (getattr(families, name) for name in families.__all__)
    if "schedule" not in one.signature.parameters
]
CALLS = {
    "bound": Known(schedules.bound, {"problem": schedules.Problem(Costs(), linear(2), 2)}),
    "play": Known(
        schedules.play,
        {"problem": schedules.Problem(Costs(), linear(2), 2)},
        {"lanes": ([F(0, 0)], [[F(0, 0)], [F(1, 0)]], [[["0F0"]], [["1F0"]]], [[[F(0, 0)]]], [3, 4])},
    ),
    "Problem": Known(
        schedules.Problem,
        {"costs": Costs(), "placement": linear(2), "microbatches": 2},
        {"microbatches": NEVER, "memory": (-1, (1,), (1, 2, 3), "80GB")},
    ),
    "check": Known(check, {"schedule": S}),
    "connect": Known(schedules.connect, {"schedule": S, "graph": chain(2)}, {"graph": [chain(3)]}),
    "critical_path": Known(schedules.critical_path, {"schedule": S}),
    "chain": Known(schedules.chain, {"stages": 2}, {"stages": (-1, 10**30)}),
    "Costs": Known(
        Costs,
        {},
        numbers("F", "B", "I", "W", "C", "R", "OVERLAP_F", "G", "U", "UNSHARD", "REDUCE_GRAD")
        | {"comm": (-1, (), math.inf), "jitter": (-1, 1)},
    ),
    "dag": Known(
        schedules.dag,
        {"stages": 3, "edges": {(0, 1)}},
        {"edges": ({(1, 0)}, {(0, 9)}, {"x"}, {(0, 1, 2)}, {(0.0, 1.0)}), "stages": (-1,)},
    ),
    "defer_weights": Known(schedules.defer_weights, {"schedule": S, "memory": 4}),
    "estimate": Known(
        schedules.estimate, {"schedule": S, "timelines": TIMELINE}, {"timelines": ([3], [None], iter("ab"))}
    ),
    "forwards": Known(schedules.forwards, {"schedule": S}),
    "Graph": Known(
        Graph,
        {"stages": 2, "values": frozenset(), "cotangents": frozenset()},
        {"stages": (-1,), "values": (frozenset({(1, 0)}), frozenset("ab"))},
    ),
    "legend": Known(drawing.legend, {"kinds": ["F"]}),
    "Limits": Known(schedules.Limits, {}),
    "Link": Known(
        Link,
        {},
        numbers("latency", "bytes", "back") | {"bandwidth": (0, -1, NAN), "slow": ((1,), (((0, 1), -1),), ((0, 1), 2))},
    ),
    "list_versions": Known(schedules.list_versions, {"schedule": S}),
    "lower": Known(lower, {"schedule": S}, {"graph": [chain(3)]}),
    "memory_over_time": Known(schedules.memory_over_time, {"timeline": TIMELINE, "schedule": S}, {"timeline": ([3],)}),
    "merge_backward": Known(schedules.merge_backward, {"schedule": S}),
    "mirror": Known(schedules.mirror, {"schedule": S}),
    "offload": Known(schedules.offload, {"schedule": S}),
    "overlap": Known(schedules.overlap, {"schedule": S}),
    "parse": Known(schedules.parse, {"text": "0F0"}, {"text": ("", "0F", "9" * 5000 + "F0", "0F0\n")}),
    "Placement": Known(
        Placement,
        {"ranks": 2, "homes": (0, 1)},
        {"ranks": NEVER, "homes": ((0, 2), (0.0, 1.0), 3), "mirrors": (((0,),), 3)},
    ),
    "recompute": Known(schedules.recompute, {"schedule": S}, {"stages": (99, (99,), (0.0,), [0])}),
    "reduce_gradients": Known(schedules.reduce_gradients, {"schedule": S}),
    "repeat": Known(schedules.repeat, {"schedule": S, "times": 2}, {"times": NEVER}),
    "schedule": Known(schedules.schedule, {}),
    "the decorator": Known(schedules.schedule(), {"generator": list_nothing}, {"generator": (int, 3, None)}),
    "shard": Known(schedules.shard, {"schedule": S, "limit": 1}, {"limit": NEVER}),
    "simulate": Known(schedules.simulate, {"schedule": S}, {"costs": [Costs(F=(1, 2, 3))], "graph": [chain(3)]}),
    "Sizes": Known(Sizes, {}, numbers("activation", "inputs", "residual", "weight", "gathered")),
    "spans": Known(spans, {"schedule": S, "costs": Costs()}),
    "split_backward": Known(schedules.split_backward, {"schedule": S}),
    "summarize": Known(schedules.summarize, {"timeline": TIMELINE, "schedule": S}, {"timeline": ([3],)}),
    "svg": Known(drawing.svg, {"timelines": {"a": TIMELINE}}, {"timelines": ({"a": [3]}, {"a": 3}), "width": (-1, 0)}),
    "text": Known(drawing.text, {"schedule": S}, {"columns": (-1, 0)}),
    "texts": Known(drawing.texts, {"timelines": {"a": TIMELINE}}, {"timelines": ({"a": [3]}, {"a": 3})}),
    "trace": Known(drawing.trace, {"timelines": {"a": TIMELINE}}, {"timelines": ({"a": [3]}, {"a": 3})}),
    "transform": Known(schedules.transform, {}),
    "update_weights": Known(schedules.update_weights, {"schedule": S}),
    **{
        name: Known(getattr(schedules, name), {"ranks": 2}, {"ranks": NEVER, "chunks": NEVER})
        for name in ("linear", "looped", "vee", "bidirectional")
    },
    "wave": Known(schedules.wave, {"ranks": 2}, {"ranks": NEVER, "waves": NEVER}),
    "read_csv": Known(files.read_csv, {"file": io.StringIO("0F0,0B0\n")}),
    "write_csv": Known(files.write_csv, {"plan": S, "file": io.StringIO()}),
    "Schedule.actions": Known(S.actions, {"rank": 0}, {"rank": (-1, 2)}),
} | {one.function.__name__: one for one in FACTORIES}
SUITES = {
    "conformance": Known(testing.conformance, {"factory": gpipe}, {"sizes": ({"ranks": 3}, {"rank": [1]})}),
    "mutants": Known(testing.mutants, {"plan": S}),
    "require_bounds": Known(testing.require_bounds, {"schedule": S, "graph": chain(2), "times": Costs()}),
    "require_matching_ends": Known(testing.require_matching_ends, {"program": lower(S)}),
    "require_round_trip": Known(testing.require_round_trip, {"schedule": S}),
    "require_same_times": Known(testing.require_same_times, {"schedule": S, "graph": chain(2), "costs": Costs()}),
    "schedules": Known(testing.schedules, {"factories": [gpipe]}, {"factories": ([], [3], [S])}),
    "time_program": Known(testing.time_program, {"program": lower(S), "costs": Costs()}),
}


@pytest.mark.parametrize("name", sorted(CALLS | SUITES))
def test_wrong_arguments_are_refused(name):
    assert not complain((CALLS | SUITES)[name])


@pytest.mark.parametrize("thing", [None, "0F0", ("F", 0, 0), Action("Q", 0, 0), F("0", 0), F(9, 0), B(1, 0)])
@pytest.mark.parametrize("name", [name for name, known in CALLS.items() if "schedule" in known.arguments])
def test_what_no_rank_may_yield_is_refused_by_whatever_reads_it(name, thing):
    wrong = edit(S, ((F(0, 0), thing, *S.actions(0)), S.actions(1)))
    assert find_problem(CALLS[name].function, CALLS[name].arguments | {"schedule": wrong}) in ("", "accepted")
