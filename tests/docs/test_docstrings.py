# SPDX-License-Identifier: Apache-2.0
"""Docstrings become reStructuredText."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "extensions" / "docstrings.py"


@pytest.fixture(scope="module")
def docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Return `x`.", "Return ``x``."),
        ("See `fpipe.verify`.", "See :py:obj:`fpipe.verify`."),
        ("`a * b` is 2 * 3", r"``a * b`` is 2 \* 3"),
        ("*units* and *args", r"*units* and \*args"),
        ("|x| and x_ and x_y", r"\|x\| and x\_ and x_y"),
    ],
)
def test_code_is_marked_and_the_rest_is_literal(docstrings, line, expected):
    assert docstrings.escape(line) == expected


def test_paragraphs_keep_their_kind(docstrings):
    lines = ["Draw:", "- `a`: one", "  more", "", "    an example *", "", ">>> f(`x`)", "'*'"]
    docstrings.convert(lines)
    assert lines == [
        *("Draw:", "", "- ``a``: one", "  more", ""),
        *("::", "", "    an example *", ""),
        *(">>> f(`x`)", "'*'", ""),
    ]


def test_signatures_have_no_angle_brackets(docstrings):
    assert docstrings.tidy("(a=<function f>, b=<factory>)", "int") == ("(a=f, b=...)", "int")
    assert docstrings.tidy("(*args, **kwargs)", None) == ("", None)
