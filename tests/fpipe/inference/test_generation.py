# SPDX-License-Identifier: Apache-2.0
"""Generated tokens and their logits are those of a plain loop with the same cache on one device, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

import fpipe
from fpipe.inference import generation
from fpipe.inference.decoders import build_decoding
from fpipe.pipelines.planner import Planner
from fpipe.tensors.tree import same_bits
from schedules import dualpipe, forward_only, gpipe, one_f_one_b, zb_v
from tests.common.averages import VOCABULARY, Average, AverageDecoder, generate_from_scratch, texts, word_loss
from tests.common.comparison import Result, assert_same
from tests.common.generation import generate_plainly, gpt2, llama, next_word, padding
from tests.common.generators import seeded
from tests.common.options import grouped
from tests.common.sizes import by_night, covering, sampled

LENGTH, WIDTH, COUNT = 12, 5, 8


def pipeline(model, how=None, **options):
    ids = texts(4, WIDTH)
    how = one_f_one_b(ranks=2, microbatches=2) if how is None else how
    example = {"input_ids": ids, "use_cache": False}
    return fpipe.pipeline(model, example=example, targets=ids, loss=next_word, schedule=how, **grouped(options))


def average(how=None):
    """A pipeline of a model of our own, whose captures take little time."""
    torch.manual_seed(0)
    model, ids = Average(), texts(4, WIDTH)
    how = gpipe(ranks=2, microbatches=2) if how is None else how
    return model, fpipe.pipeline(model, example=(ids,), targets=ids, loss=word_loss, schedule=how, cuts=["mix"])


@pytest.fixture(scope="module")
def small():
    model, pipe = average()
    return model, pipe, pipe.init(model)


class Recorder:
    """Chooses the likeliest tokens, and keeps the logits."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits, generator):
        self.logits.append(logits.clone())
        return logits.argmax(-1)


@sampled(1)
@covering(build=[llama, gpt2], padded=[True, False])
def test_tokens_and_logits_are_those_of_a_plain_loop(build, padded):
    model, seen = build(), Recorder()
    pipe, mask = pipeline(model), padding(4, WIDTH) if padded else None
    generate = fpipe.generate(pipe, LENGTH, choose=seen)
    tokens, logits = generate_plainly(model, texts(4, WIDTH), COUNT, LENGTH, 2, mask)
    for _ in range(2):  # the second time, from empty caches again
        seen.logits.clear()
        assert torch.equal(generate(*pipe.init(model), texts(4, WIDTH), COUNT, mask=mask), tokens)
        assert same_bits(torch.stack(seen.logits, 1), logits)


@by_night
def test_stages_of_a_rank_have_a_cache_each():
    model = llama(layers=4)
    pipe = pipeline(model, zb_v(ranks=2, microbatches=2))
    tokens, _ = generate_plainly(model, texts(4, WIDTH), COUNT, LENGTH, 2)
    assert torch.equal(fpipe.generate(pipe, LENGTH)(*pipe.init(model), texts(4, WIDTH), COUNT), tokens)


