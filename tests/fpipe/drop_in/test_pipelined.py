# SPDX-License-Identifier: Apache-2.0
"""A drop-in module trains as the model does in a plain loop over microbatches, bit for bit, in whatever order the
script calls things; and what it can't follow, it refuses."""

import copy
import gc
from functools import partial
from types import FunctionType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.drop_in.norms import WholeNorm
from fpipe.tensors.torch_private import total_norm_cell
from fpipe.tensors.tree import same_bits
from schedules import one_f_one_b, zb_h1
from tests.common.drop_in import M, batches, make, net
from tests.common.options import grouped
from tests.common.sizes import sampled


class Plain:
    """The model in a plain loop over microbatches, called as the drop-in module is."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x, targets, divide=1.0):
        parts = [
            functional.cross_entropy(self.model(a), b) / M for a, b in zip(x.chunk(M), targets.chunk(M), strict=True)
        ]
        self.losses = [part / divide for part in parts]
        return sum(part.detach() for part in parts)

    def backward(self):
        for loss in self.losses:
            loss.backward()

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


class Piped:
    """The drop-in module, called as a plain loop is."""

    def __init__(self, model, **options):
        self.model, self.options = model, options

    def __call__(self, x, targets, divide=1.0):
        loss = self.model(x, targets=targets, **self.options)
        self.loss = loss / divide
        return loss.detach()

    def backward(self):
        self.loss.backward()

    def clip(self, max_norm):
        return self.model.clip_grad_norm_(max_norm)


def train(run, steps=6, accumulate=1, divide=1.0, cleared="last", max_norm=None, make_optimizer=torch.optim.AdamW):
    """Losses and norms of a training script that clears gradients at one of three places."""
    optimizer, data, seen = make_optimizer(run.model.parameters(), lr=0.05), batches(steps * accumulate), []
    for _ in range(steps):
        for k in range(accumulate):
            if cleared == "first" and k == 0:
                optimizer.zero_grad()
            seen.append(run(*next(data), divide))
            if cleared == "between" and k == 0:
                optimizer.zero_grad()
            run.backward()
        if max_norm is not None:
            seen.append(run.clip(max_norm))
        optimizer.step()
        if cleared == "last":
            optimizer.zero_grad()
    return seen, run.model.state_dict(), optimizer.state_dict()["state"]


def assert_equal(one, two):
    for a, b in zip(one[0], two[0], strict=True):
        assert same_bits(a, b)
    assert list(one[1]) == list(two[1])
    assert all(same_bits(one[1][name], two[1][name]) for name in one[1])
    for k, slots in one[2].items():
        assert all(same_bits(value, two[2][k][slot]) for slot, value in slots.items())


@settings(max_examples=12)
@given(
    accumulate=st.integers(1, 3),
    exponent=st.integers(-3, 3),
    cleared=st.sampled_from(["first", "between", "last"]),
    max_norm=st.sampled_from([None, 0.1]),
    schedule=st.sampled_from([one_f_one_b(2, M), zb_h1(3, M)]),
)
def test_a_script_trains_as_a_plain_loop(accumulate, exponent, cleared, max_norm, schedule):
    how = {"steps": 3, "accumulate": accumulate, "divide": 2.0**exponent, "cleared": cleared, "max_norm": max_norm}
    assert_equal(train(Plain(net()), **how), train(Piped(make(schedule=schedule)), **how))


@sampled(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_any_optimizer_trains_as_a_plain_loop(optimizer):
    how = {"steps": 20, "make_optimizer": optimizer, "max_norm": 0.5}
    assert_equal(train(Plain(net()), **how), train(Piped(make()), **how))


def test_a_scale_that_the_forward_knows_may_be_any_number():
    how = {"accumulate": 3, "divide": 3.0}
    assert_equal(train(Plain(net()), **how), train(Piped(make(), scale=1 / 3), **how))


def test_steps_average_all_accumulated_losses():
    """As in a plain loop that divides each loss by 3 times the number of its microbatches; a small batch has few."""
    model, plain = make(), net()
    for one in (model, plain):
        next(part for part in one.modules() if isinstance(part, nn.BatchNorm1d)).eval()  # for a single row
    for rows, (x, y) in zip((None, None, M - 1), batches(3), strict=True):
        x, y, count = x[:rows], y[:rows], min(M, len(x[:rows]))
        loss = model(x, targets=y, steps=3)
        loss.backward()
        total = torch.zeros(())
        for a, b in zip(x.chunk(M), y.chunk(M), strict=True):
            part = functional.cross_entropy(plain(a), b) * (1 / (3 * count))
            part.backward()
            total = total + part.detach()
        torch.testing.assert_close(loss.detach(), total)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


class Scored(nn.Module):
    """A model that computes its own loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x):
        y = self.layers(x)
        return {"loss": y.square().mean(), "y": y, "most": y.max()}


