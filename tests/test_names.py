# SPDX-License-Identifier: Apache-2.0
"""One meaning per word: no two modules of the packages define the same public name, and functions stay short."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.common.sources import list_nodes

HOME = Path(__file__).parents[1]
FILES = sorted(file for package in ("fpipe", "schedules") for file in (HOME / package).rglob("*.py"))
SHARED = {"costs", "main", "prove"}  # `Costs`, measured or drawn; a command line; a proof on formulas or operators
ALONE = "certificate.py"  # shares nothing with the rest, names included
BODY = 50


def names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines at its top level."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_no_public_name_has_two_definitions():
    where = defaultdict(set)
    for file in (file for file in FILES if file.name != ALONE):
        for name in names(list_nodes(file)[0]):
            if not name.startswith("_"):
                where[name].add(str(file.relative_to(HOME)))
    assert {name: found for name, found in where.items() if len(found) > 1 and name not in SHARED} == {}


def body(function: ast.FunctionDef) -> int:
    """Return the lines of a function after its docstring."""
    first = function.body[ast.get_docstring(function) is not None :] or function.body
    return (function.end_lineno or 0) - first[0].lineno + 1


def test_functions_stay_short():
    functions = {
        f"{file.relative_to(HOME)}: {node.name}": body(node)
        for file in FILES
        for node in list_nodes(file)
        if isinstance(node, ast.FunctionDef) and body(node) > BODY
    }
    assert set(functions) <= {"schedules/playing/engine.py: _play"}, "the one loop, with a comment per paragraph"
