# SPDX-License-Identifier: Apache-2.0
"""What a stage can compute from its part of the batch is not sent, and every bit stays."""

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fpipe
from schedules import one_f_one_b, recompute, zb_h1
from tests.common.cases import WIDTH, Case, mse
from tests.common.comparison import assert_same
from tests.common.loops import loop
from tests.common.options import grouped
from tests.common.programs import LAYERS, Aside, Program, programs, sided
from tests.common.running import SEED, build, run, run_reference
from tests.common.sizes import few, in_turn, sampled

SCHEDULES = [one_f_one_b, zb_h1, lambda **sizes: recompute(one_f_one_b(**sizes))]


def sent(pipe):
    """How many values each stage sends."""
    return [sum(len(one.specs) for one in stage.gives) for stage in pipe.stages]


def computed(pipe):
    """How many values each stage computes before its forwards: once a step, and for each microbatch."""
    found = [stage.prologue for stage in pipe.stages]
    return [(len(one.kept), len(one.specs) - len(one.kept)) for one in found]


@settings(max_examples=few(12))
@given(programs())
def test_only_what_a_stage_cannot_compute_is_sent(program):
    how = SCHEDULES[len(program.asides) % 3](ranks=LAYERS, microbatches=2)
    backward = "graph" if len(program.asides) % 2 else "autograd"
    pipe, model, inputs, targets = build(sided(program), how, 5, capture="trace", backward=backward)
    seed = SEED if program.is_random else None
    got = run(pipe, model, inputs, targets, seed=seed)
    assert_same(got, run_reference(pipe, model, inputs, targets, seed=seed))
    if not program.is_random:
        assert_same(got, loop(model, mse, inputs, targets, 2))
    assert sum(sent(pipe)) == program.sent
    assert all(sum(computed(pipe)[s]) >= program.repeated(s) for s in range(LAYERS))


def one(*kinds, operands=()):
    """A program whose last value, made before the first layer, is used by all layers."""
    asides = tuple(Aside(kind, operands if k == len(kinds) - 1 else (), 0) for k, kind in enumerate(kinds))
    return Program(asides, (frozenset({len(kinds) - 1}),) * LAYERS)


ONCE, EACH, NEVER = (1, 0), (0, 1), (0, 0)


@sampled(1)
@pytest.mark.parametrize(
    ("case", "capture"),
    in_turn(
        [
            (one("positions"), [ONCE] * 4),
            (one("constant"), [ONCE] * 4),
            (one("still"), [ONCE] * 4),
            (one("leaf"), [NEVER, *[EACH] * 3]),
            (one("still", "leaf", "sum", operands=(0, 1)), [NEVER, *[EACH] * 3]),
            (one("leaf", "in place", operands=(0, 0)), [NEVER, *[EACH] * 3]),
            (one("still", "through a view", operands=(0, 0)), [ONCE] * 4),
            (one("weight"), [NEVER] * 4),
            (one("moving"), [NEVER] * 4),
            (one("random"), [NEVER] * 4),
            (one("random", "leaf", "sum", operands=(0, 1)), [NEVER] * 4),
        ],
        ["trace", "export"],
    ),
    ids=lambda value: "-".join(a.kind for a in value[0].asides) if isinstance(value, tuple) else value,
)
def test_what_follows_from_the_batch_is_computed_for_each_microbatch_and_all_else_once(case, capture):
    program, expected = case
    pipe, model, inputs, targets = build(sided(program), one_f_one_b(ranks=LAYERS, microbatches=2), 4, capture=capture)
    assert computed(pipe) == expected
    assert sent(pipe) == [1 + (expected[1] == NEVER)] * 3 + [0]
    seed = SEED if program.is_random else None
    assert_same(run(pipe, model, inputs, targets, seed=seed), run_reference(pipe, model, inputs, targets, seed=seed))


