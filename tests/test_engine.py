"""Generation: golden tokens however a prompt is chunked and batched, and every way that it ends."""

import random
from dataclasses import replace

import expecttest
import pytest
import torch
from golden import GOLDENS, PROMPTS, TENSORS, golden_prompt, logits_of, new_model, shared_model
from random_models import make_config, make_ids
from random_models import make_model as make_random_model

from kimi_k25.engine import Engine, Prompt, SamplingParams
from kimi_k25.layers.kv_cache import CachedSequence, CacheFullError, PagedKVCache

GREEDY = SamplingParams(max_new_tokens=16, temperature=0)
ATOL = 1.5e-4  # float32, as for the goldens.


def make_model(variant="base.fp32", *, stop=(), **text):
    model = new_model(variant)
    text_config = replace(model.config.text_config, **text)
    model.config = replace(model.config, stop_token_ids=frozenset(stop), text_config=text_config)
    return model


def make_cache(model, *, max_seqs=4, max_seq_len=80, page_size=4):
    config = model.config.text_config
    return PagedKVCache(
        config, max_seqs=max_seqs, max_seq_len=max_seq_len, page_size=page_size, dtype=torch.float32, device="cpu"
    )


def tokens_of(engine, prompts, sampling=GREEDY):
    """Ids and finish reasons of each prompt."""
    ids, reasons = [[] for _ in prompts], [None] * len(prompts)
    for token in engine.generate(prompts, sampling):
        assert reasons[token.index] is None  # Nothing comes after the end.
        ids[token.index].append(token.token_id)
        reasons[token.index] = token.finish_reason
    return ids, reasons


def golden_ids(weights, name):
    return GOLDENS["greedy"][f"{weights}.fp32.{name}"]["ids"]


# -- golden tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("weights", ["base", "int4"])
def test_greedy_tokens(weights, name):
    engine = Engine(make_model(f"{weights}.fp32"))

    assert tokens_of(engine, [golden_prompt(name)]) == ([golden_ids(weights, name)], ["length"])


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("weights", ["base", "int4"])
def test_greedy_tokens_in_chunks_over_small_pages(weights, name, chunk):
    model = make_model(f"{weights}.fp32")
    engine = Engine(model, cache=make_cache(model, max_seqs=1), prefill_chunk=chunk)

    assert tokens_of(engine, [golden_prompt(name)]) == ([golden_ids(weights, name)], ["length"])


@pytest.mark.parametrize(("chunk", "steps"), [(200, [146]), (146, [146]), (60, [60, 60, 26]), (5, [5] * 29 + [1])])
def test_prefill_fills_every_step_up_to_the_chunk(chunk, steps):
    model, sizes = make_model(), []

    def decoder(inputs_embeds, batch):
        sizes.append(inputs_embeds.shape[0])
        return model.language_model(inputs_embeds, batch)

    prompts = [golden_prompt(name) for name in PROMPTS]
    tokens_of(Engine(model, decoder=decoder, prefill_chunk=chunk), prompts, replace(GREEDY, max_new_tokens=2))

    assert sizes == [*steps, 4]


@pytest.mark.parametrize("chunk", [5, 23, 2048])
@pytest.mark.parametrize("order", [PROMPTS, PROMPTS[::-1], ("video", "text", "video", "text")])
@pytest.mark.parametrize("weights", ["base", "int4"])
def test_greedy_tokens_of_prompts_in_one_batch(weights, order, chunk):
    model = make_model(f"{weights}.fp32")
    engine = Engine(model, cache=make_cache(model), prefill_chunk=chunk)

    ids, _ = tokens_of(engine, [golden_prompt(name) for name in order])

    assert ids == [golden_ids(weights, name) for name in order]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("weights", ["base", "int4"])
@torch.no_grad()
def test_logits_of_every_decode_step_equal_the_whole_forward(weights, name):
    model, prompt = shared_model(f"{weights}.fp32"), golden_prompt(name)
    language_model, ids = model.language_model, golden_ids(weights, name)
    longer = torch.cat((prompt.input_ids, torch.tensor(ids)))
    whole = model(longer, pixel_values=prompt.pixel_values, grid_thws=prompt.grid_thws)
    cache, sequence = make_cache(model, max_seqs=1), CachedSequence()
    embeds = model.embed(longer, prompt.pixel_values, prompt.grid_thws)

    steps = []
    for part in embeds.split([len(prompt.input_ids), *[1] * 16]):
        steps.append(language_model.compute_logits(language_model(part, cache.step([sequence], [len(part)]))))

    torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=ATOL)
    golden = TENSORS[f"{weights}.fp32.{name}.logits"]
    torch.testing.assert_close(steps[0][-len(golden) :], golden, rtol=0, atol=ATOL)


