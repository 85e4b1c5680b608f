# SPDX-License-Identifier: Apache-2.0
"""Layouts of Megatron-LM's `--pipeline-model-parallel-layout`, such as `"Et*3|(tt|)*29,m|L"`, as schedules.

A bar ends a stage; `E` is the embedding, `t` a decoder layer, `m` a layer of multi-token prediction, and `L` the loss;
`x*n` and `(xx|)*n` repeat, and commas only separate. Stage `s` is on rank `s mod ranks`. Megatron-LM runs plain 1F1B,
or interleaved 1F1B if a rank has several stages (see its page "Custom Pipeline Model Parallel Layout").

Runs on request.
"""

from __future__ import annotations

import re
from typing import Final

from schedules.arguments import require_types
from schedules.errors import TableError, quote
from schedules.families import interleaved_1f1b, one_f_one_b
from schedules.language.schedule import Schedule

MOST_LAYERS: Final = 2**16
LAYERS: Final = "EtmL"
_REPEATED: Final = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|]))\*([0-9]{1,5})")


def read_layout(text: str) -> tuple[str, ...]:
    """Return the layers of each stage of a layout; raise `TableError` for a text that is none.

    >>> read_layout("Et*3|(tt|)*2,m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')
    """
    require_types(read_layout, locals())
    plain = text.replace(",", "").replace(" ", "")
    while (found := _REPEATED.search(plain)) is not None:
        part, times = found[1] if found[2] is None else found[2], int(found[3])
        if len(part) * times > MOST_LAYERS:
            raise TableError(
                f"layout: got {found[3]} times {quote(part)}, expected at most {MOST_LAYERS} layers. Correct it."
            )
        plain = plain[: found.start()] + part * times + plain[found.end() :]
    stages = tuple(plain.split("|"))
    if (
        not set(plain) <= {*LAYERS, "|"}
        or plain[:1] != "E"
        or plain[-1:] != "L"
        or plain.count("E") + plain.count("L") != 2
    ):
        raise TableError(
            f"layout: got {quote(text)}, expected stages of E, t, m and L between bars, with E first and L last, as in "
            '"Et*3|(tt|)*2,m|L". Correct it.'
        )
    return stages


def layout_schedule(layout: str, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule that Megatron-LM runs for a layout; raise `TableError` if its stages don't fit the ranks.

    >>> layout_schedule("Et|t|t|tL", ranks=2, microbatches=4)
    interleaved_1f1b(ranks=2, microbatches=4, chunks=2)
    """
    stages = read_layout(layout)
    if ranks < 1 or len(stages) % ranks:
        raise TableError(
            f"layout: got {len(stages)} stages for {ranks} ranks, expected the same number for each rank. Add or "
            "remove a bar."
        )
    chunks = len(stages) // ranks
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    return interleaved_1f1b(ranks, microbatches, chunks=chunks)
