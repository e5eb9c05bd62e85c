"""The paged cache: who owns which page, what a step says, and that a refused step changes nothing."""

import copy

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import make_config

from kimi_k25.layers.kv_cache import (
    CachedSequence,
    CacheFullError,
    PagedKVCache,
    append_to_cache,
    read_cache,
)

CONFIG = make_config().text_config
CPU = torch.device("cpu")


def make_cache(*, max_seqs=3, max_seq_len=10, page_size=4, dtype=torch.float32):
    return PagedKVCache(
        CONFIG, max_seqs=max_seqs, max_seq_len=max_seq_len, page_size=page_size, dtype=dtype, device=CPU
    )


def test_the_cache_holds_a_latent_and_a_roped_key_a_token_in_whole_pages_and_one_page_for_padding():
    cache = make_cache(dtype=torch.bfloat16)

    assert cache.layers.shape == (3, 1 + 3 * 3, 4, 24 + 8)
    assert cache.layers.dtype == torch.bfloat16 and not cache.layers.any()
    assert cache.max_seq_len == 12


def test_a_step_describes_where_each_token_goes():
    cache, first, second = make_cache(), CachedSequence(), CachedSequence()

    batch = cache.step([first, second], [5, 2])

    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7] and batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.num_query_tokens, batch.num_tokens) == (5, 7, None)
    a, b, c = *first.pages, *second.pages
    assert len({0, a, b, c}) == 4
    step = batch.cache
    assert step.slot_mapping.tolist() == [*range(4 * a, 4 * a + 4), 4 * b, 4 * c, 4 * c + 1]
    assert step.block_table.tolist() == [[a, b, 0], [c, 0, 0]] and step.block_table.dtype == torch.int32
    assert step.seq_lens.tolist() == [5, 2] and step.max_kv_len == 5
    assert not step.has_prefix and not step.is_decode
    assert step.layers is cache.layers


def test_the_next_step_goes_on_where_the_last_one_ended():
    cache, first, second = make_cache(), CachedSequence(), CachedSequence()
    cache.step([first, second], [5, 2])
    pages = list(first.pages)

    batch = cache.step([second, first], [1, 1])

    assert batch.positions.tolist() == [2, 5]
    assert batch.cache.slot_mapping.tolist() == [4 * second.pages[0] + 2, 4 * pages[1] + 1]
    assert batch.cache.seq_lens.tolist() == [3, 6]
    assert batch.cache.is_decode and batch.cache.has_prefix
    assert first.pages == pages


def test_a_step_with_one_new_sequence_and_one_old_has_a_prefix():
    cache, old = make_cache(), CachedSequence()
    cache.step([old], [3])

    assert cache.step([CachedSequence(), old], [2, 1]).cache.has_prefix


@pytest.mark.parametrize(("earlier", "lengths"), [([4, 4], [9, 4]), ([4, 9], [4, 4]), ([0, 4], [4, 9])])
def test_a_step_that_does_not_fit_changes_nothing(earlier, lengths):
    cache, sequences = make_cache(max_seqs=1), [CachedSequence(), CachedSequence()]
    for sequence, length in zip(sequences, earlier, strict=True):
        with_room = min(length, 4)
        if with_room:
            cache.step([sequence], [with_room])
    before = copy.deepcopy((sequences, cache._free_pages, cache.layers))

    with pytest.raises(CacheFullError):
        cache.step(sequences, lengths)

    assert sequences == before[0] and cache._free_pages == before[1] and torch.equal(cache.layers, before[2])


def test_the_error_says_what_was_asked_for_and_what_there_is():
    cache = make_cache(max_seqs=1)
    with pytest.raises(CacheFullError) as too_long:
        cache.step([CachedSequence()], [13])
    cache.step([CachedSequence()], [5])
    with pytest.raises(CacheFullError) as too_many:
        cache.step([CachedSequence(), CachedSequence()], [1, 4])

    expecttest.assert_expected_inline(
        f"{too_long.value}\n{too_many.value}".replace("; ", ";\n"),
        """\
this step needs 4 pages of 4 tokens and sequences of up to 13;
3 pages are free and a sequence holds at most 12 tokens;
release finished sequences, or make the cache with a larger max_seqs or max_seq_len
this step needs 2 pages of 4 tokens and sequences of up to 4;
1 pages are free and a sequence holds at most 12 tokens;
release finished sequences, or make the cache with a larger max_seqs or max_seq_len""",
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=30))
def test_no_page_ever_has_two_owners_or_none(events):
    """Sequences grow (length > 0) and go (0) in any order; pages are theirs or free, page 0 is nobody's."""
    cache, sequences = make_cache(max_seqs=2), [CachedSequence() for _ in range(4)]
    for which, length in events:
        if length == 0:
            cache.release(sequences[which])
        else:
            try:
                batch = cache.step([sequences[which]], [length])
            except CacheFullError:
                continue
            slots = batch.cache.slot_mapping.tolist()
            assert {slot // 4 for slot in slots} <= set(sequences[which].pages)

        held = [page for sequence in sequences for page in sequence.pages]
        assert sorted([*held, *cache._free_pages]) == list(range(1, 7))
        assert all(len(s.pages) == -(-s.length // 4) for s in sequences)


def test_released_pages_serve_the_next_sequence_and_a_second_release_does_nothing():
    cache, sequence = make_cache(max_seqs=1), CachedSequence()
    cache.step([sequence], [12])

    cache.release(sequence)
    cache.release(sequence)

    assert sequence == CachedSequence()
    cache.step([sequence], [12])
    assert sorted(sequence.pages) == [1, 2, 3]


def test_what_is_written_is_read_back_in_the_order_of_each_sequence():
    cache, first, second = make_cache(), CachedSequence(), CachedSequence()
    generator = torch.Generator().manual_seed(0)
    written = {0: [], 1: []}
    for lengths in ([3, 1], [4, 1], [1, 6]):
        batch = cache.step([first, second], lengths)
        kv = torch.randn(sum(lengths), 32, generator=generator)
        append_to_cache(cache.layers[1], batch.cache.slot_mapping, kv)
        for which, part in enumerate(kv.split(lengths)):
            written[which].append(part)

    found = read_cache(cache.layers[1], batch.cache.block_table)

    assert found.shape == (2, 12, 32)
    for which, length in enumerate((8, 8)):
        assert torch.equal(found[which, :length], torch.cat(written[which]))
    assert not cache.layers[0].any() and not cache.layers[2].any() and not cache.layers[1, 0].any()
