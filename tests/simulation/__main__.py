# SPDX-License-Identifier: Apache-2.0
"""Replay one case of the simulation from its seed, or run many.

python -m tests.simulation --seed 17
python -m tests.simulation --seed 0 --cases 1000 --device
python -m tests.simulation --seed 0 --cases 1000 --stream
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from fpipe.pipelines.modes import postpone_collection
from tests.common.world.drawing import Case, draw, draw_on_device, draw_stream
from tests.common.world.verdicts import Simulator, simulate

SHOWN = 12
EVERY = 120  # cases between collections of garbage


def main() -> int:
    """Run the cases that the command line asks for; return 1 if any did not end as promised."""
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1, help="how many seeds")
    parser.add_argument("--device", action="store_true", help="let processes compute on devices")
    parser.add_argument("--stream", action="store_true", help="let each step be a stream without a flush")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fpipe").setLevel(logging.ERROR)
    made = draw_stream if arguments.stream else draw
    chosen = partial(draw_on_device, draw=made) if arguments.device else made
    if arguments.cases == 1:
        print(chosen(arguments.seed))
        print(f"  ended: {simulate(arguments.seed, chosen)}")
        return 0
    return run_many(range(arguments.seed, arguments.seed + arguments.cases), chosen)


def run_many(seeds: range, draw: Callable[[int], Case]) -> int:
    """Run the cases of these seeds until Ctrl-C; print failures, and now and then how cases have ended."""
    began, ends, failed, simulator = time.process_time(), Counter[str](), list[int](), Simulator()
    gc.freeze()
    with postpone_collection(), suppress(KeyboardInterrupt):
        for seed in seeds:
            try:
                ends[simulator.simulate(seed, draw).ended] += 1
            except Exception as error:
                failed.append(seed)
                print(draw(seed))
                traceback.print_exception(error, file=sys.stdout)
            done = ends.total() + len(failed)
            if done % EVERY == 0:
                gc.collect()
                print(report(ends, failed, began), flush=True)
    print(report(ends, failed, began))
    return min(len(failed), 1)


def report(ends: Counter[str], failed: list[int], began: float) -> str:
    """Return how cases have ended: the most common ways, and how many ended in another."""
    done, common = ends.total() + len(failed), dict(ends.most_common(SHOWN))
    return (
        f"{done} cases, {(time.process_time() - began) / max(1, done):.3f} CPU seconds each; "
        f"ended: {common}, otherwise: {ends.total() - sum(common.values())}; failed: {failed}"
    )


if __name__ == "__main__":
    sys.exit(main())
