# SPDX-License-Identifier: Apache-2.0
"""A long call says what it does, on one line that it erases, and in the log."""

import io
import logging
import os
from types import SimpleNamespace

import pytest

from schedules import Costs, Problem, looped, search, status
from schedules.status import say, showing


class Terminal(io.StringIO):
    """A stream that is a terminal, with a clock that stands still between ticks."""

    now, is_terminal = 0.0, True

    def isatty(self):
        return self.is_terminal

    def drawn(self):
        """What was written, one entry for each time that the line was drawn."""
        found = self.getvalue().split("\r")
        self.seek(0)
        self.truncate()
        return found


@pytest.fixture
def screen(monkeypatch):
    made = Terminal()
    monkeypatch.setattr(status, "monotonic", lambda: made.now)
    monkeypatch.setattr(status, "sys", SimpleNamespace(stderr=made))
    monkeypatch.delenv("RANK", raising=False)
    return made


def test_a_line_appears_after_two_seconds_and_is_erased(screen):
    with showing("prove"):
        for screen.now in (0.0, 1.9, 2.0, 2.05, 2.2):
            say(f"at {screen.now}", screen.now / 4)
    shown = [line.strip() for line in screen.drawn()]
    assert shown == ["", "prove: [#####     ] 2 s, at 2.0", "prove: [######    ] 2 s, at 2.2", "", ""]


def test_a_short_call_draws_nothing(screen):
    with showing("plan"):
        say("trying schedules")
    say("outside of a call")
    assert screen.drawn() == [""]


def test_a_call_inside_of_another_belongs_to_it(screen):
    with showing("plan"):
        screen.now = 3.0
        with showing("profile"):
            say("timing")
        screen.now = 4.0
        say("done")
    assert [line.split(":")[0] for line in screen.drawn() if line.strip()] == ["plan", "plan"]


def test_the_line_is_erased_if_the_call_raises(screen):
    with pytest.raises(KeyError), showing("load"):  # noqa: PT012
        screen.now = 2.0
        say("reading")
        raise KeyError
    assert screen.drawn()[-2].isspace()
    with showing("load"):
        say("again")
    assert screen.drawn() == [""]


@pytest.mark.parametrize(("columns", "width"), [(80, 79), (200, 100)])
def test_the_line_fits_the_terminal(screen, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    with showing("plan"):
        screen.now = 2.0
        say("moving cuts of " + "zb_v\n" * 40)
    assert {len(one) for one in screen.drawn()} == {0, width}


@pytest.mark.parametrize("how", ["a pipe", "another rank", "no stream"])
def test_only_the_terminal_of_the_first_process_gets_it(screen, monkeypatch, how):
    if how == "a pipe":
        screen.is_terminal = False
    elif how == "another rank":
        monkeypatch.setitem(os.environ, "RANK", "1")
    else:
        status.sys.stderr = None
    with showing("plan"):
        screen.now = 5.0
        say("trying")
    assert screen.drawn() == [""]


def test_the_log_has_it_every_ten_seconds(screen, caplog):
    screen.is_terminal = False
    with caplog.at_level(logging.INFO, "schedules.status"), showing("save"):
        for screen.now in (5.0, 10.0, 15.0, 21.0):
            say("writing", screen.now / 40)
    assert caplog.messages == ["save: [##        ] 10 s, writing", "save: [#####     ] 21 s, writing"]


def test_a_search_says_how_far_it_is(monkeypatch):
    said = []
    monkeypatch.setattr(status.StatusLine, "say", lambda line, doing, share=None: said.append((line.call, doing)))
    with showing("search"):
        search(Problem(Costs(), looped(2), 3), tries=3, progress=lambda one: say(f"best {one.best:g}"))
    assert ("search", "best 10") in said
