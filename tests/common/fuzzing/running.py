# SPDX-License-Identifier: Apache-2.0
"""Run cases from their seeds, one after another, and say which did not end as promised."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, Protocol

from tests.common.fuzzing.checkpoints import Checkpoints
from tests.common.fuzzing.command_lines import CommandLines
from tests.common.fuzzing.documents import Documents
from tests.common.fuzzing.schedule_files import ScheduleFiles


class Subject(Protocol):
    """What is changed at random."""

    def try_one(self, seed: int) -> str:
        """Run the case of a seed; return how it ended, or raise an error if not as promised."""


SUBJECTS: Final[Mapping[str, Callable[[], Subject]]] = MappingProxyType(
    {
        "checkpoints": Checkpoints,
        "documents": Documents,
        "schedule_files": ScheduleFiles,
        "command_lines": CommandLines,
    }
)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of fpipe out of the log."""
    logger = logging.getLogger("fpipe")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def find_failures(subject: Subject, seeds: Iterable[int], ends: Counter[str]) -> Iterator[tuple[int, Exception]]:
    """Yield the seeds of a subject that do not end as promised, each with the error; count how the others end."""
    for seed in seeds:
        try:
            with warnings.catch_warnings(), quiet():
                warnings.simplefilter("error")
                ends[subject.try_one(seed)] += 1
        except Exception as error:
            yield seed, error
