# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs tell the truth: their Python runs, and they name what exists."""

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import weakref
from importlib import import_module
from pathlib import Path

import pytest

import fpipe
from schedules import Costs, drawing, families, one_f_one_b, simulate, spans, zb_h1
from schedules.__main__ import main
from tests.common.sizes import sampled
from tests.common.sources import list_nodes

# --------- The README and the pages of docs tell the truth: their Python runs, and pictures are what the command draws

HOME = Path(__file__).parents[2]
DOCS = HOME / "docs"
README = (HOME / "README.md").read_text()
PICTURE = DOCS / "pictures" / "timelines.svg"
SHELL = (DOCS / "command_line.md").read_text()
CHOOSING = (DOCS / "which_schedule.md").read_text()
WRITING = (DOCS / "writing_schedules.md").read_text()
GALLERY = (DOCS / "gallery.md").read_text()


def load(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw_gallery = load(DOCS / "draw_gallery.py")


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


BLOCKS = blocks(README)
FILES = [*sorted(HOME.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted((DOCS / "api").glob("*.md"))]
PAGES = {path.relative_to(HOME).as_posix(): blocks(path.read_text()) for path in FILES}


@sampled(7)
@pytest.mark.parametrize(("page", "number"), [(page, k) for page, found in PAGES.items() for k in range(len(found))])
def test_python_blocks_run(page, number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some save files
    block, namespace = PAGES[page][number], {"__name__": f"{page}_{number}"}
    exec(compile(block, f"{page} block {number}", "exec"), namespace)
    for name, value in namespace.items():
        if name.startswith("test_"):
            value()
    printed = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\)\s+# ([0-9.]+|\[.*\])$", block, re.MULTILINE):
        assert expected in printed


NO_EXAMPLE = {
    **dict.fromkeys(("CHANGELOG.md", "docs/changelog.md"), "says what changed"),
    **dict.fromkeys(("CONTRIBUTING.md", "docs/contributing.md"), "its commands are those of the Makefile"),
    **dict.fromkeys(("docs/benchmarks.md", "docs/costs.md", "docs/models.md"), "figures, which benchmarks write"),
    **dict.fromkeys(("docs/glossary.md", "docs/index.md", "docs/rooms.md"), "words, links and folders, tested as such"),
    "docs/command_line.md": "its commands run",
    "docs/first_hour.md": "its commands are those of examples, which tests run",
    "docs/integrations.md": "examples/trainer.py and tests/distributed/test_integrations.py",
    "docs/troubleshooting.md": "its headings are phrases of errors",
}


def test_a_page_has_an_example_or_a_reason_to_have_none():
    without = {page for page, found in PAGES.items() if not found and not page.startswith("docs/api/")}
    assert without == {*NO_EXAMPLE}


COMMAND = re.compile(r"^    python -m schedules (.*)$", re.MULTILINE)
COMMANDS = [line for path in FILES for line in COMMAND.findall(path.read_text()) if "theirs" not in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_pages_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_the_first_screen_is_a_runnable_example():
    assert "```python" in README[:500]
    assert len(BLOCKS) == 3
    assert "fpipe.verify(" in BLOCKS[0]
    assert len(BLOCKS[0].splitlines()) <= 15
    assert len(README.splitlines()) < 130


def test_the_figures_of_the_first_screen_are_among_those_measured():
    """A number with a point is in the page of costs, and a count of architectures in that of models."""
    (claims,) = re.findall(r"^- \*\*Unedited models.*?\n\n", README, re.MULTILINE | re.DOTALL)
    measured = [(DOCS / page).read_text() for page in ("costs.md", "models_that_work.md")]
    counts = [number for number in re.findall(r"(?<![\d.])\d[\d.]*\d(?![\d%])", claims) if number not in ("24", "19")]
    assert len(counts) == 6
    assert not [number for number in counts if not any(re.search(rf"\b{number}\b", page) for page in measured)]
    assert f"{len(families.__all__)} are built in" in claims


def test_the_picture_of_the_first_screen_shows_what_the_simulator_says():
    """Every action at its time; `schedules.drawing.svg` of these spans draws it again."""
    costs = {one_f_one_b: Costs(F=1, B=2), zb_h1: Costs(F=1, I=1, W=1)}
    shown = {repr(how := make(ranks=4, microbatches=8)): spans(how, cost) for make, cost in costs.items()}
    titles = [re.findall(r"<title>(.*?)</title>", text) for text in (drawing.svg(shown), PICTURE.read_text())]
    assert len(titles[0]) == 2 * 64 + 32
    assert titles[0] == titles[1]
    for make, cost in costs.items():
        found = simulate(make(ranks=4, microbatches=8), cost)
        assert f"takes {found.makespan:g}" in README
        assert f"idle for {found.idle[0]:g}" in README


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
    exec(compile(BLOCKS[2], "README", "exec"), {"__name__": "readme_loop"})
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


def test_the_times_of_schedules_are_what_the_simulator_says():
    table = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", CHOOSING, re.MULTILINE)
    assert len(table) == 10
    for name, *times, held in table:
        how = getattr(families, name)(ranks=8, microbatches=32)
        share = how.ranks / how.stages
        found = [
            simulate(how, Costs(F=share, B=2 * share, I=share, W=share, comm=comm)).makespan / (3 * 32)
            for comm in (0, 0.1, 1)
        ]
        assert [f"{time:.2f}" for time in found] == times, name
        assert max(simulate(how).peak_memory) == float(held), name


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


def test_examples_that_commands_name_exist():
    named = {name for path in FILES for name in re.findall(r"examples/\w+\.py", path.read_text())}
    assert len(named) > 10
    assert not [name for name in sorted(named) if not (HOME / name).exists()]


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


# --------------------- Every public name is in the API reference and has a docstring; every schedule is in the gallery

PLACES = (
    *("fpipe", "fpipe.errors", "fpipe.front_ends", "fpipe.testing"),
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
    assert sorted(draw_gallery.ENTRY.findall(GALLERY)) == sorted(families.__all__)


@sampled(4)
@pytest.mark.parametrize("name", families.__all__)
def test_the_gallery_shows_what_the_simulator_says(name):
    assert draw_gallery.describe(name) in GALLERY
    assert (draw_gallery.PICTURES / f"{name}.svg").read_text() == draw_gallery.draw(name)


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


# ------------------------------------------------------ The page of troubleshooting quotes errors that the code raises

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
    return {text(node) for file in files for node in list_nodes(file)}


@sampled(21)
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


# ---------------------------------------------------------------------------------- Docstrings become reStructuredText

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
