"""Triton kernels of the fast path, through Triton's interpreter, against the plain code that defines them.

Tolerances: float32 differs by the order of sums (1e-5); bfloat16 by one rounding where the plain code rounds between
the steps of a rotation or a sum, twice that in the interpreter, which truncates (2**-6 of the largest value).
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kimi_k25.layers import mla_decode
from kimi_k25.layers.attention_batch import CacheStep
from kimi_k25.layers.kv_cache import append_to_cache
from kimi_k25.layers.mla import latent_attention
from kimi_k25.layers.mla_decode import absorb_queries, attend_parts, merge_and_project, merge_parts, num_key_splits
from kimi_k25.layers.mla_kernels import assemble_prefill, norm_rope_append
from kimi_k25.layers.mlp import swiglu
from kimi_k25.layers.moe_kernels import (
    add_norm_rows,
    align_blocks,
    combine_rows,
    max_blocks,
    route,
    route_to_pair_blocks,
    swiglu_rows,
)
from kimi_k25.layers.norm import rms_norm
from kimi_k25.layers.rope import rotate_pairs
from kimi_k25.layers.skinny_linear import linear, one_row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def close(actual, expected, dtype=None):
    dtype = dtype or expected.dtype
    scale = expected.abs().max().item() or 1.0
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=0, atol=scale * (2**-6 if dtype == torch.bfloat16 else 1e-5)
    )


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def angles(num_tokens, rope_dim, dtype):
    x = randn(num_tokens, rope_dim // 2)
    return x.cos().to(dtype), x.sin().to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 40, 24, 8), (17, 96, 64, 16)])
def test_norm_rope_append_is_norms_rotation_and_cache_write(sizes, dtype):
    num_tokens, q_rank, kv_rank, rope_dim = sizes
    qkv_a = randn(num_tokens, q_rank + kv_rank + rope_dim, dtype=dtype)
    q_weight, kv_weight = randn(q_rank, dtype=dtype), randn(kv_rank, dtype=dtype)
    cos, sin = angles(num_tokens, rope_dim, dtype)
    pages = torch.zeros(5, 8, kv_rank + rope_dim, device=DEVICE, dtype=dtype)
    slots = torch.randperm(40, device=DEVICE)[:num_tokens]
    expected_pages = pages.clone()
    q_a, latent, k_pe = qkv_a.split((q_rank, kv_rank, rope_dim), -1)
    expected = torch.cat((rms_norm(latent, kv_weight, 1e-6), rotate_pairs(k_pe, cos, sin)), -1)
    append_to_cache(expected_pages, slots, expected)

    q, kv = norm_rope_append(qkv_a, q_weight, kv_weight, cos, sin, 1e-6, pages, slots)
    uncached = norm_rope_append(qkv_a, q_weight, kv_weight, cos, sin, 1e-6, None, None)

    close(q, rms_norm(q_a, q_weight, 1e-6))
    close(kv, expected)
    close(pages, expected_pages)
    assert torch.equal(uncached[0], q) and torch.equal(uncached[1], kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(3, 4, 16, 8, 12), (17, 5, 24, 16, 32)])
def test_assemble_prefill_rotates_queries_and_repeats_the_shared_key(sizes, dtype):
    num_tokens, heads, nope, rope_dim, v_dim = sizes
    q = randn(num_tokens, heads, nope + rope_dim, dtype=dtype)
    kv_b = randn(num_tokens, heads, nope + v_dim, dtype=dtype)
    kv = randn(num_tokens, 24 + rope_dim, dtype=dtype)
    cos, sin = angles(num_tokens, rope_dim, dtype)
    expected_q = torch.cat((q[..., :nope], rotate_pairs(q[..., nope:], cos, sin)), -1)
    expected_k = torch.cat((kv_b[..., :nope], kv[:, None, 24:].expand(-1, heads, -1)), -1)
    k = torch.full_like(q, float("nan"))

    assemble_prefill(q, kv_b, kv, cos, sin, k)

    close(q, expected_q)
    assert torch.equal(k, expected_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_programs", [1, 12])  # One part a sequence, or several.
@pytest.mark.parametrize(("heads", "rank", "lengths"), [(4, 24, [1, 33, 150]), (20, 32, [1]), (20, 32, [70])])
def test_decode_attention_is_latent_attention_of_roped_queries(
    heads, rank, lengths, num_programs, dtype, monkeypatch
):
    monkeypatch.setattr(mla_decode, "NUM_PROGRAMS", num_programs)
    num_seqs, nope, rope_dim, page_size = len(lengths), 16, 8, 16
    seq_lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    per_seq = -(-max(lengths) // page_size)
    pages = randn(1 + num_seqs * per_seq, page_size, rank + rope_dim, dtype=dtype)
    pages[0] = float("nan")  # What padding rows wrote: no real token may read it.
    table = 1 + torch.randperm(num_seqs * per_seq, device=DEVICE).view(num_seqs, -1).int()
    q_latent, q = randn(num_seqs, heads, rank, dtype=dtype), randn(num_seqs, heads, nope + rope_dim, dtype=dtype)
    cos, sin = angles(num_seqs, rope_dim, dtype)
    step = CacheStep(
        layers=pages[None], slot_mapping=table, block_table=table, seq_lens=seq_lens, kv_lens=lengths,
        has_prefix=True, is_decode=True,
    )  # fmt: skip
    expected = latent_attention(q_latent, rotate_pairs(q[..., nope:], cos, sin), step, 0, 0.3)

    parts, weights = attend_parts(q_latent, q, cos, sin, pages, table, seq_lens, 0.3)
    out = merge_parts(parts, weights, q)

    close(out, expected)
    kv_b = randn(heads * (nope + 12), rank, dtype=dtype)
    w_v = kv_b.view(heads, nope + 12, rank)[:, nope:]
    close(merge_and_project(parts, weights, kv_b, nope), torch.einsum("bnc,ndc->bnd", out, w_v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_absorb_queries_is_the_keys_half_of_the_projection(dtype):
    q, kv_b = randn(3, 5, 24, dtype=dtype), randn(5 * 28, 40, dtype=dtype)
    w_k = kv_b.view(5, 28, 40)[:, :16]

    close(absorb_queries(q, kv_b, 16), torch.einsum("bnd,ndc->bnc", q[..., :16], w_k))


def test_key_splits_fill_the_chip_and_depend_on_the_batch_alone():
    assert [num_key_splits(n) for n in (1, 2, 8, 64, 264, 1000)] == [32, 32, 32, 4, 1, 1]


def plain_route(logits, bias, topk, renormalise, scaling):
    scores = logits.sigmoid()
    ids = (scores + bias).topk(topk, -1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


def routed(num_tokens, experts, topk, *, real=None, renormalise=True):
    """What route gives for random logits in a wider tensor, and what it should."""
    logits, bias = randn(num_tokens, experts + 6), randn(experts) * 0.1
    count = None if real is None else torch.tensor([real], device=DEVICE, dtype=torch.int32)
    expected = plain_route(logits[:, :experts], bias, topk, renormalise, 2.827)
    return route(logits, bias, count, topk, renormalise, 2.827), expected


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_tokens", "experts", "topk", "real"), [(1, 8, 3, None), (37, 48, 8, 20), (3, 4, 4, 0)])
def test_route_picks_as_the_router_and_counts_real_rows(num_tokens, experts, topk, real, renormalise):
    (weights, ids, ranks, counts), (expected_weights, expected_ids) = routed(
        num_tokens, experts, topk, real=real, renormalise=renormalise
    )
    real = num_tokens if real is None else real

    close(weights, expected_weights)
    assert torch.equal(ids[:real].long(), expected_ids[:real])
    assert (ids[real:] == experts).all()
    assert torch.equal(counts.long(), torch.bincount(expected_ids[:real].flatten(), minlength=experts))
    for expert in range(experts):  # Ranks count through every expert's pairs, in whatever order.
        found = ranks[ids == expert].sort().values
        assert torch.equal(found.long(), torch.arange(found.shape[0], device=DEVICE))


def check_blocks(ids, sorted_ids, expert_ids, num_rows, block_size, experts):
    """Every real pair lies once, in a block of its expert; all other rows are empty."""
    pairs = ids.numel()
    used = int(num_rows)
    assert used % block_size == 0
    rows = sorted_ids[:used].view(-1, block_size)
    flat = ids.flatten()
    for block, expert in zip(rows.tolist(), expert_ids.tolist(), strict=False):
        assert 0 <= expert < experts
        assert all(pair == pairs or flat[pair] == expert for pair in block)
    placed = rows[rows < pairs].sort().values
    assert torch.equal(placed.long(), (flat < experts).nonzero().flatten())


@pytest.mark.parametrize("block_size", [8, 24])
@pytest.mark.parametrize(("num_tokens", "experts", "topk", "real"), [(1, 8, 3, None), (40, 12, 4, 33), (70, 3, 2, 70)])
def test_align_blocks_gives_each_expert_its_own_blocks(num_tokens, experts, topk, real, block_size):
    (_, ids, ranks, counts), _ = routed(num_tokens, experts, topk, real=real)

    sorted_ids, expert_ids, num_rows = align_blocks(ids, ranks, counts, block_size)

    check_blocks(ids, sorted_ids, expert_ids, num_rows, block_size, experts)
    assert int(num_rows) == int((-(-counts // block_size)).sum()) * block_size
    assert expert_ids.shape[0] >= int(num_rows) // block_size


def test_most_blocks_is_reached_by_the_worst_routing_and_not_passed():
    worst = max(
        sum(-(-count // 4) for count in counts)
        for counts in ([13, 0, 0], [5, 8, 0], [1, 1, 11], [5, 4, 4], [9, 3, 1], [5, 5, 3])
    )
    assert worst == max_blocks(13, 3, 4) == 5
    assert max_blocks(2, 384, 64) == 2


def test_pair_blocks_are_route_and_align_at_once():
    logits, bias = randn(6, 30), randn(24) * 0.1
    count = torch.tensor([5], device=DEVICE, dtype=torch.int32)
    expected = route(logits, bias, count, 4, True, 2.5)

    weights, ids, sorted_ids, expert_ids, num_rows = route_to_pair_blocks(logits, bias, count, 4, True, 2.5, 8)

    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])
    check_blocks(ids, sorted_ids, expert_ids, num_rows, 8, 24)


HERE = {"some pairs": 0.0, "no pair": -9.0, "all pairs": 9.0}  # What is added to the bias of the experts here.


@pytest.mark.parametrize("added", HERE.values(), ids=HERE)
@pytest.mark.parametrize("block_size", [8, 24])
def test_a_rank_lays_out_the_pairs_of_its_experts_and_weighs_them_by_all(added, block_size):
    logits, bias = randn(21, 30), randn(24) * 0.1
    first, num_local = 18, 6
    bias[first:] += added
    count = torch.tensor([20], device=DEVICE, dtype=torch.int32)
    args = (logits, bias, count, 4, True, 2.5)
    whole_weights, whole_ids, *_ = route(*args)
    expected_ids = torch.where(whole_ids < first, num_local, whole_ids - first)
    expected_ids[20:] = num_local
    num_present = int((expected_ids < num_local).sum())
    assert (num_present > 0) == (added >= 0) and (num_present == 80) == (added > 0)

    weights, ids, ranks, counts = route(*args, first, num_local)
    aligned = align_blocks(ids, ranks, counts, block_size)
    pair_weights, pair_ids, *pair_blocks = route_to_pair_blocks(*args, block_size, first, num_local)

    assert torch.equal(weights, whole_weights) and torch.equal(pair_weights, whole_weights)
    assert torch.equal(ids, expected_ids) and torch.equal(pair_ids, expected_ids)
    assert torch.equal(counts.long(), torch.bincount(expected_ids.flatten(), minlength=7)[:num_local])
    check_blocks(ids, *aligned, block_size, num_local)
    check_blocks(ids, *pair_blocks, block_size, num_local)
    assert int(pair_blocks[2]) == num_present * block_size  # No block for a pair of another rank.


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_rows_of_a_matrix_and_of_columns_of_a_wider_one(dtype):
    gate_up, wide = randn(13, 48, dtype=dtype), randn(5, 10 + 20)

    close(swiglu_rows(gate_up, dtype), swiglu(gate_up.float()), dtype)
    close(swiglu_rows(wide[:, 10:], dtype), swiglu(wide[:, 10:]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_shared", [True, False])
def test_combine_rows_sums_real_rows_and_skips_what_nobody_wrote(use_shared, dtype):
    (weights, ids, _, _), _ = routed(9, 5, 3, real=7)
    rows = randn(27, 70, dtype=dtype)
    rows[21:] = float("nan")  # Padding: nobody wrote it.
    shared = randn(9, 70, dtype=dtype) if use_shared else None
    expected = torch.zeros(9, 70, device=DEVICE)
    expected[:7] = (rows[:21].unflatten(0, (7, 3)).float() * weights[:7, :, None]).sum(1)
    if shared is not None:
        expected += shared.float()

    out = combine_rows(rows, weights, ids, shared, 5)

    close(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_shared", [True, False])
def test_add_norm_rows_is_combine_residual_and_norm(use_shared, dtype):
    (weights, ids, _, _), _ = routed(9, 5, 3, real=7)
    rows, residual, weight = randn(27, 70, dtype=dtype), randn(9, 70, dtype=dtype), randn(70, dtype=dtype)
    rows[21:] = float("nan")  # Padding: nobody wrote it.
    shared = randn(9, 70, dtype=dtype) if use_shared else None
    expected = combine_rows(rows, weights, ids, shared, 5) + residual

    normed = add_norm_rows(rows, weights, ids, shared, residual, weight, 1e-5, 5)

    close(residual, expected)
    close(normed, rms_norm(expected, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "columns"), [(64, 33), (300, 16), (2500, 7)])
def test_one_row_linear_is_linear(size, columns, dtype):
    x, weight = randn(1, size, dtype=dtype), randn(columns, size, dtype=dtype) * size**-0.5

    out, unrounded = one_row_linear(x, weight, False), one_row_linear(x, weight, True)

    expected = F.linear(x.float(), weight.float())
    close(out, expected, dtype)
    close(unrounded, expected)
    assert out.dtype == dtype and unrounded.dtype == torch.float32


def test_linear_keeps_the_sum_in_float32_at_any_number_of_rows():
    weight = randn(24, 32, dtype=torch.bfloat16)
    for rows in (1, 3):
        x = randn(rows, 32, dtype=torch.bfloat16)

        out = linear(x, weight, float32=True)

        close(out, F.linear(x.float(), weight.float()))


def test_every_operator_has_a_shape_without_running():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits, bias = torch.empty(6, 24), torch.empty(24)
        weights, ids, ranks, counts = route(logits, bias, None, 4, True, 1.0)
        assert (weights.dtype, ids.shape, counts.shape) == (torch.float32, (6, 4), (24,))
        assert align_blocks(ids, ranks, counts, 8)[0].shape == (24 * 8,)
        assert route_to_pair_blocks(logits, bias, None, 4, True, 1.0, 8)[2].shape == (24 * 8,)
        assert route(logits, bias, None, 4, True, 1.0, 6, 3)[3].shape == (3,)
        rows = torch.empty(24, 32)
        assert swiglu_rows(rows, torch.bfloat16).shape == (24, 16)
        assert combine_rows(rows, weights, ids, None, 24).shape == (6, 32)
        assert one_row_linear(torch.empty(1, 32), torch.empty(7, 32), True).shape == (1, 7)
        assert norm_rope_append(rows, bias[:16], bias[:8], rows, rows, 1e-6, None, None)[1].shape == (24, 16)
