# SPDX-License-Identifier: Apache-2.0
"""The page of troubleshooting quotes errors that the code raises."""

import ast
import re
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
PAGE = (HOME / "docs" / "troubleshooting.md").read_text()
PHRASES = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
RULES = re.findall(r"`(\w+)`(?:, | \|)", PAGE[PAGE.index("| rule |") :])


def text(node):
    """Return a string literal as it reads, with an ellipsis for what is filled in; none for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


@pytest.fixture(scope="module")
def literals():
    files = [file for package in ("fpipe", "schedules") for file in sorted((HOME / package).rglob("*.py"))]
    return {text(node) for file in files for node in ast.walk(ast.parse(file.read_text()))}


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_phrase_is_in_the_code(phrase, literals):
    parts = [part for part in phrase.split("…") if part]
    having = [literal for literal in literals if all(part in literal for part in parts)]
    assert any(re.search(".*?".join(map(re.escape, parts)), literal, re.DOTALL) for literal in having)


def test_every_rule_is_explained():
    sources = [file.read_text() for file in sorted((HOME / "schedules").rglob("*.py"))]
    raised = {rule for source in sources for rule in re.findall(r'rror\(\s*"([a-z_]+)", ', source)}
    assert raised <= set(RULES)
    assert set(RULES) <= {name for source in sources for name in re.findall(r"\w+", source)}
