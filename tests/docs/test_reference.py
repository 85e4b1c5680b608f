# SPDX-License-Identifier: Apache-2.0
"""Every public name is in the API reference and has a docstring; every schedule is in the gallery."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import fpipe
from schedules import families

DOCS = Path(__file__).parents[2] / "docs"
PLACES = (
    *("fpipe", "fpipe.errors", "fpipe.front_ends"),
    *("schedules", "schedules.drawing", "schedules.files", "schedules.testing"),
)
ENTRY = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:data):: (\S+)\n(?:\n   (\S.*))?", re.MULTILINE)
ENTRIES = {name: text for page in sorted((DOCS / "api").glob("*.md")) for name, text in ENTRY.findall(page.read_text())}


def objects(place):
    """Yield the public names of a module, and what they are; a public module has a page to itself."""
    module = import_module(place)
    yield from ((name, getattr(module, name)) for name in module.__all__ if f"{place}.{name}" not in PLACES)


DOCUMENTED = {id(getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2])): name for name in ENTRIES}


@pytest.mark.parametrize("place", PLACES)
def test_the_reference_has_every_public_name(place):
    assert not [name for name, value in objects(place) if id(value) not in DOCUMENTED]


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_has_a_docstring(place):
    for name, value in objects(place):
        described = ENTRIES[DOCUMENTED[id(value)]] or inspect.getdoc(value)
        assert described, f"{place}.{name}"
        assert described != inspect.getdoc(type(value)), f"{place}.{name}"


def test_the_reference_has_nothing_else():
    for name in ENTRIES:
        place, _, last = name.rpartition(".")
        assert place in PLACES, name
        assert last in import_module(place).__all__, name


def test_the_gallery_has_every_schedule():
    shown = re.findall(r"^```\{timeline\} (\w+)\(", (DOCS / "gallery.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(families.__all__)


def test_every_page_is_in_a_table_of_contents():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("_build")}
    toctrees = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = {line for tree in toctrees for line in tree.split("\n") if line and not line.startswith(":")}
    assert pages == listed | {"index"}


def test_the_version_is_that_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fpipe.__version__)
    log = (DOCS.parent / "CHANGELOG.md").read_text()
    assert f"## {fpipe.__version__}" in log
