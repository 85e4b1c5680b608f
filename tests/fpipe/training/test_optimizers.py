# SPDX-License-Identifier: Apache-2.0
"""Optimizers as pure functions compute what the class of torch computes on its own, bit for bit."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

import fpipe
from fpipe.tensors.tree import same_bits
from tests.common.generators import seeded
from tests.common.sizes import sampled

STEPS = 6


class Options(NamedTuple):
    """A class of torch.optim with options of the optimizer, and of a group of it."""

    cls: type[optim.Optimizer]
    options: dict
    group: dict


CLASSES = [
    Options(optim.SGD, {"lr": 0.1}, {"momentum": 0.9}),
    Options(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}, {"weight_decay": 0.1}),
    Options(optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}, {"lr": 0.2}),
    Options(optim.Adam, {"lr": 0.1, "amsgrad": True}, {"amsgrad": False}),
    Options(optim.Adam, {"lr": torch.tensor(0.1)}, {"betas": (0.5, 0.9)}),
    Options(optim.AdamW, {"lr": 0.1}, {"weight_decay": 0.0}),
    Options(optim.AdamW, {"lr": 0.1, "foreach": True}, {"eps": 1e-3}),
    Options(optim.AdamW, {"lr": 0.1, "fused": True}, {"weight_decay": 0.0}),
    Options(optim.Adamax, {}, {"lr": 0.1}),
    Options(optim.NAdam, {}, {"lr": 0.1}),
    Options(optim.RAdam, {}, {"lr": 0.1}),
    Options(optim.RMSprop, {"momentum": 0.5, "centered": True}, {"lr": 0.1}),
    Options(optim.Rprop, {}, {"lr": 0.1}),
    Options(optim.Adagrad, {"lr_decay": 0.1}, {"lr": 0.1}),
    Options(optim.Adadelta, {}, {"rho": 0.5}),
    Options(optim.ASGD, {"t0": 2}, {"lr": 0.1}),
    Options(optim.Adafactor, {}, {"lr": 0.1}),
    Options(optim.Muon, {}, {"lr": 0.1}),
    Options(optim.SparseAdam, {}, {"lr": 0.1}),
]


def names_of(cls) -> list[str]:
    return ["a.weight", "b.weight", "c.weight"] + ([] if cls is optim.Muon else ["a.bias", "b.bias", "scale"])


def start(cls) -> dict[str, Tensor]:
    generator = seeded(0)
    shapes = {"weight": (3, 4), "bias": (3,), "scale": ()}
    return {name: torch.randn(shapes[name.rpartition(".")[2]], generator=generator) for name in names_of(cls)}


def gradients(cls, step: int) -> dict[str, Tensor]:
    """Gradients for the parameters of a class; in some steps, one of them has none."""
    generator = seeded(step + 1)
    grads = {name: torch.randn(p.shape, generator=generator) for name, p in start(cls).items()}
    if cls is optim.SparseAdam:
        grads = {name: grad.to_sparse() for name, grad in grads.items() if grad.dim()}
    return {name: grad for k, (name, grad) in enumerate(grads.items()) if (step, k) not in ((0, 1), (3, 2))}


def torch_alone(one: Options, lr=None):
    """Parameters and state by name after a plain loop."""
    params = {name: nn.Parameter(p) for name, p in start(one.cls).items()}
    parts = [[p for name, p in params.items() if name.startswith("b.") is mine] for mine in (False, True)]
    instance = one.cls([{"params": parts[0]}, {"params": parts[1], **one.group}], **one.options)
    for step in range(STEPS):
        grads = gradients(one.cls, step)
        for name, p in params.items():
            p.grad = grads.get(name)
        if lr is not None:
            instance.param_groups[0]["lr"] = lr(step)
        instance.step()
    return params, {name: instance.state.get(p, {}) for name, p in params.items()}


def require_same(got, want) -> None:
    params, state = got
    wanted, kept = want
    assert list(params) == list(wanted)
    assert all(same_bits(params[name].detach(), p.detach()) for name, p in wanted.items())
    for name, slots in kept.items():
        assert state[name].keys() == slots.keys()
        for slot, value in slots.items():
            mine = state[name][slot]
            assert same_bits(mine, value) if isinstance(value, Tensor) else mine == value, (name, slot)


@sampled(13)
@pytest.mark.parametrize("one", CLASSES, ids=lambda one: f"{one.cls.__name__}-{'-'.join(one.options)}")
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_updates_are_those_of_the_class(one, donate):
    init, update = fpipe.optimizer(one.cls, groups={"b.*": one.group}, donate=donate, **one.options)
    params = {name: p.requires_grad_() for name, p in start(one.cls).items()}
    state = init(params)
    assert state == {name: {} for name in params}
    for step in range(STEPS):
        grads = gradients(one.cls, step)
        given = (grads, state, params)
        before = copy.deepcopy([{name: p.detach() for name, p in params.items()}, grads, state])
        params, state = update(*given)
        assert all(p.requires_grad and p.is_leaf and p.grad is None for p in params.values())
        if donate:
            assert all(params[name] is given[2][name] for name in params)
        else:
            after = [{name: p.detach() for name, p in given[2].items()}, given[0], given[1]]
            assert all(map(same_leaves, before, after)), "nothing that was passed is modified"
    require_same((params, state), torch_alone(one))


def test_a_parameter_is_updated_as_alone_whatever_the_dtypes_of_others():
    """A group of Adafactor takes the epsilon of its first parameter's dtype."""
    init, update = fpipe.optimizer(optim.Adafactor, lr=0.1)
    params = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(4)}
    grads = {name: torch.full_like(p, 1e-3) for name, p in params.items()}
    both, _ = update(grads, init(params), params)
    for name, p in params.items():
        own = {name: p}
        alone, _ = update({name: grads[name]}, init(own), own)
        assert same_bits(both[name], alone[name]), name