@sampled(1)
@pytest.mark.parametrize("weight", [None, lambda inputs, targets: len(inputs["x"])])
def test_a_models_own_loss_is_one_number_in_eval_mode(weight):
    """What the loss returns as it is; other scalars are those of each microbatch."""
    x = torch.randn(7, 6)
    piped = fpipe.Pipelined(
        Scored(),
        loss=lambda out: out["loss"],
        example={"x": x},
        schedule=one_f_one_b(2, M),
        microbatching=fpipe.Microbatching(weight=weight),
    )
    trained = piped(x=x).detach()
    if weight is None:
        piped.weigh(lambda inputs, targets: 1)
        torch.testing.assert_close(piped(x=x).detach(), trained)
    for rows in (7, 3):
        found = piped.eval()(x=x[:rows])
        parts = [piped.layers(part) for part in x[:rows].tensor_split(min(rows, M))]
        assert same_bits(found["y"], torch.cat(parts).detach())
        assert found["most"].shape == (min(rows, M),)
        counted = (
            piped.layers(x[:rows]).square().mean() if weight else sum(one.square().mean() for one in parts) / len(parts)
        )
        torch.testing.assert_close(found["loss"], counted.detach())
    other = fpipe.Pipelined(Scored(), loss=lambda out: out["loss"] * 2, example={"x": x}, schedule=one_f_one_b(2, M))
    assert other.eval()(x=x)["loss"].shape == (M,)


def test_one_set_of_gradients_is_held():
    model = make()
    for x, y in batches(3):
        before = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
        model(x, targets=y).backward()
        after = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        assert not before or before == after


def test_a_term_of_the_scripts_own_is_added():
    model, (x, y) = make(), next(batches(1))
    model(x, targets=y).backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    decay = sum(p.square().sum() for p in model.parameters())
    (model(x, targets=y) + decay).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, alone[name] + 2 * p.detach())


def test_eval_mode_returns_outputs_or_the_loss_and_changes_nothing():
    model, plain, (x, y) = make(net(0.5)), net(0.5), next(batches(1))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.eval()
    plain.eval()
    assert same_bits(model(x), torch.cat([plain(a) for a in x.chunk(M)]).detach())
    with torch.no_grad():
        loss = model(x, targets=y)
    torch.testing.assert_close(loss, functional.cross_entropy(plain(x), y))
    assert not loss.requires_grad
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_the_seed_of_the_script_decides_what_is_drawn():
    found = []
    for seed in (1, 1, 2):
        model = make(net(0.5))
        torch.manual_seed(seed)
        found.append([model(x, targets=y).item() for x, y in batches(3)])
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == 3


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    model, (x, y) = make(), next(batches(1))
    state = torch.get_rng_state()
    model(x, targets=y).backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_seed_makes_a_step_a_function_of_its_arguments():
    model, (x, y) = make(net(0.5)), next(batches(1))
    losses = [model(x, targets=y, seed=seed).item() for seed in (7, 7, 8)]
    assert losses[0] == losses[1] != losses[2]


def test_freezing_and_thawing_is_followed():
    model, plain = Piped(make()), Plain(net())
    for run in (model, plain):
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    for k, (x, y) in enumerate(batches(6)):
        for run in (model, plain):
            run.model.get_submodule("0").requires_grad_(k not in (1, 2, 4))
            run(x, y)
            run.backward()
            assert (run.model.get_parameter("0.weight").grad is None) == (k in (1, 2, 4))
            run.optimizer.step()
            run.optimizer.zero_grad()
    for name, value in plain.model.state_dict().items():
        assert same_bits(model.model.state_dict()[name], value), name


