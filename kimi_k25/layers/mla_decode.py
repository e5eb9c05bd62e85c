"""Absorbed decode attention over the paged latents, in Triton: no plan, no host sync, the same bits every run.

FlashInfer's wrapper wants the lengths on the host before every replay of a decode graph, about as much host work as
the step has time; here a kernel reads the block table and the lengths itself. Keys are split over programs, the parts
merged by a second kernel in a fixed order. layers/mla.py's decode and latent_attention define the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin, launch_options
from .operators import kernel_op

__all__ = ["absorb_queries", "attend_parts", "merge_and_project", "merge_parts", "num_key_splits"]

NUM_PROGRAMS = 264  # Two for each multiprocessor of a Hopper chip.


def num_key_splits(num_seqs: int) -> int:
    """Into how many parts each sequence's keys are divided: a power of two that depends on the batch size alone."""
    return 1 << max(0, min(5, (NUM_PROGRAMS // max(num_seqs, 1)).bit_length() - 1))


@triton.jit
def _split_kernel(
    q_latent, q, cos, sin, pages, block_table, seq_lens, parts, weights, scale, table_stride,
    H: tl.constexpr, C: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
    WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_R)
    half = DR // 2
    dtype = pages.dtype.element_ty
    latent = tl.load(
        q_latent + (b * H + h[:, None]) * C + c[None, :], mask=(h[:, None] < H) & (c[None, :] < C), other=0.0
    )
    mask = (h[:, None] < H) & (j[None, :] < half)
    q_pe = q + (b * H + h[:, None]) * (DN + DR) + DN + 2 * j[None, :]
    even = tl.load(q_pe, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(q_pe + 1, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + b * half + j, mask=j < half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + b * half + j, mask=j < half, other=0.0).to(tl.float32)[None, :]
    q_even, q_odd = (even * cosine - odd * sine).to(dtype), (odd * cosine + even * sine).to(dtype)
    if WIDEN:  # Triton's interpreter has no product of bfloat16.
        latent, q_even, q_odd = latent.to(tl.float32), q_even.to(tl.float32), q_odd.to(tl.float32)

    length = tl.load(seq_lens + b)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_L) * BLOCK_L
    start = split * share
    end = tl.minimum(start + share, length)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_C), tl.float32)
    for at in range(start, end, BLOCK_L):
        place = at + tl.arange(0, BLOCK_L)
        seen = place < end
        page = tl.load(block_table + b * table_stride + place // PAGE, mask=seen, other=0).to(tl.int64)
        row = pages + (page * PAGE + place % PAGE) * (C + DR)
        kv = tl.load(row[:, None] + c[None, :], mask=seen[:, None] & (c[None, :] < C), other=0.0)  # (L, C)
        pe_mask = seen[None, :] & (j[:, None] < half)
        k_even = tl.load(row[None, :] + C + 2 * j[:, None], mask=pe_mask, other=0.0)  # (R, L)
        k_odd = tl.load(row[None, :] + C + 2 * j[:, None] + 1, mask=pe_mask, other=0.0)
        if WIDEN:
            kv, k_even, k_odd = kv.to(tl.float32), k_even.to(tl.float32), k_odd.to(tl.float32)
        scores = tl.dot(latent, tl.trans(kv), input_precision="ieee")
        scores += tl.dot(q_even, k_even, input_precision="ieee") + tl.dot(q_odd, k_odd, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))  # scale carries log2(e)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        p = tl.exp2(scores - new_highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype).to(kv.dtype), kv, input_precision="ieee")
        highest = new_highest

    part = (b * SPLITS + split) * H + h
    some = total > 0.0
    safe = tl.where(some, total, 1.0)
    tl.store(
        parts + part[:, None] * C + c[None, :], acc / safe[:, None], mask=(h[:, None] < H) & (c[None, :] < C)
    )
    tl.store(weights + part, tl.where(some, highest + tl.log2(safe), float("-inf")), mask=h < H)


@triton.jit
def _merge_kernel(
    parts, weights, out, H: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, SPLITS)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = (b * SPLITS + i) * H + h
    weight = tl.load(weights + row)
    weight = tl.exp2(weight - tl.max(weight, 0))
    weight = weight / tl.sum(weight, 0)
    values = tl.load(parts + row[:, None] * C + c[None, :], mask=c[None, :] < C, other=0.0)
    tl.store(out + (b * H + h) * C + c, tl.sum(values * weight[:, None], 0).to(out.dtype.element_ty), mask=c < C)


@triton.jit
def _absorb_kernel(
    q, kv_b, out, B, H: tl.constexpr, C: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr, QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    h = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    mask = (d[:, None] < DN) & (c[None, :] < C)
    w = tl.load(kv_b + (h * (DN + DV) + d[:, None]) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    for b in range(B):
        query = tl.load(q + (b * H + h) * QK + d, mask=d < DN, other=0.0).to(tl.float32)
        row = tl.sum(w * query[:, None], 0)
        tl.store(out + (b * H + h) * C + c, row.to(out.dtype.element_ty), mask=c < C)


@triton.jit
def _merge_project_kernel(
    parts, weights, kv_b, out, H: tl.constexpr, C: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, SPLITS)
    weight = tl.load(weights + (b * SPLITS + i) * H + h)
    highest = tl.max(weight, 0)
    total = tl.sum(tl.exp2(weight - highest), 0)
    c = tl.arange(0, BLOCK_C)
    latent = tl.zeros((BLOCK_C,), tl.float32)
    for split in tl.static_range(SPLITS):
        row = (b * SPLITS + split) * H + h
        share = tl.exp2(tl.load(weights + row) - highest) / total
        latent += share * tl.load(parts + row * C + c, mask=c < C, other=0.0)
    latent = latent.to(out.dtype.element_ty).to(tl.float32)
    mask = (v[:, None] < DV) & (c[None, :] < C)
    w = tl.load(kv_b + (h * (DN + DV) + DN + v[:, None]) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    projected = tl.sum(w * latent[None, :], 1).to(out.dtype.element_ty)
    tl.store(out + (b * H + h) * DV + v, projected, mask=v < DV)


@kernel_op()
def attend_parts(
    q_latent: Tensor,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One query a sequence over parts of its cached latents; the query's rope happens inside.

    Args:
        q_latent: (num_seqs, num_heads, kv_lora_rank), contiguous.
        q: Not yet rotated, (num_seqs, num_heads, qk_head_dim), contiguous; only its roped part is read.
        cos, sin: Of each sequence's position, (num_seqs, qk_rope_head_dim / 2).
        pages: One layer's cache, (num_pages, page_size, kv_cache_dim), contiguous.
        block_table, seq_lens: See CacheStep. Lengths are at least 1.
        scale: Of the softmax.

    Returns:
        Every part's attention, (num_seqs, parts, num_heads, kv_lora_rank) float32, and the logarithm to base 2 of
        its weight, (num_seqs, parts, num_heads) float32; minus infinity where a part has no keys.
    """
    num_seqs, num_heads, rank = q_latent.shape
    rope_dim = 2 * cos.shape[1]
    assert q_latent.is_contiguous() and q.is_contiguous() and pages.is_contiguous() and block_table.stride(1) == 1
    splits = num_key_splits(num_seqs)
    parts = torch.empty(num_seqs, splits, num_heads, rank, dtype=torch.float32, device=q.device)
    weights = torch.empty(num_seqs, splits, num_heads, dtype=torch.float32, device=q.device)
    _split_kernel[(num_seqs, splits, -(-num_heads // 16))](
        q_latent, q, cos, sin, pages, block_table, seq_lens, parts, weights, scale * 1.4426950408889634,
        block_table.stride(0),
        H=num_heads, C=rank, DN=q.shape[2] - rope_dim, DR=rope_dim, PAGE=pages.shape[1], SPLITS=splits,
        BLOCK_H=16, BLOCK_C=max(16, triton.next_power_of_2(rank)),
        BLOCK_R=max(16, triton.next_power_of_2(rope_dim // 2)), BLOCK_L=32, WIDEN=not q.is_cuda, num_warps=4,
        num_stages=2, **launch_options(q),
    )  # fmt: skip
    return parts, weights


@attend_parts.register_fake
def _(
    q_latent: Tensor, q: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_seqs, num_heads, rank = q_latent.shape
    weights = q.new_empty(num_seqs, num_key_splits(num_seqs), num_heads, dtype=torch.float32)
    return weights.new_empty(*weights.shape, rank), weights


@kernel_op()
def merge_parts(parts: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """The result of attend_parts put together, (num_seqs, num_heads, kv_lora_rank) in the dtype of `like`."""
    num_seqs, splits, num_heads, rank = parts.shape
    out = like.new_empty(num_seqs, num_heads, rank)
    block = min(128, max(16, triton.next_power_of_2(rank)))
    _merge_kernel[(num_seqs, num_heads, -(-rank // block))](
        parts, weights, out, H=num_heads, C=rank, SPLITS=splits, BLOCK_C=block, **launch_options(parts)
    )
    return out


@merge_parts.register_fake
def _(parts: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    return like.new_empty(parts.shape[0], parts.shape[2], parts.shape[3])


@kernel_op()
def absorb_queries(q: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    """Queries of few sequences through the keys' half of kv_b_proj: (B, N, Dn + Dr) to (B, N, C).

    Args:
        q: (B, N, Dn + Dr), contiguous.
        kv_b: (N * (Dn + Dv), C), contiguous.
    """
    (num_seqs, num_heads, head_dim), rank = q.shape, kv_b.shape[1]
    assert q.is_contiguous() and kv_b.is_contiguous()
    out = q.new_empty(num_seqs, num_heads, rank)
    block = min(32, triton.next_power_of_2(rank))
    _absorb_kernel[(num_heads, -(-rank // block))](
        q, kv_b, out, num_seqs, H=num_heads, C=rank, DN=nope_dim, DV=kv_b.shape[0] // num_heads - nope_dim,
        QK=head_dim, BLOCK_D=triton.next_power_of_2(nope_dim), BLOCK_C=block, **launch_options(q),
    )  # fmt: skip
    return out


@absorb_queries.register_fake
def _(q: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], kv_b.shape[1])


@kernel_op()
def merge_and_project(parts: Tensor, weights: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    """merge_parts and the values' half of kv_b_proj in one launch, for few sequences: (B, N, Dv)."""
    num_seqs, splits, num_heads, rank = parts.shape
    v_dim = kv_b.shape[0] // num_heads - nope_dim
    out = kv_b.new_empty(num_seqs, num_heads, v_dim)
    block = min(16, triton.next_power_of_2(v_dim))
    _merge_project_kernel[(num_seqs, num_heads, -(-v_dim // block))](
        parts, weights, kv_b, out, H=num_heads, C=rank, DN=nope_dim, DV=v_dim, SPLITS=splits,
        BLOCK_C=triton.next_power_of_2(rank), BLOCK_V=block, **launch_options(parts),
    )  # fmt: skip
    return out


@merge_and_project.register_fake
def _(parts: Tensor, weights: Tensor, kv_b: Tensor, nope_dim: int) -> Tensor:
    return kv_b.new_empty(parts.shape[0], parts.shape[2], kv_b.shape[0] // parts.shape[2] - nope_dim)
