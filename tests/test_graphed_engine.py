"""Generation through graphs: the same tokens as without, and every step by the graph that was captured for it."""

import json
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from oracle_media import make_image

from kimi_k25 import Prompt, SamplingParams, load_model, load_processor
from kimi_k25.decoder_graphs import GraphedDecoder, graphed_engine
from kimi_k25.generate import main
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache

ORACLE = Path(__file__).parent / "data/oracle"
GREEDY = json.loads((ORACLE / "goldens.json").read_text())["greedy"]
SAMPLING = SamplingParams(max_new_tokens=16, temperature=0)


def plan(max_seqs):
    prefill, decode = BucketPolicy.of([32, 64]), BucketPolicy.decode(max_seqs)
    return GraphPlan(backend="tape", prefill=prefill, decode=decode, poison=True, strict=True)


def prompts(folder):
    processor = load_processor(folder)
    text = processor("What is the answer? 你好世界")
    image = processor("Describe this picture.", images=[make_image("A")])
    return [Prompt(input_ids=b.input_ids, pixel_values=b.pixel_values, grid_thws=b.grid_thws) for b in (text, image)]


@pytest.mark.parametrize(("checkpoint", "variant"), [("tiny_bf16", "base"), ("tiny_int4", "int4")])
def test_text_image_and_both_together_give_the_golden_tokens(checkpoint, variant):
    model = load_model(ORACLE / checkpoint)
    model.config = replace(model.config, stop_token_ids=frozenset())
    text, image = prompts(ORACLE / checkpoint)
    golden = [GREEDY[f"{variant}.fp32.{kind}"]["ids"] for kind in ("text", "image")]
    engine, runner = graphed_engine(model, plan=plan(2), max_seq_len=128, max_seqs=2)

    for batch, expected in (([text], golden[:1]), ([image], golden[1:]), ([text, image], golden), ([text], golden[:1])):
        tokens: list[list[int]] = [[] for _ in batch]
        for token in engine.generate(batch, SAMPLING):
            tokens[token.index].append(token.token_id)

        assert tokens == expected
    assert runner.stats()["runs"] == {"piecewise": 4, "full": 4 * 15}
    runner.close()


def facts(batch):
    """Every field of a step and of its cache's, tensors as lists."""
    values = {f.name: getattr(part, f.name) for part in (batch, batch.cache) for f in fields(part)}
    values = {name: value for name, value in values.items() if name not in ("cache", "layers", "num_tokens")}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def test_kernels_between_graphs_find_every_fact_of_the_step():
    model, seen = load_model(ORACLE / "tiny_bf16"), []
    cache = PagedKVCache(model.config.text_config, max_seqs=2, max_seq_len=16, dtype=torch.float32, device="cpu")
    model.language_model.model.fast = Mock(side_effect=lambda embeds, batch: (seen.append(facts(batch)), embeds)[1])
    graphed, sequences = GraphedDecoder(model, cache, GraphPlan(backend="eager")), [CachedSequence(), CachedSequence()]

    for lengths in ([5, 2], [3, 1], [1, 1]):
        batch = cache.step(sequences, lengths)
        graphed(torch.zeros(sum(lengths), model.config.text_config.hidden_size), batch)

        assert seen.pop() == facts(batch)


def test_a_listener_that_leaves_gives_its_pages_back():
    model = load_model(ORACLE / "tiny_bf16")
    text, _ = prompts(ORACLE / "tiny_bf16")
    engine, runner = graphed_engine(model, plan=plan(1), max_seq_len=64)
    for _ in range(3):  # Each needs the cache's only sequence.
        tokens = engine.generate([text], SAMPLING)
        next(tokens)
        tokens.close()

    assert len(list(engine.generate([text], SAMPLING))) > 1
    runner.close()


def test_a_prompt_beyond_the_cache_is_refused():
    model = load_model(ORACLE / "tiny_bf16")
    engine, runner = graphed_engine(model, plan=plan(1), max_seq_len=64)

    message = "the prompt has 64 tokens; the cache holds 64, one of them for the answer; shorten it, or raise max_seq"
    with pytest.raises(ValueError, match=message):
        next(engine.generate([Prompt(input_ids=torch.ones(64, dtype=torch.int64))], SAMPLING))
    runner.close()


def test_decode_graphs_beyond_the_cache_are_refused():
    model = load_model(ORACLE / "tiny_bf16")

    with pytest.raises(ValueError, match="decode graphs for 4 sequences, but max_seqs is 2; make it 4"):
        graphed_engine(model, plan=plan(4), max_seq_len=64, max_seqs=2)


@pytest.mark.parametrize(("mode", "why"), [("auto", "no CUDA graphs on cpu"), ("off", "--graphs off")])
def test_generate_says_why_there_are_no_graphs(capsys, mode, why):
    assert main([str(ORACLE / "tiny_bf16"), "-p", "hi", "-n", "1", "--device", "cpu", "--graphs", mode]) == 0

    assert f"graphs: eager ({why})" in capsys.readouterr().err


def test_generate_refuses_strict_graphs_on_a_cpu(capsys):
    code = main([str(ORACLE / "tiny_bf16"), "-p", "hi", "-n", "1", "--device", "cpu", "--graphs", "strict"])

    assert code != 0
    assert "--graphs strict needs a CUDA device" in capsys.readouterr().err
