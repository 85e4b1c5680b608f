# SPDX-License-Identifier: Apache-2.0
"""An audit finds bits that a second run does not give, names their action, and changes nothing else."""

import gc
import pickle
import re
import weakref
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fpipe
from fpipe.audits import auditor, idle, replay
from fpipe.audits.audit import DRAWN_KINDS, find_chain
from fpipe.pipelines.step import make_auditor, make_training_step, training_variant
from fpipe.runtime.local import LocalHandle
from schedules import (
    chimera,
    dualpipe,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    overlap,
    parse,
    recompute,
    seq_1f1b,
    split_backward,
    zb_h1,
    zb_v,
)
from tests.common.comparison import Result, assert_same
from tests.common.faults import flip, flip_in_place, flip_some, plant
from tests.common.meshes import SHAPES, options
from tests.common.random_models import case_of, descriptions, places
from tests.common.random_pipelines import build_unless_refused, schedules_of
from tests.common.running import build, run
from tests.common.sizes import covering, few, sampled
from tests.common.sliced_models import make_model, word_loss
from tests.common.zoo import ZOO

INF = float("inf")
ALL = 10**6
SCHEDULES = {
    "gpipe": gpipe(ranks=2, microbatches=4),
    "1F1B": one_f_one_b(ranks=4, microbatches=4),
    "interleaved": interleaved_1f1b(ranks=2, microbatches=4),
    "ZB-H1": zb_h1(ranks=4, microbatches=4),
    "ZB-V": zb_v(ranks=2, microbatches=4),
    "recomputed": recompute(one_f_one_b(ranks=4, microbatches=4)),
    "halves, recomputed": recompute(zb_h1(ranks=2, microbatches=4), (0,)),
    "replicas": chimera(ranks=4, microbatches=4),
    "pairs": overlap(dualpipe(ranks=2, microbatches=4)),
}


def audited(pipe, outputs=False, **options):
    """The step with an audit of all actions, and what it reports."""
    told = []
    given = {"draws": ALL, "allowance": INF, "report": told.append, **options}
    return fpipe.value_and_grad(pipe, outputs=outputs, audit=fpipe.Audit(**given)), told


def run_audited(pipe, model, inputs, targets, seed=None, **options):
    """One audited step from the model's parameters, and what it reports."""
    step, told = audited(pipe, outputs=True, **options)
    out, grads = step(*pipe.init(model), inputs, targets, seed=seed)
    return Result(out.loss, out.outputs, grads, out.buffers), told


# ----------------------------------------------------------------------------------------------- Right steps stay right


@sampled(10)
@covering(how=SCHEDULES, case=ZOO, backward=("autograd", "graph"))
def test_every_action_is_run_again_and_nothing_else_changes(how, case, backward):
    try:
        built = build(case, how, 2 * how.microbatches, backward=backward)
    except fpipe.PipelineError:
        pytest.skip("the zoo's own tests say why")
    seed = 5 if case.random else None
    got, told = run_audited(*built, seed=seed)
    assert_same(got, run(*built, seed=seed))
    drawable = [a for r in range(how.ranks) for a in how.actions(r) if a.kind in DRAWN_KINDS]
    assert Counter(one.action for one in told) == Counter(drawable)
    assert all(one.seconds is not None for one in told)


@settings(max_examples=few(16))
@given(descriptions(), st.data())
def test_random_models_are_audited_without_a_false_alarm(description, data):
    names, microbatches = places(description), 3
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=3)) if names else set()
    cuts = tuple(name for name in names if name in chosen)
    how = data.draw(schedules_of(len(cuts) + 1, microbatches))
    built = build_unless_refused(description, case_of(description), how, 8, cuts, capture="trace")
    if built is None:
        return
    seed = 5 if description.random else None
    try:
        want = run(*built, seed=seed)
    except RuntimeError as error:
        assume("modified by an inplace operation" not in str(error))
        raise
    got, told = run_audited(*built, seed=seed)
    assert_same(got, want)
    assert all(one.seconds is not None for one in told)


@pytest.mark.parametrize("shape", ["dp", "shard", "both"])
def test_copies_on_a_mesh_are_audited(shape):
    how = one_f_one_b(ranks=2, microbatches=2)
    built = build(ZOO["mlp"], how, 16, **options(2, *SHAPES[shape]))
    got, told = run_audited(*built)
    assert_same(got, run(*built))
    assert len(told) == 8 * SHAPES[shape][0] * SHAPES[shape][1]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "recomputed"])