def test_modes_and_attributes_of_modules_are_followed():
    model, plain = Piped(make()), Plain(net())
    for k, (x, y) in enumerate(batches(4)):
        for run in (model, plain):
            run.model.train()
            if k % 2:
                for one in run.model.modules():
                    if isinstance(one, nn.BatchNorm1d):
                        one.eval()
            run.model.get_submodule("1").momentum = 0.1 if k < 2 else 0.5
            run(x, y)
    for name, value in plain.model.state_dict().items():
        assert same_bits(model.model.state_dict()[name], value), name


class Layer(nn.Linear):
    """A layer whose forward runs in `around`, as those of transformers run in a checkpoint that is set later."""

    around = None

    def forward(self, x):
        return super().forward(x) if self.around is None else self.around(super().forward, x)


def test_a_function_of_a_library_that_is_set_later_is_followed():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(6, 16), Layer(16, 3))
    plain, piped = Plain(copy.deepcopy(model)), Piped(make(model))
    for k, (x, y) in enumerate(batches(2)):
        for run in (plain, piped):
            run.model.get_submodule("1").around = partial(checkpoint, use_reentrant=False) if k else None
            run(x, y)
            run.backward()
        grads = {name: p.grad for name, p in piped.model.named_parameters()}
        assert all(same_bits(grads[name], p.grad) for name, p in plain.model.named_parameters())
    assert piped.model.pipe.model[1].around.func is checkpoint


@pytest.mark.filterwarnings("ignore")  # dynamo's
def test_a_compiled_model_trains_under_its_own_names():
    compiled = torch.compile(net(), backend="eager")
    losses, weights, _ = train(Piped(make(compiled)), steps=2)
    expected, plain, _ = train(Plain(net()), steps=2)
    assert all(map(same_bits, losses, expected))
    assert all(same_bits(weights[f"_orig_mod.{name}"], value) for name, value in plain.items())


def test_the_module_looks_like_the_model():
    model, plain = make(), net()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in list(model.modules())[1:]] == [type(m) for m in list(plain.modules())[1:]]
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    assert not model.get_parameter("0.weight").any()


