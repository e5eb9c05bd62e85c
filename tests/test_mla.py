"""Latent attention: prefill, chunks over a cache, absorbed decode and padding, all against the slow definition."""

import pytest
import reference
import torch
from random_models import make_config, randomize

from kimi_k25.layers.attention_batch import AttentionBatch
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache
from kimi_k25.layers.mla import MultiHeadLatentAttention
from kimi_k25.layers.rope import TextRope

CPU = torch.device("cpu")
SHAPES = {
    "tiny": {},
    "one head": {"num_attention_heads": 1, "kv_lora_rank": 16, "v_head_dim": 20},
    "no scaling": {"rope_scaling": None, "num_attention_heads": 3, "q_lora_rank": 8, "qk_rope_head_dim": 2},
}
# float32 against float64: sums of a few hundred products.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def attention(request):
    config = make_config(**request.param).text_config
    return randomize(MultiHeadLatentAttention(config, layer=1)), config


def make_x(num_tokens, seed=0):
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(seed))


def expected_for(attention, config, x, lengths):
    positions = [p for length in lengths for p in range(length)]
    return reference.latent_attention(attention, config, x, positions, lengths)


@torch.no_grad()
def run(attention, config, x, batch):
    return attention(x, TextRope(config)(batch.positions, x.dtype), batch)


def make_cache(config, *, page_size=4, max_seqs=4, max_seq_len=20):
    return PagedKVCache(
        config, max_seqs=max_seqs, max_seq_len=max_seq_len, page_size=page_size, dtype=torch.float32, device=CPU
    )


@pytest.mark.parametrize("lengths", [[1], [17], [3, 1, 9, 1]])
def test_prefill_without_a_cache(attention, lengths):
    module, config = attention
    x = make_x(sum(lengths))

    out = run(module, config, x, AttentionBatch.without_cache(lengths, device=CPU))

    torch.testing.assert_close(out.double(), expected_for(module, config, x, lengths), **TOLERANCE)


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 5, 3], [4, 4, 4, 1], [1, 12], [12, 1]])
def test_any_chunks_over_a_growing_cache(attention, chunks):
    module, config = attention
    x, cache, sequence = make_x(13), make_cache(config), CachedSequence()

    outs = [run(module, config, part, cache.step([sequence], [len(part)])) for part in x.split(chunks)]

    torch.testing.assert_close(torch.cat(outs).double(), expected_for(module, config, x, [13]), **TOLERANCE)


def test_sequences_of_one_step_may_be_new_continued_and_decoding(attention):
    module, config = attention
    xs, cache = [make_x(n, seed=n) for n in (9, 6, 14)], make_cache(config)
    sequences, done, found = [CachedSequence() for _ in xs], [0, 0, 0], [[], [], []]

    for step in ({0: 7}, {0: 1, 1: 2}, {1: 3, 2: 10}, {0: 1, 1: 1, 2: 1}, {2: 3}):
        parts = [xs[i][done[i] : done[i] + n] for i, n in step.items()]
        batch = cache.step([sequences[i] for i in step], list(step.values()))
        out = run(module, config, torch.cat(parts), batch)
        for (i, n), rows in zip(step.items(), out.split(list(step.values())), strict=True):
            done[i] += n
            found[i].append(rows)

    for x, rows in zip(xs, found, strict=True):
        torch.testing.assert_close(torch.cat(rows).double(), expected_for(module, config, x, [len(x)]), **TOLERANCE)


def test_the_cache_holds_the_normalised_latent_and_the_roped_key(attention):
    module, config = attention
    x, cache, sequence = make_x(3), make_cache(config), CachedSequence()

    run(module, config, x, cache.step([sequence], [3]))

    found = cache.layers[1, sequence.pages[0], :3].double()
    compressed = reference.linear(x, module.kv_a_proj_with_mqa)
    latent = reference.rms_norm(compressed[:, : config.kv_lora_rank], module.kv_a_layernorm.weight, 1e-6)
    frequencies = reference.inverse_frequencies(config)
    keys = [
        reference.turn(row[config.kv_lora_rank :], [p * f for f in frequencies]) for p, row in enumerate(compressed)
    ]
    torch.testing.assert_close(found, torch.cat((latent, torch.stack(keys)), -1), rtol=1e-5, atol=1e-5)
    assert not cache.layers[0].any() and not cache.layers[2].any()


