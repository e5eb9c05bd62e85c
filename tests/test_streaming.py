"""Messages in, text out: what streams is what there is, reasoning apart from the answer, and what each answer took."""

import itertools
import shutil
import types
from dataclasses import replace

import pytest
import torch
from golden import FOLDERS, GOLDENS, TENSORS, shared_model
from oracle_media import make_frames, make_image

from kimi_k25 import Engine, SamplingParams, generate_text, load_model, load_processor, stream_generate
from kimi_k25.engine import GeneratedToken
from kimi_k25.layers.kv_cache import PagedKVCache

TEXT = "What is the answer? 你好世界"
GREEDY = SamplingParams(max_new_tokens=16, temperature=0)
END_OF_TURN, THINK, END_OF_THINKING = 386, 406, 407


@pytest.fixture(scope="module")
def model():
    return shared_model("base.fp32")


@pytest.fixture(scope="module")
def processor():
    return load_processor(FOLDERS["base"])


class Scripted:
    """An engine that says the given ids, whatever it is asked, and keeps what it was asked."""

    def __init__(self, ids, finish_reason="stop"):
        self.ids, self.finish_reason, self.timings_ms = ids, finish_reason, {"embed": 1.0, "prefill": 2.0}

    def generate(self, prompts, sampling):
        (self.prompt,), self.sampling = prompts, sampling
        for i, token_id in enumerate(self.ids, start=1):
            yield GeneratedToken(0, token_id, self.finish_reason if i == len(self.ids) else None)


def say(model, processor, ids, finish_reason="stop", **options):
    """Steps of an answer that was scripted."""
    return list(stream_generate(model, processor, "hi", engine=Scripted(ids, finish_reason), **options))


def texts(steps):
    return "".join(step.reasoning for step in steps), "".join(step.text for step in steps)


# -- golden answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message", "options"),
    [
        ("text", TEXT, {}),
        ("image", "Describe this picture.", {"images": [make_image("A")]}),
        ("two_images", "the other thing", {"images": [make_image("B"), make_image("D")], "thinking": False}),
    ],
)
def test_golden_tokens_from_messages(model, processor, name, message, options):
    golden, prompt = GOLDENS["greedy"][f"base.fp32.{name}"]["ids"], GOLDENS["prompts"][name]["ids"]

    steps = list(stream_generate(model, processor, message, sampling=GREEDY, **options))

    assert [step.token_id for step in steps] == golden
    assert texts(steps) == processor.split_output(prompt, golden)
    assert [step.finish_reason for step in steps] == [None] * 15 + ["length"]


def test_a_video_and_messages_in_parts(model, processor):
    parts = [{"type": "video"}, {"type": "text", "text": "What is the video?"}]
    messages = [{"role": "user", "content": parts}]

    steps = list(stream_generate(model, processor, messages, videos=[(make_frames(7), 2.0)], sampling=GREEDY))

    assert [step.token_id for step in steps] == GOLDENS["greedy"]["base.fp32.video"]["ids"]
    assert steps[-1].stats.prompt_tokens == len(GOLDENS["prompts"]["video"]["ids"])


def test_the_answer_as_a_whole_is_what_streams(model, processor):
    options = {"sampling": SamplingParams(max_new_tokens=40, temperature=2.0, seed=3), "thinking": False}
    steps = list(stream_generate(model, processor, TEXT, **options))

    whole = generate_text(model, processor, TEXT, **options)

    assert len(whole) > 20
    assert whole == "".join(step.text for step in steps) == processor.decode([step.token_id for step in steps])


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_reasoning_is_apart_from_the_answer(model, processor, finish_reason):
    encode = processor.tokenizer.encode
    ids = [*encode("Let me see: 世界"), END_OF_THINKING, *encode("The answer.\n你好")]
    ids += [END_OF_TURN] if finish_reason == "stop" else []

    steps = say(model, processor, ids, finish_reason)

    assert texts(steps) == ("Let me see: 世界", "The answer.\n你好")
    assert not [step for step in steps if step.reasoning and step.text]
    assert [step.token_id for step in steps] == ids
    assert generate_text(model, processor, "hi", engine=Scripted(ids, finish_reason)) == "The answer.\n你好"


