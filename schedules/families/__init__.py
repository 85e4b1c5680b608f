# SPDX-License-Identifier: Apache-2.0
"""Schedules of the literature, one file per family."""

from schedules.families.asynchronous import pipedream, pipedream_2bw
from schedules.families.bidirectional import chimera, dualpipe, dualpipe_v
from schedules.families.fill_drain import forward_only, gpipe
from schedules.families.looped import breadth_first, interleaved_1f1b, interleaved_zero_bubble
from schedules.families.one_forward_one_backward import eager_1f1b, kfkb, one_f_one_b
from schedules.families.sliced import seq_1f1b
from schedules.families.wave import hanayo

__all__ = [
    "gpipe",
    "forward_only",
    "one_f_one_b",
    "eager_1f1b",
    "kfkb",
    "interleaved_1f1b",
    "breadth_first",
    "interleaved_zero_bubble",
    "dualpipe_v",
    "dualpipe",
    "chimera",
    "hanayo",
    "pipedream",
    "pipedream_2bw",
    "seq_1f1b",
]
