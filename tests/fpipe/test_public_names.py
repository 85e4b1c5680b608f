# SPDX-License-Identifier: Apache-2.0
"""What users type does not change by accident, and what they are shown imports public names only."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import fpipe

PLACES = {
    "fpipe": """
Audit CaptureError Cause Checkpoint CorruptionError CutError DeadlockError Executed Gradients GraphError InputError
LossScale MeasuredTimeline Microbatching MismatchError ModelRecord ModelStages ModuleGraph NonFinite Optimizer Part
Pipeline PipelineError Pipelined Place Plan Profile Proof RankError Recording Rerun Roofline ScheduleError Sharded
SizeError Stage Stages StaticDecoder Step Stream StreamResult TransportError Verification VocabularyError __version__
all_finite as_tree begin_save by_name capture catch_signals choose_likeliest clip clip_value connect_stages costs cut
delays error_feedback evaluate even_costs execute export find_nonfinite generate is_checkpoint load masters norm
optimizer pipeline pipemare plan predict predict_weights processes profile prove reference reference_stream
require_same safetensors sample save stage stream timeline train_step train_stream value_and_grad verify
""",
    "fpipe.errors": """
CaptureError Cause CorruptionError CutError DeadlockError GraphError InputError MismatchError PipelineError RankError
ScheduleError SizeError TransportError VocabularyError
""",
    "fpipe.front_ends": """
BatchLeaf Buffer Call CaptureFunction Captured Constant FrontEnd Function Labels Objective Observed Parameter Structure
Unit Value fake fake_mode flatten
""",
    "fpipe.testing": """
check_stage
""",
    "schedules": """
Action ArgumentError B Bound C Certificate Costs CriticalPath certify Device DeviceRun F
Factory G Graph GraphError I KINDS Limits Link OwnKind PipelineError
Placement Problem Program
ProgramError R Rule Schedule ScheduleError SearchProgress SearchResult SizeError Sizes SolverError
Span TableError Timeline U
VocabularyError W
alternate bidirectional
bound breadth_first chain check chimera connect cp_sat critical_path dag defer_weights drawing dualpipe dualpipe_v
eager_1f1b estimate forward_only forwards from_rows gis gpipe group_passes
hanayo interleaved_1f1b interleaved_zero_bubble kfkb linear list_versions looped lower
memory_over_time merge_backward merge_in_order mirror one_f_one_b overlap parse pipedream
offload pipedream_2bw play prefer recompute schedule
search seq_1f1b
reduce_gradients repeat run_on_device shard
TimelineError
simulate spans split_backward sum_replicas summarize transform update_weights v_1f1b v_half v_min v_schedule vee wave
zb_auto zb_h1 zb_h2 zb_v
""",
    "schedules.drawing": """
Picture Style draw Panel page read_trace sketch
ansi legend plain svg text texts trace
""",
    "schedules.files": """
Listing own pipelining pipelining_2_15 read_csv write_csv
""",
    "schedules.testing": """
collective_orders conformance costs graphs mutants orders require_bounds require_matching_ends require_round_trip
require_same_times
schedules sizes time_program
""",
}
HOME = Path(__file__).parents[2]
SOURCES = HOME / "docs" / "core.md"  # reads the code of the core itself
PAGES = sorted({*HOME.glob("*.md"), *(HOME / "docs").rglob("*.md")} - {SOURCES})

SIGNATURES = {
    "pipeline": (
        "model *example *loss *schedule=None *plan=None *targets=None *cuts=None *stages=None "
        "*microbatching=Microbatching() *place=Place() *recording=Recording() *gradients=Gradients()"
    ),
    "Microbatching": (
        "*batch_dims=0 *output_dims=0 *weight=None *reduce='mean' *slice_dims=1 *slice_lengths=split_evenly"
    ),
    "Place": "*group=None *mesh=None *pp='pp' *dp=None *shard=None *rows='whole' *device=None",
    "Recording": "*front_end='trace' *unsplittable=() *whole=() *plans=32",
    "Gradients": "*backward='graph' *tied='exact'",
    "capture": (
        "model *example *targets=None *loss=None "
        "*microbatching=Microbatching() *recording=Recording() *gradients=Gradients()"
    ),
    "cut": "record at=None *stages=1",
    "execute": "program stages params buffers inputs targets=None *seed=None *split=None *slicing=None *transport=None",
    "stage": "forward name='' carries=False",
    "connect_stages": "stages targets=True",
    "processes": "ranks group=None device='cpu'",
    "value_and_grad": "pipe outputs=False record=None sums=None aux=True audit=None",
    "evaluate": "pipe record=None outputs=True aux=True",
    "predict": "pipe",
    "stream": "pipe take",
    "reference": "pipe outputs=False sums=None aux=True",
    "prove": "pipe model inputs targets=None *seed=None *optimizer=None",
    "reference_stream": "pipe optimizer look_ahead=None max_norm=None",
    "train_stream": "pipe optimizer look_ahead=None max_norm=None",
    "delays": "pipe",
    "error_feedback": "optimizer strength=1.0",
    "predict_weights": "delays",
    "pipemare": "optimizer delays lr steps",
    "choose_likeliest": "logits generator",
    "sample": "temperature=1.0 top=None",
    "save": "pipe path *params *buffers=None *state=None *step=0 *data=None",
    "begin_save": "pipe path *params *buffers=None *state=None *step=0 *data=None",
    "load": "pipe path",
    "catch_signals": "pipe signals=(<Signals.SIGTERM: 15>,)",
    "export": "pipe path params buffers=None",
    "is_checkpoint": "path",
    "safetensors": "paths",
    "timeline": "pipe spans",
    "costs": "pipe timelines",
    "profile": (
        "model example targets=None *loss=None *microbatches=1 *slices=1 *cuts=None *microbatching=Microbatching() "
        "*recording=Recording() *gradients=Gradients() *source=None *device=None *link=None *group=None *seconds=3.0 "
        "*cache=None"
    ),
    "optimizer": "cls *groups=None *names=None *donate=False options",
    "masters": "optimizer dtype=torch.float32",
    "norm": "pipe grads order=2.0 names='*'",
    "clip": "pipe grads max_norm order=2.0 names='*' donate=False",
    "clip_value": "grads value donate=False",
    "all_finite": "pipe grads",
    "find_nonfinite": "pipe",
    "train_step": "pipe optimizer max_norm=None outputs=False record=None aux=True audit=None",
    "verify": (
        "pipe model inputs targets=None *params=None *buffers=None *seed=None *steps=1 *tolerance=0 *unsplit=None"
    ),
}

CALLED = "params buffers inputs targets=None *seed=None"
TRAINING = f"{CALLED} *onto=None *scale=None *total=None"


def _show(default):
    """A value made without arguments as the call that makes it, and a function as its name."""
    if inspect.isfunction(default):
        return default.__name__
    made = type(default).__name__ in fpipe.__all__ and default == type(default)()
    return f"{type(default).__name__}()" if made else repr(default)


def text(function):
    """Names and defaults; a star before what can be given by name only."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else f"={_show(parameter.default)}"
        found.append(f"{star}{parameter.name}{default}")
    return " ".join(found)


