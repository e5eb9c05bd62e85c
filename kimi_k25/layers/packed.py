"""Sequences packed end to end in one tensor, their padded form, and attention over them. Knows no model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_index(starts: Tensor, length: int, num_rows: int) -> Tensor:
    """Rows of a packed tensor laid out one sequence a line.

    Args:
        starts: First row of each sequence, (num_seqs,).
        length: Of the longest sequence.
        num_rows: Of the packed tensor.

    Returns:
        (num_seqs, length) int64. Past a sequence's end the rows are some other token's, in range, to be masked.
    """
    return (starts.long()[:, None] + torch.arange(length, device=starts.device)).clamp(max=num_rows - 1)


def packed_index(cu_seqlens: Tensor, length: int, num_tokens: int) -> Tensor:
    """The way back: for every packed token, its place in the flattened (num_seqs, length) form, (num_tokens,) int64."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    return sequence * length + tokens - cu_seqlens.long()[sequence]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool, scale: float
) -> Tensor:
    """Attention in which no sequence sees another.

    Sequences are padded to the longest one, so that one call serves them all and gradients flow.

    Args:
        q, k: (num_tokens, num_heads, qk_head_dim).
        v: (num_tokens, num_heads, v_head_dim).
        cu_seqlens: (num_seqs + 1,), first token of each sequence, then num_tokens.
        max_seqlen: Length of the longest.

    Returns:
        (num_tokens, num_heads, v_head_dim).
    """
    num_tokens = q.shape[0]
    if cu_seqlens.shape[0] == 2:
        out = attend(q[None], k[None], v[None], None, causal=causal, scale=scale)
        return out[0]
    num_seqs, place = cu_seqlens.shape[0] - 1, packed_index(cu_seqlens, max_seqlen, num_tokens)

    def pad(x: Tensor) -> Tensor:
        # Every token has one place, so the gradient is a plain gather; that of x[index] would sort and add.
        return x.new_zeros(num_seqs * max_seqlen, *x.shape[1:]).index_copy_(0, place, x).unflatten(0, (num_seqs, -1))

    mask = None
    if not causal:  # A causal token never sees the padding behind it.
        lengths = cu_seqlens.diff()
        mask = (torch.arange(max_seqlen, device=q.device) < lengths[:, None])[:, None, None, :]
    out = attend(pad(q), pad(k), pad(v), mask, causal=causal, scale=scale)
    return out.flatten(0, 1).index_select(0, place)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False, scale: float) -> Tensor:
    """scaled_dot_product_attention on (num_seqs, length, num_heads, head_dim).

    Args:
        mask: True where a query may look, (num_seqs, num_heads, queries, keys) or broadcast to it; None: everywhere.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)
