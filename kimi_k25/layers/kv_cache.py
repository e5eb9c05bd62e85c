"""The paged cache of latents. Knows no attention.

Of every token and layer one vector is kept: the normalised latent, then the roped key shared by all heads
(512 + 64 values in the published model). A page belongs to one sequence at a time; page 0 belongs to none and takes
what padding rows write.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import TextConfig
from .attention_batch import AttentionBatch, CacheStep


@dataclass(slots=True)
class CachedSequence:
    """A sequence's pages, in order, and how many tokens they hold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class CacheFullError(RuntimeError):
    """A step needs more pages than are free, or a sequence more than its share."""


class PagedKVCache:
    """Latents of all layers and the pages that sequences hold.

    Attributes:
        layers: (num_hidden_layers, num_pages, page_size, kv_cache_dim). Zeros, not whatever memory held: attention
            masks unwritten slots by a weight of zero, and zero times NaN is NaN.
        max_pages_per_seq: Most pages of one sequence.

    Args:
        max_seqs, max_seq_len: Sequences that fit at once, and tokens of each; all memory is taken now.
        page_size: Tokens a page.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        max_seqs: int,
        max_seq_len: int,
        page_size: int = 64,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.max_pages_per_seq = -(-max_seq_len // page_size)
        num_pages = 1 + max_seqs * self.max_pages_per_seq
        shape = (config.num_hidden_layers, num_pages, page_size, config.kv_cache_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        self._free_pages = list(range(num_pages - 1, 0, -1))

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one sequence, a whole number of pages."""
        return self.max_pages_per_seq * self.page_size

    def step(self, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> AttentionBatch:
        """Makes room for lengths[i] new tokens behind sequences[i], and describes the step that writes them.

        Raises:
            CacheFullError: Too few pages are free; nothing has changed then.
        """
        ends = [sequence.length + length for sequence, length in zip(sequences, lengths, strict=True)]
        wanted = [-(-end // self.page_size) - len(s.pages) for s, end in zip(sequences, ends, strict=True)]
        if sum(wanted) > len(self._free_pages) or max(ends) > self.max_seq_len:
            raise CacheFullError(
                f"this step needs {sum(wanted)} pages of {self.page_size} tokens and sequences of up to {max(ends)}; "
                f"{len(self._free_pages)} pages are free and a sequence holds at most {self.max_seq_len} tokens; "
                "release finished sequences, or make the cache with a larger max_seqs or max_seq_len"
            )
        positions: list[int] = []
        slots: list[int] = []
        has_prefix = any(sequence.length for sequence in sequences)
        for sequence, end, pages in zip(sequences, ends, wanted, strict=True):
            sequence.pages += [self._free_pages.pop() for _ in range(pages)]
            new = range(sequence.length, end)
            positions += new
            slots += [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in new]
            sequence.length = end

        def on_device(values: Sequence[object], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.layers.device)

        padded_pages = [s.pages + [0] * (self.max_pages_per_seq - len(s.pages)) for s in sequences]
        return AttentionBatch(
            positions=on_device(positions, torch.int64),
            cu_seqlens=on_device([0, *itertools.accumulate(lengths)], torch.int32),
            lengths=lengths,
            cache=CacheStep(
                layers=self.layers,
                slot_mapping=on_device(slots, torch.int64),
                block_table=on_device(padded_pages, torch.int32),
                seq_lens=on_device(ends, torch.int32),
                kv_lens=ends,
                has_prefix=has_prefix,
                is_decode=max(lengths) == 1,
            ),
        )

    def release(self, sequence: CachedSequence) -> None:
        """Gives a sequence's pages back; the sequence is empty afterwards."""
        self._free_pages += reversed(sequence.pages)
        sequence.pages.clear()
        sequence.length = 0


def append_to_cache(pages: Tensor, slot_mapping: Tensor, kv: Tensor) -> None:
    """Writes one layer's new vectors, in place.

    Args:
        pages: (num_pages, page_size, kv_cache_dim).
        slot_mapping: (num_tokens,) int64.
        kv: (num_tokens, kv_cache_dim).
    """
    pages.flatten(0, 1).index_copy_(0, slot_mapping, kv)


def read_cache(pages: Tensor, block_table: Tensor) -> Tensor:
    """One layer's vectors in sequence order, (num_seqs, max_pages_per_seq * page_size, kv_cache_dim)."""
    return pages[block_table.long()].flatten(1, 2)