@torch.no_grad()
def test_prompts_of_one_token_alone_and_beside_a_long_one():
    model = make_model()
    prompts = [Prompt(input_ids=torch.tensor([i])) for i in (0, 387, 639)]
    expected = []
    for prompt in prompts:
        ids = prompt.input_ids
        for _ in range(4):
            ids = torch.cat((ids, model(ids)[-1:].argmax(-1)))
        expected.append(ids[1:].tolist())
    few = replace(GREEDY, max_new_tokens=4)

    alone = [tokens_of(Engine(model), [prompt], few)[0][0] for prompt in prompts]
    together, _ = tokens_of(Engine(model, prefill_chunk=2), prompts, few)
    beside, _ = tokens_of(Engine(model), [golden_prompt("text"), *prompts], few)

    assert alone == together == expected
    assert beside == [golden_ids("base", "text")[:4], *expected]


def test_calls_that_take_turns_over_one_cache_do_not_mix():
    model = make_model()
    engine = Engine(model, cache=make_cache(model), prefill_chunk=9)

    turns = zip(*(engine.generate([golden_prompt(name)], GREEDY) for name in PROMPTS), strict=True)

    for name, tokens in zip(PROMPTS, zip(*turns, strict=True), strict=True):
        assert [token.token_id for token in tokens] == golden_ids("base", name)


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_any_batch_in_any_chunks_over_any_pages_equals_each_prompt_alone(seed):
    rng = random.Random(seed)
    shape = rng.choice([{}, {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}, {"rope_scaling": None}])
    model = make_random_model(make_config(int4=rng.random() < 0.5, **shape), seed)
    stop = frozenset(rng.sample(range(640), 60))
    model.config = replace(model.config, stop_token_ids=stop)
    lengths = [rng.randint(1, 18) for _ in range(rng.randint(1, 4))]
    prompts = [Prompt(input_ids=make_ids(model.config, n, seed + n)) for n in lengths]
    cache = make_cache(model, max_seq_len=max(lengths) + 10 + rng.randint(0, 9), page_size=rng.choice([1, 3, 7, 64]))
    cache.layers.normal_()  # What earlier sequences left.

    ids, reasons = tokens_of(
        Engine(model, cache=cache, prefill_chunk=rng.choice([1, 2, 3, 8, 21])),
        prompts,
        SamplingParams(max_new_tokens=10, temperature=0),
    )

    for prompt, new, reason in zip(prompts, ids, reasons, strict=True):
        n, whole = prompt.input_ids.shape[0], torch.cat((prompt.input_ids, torch.tensor(new)))
        logits = model(whole)[n - 1 : -1]
        logits[:, model.config.media_placeholder_token_id] = -torch.inf
        picked = logits.gather(-1, whole[n:, None])[:, 0]
        assert (logits.amax(-1) - picked).max() <= ATOL  # The likeliest, or as good as that.
        assert not stop & set(new[:-1]) and reason == ("stop" if new[-1] in stop else "length")
        assert reason == "stop" or len(new) == 10


def test_a_cache_serves_one_call_after_the_other():
    model = make_model()
    cache = make_cache(model, max_seqs=1)
    engine = Engine(model, cache=cache)
    free = set(cache._free_pages)

    for name in (*PROMPTS, *PROMPTS):
        assert tokens_of(engine, [golden_prompt(name)])[0] == [golden_ids("base", name)]
        assert set(cache._free_pages) == free


def test_bfloat16_generates_over_a_bfloat16_cache():
    model = make_model("int4.bf16")
    golden = GOLDENS["greedy"]["int4.bf16.text"]  # No golden tokens in bfloat16 but where the margin is wide.
    assert golden["margins"][0] > 4

    ids, _ = tokens_of(Engine(model), [golden_prompt("text")])

    assert ids[0][0] == golden["ids"][0] and len(ids[0]) == 16


# -- ends ---------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_answer_and_is_its_last_token():
    engine = Engine(make_model(stop={golden_ids("base", "text")[2], 5000}))

    assert tokens_of(engine, [golden_prompt("text")]) == ([golden_ids("base", "text")[:3]], ["stop"])


