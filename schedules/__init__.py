# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as plain values: write, check, lower, simulate and draw them. Uses only the standard library.

All of it runs when a pipeline is built, or on request; none of it runs in a training step.
"""

from schedules import drawing
from schedules.analysis.bounds.lower_bound import Bound, bound
from schedules.analysis.critical_path import CriticalPath, critical_path
from schedules.analysis.estimation import estimate
from schedules.analysis.simulation import Timeline, memory_over_time, simulate, spans, summarize
from schedules.certification import Certificate, certify
from schedules.checking.rules import check, list_versions
from schedules.errors import (
    ArgumentError,
    GraphError,
    PipelineError,
    ProgramError,
    ScheduleError,
    SizeError,
    SolverError,
    TableError,
    TimelineError,
    VocabularyError,
)
from schedules.families import (
    breadth_first,
    chimera,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    gis,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zero_bubble,
    kfkb,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    seq_1f1b,
    v_1f1b,
    v_half,
    v_min,
    v_schedule,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from schedules.families.blocks import merge_in_order
from schedules.families.one_forward_one_backward import alternate, group_passes
from schedules.families.placements import bidirectional, looped, vee, wave
from schedules.language.actions import KINDS, Action, B, C, F, G, I, R, U, W, parse
from schedules.language.graph import Graph, chain, dag
from schedules.language.placement import Placement, linear
from schedules.language.schedule import Factory, Limits, Schedule, schedule
from schedules.lowering.program import Program, lower
from schedules.own_kinds import OwnKind
from schedules.playing.board import sum_replicas
from schedules.playing.costs import Costs, Link, Sizes
from schedules.playing.engine import Span
from schedules.playing.play import Rule, play, prefer
from schedules.playing.problem import Problem
from schedules.playing.rows import from_rows
from schedules.proof.devices import Device, DeviceRun, run_on_device
from schedules.searching.search import SearchProgress, SearchResult, search
from schedules.searching.solver import cp_sat
from schedules.transforms.connect import connect
from schedules.transforms.defer import defer_weights
from schedules.transforms.forwards import forwards
from schedules.transforms.mirror import mirror
from schedules.transforms.offload import offload
from schedules.transforms.overlap import overlap
from schedules.transforms.recompute import recompute
from schedules.transforms.reduce import reduce_gradients
from schedules.transforms.repeat import repeat
from schedules.transforms.shard import shard
from schedules.transforms.split import merge_backward, split_backward
from schedules.transforms.transform import transform
from schedules.transforms.update import update_weights

__version__ = "0.1.0"

__all__ = [
    "drawing",
    "KINDS",
    "Action",
    "ArgumentError",
    "B",
    "Certificate",
    "certify",
    "Bound",
    "C",
    "Costs",
    "CriticalPath",
    "Device",
    "DeviceRun",
    "F",
    "Factory",
    "G",
    "Graph",
    "GraphError",
    "I",
    "Limits",
    "Link",
    "PipelineError",
    "Problem",
    "OwnKind",
    "Placement",
    "Program",
    "R",
    "Rule",
    "ProgramError",
    "Schedule",
    "ScheduleError",
    "SearchProgress",
    "SearchResult",
    "SizeError",
    "Sizes",
    "SolverError",
    "Span",
    "TableError",
    "Timeline",
    "TimelineError",
    "U",
    "VocabularyError",
    "W",
    "alternate",
    "bidirectional",
    "bound",
    "chain",
    "check",
    "connect",
    "cp_sat",
    "critical_path",
    "dag",
    "estimate",
    "forwards",
    "from_rows",
    "gpipe",
    "group_passes",
    "linear",
    "list_versions",
    "looped",
    "lower",
    "memory_over_time",
    "merge_backward",
    "merge_in_order",
    "offload",
    "one_f_one_b",
    "parse",
    "play",
    "prefer",
    "schedule",
    "search",
    "shard",
    "simulate",
    "spans",
    "split_backward",
    "sum_replicas",
    "summarize",
    "transform",
    "update_weights",
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
    "gis",
    "defer_weights",
    "recompute",
    "reduce_gradients",
    "repeat",
    "run_on_device",
    "v_1f1b",
    "v_half",
    "v_min",
    "v_schedule",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
