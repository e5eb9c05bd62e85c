"""The decoder stack: against the slow definition, over a cache, packed, padded, and free of host syncs."""

import pytest
import reference
import torch
from random_models import make_config, make_model, randomize

from kimi_k25.graphs import will_it_capture
from kimi_k25.language_model import DeepseekV3ForCausalLM
from kimi_k25.layers.attention_batch import AttentionBatch
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache

CPU = torch.device("cpu")
ATOL = 1.5e-4  # Of float32 logits whose standard deviation is about 1, here and in the goldens.
SHAPES = {
    "tiny": {},
    "groups": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "no shared expert": {"n_shared_experts": 0},
    "two shared experts": {"n_shared_experts": 2},
    "every other layer": {"moe_layer_freq": 2, "num_hidden_layers": 5},
    "experts everywhere": {"first_k_dense_replace": 0, "num_hidden_layers": 2},
    "no experts": {"first_k_dense_replace": 2, "num_hidden_layers": 2},
    "no rope scaling": {"rope_scaling": None, "num_hidden_layers": 2},
    "other sizes": {
        "hidden_size": 40,
        "intermediate_size": 13,
        "moe_intermediate_size": 24,
        "num_attention_heads": 3,
        "q_lora_rank": 7,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 6,
        "v_head_dim": 4,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-2,
    },
}


def make_decoder(shape=None, *, int4=False):
    config = make_config(int4=int4, **(shape or {}))
    packed_layers = config.text_config.moe_layers if int4 else ()
    model = randomize(DeepseekV3ForCausalLM(config, packed_layers=packed_layers)).eval()
    return model, config.text_config


def make_embeds(config, num_tokens, seed=0):
    return torch.randn(num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def make_cache(config, *, max_seqs=4, max_seq_len=24, page_size=4, dtype=torch.float32):
    return PagedKVCache(
        config, max_seqs=max_seqs, max_seq_len=max_seq_len, page_size=page_size, dtype=dtype, device=CPU
    )


@torch.no_grad()
def logits(model, embeds, batch):
    return model.compute_logits(model(embeds, batch))


def whole(model, embeds):
    return logits(model, embeds, AttentionBatch.without_cache([embeds.shape[0]], device=CPU))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_hidden_states_equal_the_definition(shape):
    model, config = make_decoder(shape)
    embeds, lengths = make_embeds(config, 11), [2, 8, 1]

    with torch.no_grad():
        hidden = model(embeds, AttentionBatch.without_cache(lengths, device=CPU))

    positions = [p for length in lengths for p in range(length)]
    expected = reference.decoder(model.model, config, embeds, positions, lengths)[-1]
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=ATOL)


def test_int4_hidden_states_equal_the_definition():
    model, config = make_decoder(int4=True)
    embeds = make_embeds(config, 9)

    with torch.no_grad():
        hidden = model(embeds, AttentionBatch.without_cache([9], device=CPU))

    expected = reference.decoder(model.model, config, embeds, list(range(9)), [9])[-1]
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("shape", ["tiny", "groups", "no rope scaling"])
def test_every_decode_step_equals_the_whole_sequence(shape, int4):
    model, config = make_decoder(SHAPES[shape], int4=int4)
    embeds, cache, sequence = make_embeds(config, 20), make_cache(config), CachedSequence()
    steps = [logits(model, embeds[:5], cache.step([sequence], [5]))]

    steps += [logits(model, embeds[i : i + 1], cache.step([sequence], [1])) for i in range(5, 20)]

    torch.testing.assert_close(torch.cat(steps), whole(model, embeds), rtol=0, atol=ATOL)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("chunks", [[5, 5, 5, 2], [1, 1, 15], [16, 1]])
def test_chunked_prefill_equals_the_whole_sequence(chunks, page_size):
    model, config = make_decoder()
    embeds, sequence = make_embeds(config, 17), CachedSequence()
    cache = make_cache(config, page_size=page_size)

    steps = [logits(model, part, cache.step([sequence], [len(part)])) for part in embeds.split(chunks)]

    torch.testing.assert_close(torch.cat(steps), whole(model, embeds), rtol=0, atol=ATOL)


def test_sequences_that_come_and_go_equal_each_alone():
    """Pages are given back and taken by others in between; stale latents must not be seen."""
    model, config = make_decoder()
    lengths = [9, 3, 14, 6, 11]
    prompts = [make_embeds(config, n, seed=n) for n in lengths]
    cache = make_cache(config, max_seqs=2, max_seq_len=16)
    found, waiting, running = [[] for _ in prompts], [0, 1, 2, 3, 4], {}
    while waiting or running:
        while waiting and len(running) < 2:
            running[waiting.pop(0)] = CachedSequence()
        newest_first = reversed(running.items())  # So a step may start with a sequence that has nothing cached.
        step = {i: min(4 if s.length == 0 else 1 + i % 3, lengths[i] - s.length) for i, s in newest_first}
        parts = [prompts[i][running[i].length :][:n] for i, n in step.items()]
        batch = cache.step([running[i] for i in step], list(step.values()))
        for i, rows in zip(step, logits(model, torch.cat(parts), batch).split(list(step.values())), strict=True):
            found[i].append(rows)
        for i in [i for i, s in running.items() if s.length == lengths[i]]:
            cache.release(running.pop(i))

    for prompt, rows in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.cat(rows), whole(model, prompt), rtol=0, atol=ATOL)


