# SPDX-License-Identifier: Apache-2.0
"""Run a command as a well-behaved process: exit codes, one line for an error, closed pipes, interrupts.

Errors that a user's own file raises are the user's to repair: they are told where, without the frames of this package.
An error of the package is a bug, and keeps its traceback.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from textwrap import fill

from schedules.errors import PipelineError, describe_error, printable

INTERRUPTED = 130
"""The exit code after an interrupt, as shells have it."""
USERS_MODULE = "schedules_of_the_user"
"""The name of a user's file as a module: not the file's own, which may be that of an imported module."""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Return the exit code of `work`; print errors to standard error as one line that begins with `name`."""
    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `show gpipe | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _complain(name, "interrupted", INTERRUPTED)
    except (PipelineError, OSError) as error:
        return _complain(name, str(error))
    except (Exception, SystemExit) as error:
        where = _find_users_line(error)
        if where is None:
            raise
        return _complain(name, f"{where}: got {describe_error(error)}, expected a file that runs. Fix it.")


def _complain(name: str, text: str, code: int = 2) -> int:
    line = f"{name}: {' '.join(map(printable, text.splitlines()))}"
    if sys.stderr is not None:
        wide = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
        print(fill(line, wide, break_long_words=False) if wide > 1 else line, file=sys.stderr)
    return code


def _find_users_line(error: BaseException) -> str | None:
    """Return the last line of the user's file that led to an error, or `None`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == USERS_MODULE:
            found = f"{frame.f_code.co_filename}, line {line}"
    return found
