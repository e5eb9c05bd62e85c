"""What a step says of its sequences, and that it can't be made without their lengths."""

import pytest
import torch

from kimi_k25.layers.attention_batch import AttentionBatch, CacheStep

CPU = torch.device("cpu")
NONE = torch.zeros(0, dtype=torch.int32)


def test_whole_sequences_without_a_cache():
    batch = AttentionBatch.without_cache([2, 1, 3], device=CPU)

    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6] and batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.num_query_tokens, batch.cache) == (3, 6, None)
    positions = torch.arange(6) + 7
    assert AttentionBatch.without_cache([6], device=CPU, positions=positions).positions is positions


def test_a_step_without_lengths_is_refused():
    with pytest.raises(TypeError, match="lengths"):
        AttentionBatch(positions=NONE, cu_seqlens=NONE)
    with pytest.raises(TypeError, match="kv_lens"):
        CacheStep(
            layers=NONE, slot_mapping=NONE, block_table=NONE, seq_lens=NONE, has_prefix=False, is_decode=False
        )


def test_sizes_follow_the_lengths_of_the_step_that_is_held():
    batch = AttentionBatch.without_cache([2, 1, 3], device=CPU)

    batch.lengths = [4]

    assert (batch.max_seqlen, batch.num_query_tokens) == (4, 4)
