# SPDX-License-Identifier: Apache-2.0
"""What single ranks would be given, without starting them."""

import dataclasses

import torch

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b
from tests.common.cases import Case


def on_meta(case: Case, ranks: int = 1, rows: int = 4):
    """A pipeline of a case whose model has no values."""
    _, inputs, targets = case.make(rows)
    with torch.device("meta"):
        model = case.build()
    return fpipe.pipeline(
        model,
        example=inputs,
        targets=targets,
        loss=case.loss,
        schedule=one_f_one_b(ranks=ranks, microbatches=2),
        cuts=case.at(ranks),
    )


def ranks_of(pipe: fpipe.Pipeline):
    """The same pipeline as each of its ranks alone would have it; only what it holds can be asked for."""
    for rank in range(pipe.schedule.ranks):
        memo, of_rank = pipe.memo, lambda plan: dataclasses.replace(plan, ranks=(rank,))  # noqa: B023 - called at once
        batches = {kind: one._replace(plan=of_rank(one.plan)) for kind, one in memo.batches.items()}
        captures = dataclasses.replace(pipe.captures, memo=dataclasses.replace(memo, batches=batches))
        yield dataclasses.replace(pipe, planner=dataclasses.replace(pipe.planner, captures=captures))


def union(states):
    """All leaves of all ranks, which must agree where they hold the same one."""
    found = {}
    for params, buffers in states:
        for name, value in {**params, **buffers}.items():
            assert name not in found or same_bits(found[name], value), name
            found[name] = value
    return found