def test_decode_reads_nothing_behind_a_sequence(attention):
    module, config = attention
    x, cache, sequence = make_x(6), make_cache(config), CachedSequence()
    run(module, config, x[:5], cache.step([sequence], [5]))
    batch = cache.step([sequence], [1])
    clean = run(module, config, x[5:], batch)

    for page in range(cache.layers.shape[1]):
        first_foreign = 6 - 4 * sequence.pages.index(page) if page in sequence.pages else 0
        cache.layers[1, page, max(first_foreign, 0) :] = 1e4  # What an earlier sequence may have left.

    assert torch.equal(run(module, config, x[5:], batch), clean)


def test_given_positions_are_used():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)), make_x(4)
    positions = torch.tensor([3, 0, 100, 7])

    out = run(module, config, x, AttentionBatch.without_cache([4], device=CPU, positions=positions))

    expected = reference.latent_attention(module, config, x, positions.tolist(), [4])
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


def padded(batch, x, num_rows, dirt):
    """The step with rows behind its tokens, which write to page 0 as a graph's padding does."""
    more = num_rows - x.shape[0]
    batch.num_tokens = torch.tensor(batch.num_query_tokens)
    batch.positions = torch.cat((batch.positions, batch.positions.new_zeros(more)))
    if batch.cache is not None:
        batch.cache.slot_mapping = torch.cat((batch.cache.slot_mapping, batch.cache.slot_mapping.new_zeros(more)))
    return torch.cat((x, torch.full((more, x.shape[1]), dirt)))


@pytest.mark.parametrize("dirt", [0.0, 1e3, 1e15])
def test_rows_of_padding_change_no_real_row_now_or_later(dirt, uninitialised_is_nan):
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)), make_x(12)
    outs = []
    for rows in (0, 9):
        cache, sequences, start = make_cache(config), [CachedSequence(), CachedSequence()], 0
        outs.append([])
        for lengths in ([2, 3], [1, 4], [1, 1]):
            batch, part = cache.step(sequences, lengths), x[start : start + sum(lengths)]
            start += sum(lengths)
            if rows and not batch.cache.is_decode:
                part = padded(batch, part, rows, dirt)
            outs[-1].append(run(module, config, part, batch)[: sum(lengths)])

    torch.testing.assert_close(torch.cat(outs[1]), torch.cat(outs[0]), rtol=1e-6, atol=1e-6)


def test_prefill_and_decode_work_in_bfloat16():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)), make_x(9)
    expected = run(module, config, x, AttentionBatch.without_cache([9], device=CPU))
    module, x = module.to(torch.bfloat16), x.bfloat16()
    cache, sequence = PagedKVCache(config, max_seqs=1, max_seq_len=9, dtype=x.dtype, device=CPU), CachedSequence()

    outs = [run(module, config, part, cache.step([sequence], [len(part)])) for part in x.split([4, 3, 1, 1])]

    assert outs[0].dtype == torch.bfloat16
    # Weights, projections and probabilities are each rounded to 8 bits.
    torch.testing.assert_close(torch.cat(outs).float(), expected, rtol=0.05, atol=0.05)


def test_gradients_reach_every_weight_of_a_packed_batch():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)).double(), make_x(5).double().requires_grad_()
    batch = AttentionBatch.without_cache([2, 3], device=CPU)
    rope = tuple(t.double() for t in TextRope(config)(batch.positions, torch.float32))

    out = module(x, rope, batch)
    grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])

    torch.manual_seed(0)  # The norms inside compute in float32: some directions miss the tolerance by rounding.
    step = 1e-3
    for tensor, grad in zip([x, *module.parameters()], grads, strict=True):
        direction = torch.randn_like(tensor)
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                tensor.add_(direction, alpha=sign * step)
                ends.append(module(x, rope, batch).square().sum())
                tensor.add_(direction, alpha=-sign * step)
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), (grad * direction).sum(), rtol=2e-3, atol=2e-3)