def test_a_packed_batch_equals_each_alone():
    model, config = make_decoder()
    lengths = [1, 17, 3, 1, 8]
    embeds = make_embeds(config, 30)

    found = logits(model, embeds, AttentionBatch.without_cache(lengths, device=CPU))

    alone = torch.cat([whole(model, part) for part in embeds.split(lengths)])
    torch.testing.assert_close(found, alone, rtol=0, atol=ATOL)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("dirt", [0.0, 1e3])
def test_padding_changes_no_real_row_in_any_layer_now_or_later(dirt, int4, uninitialised_is_nan):
    """As captured steps are padded: rows behind the real ones write to page 0, which short sequences read, masked."""
    model, config = make_decoder(int4=int4)
    embeds = make_embeds(config, 16)
    found = []
    for num_rows in (0, 8):
        cache, sequences, start, rows = make_cache(config), [CachedSequence(), CachedSequence()], 0, []
        for lengths in ([2, 3], [4, 1], [1, 1], [1, 1], [1, 1]):
            batch, n = cache.step(sequences, lengths), sum(lengths)
            part, step = embeds[start : start + n], batch.cache
            if num_rows:
                more = num_rows - n
                part = torch.cat((part, torch.full((more, config.hidden_size), dirt)))
                batch.num_tokens = torch.tensor([n], dtype=torch.int32)
                batch.positions = torch.cat((batch.positions, torch.zeros(more, dtype=torch.int64)))
                step.slot_mapping = torch.cat((step.slot_mapping, torch.zeros(more, dtype=torch.int64)))
                if step.is_decode:
                    step.block_table = torch.cat((step.block_table, step.block_table.new_zeros(more, 6)))
                    step.seq_lens = torch.cat((step.seq_lens, step.seq_lens.new_ones(more)))
            rows.append(logits(model, part, batch)[:n])
            start += n
        found.append(torch.cat(rows))

    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


def test_padding_reaches_no_routed_expert():
    model, config = make_decoder()
    batch, ends = AttentionBatch.without_cache([7], device=CPU), []
    batch.num_tokens = torch.tensor(4)
    for layer in config.moe_layers:
        experts = model.model.layers[layer].mlp.experts
        experts.register_forward_hook(lambda _module, args, _out: ends.append(args[1][-1].item()))

    with torch.no_grad():
        model(make_embeds(config, 7), batch)

    assert ends == [4 * config.num_experts_per_tok] * len(config.moe_layers)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 1, 2], [9]])
def test_nothing_waits_for_the_device_or_depends_on_values_but_prefill_attention(lengths, int4):
    model, config = make_decoder(SHAPES["groups"], int4=int4)
    cache, sequences = make_cache(config), [CachedSequence() for _ in lengths]
    cache.step(sequences, [3] * len(lengths))
    batch = cache.step(sequences, lengths)
    batch.num_tokens = torch.tensor(sum(lengths))

    with torch.no_grad():
        report = will_it_capture(model.model.forward, make_embeds(config, sum(lengths)), batch)

    assert report, str(report)
    assert report.num_ops > 100
    assert report.num_breaks == (0 if batch.cache.is_decode else config.num_hidden_layers)


def test_the_watch_above_can_fail(monkeypatch):
    model, config = make_decoder()
    original = type(model.model.layers[1].mlp.gate).forward
    counting = lambda self, x: original(self, x) if x.sum().item() else None  # noqa: E731
    monkeypatch.setattr(type(model.model.layers[1].mlp.gate), "forward", counting)

    with torch.no_grad():
        batch = AttentionBatch.without_cache([3], device=CPU)
        report = will_it_capture(model.model.forward, make_embeds(config, 3), batch)

    assert not report and "item" in str(report)


def test_dtypes_that_survive_a_conversion_of_the_whole_model():
    model, _ = make_decoder(int4=True)

    model.to(torch.bfloat16)

    state = dict([*model.named_parameters(), *model.named_buffers()])
    kept = {name: t.dtype for name, t in state.items() if t.dtype != torch.bfloat16}
    layers = ["model.layers.1.mlp", "model.layers.2.mlp"]
    words = [f"{layer}.experts.{name}_proj_packed" for layer in layers for name in ("gate_up", "down")]
    float32 = ["model.rope.inv_freq", *(f"{layer}.gate.e_score_correction_bias" for layer in layers)]
    assert kept == dict.fromkeys(words, torch.int32) | dict.fromkeys(float32, torch.float32)


def test_logits_are_float32_in_any_model():
    model = make_model().language_model.to(torch.bfloat16)

    assert model.compute_logits(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_bfloat16_stays_near_float32_over_the_cache():
    model, config = make_decoder({"num_hidden_layers": 2, "num_experts_per_tok": 8})  # All chosen: no near ties.
    embeds = make_embeds(config, 12)
    exact = whole(model, embeds)
    model.to(torch.bfloat16)
    cache, sequence = make_cache(config, dtype=torch.bfloat16), CachedSequence()

    steps = [
        logits(model, part.bfloat16(), cache.step([sequence], [len(part)])) for part in embeds.split([5, 3, 1, 1, 1, 1])
    ]

    assert (torch.cat(steps) - exact).norm() < 0.02 * exact.norm()
