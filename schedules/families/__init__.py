# SPDX-License-Identifier: Apache-2.0
"""Schedules from the literature, one module per family."""

from schedules.families.asynchronous import pipedream, pipedream_2bw
from schedules.families.bidirectional import chimera, dualpipe, dualpipe_v
from schedules.families.fill_drain import forward_only, gpipe
from schedules.families.greedy import zb_auto
from schedules.families.looped import breadth_first, gis, interleaved_1f1b, interleaved_zero_bubble
from schedules.families.one_forward_one_backward import eager_1f1b, kfkb, one_f_one_b
from schedules.families.sliced import seq_1f1b
from schedules.families.vee import v_1f1b, v_half, v_min, v_schedule, zb_v
from schedules.families.wave import hanayo
from schedules.families.zero_bubble import zb_h1, zb_h2

__all__ = [
    "gpipe",
    "forward_only",
    "one_f_one_b",
    "eager_1f1b",
    "kfkb",
    "interleaved_1f1b",
    "breadth_first",
    "interleaved_zero_bubble",
    "gis",
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "zb_v",
    "v_half",
    "v_min",
    "v_1f1b",
    "v_schedule",
    "dualpipe_v",
    "dualpipe",
    "chimera",
    "hanayo",
    "pipedream",
    "pipedream_2bw",
    "seq_1f1b",
]
