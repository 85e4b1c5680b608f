# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and resumed on another layout goes on bit for bit as if nothing had happened."""

import tempfile
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

import fpipe
from fpipe.tensors.tree import same_bits
from schedules import gpipe
from tests.common.resuming import LAYOUTS, OPTIMIZERS, SUBJECTS, Trainer, pipeline, require_same_run, undisturbed
from tests.common.sizes import by_day, few, sampled

STEPS = 5
MIRRORED = "dualpipe on two"  # adds gradients in another order: not comparable with the others once it has trained
whole = lru_cache(undisturbed)
trained = st.sampled_from([layout for layout in LAYOUTS if layout != MIRRORED])


@given(
    st.sampled_from([*SUBJECTS]),
    st.sampled_from([*OPTIMIZERS]),
    st.lists(st.tuples(trained, st.integers(0, STEPS)), min_size=1, max_size=3),
    trained,
)
@settings(max_examples=few(3))
def test_a_run_goes_on_exactly_after_any_saves_on_any_layouts(subject, optimizer, saves, last):
    """Train on one layout up to a step, save, resume on the next layout."""
    parts = sorted(saves, key=lambda one: one[1])
    run, done = Trainer(subject, parts[0][0]).start(), 0
    with tempfile.TemporaryDirectory() as folder:
        for (layout, step), (following, _) in zip(parts, [*parts[1:], (last, STEPS)], strict=True):
            trainer = Trainer(subject, layout, optimizer)
            trainer.save(folder, trainer.train(run, range(done, step)), step)
            run, done = Trainer(subject, following).resume(folder)
            assert done == step
    run = Trainer(subject, last, optimizer).train(run, range(done, STEPS))
    require_same_run(run, whole(subject, optimizer, STEPS))


@sampled(1)
@pytest.mark.parametrize("layout", by_day((layout for layout in LAYOUTS if layout != "one"), 2))
def test_twenty_steps_saved_on_four_and_resumed_elsewhere(layout, tmp_path):
    saving, resuming = Trainer("tied", "1f1b on four"), Trainer("tied", layout)
    saving.save(tmp_path, saving.train(saving.start(), range(10)), 10)
    run, step = resuming.resume(tmp_path)
    if layout == MIRRORED:
        require_same_run(run, whole("tied", "adamw", 10))
        return
    require_same_run(resuming.train(run, range(step, 20)), whole("tied", "adamw", 20))


def test_parameters_come_back_as_the_next_step_takes_them(tmp_path):
    """Leaves that require a gradient where the model's did, in the model's order."""
    trainer = Trainer("normalised", "one")
    trainer.save(tmp_path, trainer.start(), 0)
    run, _ = trainer.resume(tmp_path)
    assert list(run.params) == list(trainer.pipe.training.params)
    assert all(p.is_leaf for p in run.params.values())
    assert [name for name, p in run.params.items() if not p.requires_grad] == ["2.0.weight"]
    assert run.state == {name: {} for name in run.params}


def test_numbers_and_dtypes_of_the_state_come_back_as_they_were(tmp_path):
    pipe = pipeline("tied", "one")
    slots = {
        "count": 3,
        "flag": True,
        "rate": 0.1,
        "large": 2**80,
        "inf": float("inf"),
        "steps": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "half": torch.randn(2, 5).bfloat16(),
        "turned": torch.randn(3, 4).t(),
        "mask": torch.tensor([True, False]),
        "dotted.name": torch.ones(1),
    }
    fpipe.save(pipe, tmp_path, params=Trainer("tied", "one").start().params, state={"embed.weight": slots})
    found = fpipe.load(pipe, tmp_path).state
    assert found is not None
    assert {name for name in found if found[name]} == {"embed.weight"}
    assert found["embed.weight"].keys() == slots.keys()
    for slot, value in slots.items():
        mine = found["embed.weight"][slot]
        assert type(mine) is type(value), slot
        assert same_bits(mine, value) if isinstance(value, torch.Tensor) else mine == value, slot


def test_another_optimizer_refuses_the_state_and_names_the_leaf(tmp_path):
    trainer = Trainer("tied", "one", "momentum")
    trainer.save(tmp_path, trainer.train(trainer.start(), range(1)), 1)
    run, _ = trainer.resume(tmp_path)
    _, update = fpipe.optimizer(torch.optim.AdamW)
    with pytest.raises(
        fpipe.InputError, match=r"state\['embed\.weight'\]: got \['momentum_buffer'\], expected \['exp_avg'"
    ):
        update({"embed.weight": torch.ones_like(run.params["embed.weight"])}, run.state, run.params)


def test_state_has_the_layout_of_its_parameter(tmp_path):
    """Norms of what a later step computes from it may depend on strides."""
    conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    x = torch.randn(2, 2, 4, 4)
    pipe = fpipe.pipeline(conv, example=(x,), loss=torch.mean, schedule=gpipe(1, 2))
    params, _ = pipe.init(conv)
    fpipe.save(
        pipe, tmp_path, params=params, state={"weight": {"exp_avg": torch.randn_like(params["weight"]).double()}}
    )
    found = fpipe.load(pipe, tmp_path)
    assert found.params["weight"].stride() == params["weight"].stride()
    assert found.state["weight"]["exp_avg"].stride() == params["weight"].stride()
    assert found.state["weight"]["exp_avg"].dtype == torch.float64


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3).filter(lambda key: not key.startswith("$")), inner, max_size=3)
    ),
    max_leaves=6,
)


def same_tree(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_tree(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(TREES)
@settings(max_examples=few(15))
def test_data_comes_back_as_it_was(tree):
    pipe = pipeline("tied", "one")
    with tempfile.TemporaryDirectory() as folder:
        fpipe.save(pipe, folder, params=Trainer("tied", "one").start().params, data=tree)
        found = fpipe.load(pipe, folder)
    assert same_tree(found.data, tree)
    assert found.state is None


def test_a_save_in_the_background_holds_the_values_of_when_it_began(tmp_path):
    pipe, run = pipeline("tied", "1f1b on four"), Trainer("tied", "1f1b on four").start()
    before = {name: p.detach().clone() for name, p in run.params.items()}
    finish = fpipe.begin_save(
        pipe, tmp_path, params=run.params, state={"embed.weight": {"sum": run.params["embed.weight"].detach()}}
    )
    with torch.no_grad():
        for p in run.params.values():
            p.zero_()
    assert not fpipe.is_checkpoint(tmp_path)
    finish()
    found = fpipe.load(pipe, tmp_path)
    assert all(same_bits(found.params[name].detach(), before[name]) for name in before)
    assert same_bits(found.state["embed.weight"]["sum"], before["embed.weight"])


def test_stock_torch_reads_the_files(tmp_path):
    """Names are the model's; nothing is pickled."""
    trainer = Trainer("tied", "zb_v on two")
    run = trainer.train(trainer.start(), range(2))
    trainer.save(tmp_path, run, 2)
    names = ["params.embed.weight", "state.embed.weight.exp_avg"]
    values = {name: torch.empty_like(run.params["embed.weight"]) for name in names}
    with pytest.warns(UserWarning, match="single process"):
        load(values, storage_reader=HuggingFaceStorageReader(str(tmp_path / "save-1")), no_dist=True)
    assert same_bits(values[names[0]], run.params["embed.weight"].detach())
    assert same_bits(values[names[1]], run.state["embed.weight"]["exp_avg"])
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
