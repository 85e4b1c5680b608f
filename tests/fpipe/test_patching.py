# SPDX-License-Identifier: Apache-2.0
"""What a capture replaces in torch, it replaces for its own thread, and for as long as it lasts."""

import ast
import random
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.tensors import patching
from fpipe.tensors.patching import (
    MISSING,
    OWNER,
    caller,
    current,
    original,
    replace,
    replace_value,
    share,
)
from fpipe.tensors.torch_private import FAKE_TENSOR, FakeTensor, FakeTensorMode, set_thread_local
from schedules import one_f_one_b
from tests.common.sizes import sampled
from tests.common.sources import list_nodes

HOME = Path(__file__).parents[2]
FRONTS = ["trace", "modules", "export", "fx", "dynamo"]


def elsewhere(function):
    """Run a function in a thread of its own, and return what it returns."""
    answers = []

    def act():
        try:
            answers.append((function(), None))
        except BaseException as error:
            answers.append((None, error))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60)
    answer, error = answers[0]
    if error is not None:
        raise error
    return answer


class Some:
    def method(self, x):
        return "original", x

    @classmethod
    def of_class(cls, x):
        return cls.__name__, x


class Other(Some):
    pass


def test_only_the_thread_that_replaces_gets_the_replacement():
    with replace(Some, "method", lambda self, x: ("replaced", x)):
        assert Some().method(1) == Other().method(1) == ("replaced", 1)
        assert elsewhere(lambda: Some().method(1)) == ("original", 1)
    assert Some().method(1) == ("original", 1)


def test_a_thread_of_a_backward_gets_the_replacements_of_the_thread_it_works_for():
    here = threading.get_ident()

    def work(owner):
        set_thread_local(OWNER, owner)  # as torch does before it runs a backward in another thread
        return Some().method(1)

    with replace(Some, "method", lambda self, x: ("replaced", x)):
        assert elsewhere(lambda: work(here)) == ("replaced", 1)
        assert elsewhere(lambda: work(0)) == ("original", 1)


def test_class_methods_get_their_class():
    before = vars(Some)["of_class"]
    with replace(Some, "of_class", lambda cls, x: (cls, x)):
        assert Other.of_class(1) == (Other, 1)
        assert elsewhere(lambda: Other.of_class(1)) == ("Other", 1)
        assert original(Some, "of_class") is before
    assert vars(Some)["of_class"] is before


def test_the_innermost_replacement_is_called_and_may_hand_on():
    def add(label):
        handed = current(Some, "method")
        return replace(Some, "method", lambda self, x: (label, *handed(self, x)))

    with add("outer"), add("inner"):
        assert Some().method(1) == ("inner", "outer", "original", 1)
        assert elsewhere(lambda: current(Some, "method")(Some(), 1)) == ("original", 1)


def test_what_a_class_inherits_is_replaced_there_only():
    with replace(Other, "method", lambda self, x: "replaced"):
        assert (Other().method(1), Some().method(1)) == ("replaced", ("original", 1))
        assert elsewhere(lambda: Other().method(1)) == ("original", 1)
    assert "method" not in vars(Other)


def test_a_new_getattr_leaves_other_threads_with_the_usual_error():
    with replace(Other, "__getattr__", lambda self, name: name):
        assert Other().absent == "absent"
        with pytest.raises(AttributeError, match="'Other' object has no attribute 'absent'"):
            elsewhere(lambda: Other().absent)
    assert "__getattr__" not in vars(Other)


def test_threads_may_replace_in_any_order():
    """The second begins before the first ends, and ends after it."""
    before, began, ended = vars(Some)["method"], threading.Event(), threading.Event()

    def second():
        with replace(Some, "method", lambda self, x: "second"):
            began.set()
            assert ended.wait(60)
            return Some().method(1)

    answers = []
    with replace(Some, "method", lambda self, x: "first"):
        thread = threading.Thread(target=lambda: answers.append(second()))
        thread.start()
        assert began.wait(60)
        assert Some().method(1) == "first"
    assert Some().method(1) == ("original", 1)
    assert vars(Some)["method"] is not before
    ended.set()
    thread.join(60)
    assert answers == ["second"]
    assert vars(Some)["method"] is before


def test_values_of_modules_are_replaced_for_one_thread():
    module = FAKE_TENSOR.owner
    with replace_value(*FAKE_TENSOR, int):
        from torch._subclasses import FakeTensor as Found

        assert Found is module.FakeTensor is int
        assert elsewhere(lambda: module.FakeTensor) is FakeTensor
        with pytest.raises(AttributeError, match="has no attribute 'absent'"):
            _ = module.absent
    assert vars(module)["FakeTensor"] is FakeTensor
    assert "__getattr__" not in vars(module)


def test_shared_values_stay_until_the_last_needs_them():
    space = {"kept": 1}
    with share([space], "kept", 2), share([space], "new", 3):
        with share([space], "kept", 2):
            assert space == {"kept": 2, "new": 3}
        assert space == {"kept": 2, "new": 3}
    assert space == {"kept": 1}


def test_a_replacement_knows_who_called():
    with replace(Some, "method", lambda self, x: caller().f_code.co_name):
        assert Some().method(1) == "test_a_replacement_knows_who_called"


def test_functions_are_replaced_nowhere_else():
    for file in (HOME / "fpipe").rglob("*.py"):
        for node in list_nodes(file):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
                assert not any("mock" in name for name in names), file