class Masked(nn.Module):
    """Three layers; what `make(self, x, mask)` returns before the first is multiplied to what each returns."""

    def __init__(self, make, use=lambda self, y, t: y * t):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.make, self.use = make, use
        self.register_buffer("table", torch.rand(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, mask):
        t = self.make(self, x, mask)
        y = self.use(self, self.a(x), t)
        return self.c(self.use(self, self.b(y), t)) * t


def masked(make, *use):
    def batch(rows):
        return (torch.randn(rows, WIDTH), torch.rand(rows, WIDTH)), torch.randn(rows, WIDTH)

    return Case(lambda: Masked(make, *use), batch, mse, ("b", "c", ""))


def built(make, *use, rows=6, **options):
    how = options.pop("how", one_f_one_b(ranks=3, microbatches=3))
    return build(masked(make, *use), how, rows, ("b", "c"), capture=options.pop("capture", "trace"), **options)


def built_from(model, loss=mse, **options):
    """A pipeline of this model."""
    inputs, targets = masked(None).batch(6)
    options |= {"schedule": one_f_one_b(ranks=3, microbatches=3), "cuts": ["b", "c"]}
    pipe = fpipe.pipeline(model, example=inputs, targets=targets, loss=loss, **grouped(options))
    return pipe, model, inputs, targets


def require_equal(pipe, model, inputs, targets):
    microbatches = pipe.schedule.microbatches
    assert_same(run(pipe, model, inputs, targets), loop(model, mse, inputs, targets, microbatches))


def counted(self, mask):
    self.count.add_(1)
    return mask * self.count


def read(tensor):
    """A value that depends on a question."""
    return tensor * int((tensor > 0.5).sum())


KEPT = {  # what no stage may compute again
    "a value whose place in autograd changes": lambda self, x, mask: (mask * 2).requires_grad_(),
    "a buffer that is written": lambda self, x, mask: counted(self, mask),
    "a parameter": lambda self, x, mask: self.a.weight.detach()[0] * mask,
    "a view of a parameter": lambda self, x, mask: self.a.weight.detach()[0],
}


@sampled(2)
@pytest.mark.parametrize("what", KEPT)
def test_these_are_sent(what):
    pipe, *given = built(KEPT[what])
    assert computed(pipe) == [NEVER] * 3
    assert sent(pipe) == [2, 2, 0]
    require_equal(pipe, *given)


class Branching(nn.Module):
    """Decides by its values what to compute: it runs as a whole."""

    def forward(self, mask):
        return mask * 2 if mask.mean() > 0.5 else mask * 3


class WithBranching(Masked):
    def __init__(self):
        super().__init__(lambda self, x, mask: self.branching(mask))
        self.branching = Branching()


def test_what_is_made_in_a_call_that_runs_as_a_whole_is_sent():
    pipe, *given = built_from(WithBranching(), unsplittable=["branching"])
    assert computed(pipe) == [NEVER] * 3
    assert sent(pipe) == [2, 2, 0]
    require_equal(pipe, *given)


REPEATED = {
    "a view of the batch": lambda self, x, mask: mask[:, :1],
    "an answer to a question": lambda self, x, mask: read(mask),
    "selected rows": lambda self, x, mask: mask[mask > 0.5].mean() + self.table,
    "a function of functions": lambda self, x, mask: torch.func.vmap(torch.mul, (0, None))(mask, self.table),
    "a value that is written in place": lambda self, x, mask: (mask * 2).add_(1).mul_(self.table),
    "a table under autocast": lambda self, x, mask: torch.autocast("cpu", torch.bfloat16)(torch.mm)(
        mask, torch.ones(WIDTH, WIDTH)
    ).float(),
}


@sampled(2)
@pytest.mark.parametrize(("what", "backward"), in_turn(REPEATED, ["autograd", "graph"]))
def test_these_are_computed_by_each_stage(what, backward):
    pipe, *given = built(REPEATED[what], backward=backward)
    assert computed(pipe)[1:] == [EACH] * 2
    assert sent(pipe) == [1, 1, 0]
    require_equal(pipe, *given)


def test_a_value_that_a_later_stage_writes_is_sent():
    """Its units would write twice."""

    class Later(Masked):
        def forward(self, x, mask):
            t = mask * 2
            y = self.b(self.a(x))
            t.add_(1)
            return self.c(y * t)

    pipe, *given = built_from(Later(None))
    assert computed(pipe) == [NEVER] * 3
    assert sent(pipe) == [2, 1, 0]
    require_equal(pipe, *given)


def test_a_value_that_is_written_after_its_first_use_is_not_repeated():
    class Late(Masked):
        def forward(self, x, mask):
            t = mask * 2
            y = self.a(x) + t  # this use saves nothing
            t.add_(1)
            return self.c(self.b(y) * t) * t

    pipe, *given = built_from(Late(None))
    assert computed(pipe) == [NEVER] * 3
    require_equal(pipe, *given)


def test_outputs_that_a_stage_can_compute_are_those_of_each_microbatch():
    """An invariant output is computed anew for each microbatch: whoever gets one may change it."""

    class Returning(Masked):
        def forward(self, x, mask):
            positions = torch.arange(20_000) * self.table.mean()
            return super().forward(x, mask), positions, mask[:, :2]

    model = Returning(lambda self, x, mask: mask * 2)
    pipe, *given = built_from(model, lambda out, y: mse(out[0], y) + out[1].mean())
    assert fpipe.verify(pipe, *given).eager
    expected = torch.arange(20_000) * model.table.mean()

    def change(i, outputs):
        assert torch.equal(outputs[1], expected)
        outputs[1].zero_()

    fpipe.stream(pipe, change)(*pipe.init(model), given[1])


def test_what_is_computed_once_uses_the_buffers_of_the_step():
    """A step is a function of its buffers, whatever they were when the pipeline was built."""
    pipe, model, inputs, targets = built(lambda self, x, mask: torch.cos(self.table))
    params, buffers = pipe.init(model)
    model.table.add_(1)
    step, grads = fpipe.value_and_grad(pipe)(params, {**buffers, "table": model.table}, inputs, targets)
    want = loop(model, mse, inputs, targets, 3)
    assert torch.equal(step.loss, want.loss)
    assert all(torch.equal(grads[name], want.grads[name]) for name in grads)


def test_buffers_are_held_where_they_are_read():
    pipe, *_ = built(lambda self, x, mask: torch.cos(self.table) * mask)
    assert [set(stage.buffers) for stage in pipe.stages] == [{"table"}] * 3


class Counting(torch.overrides.TorchFunctionMode):
    """Counts calls of a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.count = function, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is self.function
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "calls"), [(lambda s, x, m: torch.cos(s.table), 3), (lambda s, x, m: torch.cos(m), 9)]
)
def test_invariant_values_are_computed_once_a_step_on_each_stage(make, calls):
    pipe, model, inputs, targets = built(make, backward="autograd")
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    for _ in range(2):
        with Counting(torch.cos) as counting:
            step(*state, inputs, targets)
        assert counting.count == calls, "three stages, and three microbatches"


class Table(nn.Module):
    def forward(self, table):
        return torch.cos(table)


class WithTable(Masked):
    def __init__(self):
        super().__init__(lambda self, x, mask: self.tables(self.table))
        self.tables = Table()


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_with_hooks_that_runs_as_python_is_called_for_each_microbatch(whole):
    seen = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = WithTable()
    model.tables.register_forward_hook(lambda module, args, out: seen.append(len(seen)))
    pipe, _, inputs, targets = built_from(model, whole="tables" if whole else ())
    state = pipe.init(model)
    seen.clear()
    with Counting(torch.cos) as counting:
        fpipe.value_and_grad(pipe)(*state, inputs, targets)
    assert len(seen) == 3 * whole
    assert counting.count == 3


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return x * self.weight.sum()


class Masks(nn.Module):
    def forward(self, mask):
        return mask * 2, mask * 3


class Towards(nn.Module):
    """Layers of 190, 10 and 200 parameters; masks for the last are made after the first."""

    def __init__(self):
        super().__init__()
        self.a, self.masks, self.b, self.c = Scale(190), Masks(), Scale(10), Scale(200)

    def forward(self, x, mask):
        y = self.a(x)
        one, two = self.masks(mask)
        return self.c(self.b(y) * 1) * one * two


def test_even_cuts_count_only_values_that_are_sent():
    """In the middle, three values are needed later, of which one is sent: not more than before the masks are made."""
    inputs, targets = masked(None).batch(6)
    how = one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(Towards(), example=inputs, targets=targets, loss=mse, schedule=how)
    assert [stage.parameters for stage in pipe.stages] == [("a.weight", "b.weight"), ("c.weight",)]
    assert sent(pipe) == [1, 0]


SCALE = 2.0


class Scaled(nn.Module):
    def forward(self, table):
        return torch.cos(table) * SCALE


class WithScaled(Masked):
    def __init__(self):
        super().__init__(lambda self, x, mask: self.scaled(self.table))
        self.scaled = Scaled()


def test_what_repeated_code_reads_must_stay(monkeypatch):
    """Other stages don't call the module, so they would not see another value."""
    pipe, model, inputs, targets = built_from(WithScaled())
    state, step = pipe.init(model), fpipe.value_and_grad(pipe)
    step(*state, inputs, targets)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    with pytest.raises(fpipe.InputError, match="SCALE"):
        step(*state, inputs, targets)
