# SPDX-License-Identifier: Apache-2.0
"""Draw the gallery again: `python docs/draw_gallery.py` writes its pictures, and what the page says of each schedule.

A rank's share of the model takes 1 for a forward and 2 for a backward, however many stages it is cut into, so pictures
can be compared.
"""

import re
from pathlib import Path

import schedules

HERE = Path(__file__).parent
PAGE, PICTURES = HERE / "gallery.md", HERE / "pictures" / "gallery"
ENTRY = re.compile(r"^### (\w+)\n\n.*\n\n!\[.*\n\n.*\n", re.MULTILINE)
"""A heading, the summary, the picture, and what the simulation says."""


def make(name: str) -> tuple[schedules.Schedule, schedules.Costs]:
    """Return a schedule of the gallery, and its costs."""
    schedule = getattr(schedules, name)(ranks=4, microbatches=8)
    share = schedule.stages // schedule.ranks
    return schedule, schedules.Costs(F=1 / share, B=2 / share, I=1 / share, W=1 / share)


def draw(name: str) -> str:
    """Return the picture of a schedule as SVG."""
    schedule, costs = make(name)
    return schedules.drawing.svg({repr(schedule): schedules.spans(schedule, costs)})


def describe(name: str) -> str:
    """Return the entry of a schedule."""
    schedule, costs = make(name)
    totals = schedules.simulate(schedule, costs)
    said = f"makespan {totals.makespan:g}, bubble {totals.bubble:.2f}, peak memory {max(totals.peak_memory):g}"
    summary = (schedule.factory.__doc__ or "").split("\n")[0]
    link = f"[`schedules.{name}`](api/schedules.md)"
    return f"### {name}\n\n{summary}\n\n![{name}: {said}](pictures/gallery/{name}.svg)\n\n{said} · {link}\n"


def main() -> None:
    """Write the pictures, and their entries on the page."""
    text = PAGE.read_text()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in ENTRY.findall(text):
        (PICTURES / f"{name}.svg").write_text(draw(name))
    PAGE.write_text(ENTRY.sub(lambda entry: describe(entry[1]), text))


if __name__ == "__main__":
    main()