# ------------------------------------------------------------------------------------------------------------ captures


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Body(nn.Module):
    """A linear layer that calls `during` in each forward."""

    def __init__(self, during=lambda: None):
        super().__init__()
        self.linear, self.during = nn.Linear(4, 4), during

    def forward(self, x):
        self.during()
        return self.linear(x)


class Refused(Body):
    def forward(self, x):
        torch.random.manual_seed(1)
        return super().forward(x)


def build(part, capture="trace"):
    return fpipe.pipeline(
        nn.Sequential(part, Body()),
        example=(torch.ones(4, 4),),
        targets=torch.ones(4, 4),
        loss=nn.functional.mse_loss,
        schedule=one_f_one_b(ranks=2, microbatches=2),
        cuts=["1"],
        recording=fpipe.Recording(front_end=capture),
    )


def use_torch():
    """Call what captures replace; return the bits of all that came out."""
    state, found = torch.random.get_rng_state(), []
    for seed in (torch.manual_seed, torch.random.manual_seed):
        seed(5)
        found.append(torch.rand(2))
    x = torch.ones(2, 4, requires_grad=True)
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    module = Body()
    module.register_buffer("extra", torch.zeros(1))
    module.note, module.extra = 1, torch.ones(1)
    with torch.autocast("cpu"), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        found.append(module(x))
    found += [Square.apply(x), checkpoint(module, x, use_reentrant=False), attention(x.unsqueeze(0))]
    found += [torch.func.vmap(torch.sin)(x), torch.func.grad(lambda t: t.sum())(x.detach())]
    found.append(torch.distributions.Normal(torch.zeros(1), torch.ones(1)).log_prob(torch.ones(1)))
    hooked = x * 1
    hooked.register_hook(lambda grad: grad * 2)
    found += torch.autograd.grad(hooked.sum(), x)
    torch.random.set_rng_state(state)
    return [tensor.detach() for tensor in found]


def ask_about_fakes():
    """Answer, about a fake tensor of this thread, what a capture answers as if it were real."""
    fake = FakeTensorMode().from_tensor(torch.ones(1))
    failed = "nothing"
    try:
        _ = fake.absent
    except AttributeError as error:
        failed = str(error)
    return isinstance(fake, FakeTensor), type(fake) is fake_tensor.FakeTensor, failed


def replaced_places():
    """The places that are replaced now, in any thread: the owner or namespace, and the name there."""
    with patching._LOCK:
        shared = [(space, name) for name, one in patching._SHARED.items() for space, _ in one.before.values()]
        return [*((switch.owner, switch.name) for switch in patching._SWITCHES.values()), *shared]


def drain(queue):
    while not queue.empty():
        yield queue.get()


def test_other_threads_get_torch_s_own_functions_during_a_capture():
    before, notes = use_torch(), SimpleQueue()  # lists would be restored, as state of the model

    def during():
        places = replaced_places()
        ours = [current(*one) is not original(*one) for one in functions(places)]
        theirs = elsewhere(lambda: (use_torch(), ask_about_fakes(), [*map(is_original, functions(places))]))
        notes.put((places, ours, *theirs))

    build(Body(during))
    seen = [*drain(notes)]
    replaced = {(id(owner), name) for places, *_ in seen for owner, name in places}
    assert replaced >= {(id(owner), name) for owner, name in EXPECTED}
    for _, ours, found, about, theirs in seen:
        assert all(ours)
        assert all(map(torch.equal, found, before))
        assert about == (True, True, "'FakeTensor' object has no attribute 'absent'")
        assert all(theirs)


EXPECTED = [(torch, "manual_seed"), (torch.random, "manual_seed"), (nn.Module, "__call__"), (FakeTensor, "tolist")]
"""Some of the places that are replaced during every capture."""


def functions(places):
    """The places of functions; namespaces and values are asked about by `ask_about_fakes`."""
    return [(owner, name) for owner, name in places if not isinstance(owner, dict) and owner is not FAKE_TENSOR.owner]


def is_original(place):
    """Return whether calls of a place from this thread reach the original."""
    owner, name = place
    return current(owner, name) is patching._SWITCHES[id(owner), name].original


def test_the_thread_of_a_capture_is_not_seen_to_seed():
    """Another thread's seeds, draws and modules change nothing in the pipeline that is built."""
    stop, state = threading.Event(), random.getstate()

    def disturb():
        while not stop.is_set():
            use_torch()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for capture in FRONTS[:2]:
            build(Body(), capture)
    finally:
        stop.set()
        thread.join(60)
        random.setstate(state)


@sampled(2)
@pytest.mark.parametrize("make", [Body, Refused])
@pytest.mark.parametrize("capture", FRONTS)
def test_nothing_stays_patched(make, capture, monkeypatch):
    class Noting(dict):
        """Notes what each place held when it was first replaced."""

        def __setitem__(self, key, switch):
            noted.append((vars(switch.owner), switch.name, switch.before))
            super().__setitem__(key, switch)

        def __delitem__(self, key):
            if isinstance(key, str):
                noted.extend((space, key, before) for space, before in self[key].before.values())
            super().__delitem__(key)

    noted = []
    monkeypatch.setattr(patching, "_SWITCHES", Noting())
    monkeypatch.setattr(patching, "_SHARED", Noting())
    if make is Refused and capture != "modules":
        with pytest.raises(fpipe.CaptureError, match="seeds the generator"):
            build(make(), capture)
    else:
        try:
            build(make(), capture)
        except fpipe.CaptureError:
            assert make is Refused
    assert replaced_places() == []
    assert noted
    assert not [name for space, name, before in noted if space.get(name, MISSING) is not before]
