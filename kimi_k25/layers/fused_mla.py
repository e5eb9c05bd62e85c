"""MultiHeadLatentAttention with fused kernels: the same function of the same parameters, faster on a Hopper GPU.

Holds the plain module without registering it again, and one derived weight: q_a and kv_a as one product. Suffixes as
in mla.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..graphs import break_point
from .attention_batch import AttentionBatch, CacheStep
from .kv_cache import read_cache
from .mla import LORA_NORM_EPS, MultiHeadLatentAttention
from .mla_decode import absorb_queries, attend_parts, merge_and_project, merge_parts
from .mla_kernels import assemble_prefill, norm_rope_append
from .packed import packed_index
from .skinny_linear import linear

__all__ = ["FusedLatentAttention", "PrefillAttention", "PrefillBuffers", "PrefillRows"]

FEW_SEQS = 16  # Up to here the products over heads cost less in kernels of their own than in cuBLAS.


class PrefillAttention(Protocol):
    """Attention of packed sequences: see flashinfer_ops.RaggedPrefill."""

    def plan(self, batch: AttentionBatch) -> None:
        """Reads a step's lengths, once for all layers."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer's attention of the planned step, into `out`; rows behind the step's tokens are padding."""


class PrefillRows(NamedTuple):
    """One step's views of the buffers: q, k (T, N, Dn + Dr), kv_b (T, N, Dn + Dv), v its last part, out (T, N, Dv)."""

    q: Tensor
    k: Tensor
    kv_b: Tensor
    v: Tensor
    out: Tensor


class PrefillBuffers:
    """What crosses the break around prefill attention, shared by all layers: a graph need not copy it over.

    A step larger than all before gets new buffers; those before stay alive, since captured graphs hold their address.
    """

    def __init__(self, plain: MultiHeadLatentAttention) -> None:
        num_heads = plain.o_proj.weight.shape[1] // plain.v_head_dim
        nope, v = plain.qk_nope_head_dim, plain.v_head_dim
        self._nope, self._like = nope, plain.o_proj.weight
        self._shapes = [(num_heads, width) for width in (nope + plain.qk_rope_head_dim, nope + v, v)]
        self._buffers: list[PrefillRows] = []
        self._rows: PrefillRows | None = None

    def rows(self, num_tokens: int) -> PrefillRows:
        """The same tensors for all layers of a step, at the same address for all steps of that size."""
        if self._rows is None or self._rows.q.shape[0] != num_tokens:
            buffers = next((b for b in self._buffers if b.q.shape[0] >= num_tokens), None)
            if buffers is None:
                buffers = self._allocate(num_tokens)
                self._buffers.append(buffers)
            self._rows = PrefillRows(*(buffer[:num_tokens] for buffer in buffers))
        return self._rows

    def _allocate(self, num_tokens: int) -> PrefillRows:
        qk, kv_b, v = self._shapes
        with torch.inference_mode(False):  # What inference mode makes can't be written outside it.
            q, k, kv, out = (self._like.new_zeros(num_tokens, *shape) for shape in (qk, qk, kv_b, v))
        return PrefillRows(q, k, kv, kv[..., self._nope :], out)


