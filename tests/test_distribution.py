# SPDX-License-Identifier: Apache-2.0
"""What users install is whole: the source archive, the wheel made from it, its name in every message, and no extras."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.common.processes import ENVIRONMENT

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT = ("fpipe", "schedules", "tests", "docs", "examples", "benchmarks")
OTHERS = ("Makefile", "LICENSE", "MANIFEST.in")
LEFT_OUT = ("__pycache__", "_build", ".hypothesis")
HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def run_python(*words, cwd, **env):
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env={**ENVIRONMENT, **env}, capture_output=True, text=True, timeout=300, check=False
    )


def test_messages_and_pages_name_the_distribution_and_its_extras():
    pattern = re.compile(r"pip install\s+[\"']?([\w-]+)\[([\w,-]+)\]")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    modules = [path for package in ("fpipe", "schedules") for path in ROOT.glob(f"{package}/**/*.py")]
    found = [match for path in [*pages, *modules] for match in pattern.findall(path.read_text())]
    assert len(found) >= 4
    for name, extras in found:
        assert name == PROJECT["name"]
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive of this tree, and the wheel that is made from the archive alone."""
    home = tmp_path_factory.mktemp("distribution")
    source = home / "source"
    source.mkdir()
    for name in BUILT:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), *map(ROOT.joinpath, OTHERS)):
        shutil.copy(path, source)
    archive = _build(source, "sdist", home)
    with tarfile.open(archive) as file:
        file.extractall(home, filter="data")
    return archive, _build(home / archive.name.removesuffix(".tar.gz"), "wheel", home)


def _build(source, kind, home):
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(home)!r}))"
    ran = run_python("-c", build, cwd=source)
    assert ran.returncode == 0, ran.stderr
    return home / ran.stdout.strip().rpartition("\n")[2]


def test_the_archive_has_everything_and_the_wheel_the_two_packages(built):
    archive, wheel = built
    with tarfile.open(archive) as file:
        files = {name.partition("/")[2] for name in file.getnames()}
    own = {str(path.relative_to(ROOT)) for name in BUILT for path in (ROOT / name).glob("**/*.py")}
    assert {name for name in own if not any(part in name for part in LEFT_OUT)} <= files
    assert {"README.md", "CHANGELOG.md", "docs/index.md", "docs/start.md", "LICENSE", "constraints.txt"} <= files
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"fpipe", "schedules"}
    assert {"fpipe/py.typed", "schedules/py.typed"} <= set(names)
    assert {"schedules/drawing/order.js", "schedules/drawing/page.js", "schedules/drawing/page.html"} <= set(names)


def test_the_wheel_runs_the_readme_without_extras(built, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(built[1]) as file:
        file.extractall(site)
    example = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL))
    extras = {re.split(r"[>=<]", one)[0] for some in PROJECT["optional-dependencies"].values() for one in some}
    save = 'fpipe.save(pipe, "run", params=params, buffers=buffers, state=state, step=1)\nprint(fpipe.__file__)\n'
    script = tmp_path / "script.py"
    script.write_text(HIDE.format(hidden=sorted(extras | {"pytest", "rich"})) + example + save)
    ran = run_python(script, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(site), *sys.path[1:]]))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == str(site / "fpipe" / "__init__.py")


# ------------------------------------------------------------------------------------------- other modules of that name


def _import(folder, **env):
    return run_python("-c", "import fpipe", cwd=folder, **{"PYTHONPATH": str(ROOT), **env})


@pytest.mark.parametrize("name", ["schedules.py", "schedules/__init__.py"])
def test_a_module_of_the_user_that_hides_schedules_is_named(tmp_path, name):
    hiding = tmp_path / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("def warmup(): return 0\n")
    ran = _import(tmp_path)
    assert ran.returncode == 1
    assert f"ImportError: schedules: got {hiding}, expected the package that comes with fpipe, " in ran.stderr
    assert "rename it, or move it off the path" in ran.stderr


def test_a_package_that_overwrote_schedules_is_named(tmp_path):
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "__init__.py").write_text("jobs = []\n")
    shutil.copytree(ROOT / "fpipe", tmp_path / "fpipe", ignore=shutil.ignore_patterns(*LEFT_OUT))
    ran = _import(tmp_path, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert "schedules/__init__.py of another package, which overwrote the one that comes with fpipe. Run" in ran.stderr


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("package", ["fpipe", "schedules"])
def test_commands_print_their_version_and_help_that_ends_in_a_sentence(package, capsys):
    main = importlib.import_module(f"{package}.__main__").main
    for option, pattern in (("--version", package + r" \d+\.\d+\.\d+\n"), ("--help", r".*prints the version\.\s*")):
        with pytest.raises(SystemExit) as caught:
            main([option])
        assert caught.value.code == 0
        assert re.fullmatch(pattern, capsys.readouterr().out, flags=re.DOTALL)
