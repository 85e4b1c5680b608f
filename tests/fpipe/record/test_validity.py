# SPDX-License-Identifier: Apache-2.0
"""A front end of one's own: taken as it is if it keeps to the contract, and told what is wrong where it does not."""

from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe.record.captured import BatchLeaf, Call, Captured, Constant, Parameter
from fpipe.record.front_ends.registry import find_capture
from fpipe.tensors.fake import fake_mode
from schedules import gpipe, one_f_one_b
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.running import build, run
from tests.common.sizes import sampled
from tests.common.zoo import ZOO

CASE = ZOO["tied_sequence"]


def by_hand(model, objective, leaves):
    """A captured model as one made by hand: fpipe runs its units."""
    found = find_capture("export")(model, objective, leaves)
    made = Captured(
        found.units, found.sources, found.loss, found.outputs, found.structure, found.fakes, found.mode, found.trainable
    )
    return replace(made, calls=found.calls)


def with_units(found, change):
    """The captured model with other units."""
    return replace(found, units=tuple(change(list(found.units))))


def with_sources(found, change):
    """The captured model with other sources."""
    sources = dict(found.sources)
    change(sources)
    return replace(found, sources=sources)


def first(found, kind):
    return next(value for value, source in found.sources.items() if isinstance(source, kind))


def remake(units):
    units[1] = replace(units[1], makes=units[0].makes)
    return units


def other_modes(found):
    other = fake_mode()
    return replace(found, fakes={value: other.from_tensor(torch.ones(1)) for value in found.fakes})


def without_fakes(found):
    return replace(found, fakes={})


def rename(sources):
    sources[next(v for v, source in sources.items() if isinstance(source, Parameter))] = Parameter("gone")


def repeat(sources):
    sources[max(sources) + 10_000] = Parameter("0.weight")


WRONG = {
    "nothing": (lambda found: None, "got NoneType, expected a Captured"),
    "not a unit": (lambda found: with_units(found, lambda units: ["unit", *units]), "got str as unit 0"),
    "read too early": (lambda found: with_units(found, reversed), "reads the values"),
    "made twice": (lambda found: with_units(found, remake), "exist already or twice"),
    "a source made": (
        lambda found: with_units(found, lambda units: [replace(units[0], makes=(next(iter(found.sources)),))]),
        "exist already",
    ),
    "other parameter": (lambda found: with_sources(found, rename), r"missing \['0.weight'\], unknown \['gone'\]"),
    "parameter twice": (
        lambda found: with_sources(
            replace(found, fakes=found.fakes | {max(found.sources) + 10_000: found.fakes[first(found, Parameter)]}),
            repeat,
        ),
        r"repeated \['0.weight'\]",
    ),
    "no source": (lambda found: with_sources(found, lambda s: s.update({0: "x"})), "expected a Source"),
    "unknown leaf": (
        lambda found: with_sources(found, lambda s: s.update({0: BatchLeaf(7)})),
        "expected a leaf below 2",
    ),
    "fake constant": (
        lambda found: with_sources(found, lambda s: s.update({0: Constant(found.fakes[0])})),
        "a constant without values",
    ),
    "no fakes": (without_fakes, "got NoneType as the fake of value"),
    "fakes of another mode": (other_modes, "a fake tensor of another mode"),
    "no loss": (lambda found: replace(found, loss=None), "got no loss, expected what the objective asks for"),
    "unknown loss": (lambda found: replace(found, loss=-1), r"the loss reads the values \[-1\]"),
    "unknown outputs": (lambda found: replace(found, outputs=(-1,)), r"the outputs reads the values \[-1\]"),
    "too few outputs": (lambda found: replace(found, outputs=()), "got 0 outputs for a tree of 1 tensors"),
    "trainable": (lambda found: replace(found, trainable=frozenset()), "got the trainable parameters"),
    "call beyond": (lambda found: replace(found, calls=(Call("a", object, 0, 99),)), "stops at"),
    "calls that overlap": (
        lambda found: replace(found, calls=(Call("a", object, 0, 2), Call("b", object, 1, 3))),
        "which ends after the call around it",
    ),
    "calls out of order": (
        lambda found: replace(found, calls=(Call("a", object, 1, 2), Call("b", object, 0, 1))),
        "starts at 1 or later",
    ),
    "too many results": (
        lambda found: with_units(found, lambda units: [replace(units[0], call=lambda *_: ()), *units[1:]]),
        r"got \[\] from the unit's call, expected a tuple of 1",
    ),
    "no tensor": (
        lambda found: with_units(found, lambda units: [replace(units[0], call=lambda *_: (1,)), *units[1:]]),
        r"got \['int'\] from the unit's call",
    ),
}


@sampled(2)
@pytest.mark.parametrize("what", WRONG)
def test_a_front_end_that_breaks_the_contract_is_refused_by_name(what):
    change, message = WRONG[what]

    def mine(model, objective, leaves):
        return change(by_hand(model, objective, leaves))

    with pytest.raises(fpipe.CaptureError, match=message) as caught:
        build(CASE, gpipe(ranks=1, microbatches=2), 4, capture=mine)
    assert "mine" in str(caught.value) or "unit's call" in message


def test_users_may_write_their_own_front_end():
    seen = []

    def mine(model, objective, leaves):
        seen.append(len(leaves))
        return by_hand(model, objective, leaves)

    built = _, model, inputs, targets = build(CASE, one_f_one_b(ranks=4, microbatches=3), 6, capture=mine)
    assert seen == [2]
    assert_same(run(*built), loop(model, CASE.loss, inputs, targets, 3))


@pytest.mark.parametrize("capture", ["nothing", 3, None])
def test_an_unknown_front_end_is_refused(capture):
    with pytest.raises(
        fpipe.InputError, match=r"expected (one of .*'export'.*, or your own front end|a text or a function)"
    ):
        build(CASE, gpipe(ranks=1, microbatches=2), 4, capture=capture)
