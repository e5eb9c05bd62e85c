"""What a step says of its sequences."""

import torch

from kimi_k25.layers.attention_batch import AttentionBatch

CPU = torch.device("cpu")


def test_whole_sequences_without_a_cache():
    batch = AttentionBatch.without_cache([2, 1, 3], device=CPU)

    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6] and batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.num_query_tokens, batch.cache) == (3, 6, None)
    positions = torch.arange(6) + 7
    assert AttentionBatch.without_cache([6], device=CPU, positions=positions).positions is positions