def test_microbatches_that_count_for_nothing_and_shorter_ones_are_audited(name):
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    y[2:4] = 0
    weight = fpipe.Microbatching(weight=lambda inputs, targets: float(targets.abs().sum() > 0))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    given = {"example": (x,), "targets": y, "loss": nn.functional.mse_loss, "schedule": SCHEDULES[name]}
    pipe = fpipe.pipeline(model, microbatching=weight, **given)
    for rows in (7, 4):
        got, told = run_audited(pipe, model, (x[:rows],), y[:rows])
        assert_same(got, run(pipe, model, (x[:rows],), y[:rows]))
        assert told
        assert all(one.seconds is not None for one in told)


SLICED = {
    "halves": split_backward(seq_1f1b(2, 3, slices=2)),
    "whole backwards": seq_1f1b(2, 3, slices=2),
    "recomputed": recompute(seq_1f1b(2, 3, slices=2)),
}


@sampled(1)
@pytest.mark.parametrize("how", SLICED.values(), ids=list(SLICED))
def test_slices_of_sequences_are_audited(how):
    model, x, y = make_model()
    pipe = fpipe.pipeline(model, example=(x,), targets=y, loss=word_loss, schedule=how, cuts=["blocks.2"])
    got, told = run_audited(pipe, model, (x,), y)
    assert_same(got, run(pipe, model, (x,), y))
    drawable = [a for r in range(how.ranks) for a in how.actions(r) if a.kind in DRAWN_KINDS]
    assert Counter(one.action for one in told) == Counter(drawable)


def test_a_wrong_slice_is_named():
    model, x, y = make_model()
    pipe = fpipe.pipeline(
        model, example=(x,), targets=y, loss=word_loss, schedule=SLICED["whole backwards"], cuts=["blocks.2"]
    )
    plant(pipe.training.assembly.stages[1], "forward", 1, flip_some)  # the stage of first slices, which are longer
    require_found(pipe, pipe.init(model), ((x,), y), parse("1F1.0"))


def test_sums_are_added_to_with_the_same_bits():
    pipe, model, inputs, targets = build(ZOO["mlp"], SCHEDULES["1F1B"], 8)
    state, (step, _) = pipe.init(model), audited(pipe)
    plain, mine = fpipe.value_and_grad(pipe), {}
    for function in (plain, step):
        _, grads = function(*state, inputs, targets)
        _, mine[function] = function(*state, inputs, targets, onto=grads)
    assert all(torch.equal(mine[plain][name], mine[step][name]) for name in mine[plain])


def test_the_generator_of_the_user_is_left_alone():
    pipe, model, inputs, targets = build(ZOO["dropping"], SCHEDULES["1F1B"], 8)
    before = torch.get_rng_state()
    run_audited(pipe, model, inputs, targets, seed=5)
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------- Wrong bits are found


def require_found(pipe, state, batch, action, *words):
    """Raise unless an audit of all actions finds that this one was wrong, and says so with these words."""
    step, _ = audited(pipe)
    with pytest.raises(fpipe.CorruptionError) as error:
        step(*state, *batch)
    assert error.value.action == action, str(error.value)
    said = str(error.value)
    where = f"rank {error.value.rank}, {action}, stage {action.stage}, microbatch {action.microbatch}"
    assert said.startswith(f"{where}: got other bits in "), said
    assert action in list(pipe.schedule.actions(error.value.rank))
    assert all(word in said for word in words), said