class FusedLatentAttention:
    """One layer's attention.

    Args:
        plain: The module whose parameters these are.
        prefill: Planned by the first layer of a step, used by all.
        buffers: Shared by all layers.
        plans: Whether this is that first layer.
    """

    def __init__(
        self, plain: MultiHeadLatentAttention, *, prefill: PrefillAttention, buffers: PrefillBuffers, plans: bool
    ) -> None:
        self.plain, self.prefill, self.plans, self._buffers = plain, prefill, plans, buffers
        sizes = [plain.q_a_proj.weight.shape[0], plain.kv_a_proj_with_mqa.weight.shape[0]]
        like = plain.q_a_proj.weight
        self.qkv_a = torch.empty(sum(sizes), like.shape[1], dtype=like.dtype, device=like.device)
        self._sizes = sizes
        self.refresh_derived()

    @torch.no_grad()
    def refresh_derived(self) -> None:
        """Copies the two projections into their joined weight, in place."""
        q_a, kv_a = self.qkv_a.split(self._sizes)
        q_a.copy_(self.plain.q_a_proj.weight)
        kv_a.copy_(self.plain.kv_a_proj_with_mqa.weight)

    def __call__(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """Arguments and result are those of MultiHeadLatentAttention.forward."""
        plain, cache = self.plain, batch.cache
        q_a, kv = norm_rope_append(
            linear(hidden_states, self.qkv_a),
            plain.q_a_layernorm.weight,
            plain.kv_a_layernorm.weight,
            *rope,
            LORA_NORM_EPS,
            None if cache is None else cache.layers[plain.layer],
            None if cache is None else cache.slot_mapping,
        )
        if cache is not None and cache.is_decode:
            out = self.decode(linear(q_a, plain.q_b_proj.weight), rope, cache)
        else:
            out = self._prefill(q_a, kv, rope, batch)
        return linear(out.flatten(1), plain.o_proj.weight)

    def _prefill(self, q_a: Tensor, kv: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        plain, rows = self.plain, self._buffers.rows(q_a.shape[0])
        torch.mm(q_a, plain.q_b_proj.weight.T, out=rows.q.flatten(1))
        torch.mm(kv[:, : plain.kv_a_layernorm.weight.shape[0]], plain.kv_b_proj.weight.T, out=rows.kv_b.flatten(1))
        assemble_prefill(rows.q, rows.kv_b, kv, *rope, rows.k)
        ragged_attention(self, rows.q, rows.k, rows.v, batch, rows.out)
        return rows.out

    def decode(self, q: Tensor, rope: tuple[Tensor, Tensor], cache: CacheStep) -> Tensor:
        """One new token a sequence: (B, N * (Dn + Dr)) to (B, N, Dv)."""
        plain, kv_b, num_seqs = self.plain, self.plain.kv_b_proj.weight, q.shape[0]
        nope = plain.qk_nope_head_dim
        w = kv_b.unflatten(0, (-1, nope + plain.v_head_dim))  # (N, Dn + Dv, C)
        w_k, w_v = w.split((nope, plain.v_head_dim), 1)
        q = q.unflatten(-1, (w.shape[0], -1))
        if num_seqs <= FEW_SEQS:
            q_latent = absorb_queries(q, kv_b, nope)
        else:  # A product over heads, written straight in the order (B, N, C).
            q_latent = q.new_empty(num_seqs, w.shape[0], w.shape[2])
            torch.bmm(q[..., :nope].transpose(0, 1), w_k, out=q_latent.transpose(0, 1))
        pages = cache.layers[plain.layer]
        parts, weights = attend_parts(
            q_latent, q, *rope, pages, cache.block_table, cache.seq_lens, plain.softmax_scale
        )
        if num_seqs <= FEW_SEQS:
            return merge_and_project(parts, weights, kv_b, nope)
        out = q.new_empty(num_seqs, w.shape[0], plain.v_head_dim)
        out_latent = merge_parts(parts, weights, q)
        torch.bmm(out_latent.transpose(0, 1), w_v.transpose(1, 2), out=out.transpose(0, 1))
        return out


@break_point
def ragged_attention(
    attention: FusedLatentAttention, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, out: Tensor
) -> None:
    """Causal attention of any number of new tokens a sequence, over earlier ones in the cache too.

    Args:
        q, k: (T, N, Dn + Dr).
        v: (T, N, Dv).
        out: (T, N, Dv), written up to the step's last real token.
    """
    cache = batch.cache
    if attention.plans:
        attention.prefill.plan(batch)
    if cache is not None and cache.has_prefix:
        # The new tokens are in the cache by now: read whole sequences back, end to end, and decompress them.
        max_kv_len = cache.max_kv_len
        kv = read_cache(cache.layers[attention.plain.layer], cache.block_table)[:, :max_kv_len].flatten(0, 1)
        if cache.seq_lens.shape[0] > 1:
            ends = torch.cat((cache.seq_lens.new_zeros(1), cache.seq_lens.cumsum(0, dtype=torch.int32)))
            kv = kv.index_select(0, packed_index(ends, max_kv_len, sum(cache.kv_lens)))
        k, v = attention.plain.decompress(kv)
    attention.prefill.run(q, k, v, out)
