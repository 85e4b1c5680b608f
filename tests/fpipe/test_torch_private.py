# SPDX-License-Identifier: Apache-2.0
"""Private names of torch have one home, and every one of them is looked up when fpipe is imported."""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fpipe.tensors import torch_private
from fpipe.tensors.patching import current, replace
from fpipe.tensors.torch_private import (
    ATTRIBUTES,
    CHECKPOINT,
    GENERATOR,
    NAMES,
    OPERATORS,
    PARAMETER_MARK,
    SETTINGS,
    look_up,
    read_checkpoint,
    require_names,
)
from tests.common.sources import list_nodes

HOME = Path(__file__).parents[2]
OURS = Path(torch_private.__file__)
PYTHON = {"_replace", "_fields", "_asdict", "_getframe", "_thread"}
"""Private names of Python's own, and of its library."""

OPERATOR = {one.split(".")[0] for one in OPERATORS}


def paths(*tables: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{holder}.{name}" for table in tables for holder, listed in table.items() for name in listed]


def last_parts(table: Mapping[str, Sequence[str]]) -> set[str]:
    return {path.rpartition(".")[2] for path in paths(table)}


ATTRIBUTE = last_parts(ATTRIBUTES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def files() -> list[tuple[str, tuple[ast.AST, ...]]]:
    found = [file for file in (HOME / "fpipe").rglob("*.py") if file != OURS]
    return [(str(file.relative_to(HOME)), list_nodes(file)) for file in found]


def own_names() -> set[str]:
    """The private names that fpipe defines itself."""
    found = set()
    for _, nodes in files():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return {name for name in found if is_private(name)} - ATTRIBUTE


def accesses() -> Iterator[tuple[str, int, str, str]]:
    """Yield the file, the line, what is accessed and the private name, of every access by attribute."""
    for file, nodes in files():
        for node in nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                yield file, node.lineno, ast.unparse(node.value), node.attr


def test_nothing_private_is_imported_from_torch_elsewhere():
    found = []
    for file, nodes in files():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [(file, node.lineno, name) for name in names if is_private(name)]
            if isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".") if alias.name[:5] == "torch"]
                found += [(file, node.lineno, name) for name in names if is_private(name)]
    assert not found


def test_private_attributes_of_torch_are_in_the_tables():
    known = own_names() | PYTHON | ATTRIBUTE
    for file, line, holder, name in accesses():
        if holder.endswith("aten"):
            assert name in OPERATOR, f"{file}:{line}"
        else:
            assert name in known, f"{file}:{line}: {holder}.{name}"
            assert f"{holder}._".partition("._")[0] != "torch", f"{file}:{line}"


def test_private_names_of_torch_are_not_spelled_as_strings_elsewhere():
    inside = last_parts(NAMES)
    for file, nodes in files():
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
                assert node.value not in inside, f"{file}:{node.lineno}"


def test_no_row_is_left_over():
    used = {name for *_, name in accesses()}
    for _, nodes in files():
        used |= {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}
    assert used >= OPERATOR | ATTRIBUTE | {*SETTINGS}
    getters = {f"_get_{setting}" for setting in SETTINGS}
    text = OURS.read_text().partition("# ----")[2]
    assert not [name for name in last_parts(NAMES) - getters - {GENERATOR} if name not in text]


def test_every_private_name_that_the_module_uses_has_a_row():
    listed = {part for path in paths(NAMES, ATTRIBUTES) for part in path.split(".")}
    for node in list_nodes(OURS):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            assert node.attr in listed | {"_dynamo", "_timeout"}, node.lineno


def test_missing_names_are_reported():
    with pytest.raises(ImportError) as error:
        require_names({"torch._C": ["_gone", "_too"], "torch._C._nn": ["gelu"]})
    said = str(error.value)
    assert torch.__version__ in said
    assert "needs: torch._C._gone, torch._C._too. Install" in said


def test_names_are_found_wherever_torch_has_them():
    assert look_up("torch.nn.Module()._buffers") == {}
    assert look_up("torch._prims_common.suggest_memory_format") is torch_private.suggest_memory_format


def test_a_checkpoint_runs_what_captures_replace():
    calls = []

    def noting(*given, **named):
        calls.append(read_checkpoint(*given, **named))
        return runs(*given, **named)

    def double(x, twice=False):
        return x * 2

    runs, x = current(*CHECKPOINT), torch.ones(1)
    with replace(*CHECKPOINT, noting):
        checkpoint(double, x, twice=True, use_reentrant=False, preserve_rng_state=False)
    ((function, args, kwargs, settings),) = calls
    assert (function, args, kwargs) == (double, (x,), {"twice": True})
    assert settings["preserve_rng_state"] is False
    assert checkpoint(function, *args, use_reentrant=False, **settings, **kwargs).equal(double(x))


def test_a_mark_makes_a_parameter():
    class Other(torch.Tensor):
        pass

    tensor = torch.ones(1).as_subclass(Other)
    assert not isinstance(tensor, torch.nn.Parameter)
    setattr(tensor, PARAMETER_MARK, True)
    assert isinstance(tensor, torch.nn.Parameter)


def test_the_declared_range_is_the_one_that_was_tested():
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    (declared,) = [one for one in project["dependencies"] if one.startswith("torch")]
    first, last = torch_private.TESTED[0], torch_private.TESTED[-1]
    major, minor = last.split(".")
    assert declared == f"torch>={first},<{major}.{int(minor) + 1}"
