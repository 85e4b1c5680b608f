# SPDX-License-Identifier: Apache-2.0
"""The page that reports what was tried, and the outcomes."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence

import transformers
from classes import architectures
from trial import SCHEDULES, VARIANTS, Trial

HEAD = """# Models

Architectures of [transformers](https://github.com/huggingface/transformers) {version} as tiny random models, cut
evenly, in two microbatches. Measured on {date}, at commit {commit}. Loss, outputs, all gradients and all buffers are
compared, bit for bit, with the model's own eager loop on one device and with `fpipe.reference`. With dropout, which
draws other numbers in an eager loop, they are compared only with the reference. To write this page again:

    python benchmarks/architectures

Texts have 64 tokens, and heads are 32 wide. Keys and values have fewer heads if the configuration has a field for that
and the model accepts it. Batches are padded; under 1F1B, a batch without padding follows through the same pipeline.
Models are unedited, with their default attention, without caches (`use_cache=False`), and without layers that are
dropped at random. If a model computes a loss, that is the loss; otherwise the loss is a sum of mean squares of the
outputs. A model is tried if a plain eager step of it runs on a batch that the script can make up. Modules that branch
on data are named in `unsplittable`.

There are six variants: {schedules}, each with `backward="autograd"` and with
`"graph"`. All architectures are run in the first variant, then in the others, as far as the run got. A row that names
variants was run only in those.
"""


def page(trials: Sequence[Trial], commit: str) -> str:
    """Return the page as Markdown."""
    last = sorted(trials, key=lambda found: found.kind)
    tried = [found for found in last if not found.untried]
    equal, wrong = [t for t in tried if not t.wrong], [t for t in tried if t.wrong]
    untried = [found for found in last if found.untried]
    left = ((found.kind, found.name, _short(found.untried)) for found in untried)
    return "\n".join(
        [
            HEAD.format(
                version=transformers.__version__,
                date=f"{datetime.date.today():%Y-%m-%d}",
                commit=commit,
                schedules="; ".join(SCHEDULES),
            ),
            *_table(("", "architectures"), _counts(equal, wrong, untried)),
            "\n## Not equal\n",
            *_table(("model type", "class", "in how many of the variants", "why"), map(_wrong, wrong)),
            "\n## Equal\n",
            "The second of two stages begins at the first operation of the module named here.\n",
            *_table(("model type", "class", "parameters", "heads", "batch", "second stage", ""), map(_row, equal)),
            "\n## Not tried\n",
            *_table(("model type", "class", "why"), left),
            "",
        ]
    )


def _counts(equal: Sequence[Trial], wrong: Sequence[Trial], untried: Sequence[Trial]) -> Iterator[tuple[str, str]]:
    refused = [found for found in wrong if found.refused]
    unequal = [found for found in wrong if any(what.startswith("MismatchError") for what in found.wrong.values())]
    yield "bitwise equal in every variant that was run", str(len(equal))
    yield "of these, in all six variants", str(sum(map(_is_whole, equal)))
    yield "of these, with fewer heads of keys and values", str(sum(map(_is_grouped, equal)))
    yield "of these, with dropout too", str(sum(any(VARIANTS[n].dropping for n in found.results) for found in equal))
    yield "rejected when built", str(len(refused))
    yield "not equal", str(len([found for found in unequal if found not in refused]))
    yield "failed otherwise", str(len([found for found in wrong if found not in refused and found not in unequal]))
    yield "not tried", str(len(untried))
    yield "not reached by this run", str(len(architectures()) - len(equal) - len(wrong) - len(untried))


def _is_whole(found: Trial) -> bool:
    return all(name in found.results for name in VARIANTS if not VARIANTS[name].dropping)


def _is_grouped(found: Trial) -> bool:
    heads, groups, _ = found.attention
    return heads is not None and groups is not None and groups < heads


def _wrong(found: Trial) -> tuple[str, ...]:
    plain = [name for name in found.results if not VARIANTS[name].dropping]
    many = f"{len(found.wrong)} of {len(plain)}"
    some = f": {'; '.join(found.wrong)}" if len(found.wrong) < len(plain) else ""
    return found.kind, found.name, f"{many}{some}", _short(next(iter(found.wrong.values())))


def _row(found: Trial) -> tuple[str, ...]:
    batch = [name for name in found.batch if name not in ("use_cache", "return_dict", "attention_mask")]
    count = f"{found.parameters / 1e6:.1f} M" if found.parameters >= 1e6 else f"{found.parameters / 1e3:.0f} k"
    heads, groups, size = found.attention
    said = "" if heads is None else f"{heads}{f' / {groups}' if groups else ''}{f' of {size}' if size else ''}"
    notes = [] if _is_whole(found) else ["; ".join(found.results)]
    notes += [f"without labels: {_short(found.note)}"] if found.note else []
    notes += [f"`unsplittable={found.whole}`"] if found.whole else []
    begins = ", ".join(f"`{cut}`" for cut in found.cuts.get("2", []))
    return found.kind, found.name, count, said, ", ".join(batch), begins, "; ".join(notes)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _short(why: str) -> str:
    """Return a reason in one line."""
    line = re.search(r" At (\S+?): (.*)$", why)
    code = f": `{line[2]}` ({line[1]})" if line else ""
    if "DataDependentOutputException" in why or "DynamicOutputShapeException" in why:
        return f"shapes or control flow depend on data{code}"
    what = re.sub(r" At \S+?: .*$", "", why.split(" || ", maxsplit=1)[0])
    return f"{what[:160]}{'...' * (len(what) > 160)}{code}"
