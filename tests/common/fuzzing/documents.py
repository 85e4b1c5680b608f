# SPDX-License-Identifier: Apache-2.0
"""Profiles and plans that were altered; then read, printed and used."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import fpipe
from fpipe.planning.commands import _plan_profile
from tests.common.fuzzing.bounds import REFUSED, ask
from tests.common.fuzzing.mutations import mutate_bytes, mutate_value, plant


class Documents:
    """A small model, its profile and a plan for it, as JSON values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.example = (torch.randn(4, 4),)
        profile = fpipe.profile(self.model, self.example, loss=torch.mean, microbatches=2, seconds=0)
        plan = fpipe.plan(
            self.model, self.example, loss=torch.mean, ranks=2, microbatches=2, profile=profile, seconds=1
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "any")
            self.originals: dict[str, tuple[bytes, Any]] = {}
            for name, one in {"profile": profile, "plan": plan}.items():
                one.save(file)
                self.originals[name] = file.read_bytes(), one

    def try_one(self, seed: int) -> str:
        """Alter a profile or a plan, read it, and use it. Return how that ended."""
        drawn = Random(seed)
        name = drawn.choice(list(self.originals))
        data, original = self.originals[name]
        is_signed = drawn.random() < 0.7
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "any.json")
            file.write_bytes(self._change(drawn, data) if is_signed else mutate_bytes(drawn, data))
            if drawn.random() < 0.05:
                plant(drawn, file)
            size = file.stat().st_size if file.is_file() else 0
            read = fpipe.Profile.read if name == "profile" else fpipe.Plan.read
            found = ask(read, file, most_read=4 * size + 2**16)
            if found is REFUSED:
                return f"{name}: refused"
            if not is_signed:
                assert found == original, "another value than was saved"
                return f"{name}: as saved"
            assert "\x1b" not in ask(str, found)
            if drawn.random() < 0.1:
                return f"{name}: {self._use(drawn, file, found)}"
        return f"{name}: read"

    def _change(self, drawn: Random, data: bytes) -> bytes:
        document = json.loads(data)
        document.pop("crc32", None)
        for _ in range(drawn.choice((1, 1, 1, 2, 4))):
            document = mutate_value(drawn, document)
            if not isinstance(document, dict):
                return json.dumps(document).encode()
        if drawn.random() < 0.5:
            document = {"crc32": zlib.crc32(json.dumps(document).encode()), **document}
        text = json.dumps(document)
        if drawn.random() < 0.1:
            text = text.replace("1", drawn.choice(("1" * 5000, "1e400", "NaN", "[" * 2000)), 1)
        return text.encode()

    def _use(self, drawn: Random, file: Path, found: Any) -> str:
        if isinstance(found, fpipe.Plan):
            build = {"example": self.example, "loss": torch.mean, "plan": found}
            done = ask(lambda: fpipe.pipeline(self.model, **build).close())
        else:
            sizes = {"ranks": drawn.choice((1, 2, 3)), "microbatches": (drawn.choice((1, 2, 4)),)}
            more = drawn.choice(({}, {"memory": "1KB"}, {"memory": "80GB"}, {"cuts": ("2",)}))
            done = ask(lambda: str(_plan_profile(file, {**sizes, **more}, 0.2)))
        return "not usable" if done is REFUSED else "used"