def calls_of(how, function, stage):
    """The actions that call a function of a stage, in order."""
    kinds = {"forward": ("F", "R"), "evaluate": "C", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    ranks = sorted(how.placement.replicas(stage))
    assert len(ranks) == 1 or function == "add"
    return [a for r in ranks for a in how.actions(r) if a.stage == stage and a.kind in kinds.get(function, "G")]


FUNCTIONS = [
    ("gpipe", "forward", 0, "outgoing value 0"),
    ("1F1B", "forward", 3, "outgoing value 0"),
    ("1F1B", "backward", 2, "outgoing value 0"),
    ("1F1B", "backward", 0, "the gradient of '0.weight'"),
    ("ZB-H1", "backward_input", 1, "outgoing value 0"),
    ("ZB-H1", "backward_input", 0, "tensor for the weight half 0"),
    ("ZB-H1", "backward_weight", 1, "the gradient of"),
    ("ZB-V", "backward_weight", 3, "the gradient of"),
    ("recomputed", "evaluate", 1, "outgoing value 0"),
    ("recomputed", "backward", 1, "outgoing value 0"),
]


@sampled(12)
@pytest.mark.parametrize("call", [0, 2, 3])
@pytest.mark.parametrize(("name", "function", "s", "what"), FUNCTIONS)
def test_a_function_that_is_wrong_once_is_named(name, function, s, what, call):
    how = SCHEDULES[name]
    pipe, model, *batch = build(ZOO["mlp"], how, 8)
    stage = pipe.training.assembly.stages[s]
    plant(stage, function, call, flip_some)
    action = calls_of(how, function, s)[call]
    require_found(pipe, pipe.init(model), batch, action, what, "All later runs agree, so the first was wrong")


def test_a_wrong_buffer_is_named():
    pipe, model, *batch = build(ZOO["normalised"], SCHEDULES["gpipe"], 8)
    (stage, _) = pipe.training.assembly.stages
    plant(stage, "forward", 1, lambda made: (made[0], flip_some(made[1], 1), made[2]))
    require_found(pipe, pipe.init(model), batch, parse("0F1"), "got other bits in buffer 1 from")


def test_a_wrong_sum_of_replicas_is_named():
    how = SCHEDULES["replicas"]
    pipe, model, *batch = build(ZOO["mlp"], how, 8)
    plant(pipe.training.assembly.stages[1], "add", 0, flip_some)
    require_found(pipe, pipe.init(model), batch, parse("1G2"), "the gradient of")


def test_a_wrong_forward_of_a_pair_is_named():
    how = SCHEDULES["pairs"]
    first = next(a for a in how.actions(0) if a.kind == "OVERLAP_F")
    pipe, model, *batch = build(ZOO["mlp"], how, 8)
    add_notes = auditor.add_notes

    def add_fault(program, around):
        made = [one._replace(handler=once(one.handler)) if one.action == first else one for one in program.instructions]
        return add_notes(program._replace(instructions=tuple(made)), around)

    with patch.object(auditor, "add_notes", add_fault):
        require_found(pipe, pipe.init(model), batch, first, "outgoing value 0")


def once(handler):
    """A handler that is wrong the first time."""
    calls = iter(range(10**6))

    def wrong(*arguments):
        values = handler(*arguments)
        return flip_some(values) if next(calls) == 0 else values

    return wrong


@pytest.mark.parametrize("backward", ["graph", "autograd"])
@pytest.mark.parametrize("call", [0, 3])
def test_a_flip_in_what_a_forward_saved_is_named_by_its_backward(backward, call):
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["1F1B"], 8, backward=backward)
    stage = pipe.training.assembly.stages[2]
    right, calls = stage.backward, iter(range(10**6))

    def read_flipped(residuals, cotangents, onto=()):
        if next(calls) != call:
            return right(residuals, cotangents, onto)
        if backward == "graph":
            sizes = [(one.numel(), k) for k, one in enumerate(residuals) if one.is_floating_point()]
            k = max(sizes)[1]
            residuals[k] = flip(residuals[k], 3, 30)
            return right(residuals, cotangents, onto)
        with saved_flipped(residuals):
            return right(residuals, cotangents, onto)

    vars(stage)["backward"] = read_flipped
    require_found(pipe, pipe.init(model), batch, parse(f"2B{call}"), "in what its forward had saved")


@contextmanager
def saved_flipped(residuals):
    """Flip a bit of a tensor that autograd has saved, and flip it back."""
    nodes = [getattr(root, "node", None) or root.grad_fn for root in residuals.roots]
    saved = next(one for one in map(find_saved, nodes) if one is not None)
    flip_in_place(saved, 3, 30)
    yield
    flip_in_place(saved, 3, 30)


def find_saved(node):
    """A tensor that is saved somewhere in a graph, and that is no parameter."""
    todo = [node]
    while todo:
        one = todo.pop()
        if one is None:
            continue
        for name in ("_saved_result", "_saved_self", "_saved_mat1"):
            found = getattr(one, name, None)
            if isinstance(found, torch.Tensor) and found.is_contiguous() and not found.is_leaf:
                return found
        todo += [other for other, _ in one.next_functions]
    return None


