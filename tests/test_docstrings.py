# SPDX-License-Identifier: Apache-2.0
"""Docstrings say what the reader gets, and modules of fpipe when they run."""

import ast
from pathlib import Path

from tests.common.sources import list_nodes

ROOT = Path(__file__).parents[1]
MODULES = sorted([*ROOT.glob("fpipe/**/*.py"), *ROOT.glob("schedules/**/*.py")])
CLAUSES = ("What", "Where", "How", "Whether", "That")
"""Words that begin a clause: no noun phrase, and no imperative."""


def first_words(path):
    """The first word of each docstring in a module, by whose it is."""
    nodes = [node for node in list_nodes(path) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    where = path.relative_to(ROOT)
    return {f"{where}: {getattr(node, 'name', '')}": (ast.get_docstring(node) or "").split(" ")[0] for node in nodes}


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = {where: word for path in MODULES for where, word in first_words(path).items()}
    assert {where: word for where, word in found.items() if word in CLAUSES} == {}


def test_every_module_of_fpipe_says_when_it_runs():
    modules = [path for path in MODULES if path.is_relative_to(ROOT / "fpipe") and path.name != "__init__.py"]
    docs = {path.relative_to(ROOT).as_posix(): ast.get_docstring(list_nodes(path)[0]) or "" for path in modules}
    assert [path for path, text in docs.items() if not text.split("\n\n")[-1].startswith("Runs ")] == []
