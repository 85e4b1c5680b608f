# SPDX-License-Identifier: Apache-2.0
"""Plan a pipeline from a shell: `python -m fpipe plan train.py:task --ranks 4 --memory 80GB`.

Exit codes: 0, success; 2, the command made no sense, and standard error says why.

Runs on request.
"""

from __future__ import annotations

import argparse
import os
import sys
from inspect import getdoc

from fpipe.commands.plans import add_plan, print_plan
from fpipe.errors import PipelineError


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser("python -m fpipe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="plan")
    add_plan(commands.add_parser("plan", description=getdoc(print_plan)))
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PipelineError, OSError) as error:
        print(f"python -m fpipe: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