class Named(nn.Module):
    """A model whose tensors are named as methods of modules are; `config` is an attribute."""

    def __init__(self):
        super().__init__()
        self.pipe, self.first, self.config = nn.Parameter(torch.ones(3)), nn.Linear(6, 3), {"size": 3}
        self.clip_grad_norm = nn.Linear(3, 3)
        self.register_buffer("extra", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.clip_grad_norm(self.first(x) * self.pipe) + self.extra

    def count(self):
        return len(list(self.parameters()))


def test_names_of_the_model_and_of_the_module_do_not_meet():
    model = make(Named())
    assert list(model.state_dict()) == list(Named().state_dict())
    assert isinstance(model.pipe, fpipe.Pipeline)
    assert (model.config, model.count()) == ({"size": 3}, 5)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing


def test_an_average_of_the_module_evaluates_by_itself():
    model = make()
    average, whole = AveragedModel(model), AveragedModel(net())
    plain = Plain(net())
    for run, mean in ((Piped(model), average), (plain, whole)):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for x, y in batches(3):
            run(x, y)
            run.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(run.model)
    for name, value in whole.state_dict().items():
        assert same_bits(average.state_dict()[name], value), name
    x, _ = next(batches(1))
    average.eval()
    whole.eval()
    assert same_bits(average(x), torch.cat([whole(a) for a in x.chunk(M)]).detach())
    copy.deepcopy(model)


def test_what_a_loss_returns_beside_itself_is_kept_until_the_next():
    """In train mode, and in eval mode; merged as asked; also after a change that makes another pipeline."""

    def loss(logits, labels):
        return functional.cross_entropy(logits, labels), {"logits": logits, "rows": len(labels)}

    plain, (x, y) = net(), next(batches(1))
    given = {"loss": loss, "example": (x,), "targets": y, "schedule": one_f_one_b(ranks=2, microbatches=M)}
    model = fpipe.Pipelined(net(), aux=lambda parts: torch.cat([part["logits"] for part in parts]), **grouped(given))
    assert model.last_aux is None
    want = torch.cat([plain(part) for part in x.chunk(M)])
    model(x, targets=y).backward()
    assert same_bits(model.last_aux, want.detach())
    assert not model.last_aux.requires_grad
    next(model.parameters()).requires_grad_(False)
    model(2 * x, targets=y).backward()
    assert same_bits(model.last_aux, torch.cat([plain(part) for part in (2 * x).chunk(M)]).detach())
    model.eval()(x, targets=y)
    assert same_bits(model.last_aux, torch.cat([copy.deepcopy(plain).eval()(part) for part in x.chunk(M)]).detach())
    model(x)
    assert len(model.last_aux) == len(x)


# ------------------------------------------------------------------------- torch's own functions that clip by a norm


def test_torchs_own_clipping_takes_the_norm_of_the_whole_model():
    model, other = make(), make()
    for one in (model, other):
        one(*next(batches(1))[:1], targets=next(batches(1))[1]).backward()
    grads = [p.grad for p in model.parameters()]
    assert same_bits(get_total_norm(grads), get_total_norm([p.grad.clone() for p in model.parameters()]))
    assert same_bits(nn.utils.clip_grad_norm_(model.parameters(), 0.1), other.clip_grad_norm_(0.1))
    assert all(map(same_bits, grads, [p.grad for p in other.parameters()]))


@pytest.mark.parametrize("choose", [lambda own, other: own[:2], lambda own, other: [*own, *other]])
def test_torchs_own_clipping_of_a_part_is_refused_as_on_several_processes(choose):
    """Where a rank that holds nothing of the part would not call."""
    model, (x, y) = make(), next(batches(1))
    model(x, targets=y).backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    chosen, before = choose([*model.parameters()], [*other.parameters()]), [p.grad.clone() for p in model.parameters()]
    with pytest.raises(fpipe.InputError, match=r"gradients to take the norm of, which .*Call model.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(chosen, 0.1)
    assert all(map(same_bits, before, [p.grad for p in model.parameters()]))
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)  # what has nothing of it is left alone
    grads = {name: p.grad for name, p in model.named_parameters()}
    fpipe.clip(model.pipe, grads, 1e-4, names="0.*", donate=True)  # the repair
    assert model.get_parameter("0.weight").grad.norm() < 1e-3


def test_gradients_that_are_not_finite_are_refused_as_torch_does():
    model, (x, y) = make(), next(batches(1))
    model(x, targets=y).backward()
    model.get_parameter("0.bias").grad[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 for gradients.* error_if_nonfinite=False"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def test_torchs_function_is_put_back_with_the_last_module():
    gc.collect()
    before = total_norm_cell().cell_contents
    first, second = make(), make()
    assert isinstance(total_norm_cell().cell_contents, WholeNorm)
    del first
    gc.collect()
    assert isinstance(total_norm_cell().cell_contents, WholeNorm)
    del second
    gc.collect()
    assert total_norm_cell().cell_contents is before
    assert isinstance(before, FunctionType)


class TiedEnds(nn.Module):
    """A model whose head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)).tanh())


def test_a_checkpoint_restores_a_tied_model(tmp_path):
    """A checkpoint has a tied tensor once; `load_state_dict` asks for all of its names."""
    x = torch.arange(24).view(8, 3) % 11
    first, second = (
        fpipe.Pipelined(
            TiedEnds(),
            loss=lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten()),
            example=(x,),
            targets=x,
            schedule=one_f_one_b(ranks=2, microbatches=4),
        )
        for _ in range(2)
    )
    fpipe.save(first.pipe, tmp_path / "run", params=dict(first.named_parameters()), buffers={})
    saved = fpipe.load(second.pipe, tmp_path / "run")
    assert "head.weight" not in saved.params
    second.load_state_dict(saved.params)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert second.head.weight is second.embed.weight