@settings(max_examples=few(40))
@given(st.data())
def test_any_bit_of_anything_that_any_action_makes_is_found(data):
    name = data.draw(st.sampled_from(["gpipe", "1F1B", "ZB-H1", "ZB-V", "recomputed", "halves, recomputed"]))
    how = SCHEDULES[name]
    functions = {"F": "forward", "C": "evaluate", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    actions = [a for r in range(how.ranks) for a in how.actions(r) if a.kind in functions]
    action = data.draw(st.sampled_from(actions))
    pipe, model, *batch = build(ZOO["normalised"], how, 8)
    stage, function = pipe.training.assembly.stages[action.stage], functions[action.kind]
    call = calls_of(how, function, action.stage).index(action)
    which, place, bit = (data.draw(st.integers(0, most)) for most in (9, 10**4, 63))
    made = slice(0, 2) if function != "backward_weight" else slice(None)

    def change(values):
        return (
            (*flip_some(values[made], which, place, bit), *values[2:])
            if function == "forward"
            else flip_some(values, which, place, bit)
        )

    plant(stage, function, call, change)
    require_found(pipe, pipe.init(model), batch, action)


# ------------------------------------------------------------------------ What the message says, and what can't be seen


def test_a_wrong_second_run_is_told_from_a_wrong_first():
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["gpipe"], 8)
    plant(pipe.training.assembly.stages[0], "forward", 4, flip_some)
    require_found(pipe, pipe.init(model), batch, parse("0F0"), "so the second was wrong")


def test_an_operator_that_is_not_deterministic_is_told_from_a_fault():
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["gpipe"], 8)
    stage = pipe.training.assembly.stages[0]
    right, calls = stage.forward, iter(range(10**6))

    def noisy(*arguments):
        (value, *others), *rest = right(*arguments)
        return (value + next(calls), *others), *rest

    vars(stage)["forward"] = noisy
    require_found(pipe, pipe.init(model), batch, parse("0F0"), "is not deterministic", "use_deterministic_algorithms")


def test_a_weight_that_flips_after_the_action_is_found():
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["gpipe"], 8)
    (params, buffers), (first, second) = pipe.init(model), pipe.training.assembly.stages
    changed = params[second.parameters[0]]
    plant(first, "backward", 3, lambda made: (flip_in_place(changed, 5, 30), made)[1])
    require_found(pipe, (params, buffers), batch, parse("1F0"), "or since then in its arguments, weights included")


def test_what_flips_before_it_is_used_is_not_seen():
    """A weight, or a message on its way: both runs use it as it is."""
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["1F1B"], 8)
    params, buffers = pipe.init(model)
    want, _ = fpipe.value_and_grad(pipe)(params, buffers, *batch)
    flipped = {name: flip(one, 1, 22) for name, one in params.items()}
    step, told = audited(pipe)
    out, _ = step(flipped, buffers, *batch)
    assert not torch.equal(out.loss, want.loss)
    taken, calls = LocalHandle.take, iter(range(10**6))

    def arrive_flipped(handle):
        payload = taken(handle)
        return flip_some(payload, 0, 2, 22) if next(calls) == 0 else payload

    with patch.object(LocalHandle, "take", arrive_flipped):
        out, _ = step(params, buffers, *batch)
    assert not torch.equal(out.loss, want.loss)
    assert all(one.seconds is not None for one in told)


def test_the_error_can_be_sent():
    error = fpipe.CorruptionError(3, parse("3F1"), "rank 3, 3F1: got other bits")
    sent = pickle.loads(pickle.dumps(error))
    assert (sent.rank, sent.action, str(sent)) == (3, parse("3F1"), "rank 3, 3F1: got other bits")
    assert isinstance(error, fpipe.PipelineError)


# ---------------------------------------------------------------------------------------------- What is drawn, and when


def drawn_by(pipe, model, inputs, targets, steps, **options):
    step, told = audited(pipe, draws=1, **options)
    for _ in range(steps):
        step(*pipe.init(model), inputs, targets)
    return [(one.number, one.rank, one.action) for one in told]


def test_the_draw_depends_on_the_seed_the_step_and_the_rank_alone():
    built = build(ZOO["mlp"], SCHEDULES["1F1B"], 8)
    first = drawn_by(*built, 6)
    assert first == drawn_by(*built, 6)
    assert first != drawn_by(*built, 6, seed=1)
    assert [one[:2] for one in first] == [(n, r) for n in range(6) for r in range(4)]
    assert len({action.microbatch for *_, action in first}) == 4
    assert len({action.kind for *_, action in first}) == 2