def test_without_thinking_all_is_answer_until_the_model_thinks(model, processor):
    encode = processor.tokenizer.encode
    ids = [*encode("so"), THINK, *encode("hm"), END_OF_THINKING, *encode(" be it"), END_OF_TURN]

    assert texts(say(model, processor, ids, thinking=False)) == ("hm", "so be it")
    assert texts(say(model, processor, ids[:-1], "length", thinking=False)) == ("hm", "so be it")


def test_the_token_that_ends_the_answer_is_no_text_but_a_control_token_within_it_is(model, processor):
    encode = processor.tokenizer.encode
    tool_call = [*encode("x"), 395, 396]

    assert texts(say(model, processor, [*tool_call, END_OF_TURN], thinking=False))[1] == processor.decode(tool_call)
    assert texts(say(model, processor, [END_OF_TURN], thinking=False)) == ("", "")


def byte_tokens(processor, data):
    """Ids of single bytes, as a model writes a character that no token holds."""
    id_of = {processor.tokenizer.token_bytes(i): i for i in range(256)}
    return [id_of[bytes([byte])] for byte in data]


def test_no_step_has_half_a_character(model, processor):
    steps = say(model, processor, [*byte_tokens(processor, "aé🙂世".encode()), END_OF_TURN], thinking=False)

    assert [step.text for step in steps] == ["a", "", "é", "", "", "", "🙂", "", "", "世", ""]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_character_cut_off_by_the_end_is_replaced_once(model, processor, finish_reason):
    ids = byte_tokens(processor, "a世".encode()[:-1]) + [END_OF_TURN] * (finish_reason == "stop")

    steps = say(model, processor, ids, finish_reason, thinking=False)

    assert texts(steps) == ("", "a\N{REPLACEMENT CHARACTER}")
    assert steps[-1].text == "\N{REPLACEMENT CHARACTER}"


def test_a_character_cut_off_by_the_end_of_reasoning_stays_reasoning(model, processor):
    half = byte_tokens(processor, "世".encode()[:1])

    steps = say(model, processor, [*half, END_OF_THINKING, *processor.tokenizer.encode("b"), END_OF_TURN])

    assert texts(steps) == ("\N{REPLACEMENT CHARACTER}", "b")


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("thinking", "temperature"), [(True, 1.0), (False, 0.6)])
def test_sampling_that_the_makers_recommend_is_the_default(model, processor, thinking, temperature):
    engine = Scripted([END_OF_TURN])

    list(stream_generate(model, processor, "hi", thinking=thinking, engine=engine))

    end = frozenset({END_OF_TURN})
    assert engine.sampling == SamplingParams(temperature=temperature, top_p=0.95, stop_token_ids=end)
    opened, closed = (engine.prompt.input_ids == i for i in (THINK, END_OF_THINKING))
    assert opened.sum() == 1 and closed.sum() == (0 if thinking else 1)


def test_options_reach_the_prompt_and_the_engine(model, processor):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    sampling = SamplingParams(seed=9, stop_token_ids=frozenset({7}))
    engine, images = Scripted([END_OF_TURN]), [make_image("A")]

    list(stream_generate(model, processor, "hi", images=images, tools=tools, sampling=sampling, engine=engine))

    batch = processor("hi", images=images, tools=tools)
    assert "get_weather" in processor.decode(engine.prompt.input_ids.tolist())
    assert torch.equal(engine.prompt.input_ids, batch.input_ids)
    assert torch.equal(engine.prompt.pixel_values, batch.pixel_values)
    assert torch.equal(engine.prompt.grid_thws, batch.grid_thws)
    assert engine.sampling == replace(sampling, stop_token_ids=frozenset({7, END_OF_TURN}))


