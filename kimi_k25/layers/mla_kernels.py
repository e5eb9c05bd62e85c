"""Triton kernels around latent attention: norms with rope and cache write, and keys put together for prefill.

Each is a torch operator, so that a graph tape sees it; layers/mla.py defines what they compute. A kernel rounds to
the tensors' dtype where the plain code does, except inside the rotation, which stays in float32 here.
Triton decides when a kernel is defined whether it is compiled or interpreted (TRITON_INTERPRET=1, for CPUs).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin, launch_options
from .operators import kernel_op

__all__ = ["assemble_prefill", "norm_rope_append"]


@triton.jit
def _norm(source, weight, target, size, eps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < size, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    w = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    return (w * x.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _norm_rope_append_kernel(
    qkv_a, q_weight, kv_weight, cos, sin, slots, q_out, kv_out, pages, row_stride, eps,
    Q: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, HAS_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = qkv_a + row * row_stride
    if tl.program_id(1) == 0:
        i_q = tl.arange(0, BLOCK_Q)
        tl.store(q_out + row * Q + i_q, _norm(source, q_weight, q_out, Q, eps, BLOCK_Q), mask=i_q < Q)
    else:
        i = tl.arange(0, BLOCK_C)
        latent = _norm(source + Q, kv_weight, kv_out, C, eps, BLOCK_C)
        j = tl.arange(0, BLOCK_R)
        half = R // 2
        even = tl.load(source + Q + C + 2 * j, mask=j < half, other=0.0).to(tl.float32)
        odd = tl.load(source + Q + C + 2 * j + 1, mask=j < half, other=0.0).to(tl.float32)
        c = tl.load(cos + row * half + j, mask=j < half, other=0.0).to(tl.float32)
        s = tl.load(sin + row * half + j, mask=j < half, other=0.0).to(tl.float32)
        dtype = kv_out.dtype.element_ty
        first, second = (even * c - odd * s).to(dtype), (odd * c + even * s).to(dtype)
        target = kv_out + row * (C + R)
        tl.store(target + i, latent, mask=i < C)
        tl.store(target + C + 2 * j, first, mask=j < half)
        tl.store(target + C + 2 * j + 1, second, mask=j < half)
        if HAS_CACHE:
            cached = pages + tl.load(slots + row).to(tl.int64) * (C + R)
            tl.store(cached + i, latent, mask=i < C)
            tl.store(cached + C + 2 * j, first, mask=j < half)
            tl.store(cached + C + 2 * j + 1, second, mask=j < half)


@kernel_op(mutates_args=("pages",))
def norm_rope_append(
    qkv_a: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    pages: Tensor | None,
    slot_mapping: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The norms of query and latent, the key's rope and the cache write, in one launch.

    Args:
        qkv_a: Output of q_a_proj, then of kv_a_proj_with_mqa, (num_tokens, q_lora_rank + kv_cache_dim).
        q_weight, kv_weight: Of the two norms, (q_lora_rank,) and (kv_lora_rank,).
        cos, sin: (num_tokens, qk_rope_head_dim / 2).
        pages: One layer's cache, (num_pages, page_size, kv_cache_dim), contiguous, written in place; None: no cache.
        slot_mapping: (num_tokens,); given with pages.

    Returns:
        The query's normalised latent (num_tokens, q_lora_rank), and what was cached (num_tokens, kv_cache_dim).
    """
    num_tokens, q_rank, kv_rank = qkv_a.shape[0], q_weight.shape[0], kv_weight.shape[0]
    rope_dim = qkv_a.shape[1] - q_rank - kv_rank
    assert pages is None or (pages.is_contiguous() and pages.shape[-1] == kv_rank + rope_dim)
    q = qkv_a.new_empty(num_tokens, q_rank)
    kv = qkv_a.new_empty(num_tokens, kv_rank + rope_dim)
    _norm_rope_append_kernel[(num_tokens, 2)](
        qkv_a, q_weight, kv_weight, cos, sin,
        kv if slot_mapping is None else slot_mapping, q, kv, kv if pages is None else pages, qkv_a.stride(0), eps,
        Q=q_rank, C=kv_rank, R=rope_dim,
        BLOCK_Q=triton.next_power_of_2(q_rank), BLOCK_C=triton.next_power_of_2(kv_rank),
        BLOCK_R=triton.next_power_of_2(rope_dim // 2), HAS_CACHE=pages is not None, **launch_options(qkv_a),
    )  # fmt: skip
    return q, kv


@norm_rope_append.register_fake
def _(
    qkv_a: Tensor, q_weight: Tensor, kv_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    pages: Tensor | None, slot_mapping: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_rank = q_weight.shape[0]
    return qkv_a.new_empty(qkv_a.shape[0], q_rank), qkv_a.new_empty(qkv_a.shape[0], qkv_a.shape[1] - q_rank)


@triton.jit
def _assemble_prefill_kernel(
    q, kv_b, kv, cos, sin, k,
    H: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)[:, None]
    j = tl.arange(0, BLOCK_R)[None, :]
    half = DR // 2
    mask = (h < H) & (j < half)
    dtype = k.dtype.element_ty
    q_pe = q + (row * H + h) * (DN + DR) + DN + 2 * j
    even = tl.load(q_pe, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(q_pe + 1, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + j, mask=j < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + j, mask=j < half, other=0.0).to(tl.float32)
    tl.store(q_pe, (even * c - odd * s).to(dtype), mask=mask)
    tl.store(q_pe + 1, (odd * c + even * s).to(dtype), mask=mask)

    i = tl.arange(0, BLOCK_N)[None, :]
    mask = (h < H) & (i < DN)
    key = k + (row * H + h) * (DN + DR)
    tl.store(key + i, tl.load(kv_b + (row * H + h) * (DN + DV) + i, mask=mask, other=0.0), mask=mask)
    r = tl.arange(0, 2 * BLOCK_R)[None, :]
    k_pe = tl.load(kv + row * (C + DR) + C + r, mask=r < DR, other=0.0)
    tl.store(key + DN + r, tl.broadcast_to(k_pe, (BLOCK_H, 2 * BLOCK_R)), mask=(h < H) & (r < DR))


@kernel_op(mutates_args=("q", "k"))
def assemble_prefill(q: Tensor, kv_b: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, k: Tensor) -> None:
    """Rotates the queries in place and writes every head's key.

    Args:
        q: (num_tokens, num_heads, qk_head_dim), contiguous; its last qk_rope_head_dim values are rotated.
        kv_b: Output of kv_b_proj, (num_tokens, num_heads, qk_nope_head_dim + v_head_dim), contiguous.
        kv: From norm_rope_append: the key at its end is rotated already.
        cos, sin: (num_tokens, qk_rope_head_dim / 2).
        k: (num_tokens, num_heads, qk_head_dim), contiguous, written.
    """
    num_tokens, num_heads, head_dim = q.shape
    rope_dim = 2 * cos.shape[1]
    nope_dim = head_dim - rope_dim
    assert q.is_contiguous() and kv_b.is_contiguous() and kv.is_contiguous() and k.is_contiguous()
    _assemble_prefill_kernel[(num_tokens,)](
        q, kv_b, kv, cos, sin, k,
        H=num_heads, DN=nope_dim, DR=rope_dim, DV=kv_b.shape[2] - nope_dim, C=kv.shape[1] - rope_dim,
        BLOCK_H=triton.next_power_of_2(num_heads), BLOCK_N=triton.next_power_of_2(nope_dim),
        BLOCK_R=triton.next_power_of_2(rope_dim // 2), **launch_options(q),
    )  # fmt: skip


@assemble_prefill.register_fake
def _(q: Tensor, kv_b: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, k: Tensor) -> None:
    return None
