# SPDX-License-Identifier: Apache-2.0
"""Imports go down the tables of docs/rooms.md, never in a circle, and never to private names of another room."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.common.sources import list_nodes

HOME = Path(__file__).parents[1]
PACKAGES = ("schedules", "fpipe")
CORE = ("schedules.language", "schedules.lowering", "fpipe.runtime")


class Import(NamedTuple):
    """`module` imports `name` from `source`, a module of ours; `line` is where."""

    module: str
    line: int
    source: str
    name: str | None


def orders() -> dict[str, list[str]]:
    """Return the rooms of each package, lowest first."""
    page = (HOME / "docs" / "rooms.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {text.split()[0]: re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) for text in sections}


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module."""
    found = {}
    for package in PACKAGES:
        for file in (HOME / package).rglob("*.py"):
            parts = file.relative_to(HOME).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Yield every import of ours, deferred ones and those for types only included."""
    for node in list_nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(module, node.lineno, *((inner, None) if inner in known else (node.module, alias.name)))
        if isinstance(node, ast.Import):
            yield from (
                Import(module, node.lineno, alias.name, None)
                for alias in node.names
                if alias.name.split(".")[0] in PACKAGES
            )


def room(module: str) -> str:
    """Return the room of a module; the package itself is one."""
    return module.split(".")[min(1, module.count("."))]


@cache
def found_imports() -> list[Import]:
    known = modules()
    return [one for name, file in known.items() for one in imports(name, file, known)]


def test_every_room_is_in_the_tables():
    for package, order in orders().items():
        rooms = {room(name) for name in modules() if name.split(".")[0] == package}
        assert rooms == set(order), package
        assert len(order) == len(set(order))


def test_schedules_does_not_know_fpipe():
    assert not [one for one in found_imports() if one.module.startswith("schedules") and one.source.startswith("fpipe")]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package):
    order = orders()[package]
    ours = [one for one in found_imports() if {one.module.split(".")[0], one.source.split(".")[0]} == {package}]
    assert ours
    assert not [one for one in ours if order.index(room(one.source)) > order.index(room(one.module))]


def core() -> dict[str, Path]:
    """Return the modules that docs/core.md walks through."""
    return {name: file for name, file in modules().items() if name.startswith(CORE)}


def test_the_core_is_read_in_an_hour():
    assert sum(len(file.read_text().splitlines()) for file in core().values()) <= 2500


def test_the_core_imports_nothing_else_of_the_house():
    allowed = {*core(), "schedules.errors", "schedules.arguments", "fpipe.errors"}
    assert not [one for one in found_imports() if one.module in core() and one.source not in allowed]


def test_the_core_needs_the_standard_library_only():
    for name, file in core().items():
        nodes = list_nodes(file)
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {one.split(".")[0] for one in imported} <= {*sys.stdlib_module_names, *PACKAGES}, name


def test_the_page_about_the_core_walks_through_all_of_it():
    page = (HOME / "docs" / "core.md").read_text()
    assert not [name for name, file in core().items() if file.name != "__init__.py" and f"{file.name}`" not in page]


def test_imports_do_not_run_in_a_circle():
    graph: dict[str, set[str]] = {}
    for one in found_imports():
        if one.source != one.module:
            graph.setdefault(one.module, set()).add(one.source)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def test_rooms_keep_their_private_names():
    places = [(one, one.name) for one in found_imports()]
    for module, file in modules().items():
        aliases = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in list_nodes(file)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if f"{node.module}.{alias.name}" in modules()
        }
        for node in list_nodes(file):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                places.append((Import(module, node.lineno, aliases[node.value.id], None), node.attr))
    assert not [
        (one, name)
        for one, name in places
        if private(name)
        and (room(one.module), one.module.split(".")[0]) != (room(one.source), one.source.split(".")[0])
    ]
