# SPDX-License-Identifier: Apache-2.0
"""What users type does not change by accident."""

import inspect

import pytest

import fpipe

NAMES = """
CaptureError CutError DeadlockError GraphError InputError MismatchError ModuleGraph Part Pipeline PipelineError
ScheduleError SizeError Step TransportError Verification VocabularyError __version__ costs evaluate pipeline reference
safetensors timeline value_and_grad verify
"""

SIGNATURES = {
    "pipeline": (
        "model *example *loss *schedule *targets=None *cuts=None *stages=None *unsplittable=() *capture='trace' "
        "*backward='autograd' *tied='exact' *batch_dims=0 *output_dims=0 *weight=None *group=None"
    ),
    "value_and_grad": "pipe outputs=False record=None",
    "evaluate": "pipe record=None",
    "reference": "pipe outputs=False",
    "safetensors": "paths",
    "timeline": "pipe spans",
    "costs": "pipe timelines",
    "verify": "pipe model inputs targets=None *params=None *buffers=None *seed=None *steps=1 *tolerance=0",
}

CALLED = "params buffers inputs targets=None *seed=None"


def text(function):
    """Names and defaults; a star before what can be given by name only."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{star}{parameter.name}{default}")
    return " ".join(found)


def test_the_public_names():
    assert sorted(fpipe.__all__) == sorted(NAMES.split())
    assert all(hasattr(fpipe, name) for name in fpipe.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = getattr(fpipe, name)
    assert text(function) == SIGNATURES[name]
    assert function.__doc__
    annotated = inspect.signature(function)
    assert annotated.return_annotation is not annotated.empty
    assert all(p.annotation is not p.empty for p in annotated.parameters.values())


def test_what_is_called_every_step():
    from fpipe.api import ValueAndGrad

    pipe = pipeline()
    for function in (fpipe.value_and_grad(pipe), fpipe.reference(pipe), fpipe.evaluate(pipe)):
        assert text(function) == CALLED
    assert text(ValueAndGrad.__call__) == f"self {CALLED}"


def pipeline():
    import torch

    from schedules import gpipe

    return fpipe.pipeline(
        torch.nn.Linear(2, 1), example=(torch.ones(2, 2),), loss=torch.mean, schedule=gpipe(ranks=1, microbatches=1)
    )


def test_results():
    assert fpipe.Step._fields == ("loss", "outputs", "buffers")
    assert fpipe.Verification._fields == ("reference", "eager")


def test_what_a_pipeline_shows():
    pipe = pipeline()
    assert text(pipe.init) == "source *fill=None *strict=True"
    assert text(pipe.initialise).startswith("function=<function reset_parameters at ")
    assert text(pipe.initialise).endswith("> *seed")
    assert {"init", "initialise", "stages", "schedule", "program", "plan", "run"} <= set(dir(pipe))


@pytest.mark.parametrize(
    ("error", "others"),
    [
        ("CaptureError", ()),
        ("CutError", (ValueError,)),
        ("InputError", (ValueError,)),
        ("TransportError", (RuntimeError,)),
        ("DeadlockError", (RuntimeError,)),
        ("MismatchError", (AssertionError,)),
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
