# SPDX-License-Identifier: Apache-2.0
"""Replay one case of the simulation from its seed, or run many.

python -m tests.simulation --seed 17
python -m tests.simulation --seed 0 --cases 1000
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

import torch

from tests.common.world.drawing import draw
from tests.common.world.verdicts import simulate


def main() -> int:
    """Run the cases that the command line asks for; return the number of those that did not end as promised."""
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1, help="how many seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fpipe").setLevel(logging.ERROR)
    began, ends, failed = time.monotonic(), Counter[str](), list[int]()
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if arguments.cases == 1:
            print(draw(seed))
        try:
            verdict = simulate(seed)
        except BaseException as error:
            failed.append(seed)
            if arguments.cases > 1:
                print(draw(seed))
            traceback.print_exception(error)
            if isinstance(error, KeyboardInterrupt):
                break
            continue
        ends[verdict.ended] += 1
        if arguments.cases == 1:
            print(f"  ended: {verdict}")
    if arguments.cases > 1:
        seconds = time.monotonic() - began
        print(f"{arguments.cases} cases in {seconds:.0f} s; ended: {dict(ends.most_common())}; failed: {failed}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
