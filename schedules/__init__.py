# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as plain values: write, check, lower, simulate and draw them. Standard library only."""

from schedules.actions import KINDS, Action, B, C, F, G, I, R, U, W, parse
from schedules.authoring import Factory, Limits, Schedule, schedule
from schedules.costs import Costs, Link, Sizes
from schedules.critical import CriticalPath, critical_path
from schedules.errors import (
    GraphError,
    PipelineError,
    ProgramError,
    ScheduleError,
    SizeError,
    TableError,
    VocabularyError,
)
from schedules.families import (
    breadth_first,
    chimera,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    kfkb,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    seq_1f1b,
)
from schedules.graph import Graph, chain, dag
from schedules.lowering import Program, lower
from schedules.mirroring import mirror
from schedules.overlapping import overlap
from schedules.placement import Placement, bidirectional, linear, looped, vee, wave
from schedules.replay import Span
from schedules.rules import check
from schedules.simulation import Timeline, simulate, spans, summarize
from schedules.transforms import defer_weights, forwards, merge_backward, recompute, split_backward, transform

__all__ = [
    "KINDS",
    "Action",
    "B",
    "C",
    "Costs",
    "CriticalPath",
    "F",
    "Factory",
    "G",
    "Graph",
    "GraphError",
    "I",
    "Limits",
    "Link",
    "PipelineError",
    "Placement",
    "Program",
    "R",
    "ProgramError",
    "Schedule",
    "ScheduleError",
    "SizeError",
    "Sizes",
    "Span",
    "TableError",
    "Timeline",
    "U",
    "VocabularyError",
    "W",
    "bidirectional",
    "chain",
    "check",
    "critical_path",
    "dag",
    "forwards",
    "gpipe",
    "linear",
    "looped",
    "lower",
    "merge_backward",
    "one_f_one_b",
    "parse",
    "schedule",
    "simulate",
    "spans",
    "split_backward",
    "summarize",
    "transform",
    "vee",
    "wave",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "mirror",
    "overlap",
    "breadth_first",
    "eager_1f1b",
    "forward_only",
    "hanayo",
    "interleaved_1f1b",
    "kfkb",
    "pipedream",
    "pipedream_2bw",
    "seq_1f1b",
    "interleaved_zero_bubble",
    "defer_weights",
    "recompute",
]
