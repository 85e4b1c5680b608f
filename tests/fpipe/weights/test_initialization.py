# SPDX-License-Identifier: Apache-2.0
"""Initialisers: as under `nn.Module.apply`, the same values whatever a process holds, and nothing left unwritten."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.tensors.tree import same_bits
from fpipe.weights.initialization import initialize, list_leaves, reset_parameters
from tests.common.cases import WIDTH, Case, mse, rows_of
from tests.common.layers import Average
from tests.common.shares import on_meta, ranks_of, union
from tests.common.sizes import few
from tests.common.zoo import ZOO


def same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


class Parent(nn.Module):
    """Initialises its children's parameters too, with several draws, some of which are thrown away."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.gain = nn.Parameter(torch.empty(4, 4, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.empty(4, dtype=torch.complex64))
        self.register_buffer("ids", torch.empty(3, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))

    def reset_parameters(self):
        torch.rand(2)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter) if parameter.dtype == torch.float32 else parameter.normal_()
        self.wave.copy_(torch.randn(4, dtype=torch.complex64))
        self.ids = torch.randint(9, (3,))
        self.mask.bernoulli_(0.5)


PARENT = nn.Sequential(Parent(), nn.Linear(2, 2), Parent())
LEAVES = sorted(list_leaves(PARENT))
WHOLE = initialize(PARENT, LEAVES, reset_parameters, seed=3)


@given(st.sets(st.sampled_from(LEAVES)))
def test_values_do_not_depend_on_what_else_a_rank_holds(names):
    assert same(initialize(PARENT, names, reset_parameters, seed=3), {name: WHOLE[name] for name in names})


@functools.cache
def pipes(name):
    return [on_meta(ZOO[name], ranks) for ranks in (1, 2, 4)]


@settings(max_examples=few(6))
@given(seed=st.integers(0, 2**64), name=st.sampled_from(["gpt", "unet", "mlp", "one_weight"]))
def test_values_depend_on_neither_ranks_nor_cuts(seed, name):
    first, *others = pipes(name)
    alone = union([first.initialise(seed=seed)])
    for pipe in others:
        assert same(union(rank.initialise(seed=seed) for rank in ranks_of(pipe)), alone)
        assert same(union([pipe.initialise(seed=seed)]), alone)


def test_a_rank_initializes_its_leaves_only():
    shares = [
        {*params, *buffers} for params, buffers in (rank.initialise(seed=0) for rank in ranks_of(pipes("mlp")[2]))
    ]
    assert shares == [{f"{k}.weight", f"{k}.bias"} for k in (0, 2, 4, 6)]


def drawing(module):
    """Draws for what a module owns, and once more for what its children own."""
    for leaf in module.parameters(recurse=False):
        leaf.normal_()
    for child in module.children():
        for leaf in child.parameters(recurse=False):
            leaf.sub_(torch.randn(leaf.shape))


def test_draws_differ_between_seeds_leaves_and_calls():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    made = [initialize(model, list_leaves(model), drawing, seed) for seed in (0, 1, 2**40)]
    rows = [tuple(row) for one in made for value in one.values() for row in value.view(-1, 3).tolist()]
    assert len(set(rows)) == len(rows) == 36
    assert all(len(set(row)) == 3 for row in rows)
    assert min(abs(number) for row in rows for number in row) > 0, "the second draw is the first"


def test_a_parent_draws_different_values_for_each_child():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    made = initialize(model, list_leaves(model), lambda module: [p.normal_() for p in module.parameters()], seed=0)
    assert len({tuple(row) for value in made.values() for row in value.view(-1, 3).tolist()}) == 12