def test_sizes_come_from_the_weights():
    """A rank that holds some of the heads: its weights are a slice, and its output is that of those heads."""
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)), make_x(5)
    cut = randomize(MultiHeadLatentAttention(config, layer=0))
    nope_rope, nope_v, dv = 24, 28, 12
    halves = []
    for first, last in ((0, 1), (1, 4)):
        cut.q_b_proj.weight.data = module.q_b_proj.weight[first * nope_rope : last * nope_rope]
        cut.kv_b_proj.weight.data = module.kv_b_proj.weight[first * nope_v : last * nope_v]
        cut.o_proj.weight.data = module.o_proj.weight[:, first * dv : last * dv]
        cache, sequence = make_cache(config), CachedSequence()
        outs = [run(cut, config, part, cache.step([sequence], [len(part)])) for part in x.split([3, 1, 1])]
        halves.append(torch.cat(outs))

    whole = run(module, config, x, AttentionBatch.without_cache([5], device=CPU))

    torch.testing.assert_close(sum(halves), whole, rtol=1e-5, atol=1e-5)


def test_padding_rows_of_a_prefill_write_to_the_first_slot_alone():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=1)), make_x(11)
    caches = []
    for rows in (0, 16):
        cache, sequences = make_cache(config), [CachedSequence(), CachedSequence()]
        for lengths, part in (([3, 2], x[:5]), ([2, 4], x[5:])):  # The second step has a prefix.
            batch = cache.step(sequences, lengths)
            run(module, config, padded(batch, part, rows, 100.0) if rows else part, batch)
        caches.append(cache.layers)

    without, with_padding = caches
    torch.testing.assert_close(with_padding[:, 1:], without[:, 1:], rtol=0, atol=1e-6)
    assert with_padding[1, 0, 0].any() and not with_padding[1, 0, 1:].any()
    assert not with_padding[[0, 2]].any()


def test_padding_rows_of_a_decode_change_no_real_row_and_no_page_but_the_first():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=1)), make_x(9)
    outs, caches = [], []
    for rows in (0, 8):
        cache, sequences = make_cache(config), [CachedSequence(), CachedSequence()]
        run(module, config, x[:7], cache.step(sequences, [5, 2]))
        batch, part = cache.step(sequences, [1, 1]), x[7:]
        if rows:
            part = padded(batch, part, rows, 100.0)
            step = batch.cache
            step.block_table = torch.nn.functional.pad(step.block_table, (0, 0, 0, rows - 2))
            step.seq_lens = torch.nn.functional.pad(step.seq_lens, (0, rows - 2), value=1)
        outs.append(run(module, config, part, batch))
        caches.append(cache.layers)

    assert outs[1].isfinite().all()
    torch.testing.assert_close(outs[1][:2], outs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(caches[1][:, 1:], caches[0][:, 1:], rtol=0, atol=1e-6)


def test_a_page_given_back_leaves_no_trace_of_its_last_sequence():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=1)), make_x(6)
    cache, sequence = make_cache(config, max_seqs=1), CachedSequence()
    run(module, config, 100 * make_x(20, seed=1), cache.step([sequence], [20]))
    cache.release(sequence)

    outs = [run(module, config, part, cache.step([sequence], [len(part)])) for part in x.split([4, 1, 1])]

    torch.testing.assert_close(torch.cat(outs).double(), expected_for(module, config, x, [6]), **TOLERANCE)


def test_every_weight_has_a_gradient():
    config = make_config().text_config
    module, x = randomize(MultiHeadLatentAttention(config, layer=0)), make_x(8).requires_grad_()
    batch = AttentionBatch.without_cache([5, 3], device=CPU)

    module(x, TextRope(config)(batch.positions, x.dtype), batch).square().sum().backward()

    for name, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name
    assert (x.grad.norm(dim=1) > 0).all()


def test_padding_rows_stay_finite_from_layer_to_layer(uninitialised_is_nan):
    """Attention writes no output for them; the next layer's key of that would go to page 0, which all sequences read
    with a weight of zero, and zero times NaN is NaN."""
    config = make_config().text_config
    layers = [randomize(MultiHeadLatentAttention(config, layer=i), seed=i) for i in range(2)]
    outs = []
    for rows in (0, 9):
        cache, sequences = make_cache(config), [CachedSequence(), CachedSequence()]
        for lengths in ([2, 3], [1, 4], [1, 1]):
            batch, x = cache.step(sequences, lengths), make_x(sum(lengths))
            if rows and not batch.cache.is_decode:
                x = padded(batch, x, rows, 1.0)
            for module in layers:
                x = run(module, config, x, batch)
            assert x.isfinite().all()
            outs.append(x[: sum(lengths)])

    torch.testing.assert_close(torch.cat(outs[3:]), torch.cat(outs[:3]), rtol=1e-5, atol=1e-5)
