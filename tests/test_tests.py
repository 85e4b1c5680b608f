# SPDX-License-Identifier: Apache-2.0
"""Test modules import helpers from tests/common, and nothing from one another."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported_modules(file: Path) -> Iterator[str]:
    """Yield every module, or name of a module, that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_test_modules_do_not_import_one_another():
    assert not [
        (str(file.relative_to(TESTS)), name)
        for file in TESTS.rglob("*.py")
        for name in imported_modules(file)
        if any(part.startswith("test_") for part in name.split("."))
    ]
