# SPDX-License-Identifier: Apache-2.0
"""Training scripts for one device, and the lines that change when the model becomes a drop-in module.

A script leaves `losses`, `model` and `optimizer`. It is run as text, as users would run the file.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from tests.common.comparison import require_part, require_same_slots
from tests.common.sizes import NIGHTLY, in_turn

HEAD = """
import os
import torch
from torch import nn
from torch.nn import functional
from tests.common.zoo import GPT
from tests.common.training import cross_entropy, llama, padded

ranks = int(os.environ.get("WORLD_SIZE", 2))
torch.manual_seed(0)
losses = []
"""

CLASSIFY = (
    HEAD
    + """
model = nn.Sequential(
    nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(),
    nn.Linear(16, 3),
)
criterion = functional.cross_entropy
x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
for step in range(50):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    optimizer.zero_grad()
    loss = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4)):
        part = criterion(model(a), b) / 4
        part.backward()
        loss = loss + part.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
    if step % 20 == 10:
        model.eval()
        with torch.no_grad():
            losses.append((model(x).argmax(-1) == y).float().mean())
        model.train()
"""
)

LANGUAGE = (
    HEAD
    + """
model = GPT()
x = torch.randint(0, 11, (8, 3))
criterion = lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([dict(params=decayed), dict(params=others, weight_decay=0.0)], lr=0.01)
for step in range(50):
    for _ in range(2):
        x = torch.randint(0, 11, (8, 3))
        loss = 0.0
        for a, b in zip(x.chunk(4), x.roll(-1, 1).chunk(4)):
            part = criterion(model(a), b) / 4
            (part / 2).backward()
            loss = loss + part.detach()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    losses.append(norm)
    optimizer.step()
    optimizer.zero_grad()
"""
)

CONVERSE = (
    HEAD
    + """
numbers = torch.Generator().manual_seed(1)
model = llama()
x, y = padded(numbers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(50):
    x, y = padded(numbers)
    loss = 0.0
    for k in range(4):
        out = model(**{name: value.chunk(4)[k] for name, value in x.items()})
        part = cross_entropy(out, y.chunk(4)[k]) / 4
        part.backward()
        loss = loss + part.detach()
    losses.append(loss.detach())
    losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
"""
)

BUILD = """
import fpipe
import schedules
model = fpipe.Pipelined(
    model, loss=LOSS, example=INPUTS, targets=TARGETS, schedule=schedules.SCHEDULE(ranks=ranks, microbatches=4)
)
"""


def build(loss: str, inputs: str, targets: str) -> str:
    """Return the lines that make the drop-in module; the schedule is put in later."""
    return BUILD.replace("LOSS", loss).replace("INPUTS", inputs).replace("TARGETS", targets)


SCRIPTS = {
    "classify": (
        CLASSIFY,
        {
            "optimizer =": build("criterion", "(x,)", "y") + "optimizer =",
            """    loss = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4)):
        part = criterion(model(a), b) / 4
        part.backward()
        loss = loss + part.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
""": """    loss = model(x, targets=y)
    loss.backward()
    model.clip_grad_norm_(0.5)
""",
        },
    ),
    "language": (
        LANGUAGE,
        {
            "decayed =": build("criterion", "(x,)", "x") + "decayed =",
            """        loss = 0.0
        for a, b in zip(x.chunk(4), x.roll(-1, 1).chunk(4)):
            part = criterion(model(a), b) / 4
            (part / 2).backward()
            loss = loss + part.detach()
""": """        loss = model(x, targets=x.roll(-1, 1))
        (loss / 2).backward()
""",
            "nn.utils.clip_grad_norm_(model.parameters(), 0.1)": "model.clip_grad_norm_(0.1)",
        },
    ),
    "converse": (
        CONVERSE,
        {
            "optimizer =": build("cross_entropy", "x", "y") + "optimizer =",
            """    loss = 0.0
    for k in range(4):
        out = model(**{name: value.chunk(4)[k] for name, value in x.items()})
        part = cross_entropy(out, y.chunk(4)[k]) / 4
        part.backward()
        loss = loss + part.detach()
""": """    loss = model(**x, targets=y)
    loss.backward()
""",
            "nn.utils.clip_grad_norm_(model.parameters(), 0.5)": "model.clip_grad_norm_(0.5)",
        },
    ),
}
SCHEDULES = ("one_f_one_b", "zb_h1", "zb_v")
RUNS = in_turn([name for name in SCRIPTS if NIGHTLY or name != "converse"], SCHEDULES)
"""By day two scripts, each under one schedule; by night all under all."""


def run_script(name: str, schedule: str | None = None) -> dict[str, Any]:
    """Run a script, changed if there is a schedule, in this process; return the variables that it leaves."""
    text, lines = SCRIPTS[name]
    for old, new in lines.items() if schedule else ():
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("SCHEDULE", schedule))
    left: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        exec(compile(text, name, "exec"), left)
    return left


def require_same_training(name: str, schedule: str) -> set[str]:
    """Run both scripts: losses, parameters, buffers and optimizer state of this process are those of the plain one.

    Return the names of the tensors that were compared.
    """
    plain, piped = run_script(name), run_script(name, schedule)
    assert len(plain["losses"]) == len(piped["losses"]) >= 50
    known, found = plain["model"].state_dict(), piped["model"].state_dict()
    require_part([piped["losses"], dict(found)], [plain["losses"], known])
    states = [{n: left["optimizer"].state[p] for n, p in left["model"].named_parameters()} for left in (plain, piped)]
    require_same_slots(*optree.tree_map(torch.as_tensor, states[::-1]))
    return set(found)