def test_greedy_tokens_are_those_of_the_models_own_generate():
    model, prompts = llama(), texts(2, WIDTH)
    pipe = pipeline(model, one_f_one_b(ranks=2, microbatches=4))
    alone = forward_only(ranks=2, microbatches=1)
    own = model.eval().generate(prompts, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
    generate = fpipe.generate(pipe, LENGTH, schedule=alone)  # the model is in eval mode now, and the pipeline the same
    assert torch.equal(generate(*pipe.init(model), prompts, COUNT), own[:, WIDTH:])


class Counter(nn.Module):
    """Makes the number of calls so far the likeliest word."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, logits):
        self.calls += 1
        return logits + 100 * nn.functional.one_hot(self.calls, VOCABULARY)


def test_buffers_that_a_model_changes_go_from_token_to_token():
    model = Average()
    model.head = nn.Sequential(model.head, Counter())
    ids = texts(4, 2)
    how = gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model, example=(ids,), targets=ids, loss=word_loss, schedule=how, cuts=["mix"])
    params, buffers = pipe.init(model)
    for _ in range(2):  # the second time, from the same buffers
        tokens = fpipe.generate(pipe, 9, decoder=AverageDecoder)(params, buffers, ids, 5)
        assert tokens.tolist() == [[1, 2, 3, 4, 5]] * 4
    assert not buffers["head.1.calls"]


@by_night
@settings(max_examples=12, deadline=None)
@given(rows=st.sampled_from([1, 2, 3]), width=st.integers(1, 4), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_decoder_of_ones_own_generates_as_the_model_without_a_cache(small, rows, width, count, seed):
    model, pipe, state = small
    generate = fpipe.generate(pipe, width + count, decoder=AverageDecoder)
    text = texts(2 * rows, width, seed)
    assert torch.equal(generate(*state, text, count), generate_from_scratch(model, text, count))


def test_all_tokens_share_two_captures(small, monkeypatch):
    _, pipe, state = small
    made, plan = [], Planner._plan
    monkeypatch.setattr(Planner, "_plan", lambda *given: made.append(given) or plan(*given))
    generate = fpipe.generate(pipe, 40, decoder=AverageDecoder)
    for seed in range(3):
        generate(*state, texts(4, 3, seed), 30)
    assert len(made) == 2


def test_the_kinds_of_prompts_that_were_used_last_are_kept(monkeypatch):
    made = []
    monkeypatch.setattr(generation, "build_decoding", lambda *given: made.append(1) or build_decoding(*given))
    model, ids = Average(), texts(4, WIDTH)
    given = {"recording": fpipe.Recording(plans=2), "schedule": gpipe(ranks=2, microbatches=2), "cuts": ["mix"]}
    pipe = fpipe.pipeline(model, example=(ids,), targets=ids, loss=word_loss, **given)
    state, generate = pipe.init(model), fpipe.generate(pipe, LENGTH, decoder=AverageDecoder)
    for rows, count in ((2, 1), (4, 2), (2, 2), (6, 3), (2, 3)):
        generate(*state, texts(rows, WIDTH), 1)
        assert len(made) == count


def test_draws_depend_on_the_seed_and_not_on_ranks_or_torch(small):
    _, pipe, state = small
    found = []
    _, alone = average(forward_only(ranks=2, microbatches=1))
    for one, seed in ((pipe, 3), (pipe, 3), (alone, 3), (pipe, 4)):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        generate = fpipe.generate(one, 30, decoder=AverageDecoder, choose=fpipe.sample(temperature=2.0, top=9))
        found.append(generate(*state, texts(4, 2), 20, seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_each_token_has_draws_of_its_own(small):
    drawn, (_, pipe, state) = [], small

    def choose(logits, generator):
        drawn.append(torch.rand((), generator=generator).item())
        return logits.argmax(-1)

    fpipe.generate(pipe, 12, decoder=AverageDecoder, choose=choose)(*state, texts(4, 2), 9, seed=3)
    assert len({*drawn}) == 9


@given(top=st.integers(1, 6), seed=st.integers(0, 99), temperature=st.floats(0.1, 5))
def test_only_the_likeliest_are_drawn(top, seed, temperature):
    generator = seeded(seed)
    logits = torch.randn(50, 5, generator=generator)
    tokens = fpipe.sample(temperature, top)(logits, generator)
    assert (logits.argsort(-1, descending=True)[:, :top] == tokens[:, None]).any(-1).all()


def test_a_sequence_ends_at_its_token_and_the_call_with_the_last(small):
    _, pipe, state = small

    def choose(logits, generator):  # the first sequence ends at once, the last after three tokens
        choose.count += 1
        return torch.tensor([7, 1, 7, 1]) if choose.count == 1 else torch.full((4,), 7 if choose.count == 3 else 2)

    choose.count = 0
    generate = fpipe.generate(pipe, 20, decoder=AverageDecoder, choose=choose)
    assert generate(*state, texts(4, 2), 9, end=7).tolist() == [[7, 7, 7], [1, 2, 7], [7, 7, 7], [1, 2, 7]]


@by_night
def test_training_is_not_disturbed():
    """Steps with generations between them are the steps without: losses, gradients, buffers and torch's generator."""
    model, ids = gpt2(), texts(4, WIDTH)

    def train(look):
        pipe = pipeline(model)
        generate, step = fpipe.generate(pipe, LENGTH, choose=fpipe.sample()), fpipe.value_and_grad(pipe)
        params, buffers = pipe.init(model)
        torch.manual_seed(3)
        found = []
        for i in range(3):
            out, grads = step(params, buffers, {"input_ids": ids, "use_cache": False}, ids, seed=i)
            params, buffers = {n: (p - grads[n]).detach() for n, p in params.items()}, out.buffers
            before = {name: tensor.clone() for name, tensor in {**params, **buffers}.items()}
            if look:
                generate(params, buffers, ids, 3, seed=i)
            assert_same(*[Result(None, None, {}, one) for one in ({**params, **buffers}, before)])
            found.append((out.loss, grads, buffers))
        return found, torch.rand(3)

    assert_same(Result(None, train(True), {}, {}), Result(None, train(False), {}, {}))


@by_night
def test_a_changed_model_is_noticed():
    model = llama()
    pipe = pipeline(model)
    state = pipe.init(model)
    model.model.norm.variance_epsilon = 0.5
    with pytest.raises(fpipe.InputError, match=r"model.norm .*variance_epsilon.*rebuilt"):
        fpipe.generate(pipe, LENGTH)(*state, texts(4, WIDTH), 1)


PROMPTS = texts(4, 3)


@pytest.mark.parametrize(
    ("prompts", "count", "options", "message"),
    [
        (PROMPTS.float(), 1, {}, r"prompts: got float32\[4, 3\], expected int64"),
        (PROMPTS[0], 1, {}, r"prompts: got int64\[3\], expected int64 \[sequences, tokens\]"),
        (PROMPTS[:, :0], 1, {}, "prompts: got"),
        ([1, 2], 1, {}, "prompts: got list"),
        (PROMPTS[:3], 1, {}, "prompts: got 3 sequences, expected a multiple of 2"),
        (PROMPTS, 0, {}, "count: got 0"),
        (PROMPTS, 9, {}, "count: got 9 tokens after a prompt of 3, expected at least 1 and at most 8"),
        (PROMPTS, 1, {"mask": torch.ones(4, 2, dtype=torch.bool)}, r"mask: got bool\[4, 2\], expected bool \[4, 3\]"),
        (PROMPTS, 1, {"mask": torch.ones(4, 3)}, "mask: got float32"),
        (PROMPTS, 1, {"mask": padding(4, 3).flip(1)}, "mask, sequence 1: got padding after a token"),
    ],
)
def test_bad_prompts_are_refused(small, prompts, count, options, message):
    _, pipe, state = small
    with pytest.raises(fpipe.InputError, match=message):
        fpipe.generate(pipe, 10, decoder=AverageDecoder)(*state, prompts, count, **options)


def test_bad_choices_are_refused_and_the_next_call_works(small):
    _, pipe, state = small
    for wrong in (lambda logits, generator: logits, lambda logits, generator: 3):
        with pytest.raises(fpipe.InputError, match=r"token 0: got .* from choose, expected int64\[4\]"):
            fpipe.generate(pipe, 10, decoder=AverageDecoder, choose=wrong)(*state, PROMPTS, 2)
    assert fpipe.generate(pipe, 10, decoder=AverageDecoder)(*state, PROMPTS, 2).shape == (4, 2)
    with pytest.raises(fpipe.InputError, match="temperature: got 0"):
        fpipe.sample(temperature=0)
    with pytest.raises(fpipe.InputError, match="top: got 0"):
        fpipe.sample(top=0)


def test_bad_arguments_are_refused(small):
    _, pipe, state = small
    with pytest.raises(fpipe.InputError, match="length: got 0"):
        fpipe.generate(pipe, 0)
    with pytest.raises(fpipe.InputError, match=r"schedule: got .*, with stages on ranks \(0,\)"):
        fpipe.generate(pipe, 10, schedule=gpipe(ranks=1, microbatches=2))
    with pytest.raises(fpipe.InputError, match=r"schedule: .* each stage on one rank"):
        fpipe.generate(pipe, 10, schedule=dualpipe(ranks=2, microbatches=4))
    with pytest.raises(fpipe.InputError, match=r"model: got Average, which has no config .* decoder=make"):
        fpipe.generate(pipe, 10)(*state, PROMPTS, 2)
    with pytest.raises(fpipe.InputError, match="decoder: got Linear without the model"):
        fpipe.generate(pipe, 10, decoder=lambda *given: nn.Linear(1, 1))(*state, PROMPTS, 2)
    with pytest.raises(fpipe.InputError, match="params: got 0 leaves"):
        fpipe.generate(pipe, 10, decoder=AverageDecoder)({}, state[1], PROMPTS, 2)


def test_other_caches_are_refused():
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "sliding_window": 4}
    for model, kind in (
        (MistralForCausalLM(MistralConfig(**small, **heads)), "StaticSlidingWindowLayer"),
        (MambaForCausalLM(MambaConfig(**small, state_size=4)), "LinearAttention"),
    ):
        with pytest.raises(fpipe.InputError, match=f"layer 0: got a cache of {kind}"):
            fpipe.StaticDecoder(model, 2, 8)
