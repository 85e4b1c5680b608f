# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs tell the truth: their Python runs, and pictures are what the command draws."""

import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import fpipe
from schedules import families

HOME = Path(__file__).parents[2]
DOCS = HOME / "docs"
README = (HOME / "README.md").read_text()
SHELL = (DOCS / "command_line.md").read_text()
WRITING = (DOCS / "writing_schedules.md").read_text()


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


BLOCKS = blocks(README)
FILES = [*sorted(HOME.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted((DOCS / "api").glob("*.md"))]
PAGES = {path.relative_to(HOME).as_posix(): blocks(path.read_text()) for path in FILES}


@pytest.mark.parametrize(("page", "number"), [(page, k) for page, found in PAGES.items() for k in range(len(found))])
def test_python_blocks_run(page, number, capsys):
    block, namespace = PAGES[page][number], {"__name__": f"{page}_{number}"}
    exec(compile(block, f"{page} block {number}", "exec"), namespace)
    for name, value in namespace.items():
        if name.startswith("test_"):
            value()
    printed = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\)\s+# ([0-9.]+|\[.*\])$", block, re.MULTILINE):
        assert expected in printed


def test_the_first_screen_is_a_runnable_example():
    assert "```python" in README[:500]
    assert len(BLOCKS) == 1
    assert len(README.splitlines()) < 120


def test_the_first_loop_holds_one_set_of_gradients_and_carries_buffers_on(monkeypatch):
    """The old gradients are gone when the next step begins, so a step needs no room for two sets."""
    original, alive, passed = fpipe.value_and_grad, [], []

    def value_and_grad(pipe, *options, **named):
        step, last, returned = original(pipe, *options, **named), [], []

        def stepping(params, buffers, *batch, **seed):
            alive.append(sum(ref() is not None for ref in last))
            passed.append(not returned or buffers is returned[0])
            out, grads = step(params, buffers, *batch, **seed)
            last[:], returned[:] = map(weakref.ref, grads.values()), [out.buffers]
            return out, grads

        return stepping

    monkeypatch.setattr(fpipe, "value_and_grad", value_and_grad)
    exec(compile(BLOCKS[0], "README", "exec"), {"__name__": "readme_loop"})
    assert len(alive) == 20
    assert not any(alive)
    assert all(passed)


def test_the_picture_is_what_the_command_draws():
    command = re.search(r"^    python (-m schedules show .*)$", SHELL, re.MULTILINE)[1].split()
    drawn = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, check=True).stdout
    (picture,) = [text for text in blocks(SHELL, "text") if text.startswith("rank 0 |")]
    assert picture.strip() in drawn


def test_the_failure_of_the_broken_schedule_is_what_it_prints(capsys):
    (broken,) = [block for block in blocks(WRITING) if "def mine(" in block]
    exec(compile(broken, "writing_schedules", "exec"), {"__name__": "broken"})
    (shown,) = [text for text in blocks(WRITING, "text") if "[rule: " in text]
    assert shown.strip() in capsys.readouterr().out


def test_every_schedule_is_in_the_table():
    table = re.search(r"\| family \| schedules \|\n(.*?)\n\n", WRITING, re.DOTALL)[1]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(families.__all__)


def test_the_two_commands_are_in_the_makefile():
    makefile = (HOME / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_what_the_makefile_runs_is_here():
    for target in re.findall(r"examples/\S+\.py|(?<=-m )benchmarks\b", (HOME / "Makefile").read_text()):
        assert (HOME / target).is_file() or (HOME / target / "__main__.py").is_file()


def test_links_lead_somewhere():
    broken = [
        f"{path.name}: {target}"
        for path in FILES
        for target in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not broken


def test_modules_and_files_that_pages_name_exist():
    names = r"`((?:fpipe|schedules|benchmarks|tests|docs|examples)/[\w/.]+)`"
    missing = [
        f"{path.name}: {name}"
        for path in FILES
        for name in re.findall(names, path.read_text())
        if not (HOME / name).exists()
    ]
    assert not missing


def test_modules_that_the_rooms_name_exist():
    page = (DOCS / "rooms.md").read_text()
    rooms = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) - {"fpipe", "schedules"}
    named = [name for name in re.findall(r"`(\w+(?:\.\w+)+)`", page) if name.split(".")[0] in rooms]
    paths = {name: HOME / "fpipe" / name.replace(".", "/") for name in named}
    assert paths
    assert not [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())]