def test_sequences_that_end_at_different_steps_leave_the_others_alone():
    """577 ends text after 3 tokens and image after 8; 278 ends two_images after 2; video goes on."""
    model = make_model(stop={577, 278})
    engine = Engine(model, cache=make_cache(model))

    ids, reasons = tokens_of(engine, [golden_prompt(name) for name in PROMPTS])

    expected = [golden_ids("base", name) for name in PROMPTS]
    ends = [next((i + 1 for i, t in enumerate(e) if t in (577, 278)), 16) for e in expected]
    assert sorted(set(ends)) == [2, 3, 8, 16]
    assert ids == [e[:end] for e, end in zip(expected, ends, strict=True)]
    assert reasons == ["stop", "stop", "stop", "length"]


def test_tokens_of_one_step_come_in_the_prompts_order():
    engine = Engine(make_model())

    tokens = list(engine.generate([golden_prompt(name) for name in PROMPTS], replace(GREEDY, max_new_tokens=3)))

    assert [t.index for t in tokens] == [0, 1, 2, 3] * 3
    assert [t.finish_reason for t in tokens] == [None] * 8 + ["length"] * 4


def test_the_models_context_ends_the_answer():
    prompt = golden_prompt("text")

    for room in (1, 4):
        engine = Engine(make_model(max_position_embeddings=len(prompt.input_ids) + room))

        assert tokens_of(engine, [prompt]) == ([golden_ids("base", "text")[:room]], ["length"])


def test_a_given_cache_ends_the_answer_or_refuses_the_prompt():
    model, prompt = make_model(), golden_prompt("text")
    n = len(prompt.input_ids)
    engine = Engine(model, cache=make_cache(model, max_seqs=1, max_seq_len=20))
    assert tokens_of(engine, [prompt]) == ([golden_ids("base", "text")[: 20 - n]], ["length"])
    engine = Engine(model, cache=make_cache(model, max_seqs=1, max_seq_len=16))

    with pytest.raises(ValueError, match="the prompt has 17 tokens; the cache holds 16, one of them for the answer"):
        next(engine.generate([prompt], GREEDY))


def test_each_prompt_has_its_own_room():
    engine = Engine(make_model(max_position_embeddings=31))

    ids, _ = tokens_of(engine, [golden_prompt("image"), golden_prompt("text")])

    assert ids == [golden_ids("base", "image")[:2], golden_ids("base", "text")[:14]]


def test_a_listener_that_leaves_gives_every_page_back():
    model = make_model(stop={577})
    cache = make_cache(model)
    engine, free = Engine(model, cache=cache, prefill_chunk=7), set(cache._free_pages)

    for stop_after in (1, 2, 9, 14):
        tokens = engine.generate([golden_prompt(name) for name in PROMPTS], GREEDY)
        for _ in range(stop_after):
            next(tokens)
        assert set(cache._free_pages) < free
        tokens.close()

        assert set(cache._free_pages) == free


def test_prompts_that_do_not_fit_the_cache_together_are_refused_and_give_every_page_back():
    model = make_model()
    cache = make_cache(model, max_seqs=1)
    engine, free = Engine(model, cache=cache, prefill_chunk=30), set(cache._free_pages)

    with pytest.raises(CacheFullError, match=r"this step needs \d+ pages of 4 tokens"):
        list(engine.generate([golden_prompt(name) for name in PROMPTS], GREEDY))

    assert set(cache._free_pages) == free
    assert tokens_of(engine, [golden_prompt("text")])[0] == [golden_ids("base", "text")]


def test_no_prompts_give_no_tokens():
    assert list(Engine(make_model()).generate([], GREEDY)) == []


# -- drawing ------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_an_answer_and_another_seed_gives_another():
    engine = Engine(make_model())
    hot = SamplingParams(max_new_tokens=12, temperature=3.0, top_p=1.0, seed=1)

    first, again, other = (
        tokens_of(engine, [golden_prompt("text")], params)[0] for params in (hot, hot, replace(hot, seed=2))
    )

    assert first == again != other


def test_drawing_leaves_torchs_own_generator_alone():
    engine = Engine(make_model())
    before = torch.random.get_rng_state()

    tokens_of(engine, [golden_prompt("text")], SamplingParams(max_new_tokens=3))

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_placeholder_is_never_generated():
    model = make_model()
    logits = logits_of(model, "text")[-1]
    with torch.no_grad():  # Make the placeholder the likeliest by far, and the second one after it known.
        hidden = TENSORS["base.fp32.text.hidden.3"][-1]
        model.language_model.lm_head.weight[405] = hidden * 100
    assert logits_of(model, "text")[-1].argmax() == 405

    ids, _ = tokens_of(Engine(model), [golden_prompt("text")])

    assert 405 not in ids[0] and ids[0][0] == logits.argmax()


