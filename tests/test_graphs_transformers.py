"""Decoders nobody here wrote, unmodified, through the code of docs/bring-your-own-model.md."""

import re
from pathlib import Path

import pytest
import torch

DOC = (Path(__file__).parent.parent / "docs" / "bring-your-own-model.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "attn_implementation": "pieces",
}
MOE = {"num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
DECODERS = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 16, **MOE},
    "Mixtral": {"num_local_experts": 4, **MOE},
    "Gemma": {},
}


@pytest.fixture(scope="module")
def doc():
    """The names that the page's attention and runner define."""
    namespace = {}
    for block in BLOCKS[:2]:
        exec(compile(block, "bring-your-own-model.md", "exec"), namespace)
    return namespace


@pytest.fixture(params=DECODERS)
def pieces(request, doc):
    import transformers

    config = getattr(transformers, f"{request.param}Config")(**SIZES, **DECODERS[request.param])
    torch.manual_seed(0)
    decoder = getattr(transformers, f"{request.param}Model")(config).eval()
    plan = doc["GraphPlan"](backend="tape", poison=True, strict=True, prefill=doc["BucketPolicy"].of((4, 8, 16)))
    return doc["Pieces"](decoder, plan)


def test_prefill_in_pieces_equals_eager(pieces, doc):
    """Chunk after chunk over a growing cache: bitwise at equal size, to rounding against one prefill of it all."""
    runner = pieces.runner
    runner.capture()
    runner.freeze()
    prompt = torch.randn(25, 32)

    chunks, start = [], 0
    for length in (9, 1, 12, 3):
        inputs = pieces.inputs(prompt[start : start + length], past=start)
        chunks.append(runner.run(inputs))
        assert torch.equal(chunks[-1], runner.run_eager(inputs))
        start += length

    with torch.no_grad():
        whole = pieces.forward(pieces.inputs(prompt))
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-4, atol=1e-5)
    assert runner.stats()["runs"] == {"piecewise": 4}
    assert runner.verify(3)["L1"] == 6


def test_attention_is_what_transformers_own_eager_attention_computes(pieces):
    prompt = torch.randn(11, 32)
    with torch.no_grad():
        ours = pieces.forward(pieces.inputs(prompt))
        pieces.decoder.set_attn_implementation("eager")
        theirs = pieces.decoder(inputs_embeds=prompt[None], use_cache=False).last_hidden_state[0]

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_page_runs_and_prints_what_it_says(capsys):
    namespace = {}
    for block in BLOCKS:
        exec(compile(block, "bring-your-own-model.md", "exec"), namespace)

    (printed,) = re.findall(r"```text\n(.*?)```", DOC, re.DOTALL)
    assert capsys.readouterr().out == printed