def same_leaves(a, b) -> bool:
    """Whether two trees of dicts have the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_leaves(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return same_bits(a.to_dense(), b.to_dense()) if a.is_sparse else same_bits(a, b)
    return a == b


def test_a_schedule_is_a_function_of_the_step():
    """An option by name goes to the parameters whose group has no value of its own."""

    def lr(step):
        return 0.1 / (step + 1)

    one = Options(optim.AdamW, {"lr": 0.1}, {"lr": 0.01})
    init, update = fpipe.optimizer(one.cls, groups={"b.*": one.group}, **one.options)
    params = start(one.cls)
    state = init(params)
    for step in range(STEPS):
        params, state = update(gradients(one.cls, step), state, params, lr=lr(step))
    require_same((params, state), torch_alone(one, lr))


def test_a_schedule_over_groups_is_that_of_torch():
    """LambdaLR multiplies the rate of each group."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    plain = optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}], lr=0.1)

    def factor(step):
        return min(1, (step + 1) / 4)

    schedule = optim.lr_scheduler.LambdaLR(plain, factor)
    init, update = fpipe.optimizer(optim.AdamW, groups={"*.bias": {"lr": 0.01, "weight_decay": 0.0}}, lr=0.1)
    params = start
    state = init(params)
    for step in range(8):
        grads = {name: torch.randn(p.shape, generator=seeded(step)) for name, p in start.items()}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        plain.step()
        schedule.step()
        groups = {"*.bias": {"lr": 0.01 * factor(step)}}
        params, state = update(grads, state, params, lr=0.1 * factor(step), groups=groups)
    assert all(same_bits(params[name], p.detach()) for name, p in model.named_parameters())


def test_a_process_without_parameters_is_no_special_case():
    init, update = fpipe.optimizer(optim.AdamW, groups={"*.bias": {"lr": 0.1}}, names=["0.weight", "0.bias"])
    assert init({}) == {}
    assert update({}, {}, {}) == ({}, {})


def test_flags_are_kept():
    params = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(2)}
    init, update = fpipe.optimizer(optim.SGD)
    after, _ = update({"a": torch.ones(2), "b": torch.ones(2)}, init(params), params)
    assert (after["a"].requires_grad, after["b"].requires_grad) == (True, False)


class Counting(optim.SGD):
    """Counts its steps in an attribute."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        super().step()


class Growing(optim.SGD):
    """Changes an option of its groups."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] *= 1.1


class Global(optim.SGD):
    """Keeps state for all parameters."""

    def step(self, closure=None):
        super().step()
        self.state["all"] = 1


