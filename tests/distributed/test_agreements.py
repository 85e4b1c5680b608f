# SPDX-License-Identifier: Apache-2.0
"""The matrix of calls that differ on one rank has every public function in it."""

import inspect

import fpipe
from tests.distributed.cases import agreements


def test_every_public_function_is_in_the_matrix_or_needs_no_other_rank(monkeypatch):
    monkeypatch.setattr(agreements, "gather", lambda value: [value])
    monkeypatch.setattr(agreements.torch.distributed, "get_rank", lambda: 0)
    rows = agreements.list_rows(agreements.Run(1))
    functions = {name for name in fpipe.__all__ if inspect.isfunction(getattr(fpipe, name))}
    assert functions <= {*rows} | agreements.LOCAL
    assert not {*rows} & agreements.LOCAL
