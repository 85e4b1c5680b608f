# SPDX-License-Identifier: Apache-2.0
"""Scripts of other libraries with options drawn at random, in one process or under torchrun, against the plain scripts.

python option_worker.py FOLDER SEED COUNT

One process runs the plain scripts, too, and leaves what they computed in the folder; several processes compare with it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from tests.common.option_draws import attempt, draw, judge

RANKS = 2


def main(folder: str, first: int, count: int) -> None:
    """Run the draws of these seeds, and print how each ended; a failure ends all."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of libraries about each other
    alone, ends = int(os.environ.get("WORLD_SIZE", "1")) == 1, Counter[str]()
    for seed in range(first, first + count):
        one, file = draw(seed), Path(folder, f"{seed}.pt")
        with mock.patch.object(dist, "destroy_process_group"):  # which Accelerate calls at the end of each training
            got = attempt(one, RANKS)
        if alone and not one.refused:
            torch.save(attempt(one, None), file)
        want = None if one.refused else torch.load(file, weights_only=False)
        try:
            ended = judge(one, got, want)
        except Exception as error:
            print(f"seed {seed}: {one}\nfailed: {error}")
            traceback.print_exception(error)
            raise
        ends[f"{one.library}, {ended}"] += 1
    print(f"passed {sum(ends.values())}: {dict(ends)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
