# SPDX-License-Identifier: Apache-2.0
"""The end of a pipeline.

Problem. A program may build thousands of pipelines. Each holds captures, and connections to other ranks: threads and
descriptors that torch keeps until their process groups are destroyed.

Idea. To destroy a process group is a local call, and when a call of fpipe returns, each rank has received everything
that it needs. So each rank closes its pipelines whenever it likes, or Python does once nothing refers to them.

Invariants. Groups that other pipelines on the same processes share, over which ranks agree, stay until
`destroy_process_group()`: there are two for each set of processes. The user's groups are never destroyed.

Runs when a pipeline is closed.
"""

from __future__ import annotations

from typing import Self

from fpipe.pipelines.caches import Caches
from fpipe.pipelines.planner import Planner
from fpipe.runtime.ranks import Ranks
from fpipe.runtime.turns import wait_for_turn


class Closable:
    """The part of a pipeline that ends it."""

    planner: Planner
    ranks: Ranks
    caches: Caches

    def close(self) -> None:
        """Release the plans and captures, and this process's connections to other ranks, which need not wait for it.

        Process groups that you passed stay. Later calls of the pipeline's functions raise `InputError`; so do those of
        pipelines rebuilt from it, since they share its connections. Closing again does nothing. A pipeline to which
        nothing refers closes itself; in a `with` statement, the end of it does.

        >>> import torch, fpipe
        >>> from schedules import gpipe
        >>> model, x = torch.nn.Linear(4, 1), torch.ones(2, 4)
        >>> with fpipe.pipeline(model, example=(x,), loss=torch.mean, schedule=gpipe(1, 2)) as pipe:
        ...     step = fpipe.value_and_grad(pipe)
        ...     loss = step(*pipe.init(model), (x,))[0].loss
        >>> step({}, {}, (x,))
        Traceback (most recent call last):
        fpipe.errors.InputError: a step: got a closed pipeline, expected an open one. ...
        """
        with wait_for_turn():
            self.ranks.close()
            self.caches.clear()
            self.planner.keep_only(())

    def __enter__(self) -> Self:
        """Return the pipeline."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pipeline."""
        self.close()