@pytest.mark.parametrize("place", PLACES)
def test_the_public_names(place):
    module = importlib.import_module(place)
    assert sorted(module.__all__) == sorted(PLACES[place].split())
    assert all(hasattr(module, name) for name in module.__all__)


def code(page):
    """The Python of a page; of a session, what is typed."""
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    typed = re.findall(r"^ *(?:>>>|\.\.\.) ((?:from|import) .*)$", text, re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks] + typed


def private_imports(tree: ast.AST) -> Iterator[str]:
    """What is imported from our packages, but from no public place or not among its names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            place, _, last = name.rpartition(".")
            ours = name.split(".")[0] in ("fpipe", "schedules") and not place.startswith("fpipe.integrations.")
            if ours and name not in PLACES and last not in PLACES.get(place, "").split():
                yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_only(page):
    assert not [name for block in code(page) for name in private_imports(ast.parse(block))]


@pytest.mark.parametrize("example", sorted((HOME / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_public_names_only(example):
    assert not [*private_imports(ast.parse(example.read_text()))]


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures_do_not_change(name):
    function = getattr(fpipe, name)
    assert text(function) == SIGNATURES[name]
    assert function.__doc__
    annotated = inspect.signature(function)
    assert annotated.return_annotation is not annotated.empty
    assert all(p.annotation is not p.empty for p in annotated.parameters.values())


def test_generate_keeps_its_signature():
    shown = (
        "pipe length *choose=choose_likeliest *decoder=<class 'fpipe.inference.decoders.StaticDecoder'> *schedule=None"
    )
    assert text(fpipe.generate) == shown


def test_functions_called_in_every_step_keep_their_signatures():
    from fpipe.api import ValueAndGrad

    pipe = pipeline()
    assert text(fpipe.value_and_grad(pipe)) == text(fpipe.reference(pipe)) == TRAINING
    assert text(fpipe.evaluate(pipe)) == CALLED
    assert text(ValueAndGrad.__call__) == f"self {TRAINING}"


def pipeline():
    import torch

    from schedules import gpipe

    return fpipe.pipeline(
        torch.nn.Linear(2, 1), example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(ranks=1, microbatches=1)
    )


def test_results_keep_their_fields():
    assert fpipe.Step._fields == ("loss", "outputs", "buffers", "aux")
    assert fpipe.Checkpoint._fields == ("params", "buffers", "state", "step", "data")
    assert fpipe.Verification._fields == ("reference", "eager")


def test_a_pipeline_keeps_its_attributes():
    pipe = pipeline()
    assert text(pipe.init) == "source *fill=None *strict=True"
    assert text(pipe.initialise) == "function=reset_parameters *seed"
    assert {"init", "initialise", "stages", "schedule", "program", "plan"} <= set(dir(pipe))


@pytest.mark.parametrize(
    ("error", "others"),
    [
        ("CaptureError", ()),
        ("CutError", (ValueError,)),
        ("InputError", (ValueError,)),
        ("TransportError", (RuntimeError,)),
        ("DeadlockError", (RuntimeError,)),
        ("MismatchError", (AssertionError,)),
        ("CorruptionError", (RuntimeError,)),
        ("ScheduleError", (ValueError,)),
        ("SizeError", (ValueError,)),
        ("GraphError", (ValueError,)),
        ("VocabularyError", (ValueError,)),
    ],
)
def test_errors_are_one_hierarchy(error, others):
    found = getattr(fpipe, error)
    assert issubclass(found, fpipe.PipelineError)
    assert all(issubclass(found, other) for other in others)
    assert found.__doc__.count("\n") > 1, "it says who raises it, and what to do"
