# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file or a command line, the answer is right, or a named error, soon; and a broken parser is seen."""

import os
from collections import Counter
from unittest import mock

import pytest

import schedules.__main__
from fpipe.checkpoints import manifest
from fpipe.planning import documents
from schedules import certificate
from schedules.files import csv
from tests.common.fuzzing.running import SUBJECTS, find_failures
from tests.common.sizes import NIGHTLY, by_night

FIRST, CASES = int(os.environ.get("FUZZING_SEED", "0")), int(os.environ.get("FUZZING_CASES", "1000"))
CHUNK, BY_DAY = 500, 30


def list_failures(subject, seeds):
    """The command that replays each case that did not end as promised, with what was wrong."""
    found = find_failures(SUBJECTS[subject](), seeds, Counter())
    return [(f"python -m tests.fuzzing {subject} --seed {seed}", f"{type(e).__name__}: {e}") for seed, e in found]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_hostile_files_and_commands_are_answered(subject):
    assert not list_failures(subject, range(BY_DAY))


@by_night
@pytest.mark.parametrize("first", range(FIRST, FIRST + (CASES if NIGHTLY else 1), CHUNK))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_many_hostile_files_and_commands_are_answered(subject, first):
    assert not list_failures(subject, range(first, min(first + CHUNK, FIRST + CASES)))


BROKEN = {
    "tensors are not compared with their checksum": (
        "checkpoints",
        mock.patch.object(manifest, "_require_whole", return_value=None),
    ),
    "fields of a manifest are of any type": (
        "checkpoints",
        mock.patch.object(manifest, "_build", lambda path, kind, found: kind(**found)),
    ),
    "numbers of a document are not checked": (
        "documents",
        mock.patch.object(documents, "_is_number", return_value=True),
    ),
    "a stage may be on no line": (
        "schedule_files",
        mock.patch.object(csv, "_infer_placement", lambda ranks, homes: {}[ranks]),
    ),
    "a certificate may have anything": (
        "schedule_files",
        mock.patch.object(certificate, "_require", return_value=None),
    ),
    "errors leave a command": (
        "command_lines",
        mock.patch.object(schedules.__main__, "run_command", lambda name, work: work()),
    ),
}


SEEN_FROM = {"tensors are not compared with their checksum": 325}
"""A seed shortly before the first one that sees an error, if that is rare."""


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_parser_is_seen_within_a_few_seeds(what):
    name, broken = BROKEN[what]
    subject = SUBJECTS[name]()
    with broken:
        first = SEEN_FROM.get(what, 0)
        assert next(find_failures(subject, range(first, first + 200), Counter()), None)