@given(st.integers(1, 40), st.integers(1, 60), st.integers())
def test_draws_are_distinct_and_even(draws, count, seed):
    audit = fpipe.Audit(draws=draws, seed=seed)
    for number in range(3):
        drawn = audit.draw(number, 0, 1, list(range(count)))
        assert drawn == sorted(set(drawn))
        assert len(drawn) == min(draws, count)
        assert set(drawn) <= set(range(count))


def test_every_action_is_drawn_equally_often():
    audit, count = fpipe.Audit(), 8
    found = Counter(audit.draw(number, 0, 0, list(range(count)))[0] for number in range(4000))
    assert all(400 < found[k] < 600 for k in range(count))


@sampled(6)
@pytest.mark.parametrize("how", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_chain_begins_with_what_was_not_consumed_and_ends_with_the_drawn_action(how):
    pipe, *_ = build(ZOO["mlp"], how, 8)
    for program in pipe.training.programs.values():
        instructions = program.instructions
        for k, one in enumerate(instructions):
            if one.action.kind not in DRAWN_KINDS:
                continue
            chain = [instructions[at].action for at in find_chain(program, k)]
            assert chain[-1] == one.action
            kinds = [action.kind for action in chain]
            if one.action.kind in "BIW":
                assert kinds[0] in ("F", "R", "OVERLAP_F")
                assert kinds[1:] == (["I", "W"] if one.action.kind == "W" else [one.action.kind])
            else:
                assert len(kinds) == 1
            assert len({(action.stage, action.microbatch) for action in chain}) == 1


def test_actions_are_run_again_before_a_wait_that_is_long_enough():
    """All ranks in one process never wait for others; here, they believe so."""
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["1F1B"], 8)
    state, places = pipe.init(model), []
    want = run(pipe, model, *batch)
    compare = replay.Replay.compare

    def note_place(one, free):
        places.append((one.run.at.action, one.drawn, free))
        took = compare(one, free)
        assert (one.calls, one.begin, one.sums) == ([], None, ()), "its arguments are dropped at once"
        return took

    pipe.ranks.processes = (0, 1, 2, 3)
    step, told = audited(pipe, outputs=True)
    with patch.object(replay.Replay, "compare", note_place), patch.object(idle.IdleTimes, "predict", lambda *_: INF):
        out, grads = step(*state, *batch)
    assert_same(Result(out.loss, out.outputs, grads, out.buffers), want)
    assert len(told) == len(places) == 32
    assert all(one.seconds is not None and one.added < INF for one in told)
    assert any(str(at) != str(drawn) for at, drawn, _ in places)
    assert len({at for at, *_ in places}) > 4, "at many places, not only at the end of each rank's program"


def test_without_idle_time_the_allowance_limits_what_is_run_again():
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["gpipe"], 8)
    state, told = pipe.init(model), []
    step = fpipe.value_and_grad(pipe, audit=fpipe.Audit(allowance=1e-12, report=told.append))
    for _ in range(12):
        step(*state, *batch)
    assert len(told) <= 2, "the first step earns; what is drawn then spends far more than will ever be earned"
    step = fpipe.value_and_grad(pipe, audit=fpipe.Audit(allowance=1e6, report=told.append))
    told.clear()
    for _ in range(3):
        step(*state, *batch)
    assert [one.number for one in told] == [1, 1, 2, 2]
    assert all(one.seconds is not None for one in told)
    assert all(one.added >= one.seconds for one in told), "nothing is free in one process"


@pytest.mark.parametrize("left", [0.0, 100.0])
def test_what_is_run_again_without_idle_time_is_paid_for(left):
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["gpipe"], 8)
    told = []
    found = make_auditor(pipe, fpipe.Audit(report=told.append), None)
    found.noting, found.running = idle.Allowance(INF), idle.Allowance(0.0)
    found.running.left = left
    step = make_training_step(pipe, training_variant(outputs=False, sums=None), auditor=found)
    for _ in range(3):
        step(*pipe.init(model), *batch)
    assert len(told) == 6
    assert [one.seconds is not None for one in told] == [left > 0] * 6
    assert found.running.left == pytest.approx(left - sum(one.seconds or 0.0 for one in told))