class Normed(optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.div_(norm)
        super().step()


W = torch.ones(2, 2)
BIAS = {"groups": {"*.bias": {}}}


def adam(**options):
    """Make an optimizer."""
    fpipe.optimizer(optim.AdamW, **options)


def start_with(names, **options):
    """Begin to train parameters of these names."""
    fpipe.optimizer(optim.AdamW, **options).init({name: torch.ones(1) for name in names})


def update_nothing(options, **overrides):
    """Update no parameters, with options of this update."""
    fpipe.optimizer(optim.AdamW, **options).update({}, {}, {}, **overrides)


def update(**changed):
    """Update one parameter in place, with some argument changed; nothing may be overwritten."""
    given = {"grads": {"w": W.clone()}, "state": {"w": {}}, "params": {"w": W.clone()}} | changed
    try:
        fpipe.optimizer(optim.AdamW, donate=True).update(**given)
    finally:
        assert same_bits(given["params"]["w"], W)


TWICE = {"*.bias": {}, "0.*": {}}
SHORT = {"step": torch.ones(()), "exp_avg": W[0], "exp_avg_sq": W}
REFUSED = [
    # classes whose update is no function of one parameter
    (lambda: fpipe.optimizer(optim.LBFGS), "cls: got LBFGS, whose step needs ['closure']"),
    (lambda: fpipe.optimizer(Counting), "cls: got Counting, which changes its attribute 'count' in a step"),
    (lambda: fpipe.optimizer(Growing), "cls: got Growing, which changes its option 'lr' in a step"),
    (lambda: fpipe.optimizer(Global), "cls: got Global, which keeps state outside parameters"),
    (lambda: fpipe.optimizer(Normed), "cls: got Normed, which updates a parameter in a way that depends on others"),
    (lambda: fpipe.optimizer(nn.Linear), "expected a class of optimizers"),
    (lambda: fpipe.optimizer(optim.SGD([torch.ones(1)])), "expected a class of optimizers"),
    # options, when the optimizer is made
    (lambda: adam(lr=-1.0), "options: got {'lr': -1.0}, which AdamW refuses (Invalid learning rate: -1.0"),
    (lambda: adam(rate=1.0), "options: got {'rate': 1.0}, which AdamW refuses"),
    (lambda: adam(groups={"*": {"momentum": 1}}), "groups['*']: got {'momentum': 1}, which AdamW refuses"),
    (lambda: adam(groups=["*.bias"]), "groups: got ['*.bias'], expected a dict from pattern to options"),
    (lambda: adam(groups={"*.bias": 0.1}), "groups: got {'*.bias': 0.1}, expected a dict from pattern to options"),
    (
        lambda: adam(groups={"*.bais": {}}, names=["0.bias"]),
        "groups['*.bais']: got the pattern '*.bais', which matches",
    ),
    (lambda: adam(groups=TWICE, names=["0.bias"]), "groups: got '0.bias' in two groups, '*.bias' and '0.*'"),
    # in one process, `init` sees all names
    (lambda: start_with(["0.bias"], groups={"*.bais": {}}), "which matches none of the model's 1 parameters"),
    (lambda: start_with(["0.bias"], groups=TWICE), "in two groups"),
    # options of one update
    (lambda: update_nothing(BIAS, rate=0.1), "options: got ['rate'], expected options of AdamW: ['amsgrad'"),
    (
        lambda: update_nothing(BIAS, groups={"*": {"lr": 0.1}}),
        "groups['*']: got a pattern that is none of the optimizer's",
    ),
    (lambda: update_nothing(BIAS, groups={"*.bias": {"rate": 0.1}}), "groups['*.bias']: got ['rate']"),
    # what does not belong together
    (lambda: update(grads=W), "grads: got Tensor, expected a dict by parameter name"),
    (lambda: update(grads={"x": W}), "grads['x']: got a gradient of none of the 1 parameters"),
    (lambda: update(grads={"w": W.double()}), "grads['w']: got torch.float64 of shape [2, 2], expected torch.float32"),
    (
        lambda: update(grads={"w": W[0]}),
        "grads['w']: got torch.float32 of shape [2], expected torch.float32 of shape [2, 2]",
    ),
    (lambda: update(state={}), "state: got one for 0 parameters, expected 1 (missing ['w'], unexpected [])"),
    (lambda: update(state={"w": {}, "x": {}}), "unexpected ['x']"),
    (lambda: update(state={"w": {"momentum_buffer": W}}), "state['w']: got ['momentum_buffer'], expected ['exp_avg', "),
    (lambda: update(state={"w": 1}), "state['w']: got int, expected a dict"),
    (lambda: update(state={"w": SHORT}), "state['w']['exp_avg']: got shape [2], expected [2, 2]"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_an_optimizer_can_not_do_is_refused(call, words):
    with pytest.raises(fpipe.InputError) as error:
        call()
    assert words in str(error.value)