# -- refusals and the rest ----------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_continued_are_refused():
    model = make_model(max_position_embeddings=20)
    image = golden_prompt("image")
    messages = []
    for prompt in (
        Prompt(input_ids=torch.zeros(0, dtype=torch.int64)),
        Prompt(input_ids=torch.zeros(1, 3, dtype=torch.int64)),
        Prompt(input_ids=torch.tensor([1, 640, 2])),
        Prompt(input_ids=torch.tensor([1, -1])),
        Prompt(input_ids=torch.arange(20)),
        Prompt(input_ids=torch.arange(21)),
        Prompt(input_ids=torch.tensor([1, 405])),
        Prompt(input_ids=torch.tensor([1, 405]), pixel_values=image.pixel_values, grid_thws=image.grid_thws),
    ):
        with pytest.raises(ValueError) as caught:
            next(Engine(model).generate([golden_prompt("text"), prompt], GREEDY))
        messages.append(str(caught.value))

    expecttest.assert_expected_inline(
        "\n".join(messages),
        """\
input_ids has shape (0,); expected (num_tokens,) with at least one
input_ids has shape (1, 3); expected (num_tokens,) with at least one
input_ids has ids from 1 to 640; the vocabulary ends at 639
input_ids has ids from -1 to 1; the vocabulary ends at 639
the prompt has 20 tokens; the model's context holds 20, one of them for the answer; shorten it
the prompt has 21 tokens; the model's context holds 20, one of them for the answer; shorten it
input_ids has 1 media placeholders (id 405) but pixel_values gives 0 media tokens
input_ids has 1 media placeholders (id 405) but pixel_values gives 6 media tokens""",
    )


def test_sampling_out_of_range_is_refused():
    messages = []
    for values in (
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 2.5},
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
    ):
        with pytest.raises(ValueError) as caught:
            SamplingParams(**values)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        Engine(make_model(), prefill_chunk=0)
    messages.append(str(caught.value))

    expecttest.assert_expected_inline(
        "\n".join(messages),
        """\
max_new_tokens is 0; expected at least 1
max_new_tokens is -3; expected at least 1
max_new_tokens is 2.5; expected an integer
temperature is -0.1; expected 0 (the likeliest token) or more
temperature is inf; expected 0 (the likeliest token) or more
temperature is nan; expected 0 (the likeliest token) or more
top_p is 0.0; expected more than 0 and at most 1
top_p is 1.01; expected more than 0 and at most 1
top_p is nan; expected more than 0 and at most 1
seed is 18446744073709551616; expected an integer of 64 bits
seed is -9223372036854775809; expected an integer of 64 bits
prefill_chunk is 0; expected at least 1""",
    )


def test_phases_are_timed():
    engine = Engine(make_model())

    list(engine.generate([golden_prompt("image")], replace(GREEDY, max_new_tokens=1)))

    assert list(engine.timings_ms) == ["embed", "prefill", "sample"]
    assert all(ms > 0 for ms in engine.timings_ms.values())


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_end_generation_and_give_every_page_back(temperature):
    model = make_model()
    cache = make_cache(model)
    engine, free = Engine(model, cache=cache), set(cache._free_pages)
    prompts = [golden_prompt("text"), golden_prompt("image")]
    tokens = engine.generate(prompts, replace(GREEDY, temperature=temperature))
    next(tokens), next(tokens)
    with torch.no_grad():
        model.language_model.model.norm.weight[3] = float("nan")

    with pytest.raises(RuntimeError, match=r"logits are not finite at token 2 of prompt 0: .*torch.float32 overflows"):
        next(tokens)

    assert set(cache._free_pages) == free


def test_stop_ids_of_a_call_are_added_to_the_configurations():
    engine, text = Engine(make_model(stop={640})), golden_ids("base", "text")

    ids, reasons = tokens_of(engine, [golden_prompt("text")], replace(GREEDY, stop_token_ids=frozenset({text[3]})))

    assert (ids, reasons) == ([text[: text.index(text[3]) + 1]], ["stop"])


def test_generation_builds_no_graph_of_gradients_and_leaves_the_model_trainable():
    model = make_model()
    tokens = Engine(model).generate([golden_prompt("text")], GREEDY)
    next(tokens)

    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # Between two tokens too.
    tokens.close()
    model(golden_prompt("text").input_ids).sum().backward()
    assert model.language_model.lm_head.weight.grad is not None
