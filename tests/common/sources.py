# SPDX-License-Identifier: Apache-2.0
"""The code of this repository, parsed once."""

import ast
from functools import cache
from pathlib import Path


@cache
def list_nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree of a file, the module first."""
    return tuple(ast.walk(ast.parse(file.read_text())))