def test_nothing_is_held_after_a_step_and_no_more_than_drawn_within():
    pipe, model, *batch = build(ZOO["mlp"], SCHEDULES["1F1B"], 8)
    held, before = [], replay.Replay.before

    def note_held(one, run, call):
        before(one, run, call)
        held.extend(weakref.ref(t) for t in call.arrived)

    step, told = audited(pipe, draws=1)
    with patch.object(replay.Replay, "before", note_held):
        step(*pipe.init(model), *batch)
    gc.collect()
    assert held
    assert len(told) == 4
    assert not [ref for ref in held if ref() is not None]


# ------------------------------------------------------------------------------------------------------ Who accepts it


@pytest.fixture
def small():
    """A model, a batch, and what its pipeline is made of."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    how = one_f_one_b(ranks=2, microbatches=3)
    return net, x, y, {"example": (x,), "targets": y, "loss": nn.functional.mse_loss, "schedule": how}


def test_the_drop_in_module_is_audited(small):
    net, x, y, given = small
    told, losses = [], []
    for audit in (None, fpipe.Audit(draws=ALL, allowance=INF, report=told.append)):
        model = fpipe.Pipelined(net, audit=audit, **given)
        loss = model(x, targets=y)
        loss.backward()
        losses.append((loss, [p.grad for p in model.parameters()]))
        model.eval()(x)
    assert len(told) == 12
    (plain, grads), (mine, others) = losses
    assert torch.equal(plain, mine)
    assert all(map(torch.equal, grads, others))


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_a_training_step_is_audited(small, max_norm):
    net, x, y, given = small
    pipe, told = fpipe.pipeline(net, **given), []
    adam, found = fpipe.optimizer(torch.optim.AdamW, lr=0.1), []
    for audit in (None, fpipe.Audit(draws=ALL, allowance=INF, report=told.append)):
        params, buffers = pipe.init(net)
        step, state = fpipe.train_step(pipe, adam, max_norm=max_norm, audit=audit), adam.init(params)
        for _ in range(2):
            _, params, state, _ = step(params, buffers, state, (x,), y)
        found.append(params)
    assert len(told) == 24
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_fault_in_a_training_step_is_found(small):
    net, x, y, given = small
    pipe = fpipe.pipeline(net, **given)
    adam = fpipe.optimizer(torch.optim.AdamW, lr=0.1)
    params, buffers = pipe.init(net)
    plant(pipe.training.updating.assembly.stages[1], "backward", 1, flip_some)
    step = fpipe.train_step(pipe, adam, audit=fpipe.Audit(draws=ALL, allowance=INF))
    with pytest.raises(fpipe.CorruptionError, match="rank 1, 1B1, stage 1, microbatch 1"):
        step(params, buffers, adam.init(params), (x,), y)


def test_what_cannot_be_audited_is_refused(small):
    """Updates in place, steps that are recorded, accelerators; and whatever is no audit."""
    net, x, y, given = small
    pipe, adam = fpipe.pipeline(net, **given), fpipe.optimizer(torch.optim.AdamW, lr=0.1, donate=True)
    params, buffers = pipe.init(net)
    step = fpipe.train_step(pipe, adam, audit=fpipe.Audit())
    with pytest.raises(fpipe.InputError, match="an audit runs actions again with the old parameters"):
        step(params, buffers, adam.init(params), (x,), y)
    with pytest.raises(fpipe.InputError, match="audit: got record, too, expected one of them"):
        fpipe.value_and_grad(pipe, record=print, audit=fpipe.Audit())
    with pytest.raises(fpipe.InputError, match="audit: got True"):
        fpipe.value_and_grad(pipe, audit=True)
    with (
        patch.object(type(pipe), "device", torch.device("cuda:0")),
        pytest.raises(fpipe.InputError, match="audit: got a pipeline on cuda:0, expected one on a CPU"),
    ):
        fpipe.value_and_grad(pipe, audit=fpipe.Audit())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draws": 0}, "draws: got 0, expected an integer of at least 1"),
        ({"draws": True}, "draws: got True"),
        ({"draws": 1.0}, "draws: got 1.0"),
        ({"allowance": 0}, "allowance: got 0, expected a number above 0"),
        ({"allowance": float("nan")}, "allowance: got nan"),
        ({"allowance": "1%"}, "allowance: got '1%'"),
        ({"seed": "x"}, "seed: got 'x', expected an integer"),
        ({"report": 3}, "report: got 3, expected a function"),
    ],
)
def test_wrong_audits_are_refused(given, message):
    with pytest.raises(fpipe.InputError, match=re.escape(message)):
        fpipe.Audit(**given)
