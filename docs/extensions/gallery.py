# SPDX-License-Identifier: Apache-2.0
"""The directive `timeline`: simulate a schedule while the site is built, and show its picture.

    ```{timeline} one_f_one_b(ranks=4, microbatches=8)
    ```

shows the first line of the schedule's docstring, the picture, and what the simulation says. A rank's share of the model
takes 1 for a forward and 2 for a backward, however many stages it is cut into, so pictures can be compared.
"""

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import schedules

BOX = '<div style="overflow-x: auto; margin: 1em 0">{}</div>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("timeline", Timeline)
    return {"parallel_read_safe": True}


def share(stages: int) -> schedules.Costs:
    """Return the costs of one of a rank's `stages`."""
    return schedules.Costs(F=1 / stages, B=2 / stages, I=1 / stages, W=1 / stages)


def draw(schedule: schedules.Schedule, costs: schedules.Costs) -> str:
    """Return the picture of a schedule as SVG."""
    return schedules.drawing.svg({repr(schedule): schedules.spans(schedule, costs)})


def caption(schedule: schedules.Schedule, costs: schedules.Costs) -> str:
    """Return what the simulation says of a schedule, in a line of Markdown."""
    totals = schedules.simulate(schedule, costs)
    return (
        f"makespan {totals.makespan:g}, bubble {totals.bubble:.2f}, "
        f"peak memory {max(totals.peak_memory):g} · {{py:func}}`schedules.{schedule.factory.__name__}`"
    )


class Timeline(SphinxDirective):
    """Draw one schedule, given as the call that makes it."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the docstring's first paragraph, the picture and its caption."""
        schedule = eval(self.arguments[0], dict(vars(schedules)))  # the argument is in our own pages
        costs = share(schedule.stages // schedule.ranks)
        summary = (schedule.factory.__doc__ or "").split("\n")[0]
        return [
            *self.parse(summary),
            nodes.raw("", BOX.format(draw(schedule, costs)), format="html"),
            *self.parse(caption(schedule, costs)),
        ]

    def parse(self, text: str) -> list[nodes.Node]:
        """Return a line of Markdown as nodes."""
        parent = nodes.Element()
        self.state.nested_parse(StringList([text]), self.content_offset, parent)
        return parent.children
