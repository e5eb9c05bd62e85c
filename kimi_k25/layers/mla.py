"""Multi-head latent attention: prefill with decompressed keys and values, decode in the latent space.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Knows no layer stack and no text.

Suffixes: T tokens of this step, B sequences, L cached tokens, N heads held here, C kv_lora_rank, Dn qk_nope_head_dim,
Dr qk_rope_head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import TextConfig
from ..graphs import break_point
from .attention_batch import AttentionBatch, CacheStep
from .kv_cache import append_to_cache, read_cache
from .norm import RMSNorm
from .packed import attend, packed_attention, packed_index, padded_index
from .parallel import WHOLE, ParallelPlan
from .rope import rotate_pairs

LORA_NORM_EPS = 1e-6  # The published model's norms inside MLA keep their class default, not rms_norm_eps.


class MultiHeadLatentAttention(nn.Module):
    """Attention whose cache is one latent and one roped key a token."""

    def __init__(self, config: TextConfig, layer: int, plan: ParallelPlan = WHOLE) -> None:
        """
        Args:
            layer: Which of the cache's layers is this one's.
            plan: Gives this rank its heads; what forward returns is then a part of the sum over ranks.
        """
        super().__init__()
        self.layer = layer
        c, heads = config, config.num_attention_heads // plan.tp
        self.qk_nope_head_dim, self.qk_rope_head_dim = c.qk_nope_head_dim, c.qk_rope_head_dim
        self.v_head_dim = c.v_head_dim
        self.softmax_scale = c.softmax_scale
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, LORA_NORM_EPS)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_cache_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LORA_NORM_EPS)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """Appends the step's tokens to the cache, if there is one, and attends.

        Args:
            hidden_states: (num_tokens, hidden_size).
            rope: cos and sin of the step's positions, each (num_tokens, qk_rope_head_dim / 2).

        Returns:
            (num_tokens, hidden_size).
        """
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_nope, q_pe = q.unflatten(-1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim)).split(
            (self.qk_nope_head_dim, self.qk_rope_head_dim), -1
        )
        q_pe = rotate_pairs(q_pe, *rope)  # (T, N, Dr)
        latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split(
            (self.kv_a_layernorm.weight.shape[0], self.qk_rope_head_dim), -1
        )
        latent = self.kv_a_layernorm(latent)
        kv = torch.cat((latent, rotate_pairs(k_pe, *rope)), -1)  # (T, C + Dr)
        if batch.cache is not None:
            append_to_cache(batch.cache.layers[self.layer], batch.cache.slot_mapping, kv)
        if batch.cache is not None and batch.cache.is_decode:
            out = self.decode(q_nope, q_pe, batch.cache)
        else:
            q = torch.cat((q_nope, q_pe), -1)
            k, v = self.decompress(kv)
            # Zeros: padding rows go on to the next layer's page 0, which later steps weigh by zero, and 0 * NaN is NaN.
            out = v.new_zeros(q.shape[0], q.shape[1], self.v_head_dim)
            prefill_attention(self, q, k, v, batch, out)
        return self.o_proj(out.flatten(1))

    def decompress(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head from the cached vectors: (..., C + Dr) to (..., N, Dn + Dr), (..., N, Dv)."""
        latent, k_pe = kv.split((kv.shape[-1] - self.qk_rope_head_dim, self.qk_rope_head_dim), -1)
        k_nope, v = (
            self.kv_b_proj(latent)
            .unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
            .split((self.qk_nope_head_dim, self.v_head_dim), -1)
        )
        k_pe = k_pe.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)  # One key shared by all heads.
        return torch.cat((k_nope, k_pe), -1), v

    def decode(self, q_nope: Tensor, q_pe: Tensor, cache: CacheStep) -> Tensor:
        """One new token a sequence, with kv_b_proj absorbed into the query and the output: (B, N, Dv)."""
        w = self.kv_b_proj.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))  # (N, Dn + Dv, C)
        w_k, w_v = w.split((self.qk_nope_head_dim, self.v_head_dim), 1)
        q_latent = torch.einsum("bnd,ndc->bnc", q_nope, w_k)
        out_latent = latent_attention(q_latent, q_pe, cache, self.layer, self.softmax_scale)
        return torch.einsum("bnc,ndc->bnd", out_latent, w_v)


def latent_attention(q_latent: Tensor, q_pe: Tensor, cache: CacheStep, layer: int, scale: float) -> Tensor:
    """Attention of one query a sequence over cached latents, all shapes static.

    Args:
        q_latent, q_pe: (B, N, C) and (B, N, Dr).

    Returns:
        (B, N, C).
    """
    kv = read_cache(cache.layers[layer], cache.block_table)  # (B, L, C + Dr)
    scores = torch.einsum("bnd,bld->bnl", torch.cat((q_latent, q_pe), -1), kv).float() * scale
    visible = torch.arange(kv.shape[1], device=kv.device) < cache.seq_lens[:, None]
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).to(kv.dtype)
    return torch.einsum("bnl,blc->bnc", weights, kv[..., : q_latent.shape[-1]])


@break_point
def prefill_attention(
    attention: MultiHeadLatentAttention, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, out: Tensor
) -> None:
    """Causal attention of any number of new tokens a sequence, over earlier ones in the cache too.

    Args:
        q, k: (T, N, Dn + Dr).
        v: (T, N, Dv).
        out: (T, N, Dv), written up to the step's last real token.
    """
    n, cache, scale = batch.num_query_tokens, batch.cache, attention.softmax_scale
    if cache is None or not cache.has_prefix:
        out[:n] = packed_attention(q[:n], k[:n], v[:n], batch.cu_seqlens, batch.max_seqlen, causal=True, scale=scale)
        return
    # The new tokens are in the cache by now: read whole sequences back and decompress them.
    max_seqlen, max_kv_len = batch.max_seqlen, cache.max_kv_len
    kv = read_cache(cache.layers[attention.layer], cache.block_table)[:, :max_kv_len]
    k, v = attention.decompress(kv)  # (B, L, N, ...)
    index = padded_index(batch.cu_seqlens[:-1], max_seqlen, n)  # (B, max_seqlen)
    first = cache.seq_lens - batch.cu_seqlens.diff()
    place = first[:, None] + torch.arange(max_seqlen, device=q.device)
    visible = torch.arange(max_kv_len, device=q.device) <= place[:, :, None]  # (B, max_seqlen, L)
    padded = attend(q[index], k, v, visible[:, None], scale=scale)
    out[:n] = padded.flatten(0, 1)[packed_index(batch.cu_seqlens, max_seqlen, n)]