def test_the_size_of_the_prompt_is_told_before_it_is_read(model, processor):
    told, engine = [], Scripted([END_OF_TURN])

    def on_prompt(num_tokens):
        told.append((num_tokens, hasattr(engine, "prompt")))

    next(stream_generate(model, processor, TEXT, engine=engine, on_prompt=on_prompt))

    assert told == [(17, False)]


def test_a_stop_id_of_the_checkpoint_ends_the_answer(model, processor):
    assert model.config.stop_token_ids == {385, END_OF_TURN}
    assert say(model, processor, [END_OF_TURN])[-1].finish_reason == "stop"


def test_the_end_of_a_turn_ends_the_answer_though_no_configuration_says_so(tmp_path):
    checkpoint = shutil.copytree(FOLDERS["base"], tmp_path / "tiny")
    (checkpoint / "generation_config.json").unlink()
    model = load_model(checkpoint)
    with torch.no_grad():  # Makes it the likeliest by far.
        model.language_model.lm_head.weight[END_OF_TURN] = TENSORS["base.fp32.text.hidden.3"][-1] * 100
    assert model.config.stop_token_ids == {385}

    (step,) = stream_generate(model, load_processor(checkpoint), TEXT, sampling=GREEDY)

    assert (step.token_id, step.finish_reason) == (END_OF_TURN, "stop")


def test_what_does_not_fit_is_refused_before_the_first_token(model, processor):
    for message, options, problem in (
        ("hi", {"videos": [([], 2.0)]}, "video 0"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "the messages have 1 image parts, but images has 0"),
        ([], {}, "a list of at least one message is expected"),
    ):
        with pytest.raises(ValueError, match=problem):
            next(stream_generate(model, processor, message, **options))
    with pytest.raises(TypeError, match="temperatures"):
        generate_text(model, processor, "hi", temperatures=1)


# -- statistics ---------------------------------------------------------------------------------------------------


def test_the_last_step_says_what_the_answer_took(model, processor):
    steps = list(stream_generate(model, processor, TEXT, sampling=GREEDY))

    stats = steps[-1].stats
    assert not any(step.stats for step in steps[:-1])
    assert (stats.prompt_tokens, stats.generated_tokens) == (17, 16)
    assert list(stats.phases_ms) == ["process", "embed", "prefill", "sample"]
    assert all(ms > 0 for ms in stats.phases_ms.values())
    assert sum(stats.phases_ms.values()) <= stats.ttft_ms
    assert stats.tpot_ms > 0
    assert 0.05 < stats.peak_gib < 100


def test_times_are_those_of_the_clock(model, processor, monkeypatch):
    """A clock that ticks once a look: the start, after the processor, then once a token."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("kimi_k25.streaming.time", clock)

    one, many = (say(model, processor, ids)[-1].stats for ids in ([END_OF_TURN], [5, 6, 7, END_OF_TURN]))

    assert (one.ttft_ms, one.tpot_ms, one.generated_tokens) == (2000, None, 1)
    assert (many.ttft_ms, many.tpot_ms, many.generated_tokens) == (2000, 1000, 4)
    assert many.phases_ms == {"process": 1000, "embed": 1.0, "prefill": 2.0}


# -- leaving ------------------------------------------------------------------------------------------------------


def test_a_listener_that_leaves_frees_the_cache(model, processor):
    cache = PagedKVCache(
        model.config.text_config, max_seqs=1, max_seq_len=64, page_size=4, dtype=torch.float32, device="cpu"
    )
    engine = Engine(model, cache=cache)
    for _ in range(3):  # Each needs all of the cache's pages.
        for step in stream_generate(model, processor, TEXT, sampling=GREEDY, engine=engine):
            if step.token_id:
                break

    assert generate_text(model, processor, TEXT, sampling=GREEDY, thinking=False, engine=engine)
