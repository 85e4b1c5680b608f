# SPDX-License-Identifier: Apache-2.0
"""Replay one hostile file or command line from its seed, or run many.

python -m tests.fuzzing checkpoints --seed 17
python -m tests.fuzzing documents --seed 0 --cases 1000
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

import torch

from tests.common.fuzzing.running import SUBJECTS, find_failures


def main() -> int:
    """Run the cases that the command line asks for; return 1 if any did not end as promised."""
    parser = argparse.ArgumentParser("python -m tests.fuzzing", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1, help="how many seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, ends, failed = time.process_time(), Counter[str](), list[int]()
    seeds = range(options.seed, options.seed + options.cases)
    for seed, error in find_failures(SUBJECTS[options.subject](), seeds, ends):
        failed.append(seed)
        print(f"seed {seed}")
        traceback.print_exception(error, file=sys.stdout, limit=-9)
        sys.stdout.flush()
    took = (time.process_time() - began) / options.cases
    print(f"{options.cases} cases, {took:.3f} CPU seconds each; ended: {dict(ends.most_common())}; failed: {failed}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
