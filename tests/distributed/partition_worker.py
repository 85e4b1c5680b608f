# SPDX-License-Identifier: Apache-2.0
"""One rank of two in a network namespace of its own; it steps until its time is over, or until a step raises.

python tests/distributed/partition_worker.py RANK SECONDS FOLDER
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from schedules import one_f_one_b

TIMEOUT, STARTED = timedelta(seconds=6), 5


def main() -> None:
    rank, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = f"cable{rank}"
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(8, 16), torch.randn(8, 16)
    loss, how = nn.functional.mse_loss, one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=loss, schedule=how)
    params, buffers = pipe.init(model)
    step, start, wanted = fpipe.value_and_grad(pipe), time.monotonic(), None
    for number in range(10**9):
        try:
            out, _ = step(params, buffers, (x,), y)
        except fpipe.PipelineError as error:
            print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
            break
        wanted = out.loss if wanted is None else wanted
        assert torch.equal(out.loss, wanted)
        if number == STARTED:
            (folder / f"started{rank}").touch()
            start = time.monotonic()
        if number > STARTED and rank == 0 and time.monotonic() - start > seconds:
            print("done")
            break
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # the other rank may be out of reach


if __name__ == "__main__":
    main()
