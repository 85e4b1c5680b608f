# SPDX-License-Identifier: Apache-2.0
"""The names that the code of a function reads."""

import argparse
import ast
import dataclasses
import dis
import inspect
import typing
from pathlib import Path
from types import ModuleType

import pytest

from fpipe.record.model.walk import codes
from fpipe.record.reads.code_names import AUGMENTING, SKIPPED, Lookup, find_names, steps_of

TABLE: dict[str, float] = {}
WAYS = ()


def test_names_that_are_only_written_are_not_read():
    def function(self, calls=[]):  # noqa: B006
        global FACTOR  # noqa: PLW0603
        FACTOR += 1
        self.helper.count += 1
        TABLE["unread"] += 1
        self.seen.append(self.width)
        return [WAYS for _ in range(2)], lambda: TABLE["scale"]

    found = find_names(function.__code__)
    assert found.outer == {"TABLE", "WAYS", "range"}
    assert found.attributes == {"helper", "width"}
    assert "scale" in found.keys
    assert "unread" not in found.keys
    assert found.stored == {(Lookup("global"), "FACTOR"), (Lookup("first", "", ("helper",)), "count")}


@pytest.mark.parametrize("module", [argparse, ast, dataclasses, inspect, typing], ids=lambda module: module.__name__)
def test_instructions_are_those_that_python_disassembles(module: ModuleType):
    assert module.__file__
    for code in codes(compile(Path(module.__file__).read_text(), module.__file__, "exec")):
        expected = [one for one in dis.get_instructions(code) if one.opname not in {*SKIPPED, "EXTENDED_ARG"}]
        found = [*steps_of(code)]
        assert [(one.opname, one.arg or 0) for one in expected if one.arg is not None] == [
            (step.what, step.argument) for one, step in zip(expected, found, strict=True) if one.arg is not None
        ]
        for one, step in zip(expected, found, strict=True):
            if one.opcode in {*dis.hasname, *dis.haslocal, *dis.hasfree} or one.opname == "LOAD_CONST":
                assert step.name == one.argval
            if one.opname == "BINARY_OP":
                assert (one.arg in AUGMENTING) == one.argrepr.endswith("=")
