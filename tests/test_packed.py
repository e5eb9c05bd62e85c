"""Packed attention: every sequence by itself, whatever lies beside it."""

import itertools

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_k25.layers.packed import attend, packed_attention, packed_index, padded_index

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make_qkv(lengths, *, heads=2, qk_dim=6, v_dim=5):
    generator = torch.Generator().manual_seed(sum(lengths))
    return (torch.randn(sum(lengths), heads, dim, generator=generator) for dim in (qk_dim, qk_dim, v_dim))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[1], [7], [1, 1, 1], [3, 17, 1, 5], [2, 2]])
def test_equals_attention_token_by_token(lengths, causal):
    q, k, v = make_qkv(lengths)

    out = packed_attention(q, k, v, bounds(lengths), max(lengths), causal=causal, scale=0.3)

    for start, end in itertools.pairwise(bounds(lengths).tolist()):
        for t in range(start, end):
            seen = slice(start, t + 1 if causal else end)
            for head in range(2):
                expected = reference.attend(q[t, head].double(), k[seen, head].double(), v[seen, head].double(), 0.3)
                torch.testing.assert_close(out[t, head].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_neighbour_changes_not_one_bit(causal):
    lengths = [3, 9, 4]
    q, k, v = make_qkv(lengths)
    before = packed_attention(q, k, v, bounds(lengths), 9, causal=causal, scale=0.3)

    q[3:12], k[3:12], v[3:12] = 100.0, -100.0, 1e30

    after = packed_attention(q, k, v, bounds(lengths), 9, causal=causal, scale=0.3)
    assert torch.equal(before[:3], after[:3]) and torch.equal(before[12:], after[12:])


@given(LENGTHS)
def test_the_two_indices_are_inverse(lengths):
    cu_seqlens, num_tokens, longest = bounds(lengths), sum(lengths), max(lengths)

    padded = padded_index(cu_seqlens[:-1], longest, num_tokens)
    back = packed_index(cu_seqlens, longest, num_tokens)

    assert padded.shape == (len(lengths), longest)
    assert padded.min() >= 0 and padded.max() < num_tokens
    assert torch.equal(padded.flatten()[back], torch.arange(num_tokens))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_each_sequence_alone(causal):
    lengths = [3, 1, 4]
    q, k, v = (x.double().requires_grad_() for x in make_qkv(lengths))
    cu_seqlens = bounds(lengths)

    def packed(q, k, v):
        return packed_attention(q, k, v, cu_seqlens, 4, causal=causal, scale=0.3)

    assert torch.autograd.gradcheck(packed, (q, k, v))
    grads = torch.autograd.grad(packed(q, k, v).square().sum(), (q, k, v))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        alone = [x[None, start:end] for x in (q, k, v)]
        out = attend(*alone, None, causal=causal, scale=0.3)
        for whole, part in zip(grads, torch.autograd.grad(out.square().sum(), alone), strict=True):
            torch.testing.assert_close(whole[start:end], part[0])


@pytest.mark.parametrize("causal", [True, False])
def test_long_and_short_sequences_together_equal_each_alone(causal):
    lengths = [257, 1, 3, 17]
    q, k, v = make_qkv(lengths)

    out = packed_attention(q, k, v, bounds(lengths), 257, causal=causal, scale=0.3)

    expected = []
    for start, end in itertools.pairwise(bounds(lengths).tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k[start:end].double()) * 0.3
        if causal:
            scores = scores.masked_fill(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end].double()))
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=1e-5)