def test_the_user_s_generator_is_not_advanced():
    before = torch.random.get_rng_state()
    initialize(PARENT, LEAVES, reset_parameters, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def by_class(module):
    """An initialiser without random numbers; a parent changes what its children did."""
    for leaf in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        leaf.fill_(len(type(module).__name__))
    for child in module.children():
        for leaf in child.parameters(recurse=False):
            leaf.add_(1)


@pytest.mark.parametrize("name", ["gpt", "tied_sequence", "one_weight", "unet", "twice"])
def test_modules_are_initialized_as_under_apply(name):
    """Also where several modules fill a tied parameter, or one module is in several places: the last one has it."""
    model = ZOO[name].build()
    got = initialize(model, list_leaves(model), by_class, seed=0)
    with torch.no_grad():
        model.apply(by_class)
    assert same(got, list_leaves(model))


def test_torch_s_own_modules_need_no_function():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    made = initialize(layer, list_leaves(layer), reset_parameters, seed=0)
    constructed = dict(nn.TransformerEncoderLayer(8, 2, 16).named_parameters())
    assert made.keys() == constructed.keys()
    constant = [name for name, value in constructed.items() if len(value.unique()) == 1]
    assert constant
    assert all(torch.equal(made[name], constructed[name]) for name in constant)


# ------------------------------------------------------------------------------------------------ what is left unfilled


class Holder(nn.Module):
    """One tensor, of any dtype."""

    def __init__(self, dtype=torch.float32, shape=(2, 3)):
        super().__init__()
        self.register_buffer("kept", torch.empty(shape, dtype=dtype))


def replace_data(module):
    module.kept.data = torch.ones(2, 3)


def assign(module):
    module.kept = torch.ones(3, 2).t()


def through_a_view(module):
    module.kept.view(-1)[:3].zero_()
    module.kept.view(-1)[3:] = 1


FILLING = [
    replace_data,
    assign,
    through_a_view,
    lambda m: m.kept.fill_(-torch.inf),
    lambda m: torch.ones(2, 3, out=m.kept),
]


@pytest.mark.parametrize("fill", FILLING)
def test_functions_may_fill_tensors_in_several_ways(fill):
    module, expected = Holder(), Holder()
    own = lambda module: fill(module) if isinstance(module, Holder) else None  # noqa: E731
    own(expected)
    made = initialize(nn.Sequential(module), ["0.kept"], own, seed=0)
    assert torch.equal(made["0.kept"], expected.kept)
    assert made["0.kept"].is_contiguous()


def of_another_shape(module):
    module.kept = torch.ones(3)


LEAVING = [
    (lambda m: None, torch.float32),
    (lambda m: None, torch.int64),
    (lambda m: None, torch.bool),
    (lambda m: m.kept.mul_(2), torch.float32),
    (lambda m: m.kept[0].fill_(1), torch.bfloat16),
    (lambda m: m.kept[0].fill_(1), torch.complex64),
    (lambda m: setattr(m, "kept", torch.ones(2, 3, device="meta")), torch.float32),
    (lambda m: delattr(m, "kept"), torch.float32),
    (lambda m: m.kept + 1, torch.int64),
]


@pytest.mark.parametrize(("fill", "dtype"), LEAVING)
def test_tensors_that_are_not_filled_are_refused(fill, dtype):
    model = nn.Sequential(nn.Linear(2, 2), Holder(dtype))
    own = lambda module: fill(module) if isinstance(module, Holder) else reset_parameters(module)  # noqa: E731
    with pytest.raises(fpipe.InputError, match=r"initialise: got no value, or nan, for 1\.kept of Holder, expected"):
        initialize(model, list_leaves(model), own, seed=0)


def test_another_shape_is_refused():
    with pytest.raises(fpipe.InputError, match=r"initialized\['kept'\]: got float32\[3\], expected float32\[2, 3\]"):
        initialize(Holder(), ["kept"], of_another_shape, seed=0)


def test_tensors_without_elements_are_full():
    empty = Holder(shape=(0, 3))
    assert initialize(empty, list_leaves(empty), lambda m: m.kept.zero_(), seed=0)["kept"].shape == (0, 3)


def test_tensors_that_the_initializer_forgot_are_named():
    averaging = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Average()), rows_of(), mse, ("1",) * 3)
    pipe = on_meta(averaging, 2)
    with pytest.raises(fpipe.InputError) as caught:
        pipe.initialise(seed=0)
    assert "1.mean of Average, 1.count of Average, 1.scale of Average" in str(caught.value)
    first, last = ranks_of(pipe)
    assert list(first.initialise(seed=0)[0]) == ["0.weight", "0.bias"]
    with pytest.raises(fpipe.InputError):
        last.initialise(seed=0)


# --------------------------------------------------------------------------------------------------------------- errors


HELD = nn.Sequential(Holder())


def test_initializers_with_their_own_generator_are_refused():
    own = torch.Generator()
    with pytest.raises(fpipe.InputError, match=r"normal_\.default with its own generator, expected the default"):
        initialize(nn.Sequential(Holder()), ["0.kept"], lambda m: m.kept.normal_(generator=own), 0)


def test_an_error_in_the_function_says_where():
    def fails(module):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        initialize(HELD, list_leaves(HELD), fails, seed=0)
    assert caught.value.__notes__[0].startswith("while initializing 0 (Holder)")


def test_initialized_parameters_can_be_trained():
    """Parameters are leaves that require a gradient where the model's did; a step with them is that of a real model."""
    from tests.common.comparison import assert_same
    from tests.common.loops import loop
    from tests.common.running import run

    pipe, case = pipes("gpt")[1], ZOO["gpt"]
    params, buffers = pipe.initialise(seed=5)
    assert all(value.is_leaf and value.requires_grad for value in params.values())
    model, inputs, targets = case.make(4)
    model.load_state_dict({**params, **buffers}, strict=False)  # the tied weight has one name here
    assert_same(run(pipe, model, inputs, targets), loop(model, case.loss, inputs, targets, 2))
    step, _ = fpipe.value_and_grad(pipe)(params, buffers, inputs, targets)
    assert same_bits(step.loss, loop(model, case.loss, inputs, targets, 2).loss)


def test_frozen_parameters_stay_frozen():
    params, _ = on_meta(ZOO["frozen_below"]).initialise(seed=0)
    frozen = {name for name, value in ZOO["frozen_below"].build().named_parameters() if not value.requires_grad}
    assert {name for name, value in params.items() if not value.requires_grad} == frozen != set()
