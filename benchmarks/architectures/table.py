# SPDX-License-Identifier: Apache-2.0
"""The page that says what was tried, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import transformers
from classes import architectures
from trial import DROPPING, SCHEDULES, Trial

HEAD = """# Models

Architectures of [transformers](https://github.com/huggingface/transformers) {version} as tiny random models, cut
evenly, in two microbatches. Loss, outputs, all gradients and all buffers are compared, bit for bit, with the model's
own eager loop on one device and with `fpipe.reference`; with dropout, which draws other numbers there, with the
reference. Made by

    python benchmarks/architectures

which anyone can run again. Models are used as their authors wrote them, with the attention that they choose by default,
without caches (`use_cache=False`) and without layers that are dropped at random. Where a model computes a loss, that is
the loss; else it is a sum of mean squares of the outputs. A model is tried if a plain eager step of it runs on a batch
that the script can make up. A module that branches on data is named in `unsplittable`.

Schedules: {schedules}. A row that names none was run under all of them.
"""


def page(trials: Sequence[Trial]) -> str:
    """The page, as Markdown."""
    last = {found.kind: found for found in sorted(trials, key=lambda found: found.kind)}
    tried = [found for found in last.values() if not found.untried]
    equal, wrong = [t for t in tried if not t.wrong], [t for t in tried if t.wrong]
    untried = [found for found in last.values() if found.untried]
    refused = ((found.kind, found.name, _short(next(iter(found.wrong.values())))) for found in wrong)
    left = ((found.kind, found.name, _short(found.untried)) for found in untried)
    return "\n".join(
        [
            HEAD.format(version=transformers.__version__, schedules="; ".join(SCHEDULES)),
            *_table(("", "architectures"), _counts(equal, wrong, untried)),
            "\n## Where not\n",
            *_table(("model type", "class", "why"), refused),
            "\n## Equal\n",
            "Where stages begin: at the first operation of these modules.\n",
            *_table(("model type", "class", "parameters", "batch", "4 stages begin at", ""), map(_row, equal)),
            "\n## Not tried\n",
            *_table(("model type", "class", "why"), left),
            "",
        ]
    )


def _counts(equal: Sequence[Trial], wrong: Sequence[Trial], untried: Sequence[Trial]) -> Iterator[tuple[str, str]]:
    yield "bitwise equal", str(len(equal))
    yield "of these, with dropout too", str(sum("dropout" in " ".join(found.results) for found in equal))
    yield "refused when built, or otherwise not equal", str(len(wrong))
    yield "not tried", str(len(untried))
    yield "not reached by this run", str(len(architectures()) - len(equal) - len(wrong) - len(untried))


def _row(found: Trial) -> tuple[str, ...]:
    cuts = found.cuts.get("4") or next(iter(found.cuts.values()), [])
    batch = [name for name in found.batch if name not in ("use_cache", "return_dict", "attention_mask")]
    count = f"{found.parameters / 1e6:.1f} M" if found.parameters >= 1e6 else f"{found.parameters / 1e3:.0f} k"
    begins = ", ".join(f"`{cut}`" for cut in cuts)
    notes = [] if found.results.keys() >= {*SCHEDULES} - _dropping(found) else [", ".join(found.results)]
    notes += [f"without labels: {_short(found.note)}"] if found.note else []
    notes += [f"`unsplittable={found.whole}`"] if found.whole else []
    return found.kind, found.name, count, ", ".join(batch), begins, "; ".join(notes)


def _dropping(found: Trial) -> set[str]:
    """The schedules that a model without dropout is not run under."""
    return (
        set()
        if any(name.endswith(DROPPING) for name in found.results)
        else {name for name in SCHEDULES if name.endswith(DROPPING)}
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _short(why: str) -> str:
    """A reason in a line."""
    line = re.search(r" At (\S+?): (.*)$", why)
    code = f": `{line[2]}` ({line[1]})" if line else ""
    if "DataDependentOutputException" in why or "DynamicOutputShapeException" in why:
        return f"shapes or control flow depend on data{code}"
    what = re.sub(r" At \S+?: .*$", "", why.split(" || ", maxsplit=1)[0])
    return f"{what[:160]}{'...' * (len(what) > 160)}{code}"
