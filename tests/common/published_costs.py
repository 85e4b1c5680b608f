# SPDX-License-Identifier: Apache-2.0
"""Costs with known best times, and costs that were measured for a publication."""

from math import inf

from schedules import Costs, linear, looped, vee

# Ranks, placement, microbatches, F, B or I, W, memory in activations of a chunk, makespan.
SLOTS = """
2 linear 4 1 1  -  - 10
4 linear 4 1 1  -  2 18
4 linear 8 1 1  -  4 22
4 vee    8 1 1  -  8 38
3 looped 4 1 1  -  6 20
4 linear 8 1 2  -  - 33
4 linear 8 1 1  1  4 27
4 linear 8 1 1  1  8 27
""".strip().splitlines()

# arXiv 2401.10241, table 5, on 8 ranks: microbatches, F, I, W, transfer.
MEASURED = """
24 18.522 18.086  9.337 0.601
32 18.513 18.086  9.331 0.626
64 18.546 18.097  9.321 0.762
24 29.718 29.444 19.927 0.527
32 29.802 29.428 19.530 0.577
64 29.935 29.621 19.388 0.535
""".strip().splitlines()


def read_slots(line):
    """Return the arguments of `bound` or `search` for a line of `SLOTS`, and the best makespan."""
    ranks, name, microbatches, forward, backward, weight, cap, best = line.split()
    placement = linear(int(ranks)) if name == "linear" else {"vee": vee, "looped": looped}[name](int(ranks), 2)
    memory = inf if cap == "-" else int(cap) * placement.ranks / placement.stages
    split, I = weight != "-", float(backward)  # noqa: E741 - the action's name
    costs = Costs(F=float(forward), B=I + 1 if split else I, I=I, W=1)
    return (costs, placement, int(microbatches), {"memory": memory, "split": split}), float(best)


def read_measured(line):
    """Return the costs and the number of microbatches for a line of `MEASURED`."""
    M, F, I, W, comm = map(float, line.split())  # noqa: E741 - the action's name
    return Costs(F=F, B=I + W, I=I, W=W, comm=comm), int(M)
