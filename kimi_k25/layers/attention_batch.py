"""One step as attention sees it: packed sequences with their places in the cache. Knows no attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionBatch", "CacheStep"]


@dataclass(slots=True, kw_only=True)
class CacheStep:
    """What one step does with the cache.

    Attributes:
        layers: The cache itself, (num_hidden_layers, num_pages, page_size, kv_cache_dim), appended to in place.
        slot_mapping: Slot of each new token, (num_tokens,) int64.
        block_table: Pages of each sequence in order, then page 0, (num_seqs, max_pages_per_seq) int32.
        seq_lens: Cached tokens of each sequence after this step, (num_seqs,) int32.
        kv_lens: The same as the host knows them.
        has_prefix: Some sequence attends to tokens of an earlier step.
        is_decode: Every sequence has exactly one new token.
    """

    layers: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_lens: Sequence[int]
    has_prefix: bool
    is_decode: bool

    @property
    def max_kv_len(self) -> int:
        """Most cached tokens of any sequence."""
        return max(self.kv_lens)


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """One step: which tokens form which sequence, and where their cache lies.

    Tensors may have more rows than `num_query_tokens`; the rows behind are padding. Attention gets the object by
    reference, so that the eager attention between captured graphs finds the current step in it.

    Attributes:
        positions: (num_tokens,) int64.
        cu_seqlens: First new token of each sequence, then their sum, (num_seqs + 1,) int32.
        lengths: New tokens of each sequence as the host knows them, so that a plan need not wait for the device.
        num_tokens: New tokens in all, on the device, 0-d; None if no row is padding.
        cache: None for whole sequences of which nothing is kept.
    """

    positions: Tensor
    cu_seqlens: Tensor
    lengths: Sequence[int]
    num_tokens: Tensor | None = None
    cache: CacheStep | None = None

    @classmethod
    def without_cache(
        cls, lengths: Sequence[int], *, device: torch.device, positions: Tensor | None = None
    ) -> AttentionBatch:
        """Whole sequences of the given lengths, of which nothing is kept."""
        # non_blocking: the host does not wait until the device has done all that came before.
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if positions is None:
            positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        return cls(
            positions=positions,
            cu_seqlens=cu_seqlens.to(device, non_blocking=True),
            lengths=lengths,
        )

    @property
    def max_seqlen(self) -> int:
        """Most new tokens of any sequence."""
        return max(self.lengths)

    @property
    def num_query_tokens(self) -> int:
        """New tokens in all, as the host knows them."""
        return sum(self.lengths)
