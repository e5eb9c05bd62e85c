import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k25.graphs import BucketPolicy

maxima = st.integers(1, 40_000)
policies = st.one_of(
    maxima.map(BucketPolicy.prefill),
    st.integers(1, 1024).map(BucketPolicy.decode),
    st.builds(lambda sizes, top: BucketPolicy.of(sizes, maximum=top), st.lists(st.integers(-5, 3000)), maxima),
)


@given(policies)
def test_sizes_are_positive_sorted_and_unique(policy):
    assert policy.sizes == tuple(sorted(set(policy.sizes)))
    assert policy.sizes[0] >= 1


@given(maxima)
def test_prefill_ladder_ends_with_the_maximum(maximum):
    assert BucketPolicy.prefill(maximum).sizes[-1] == maximum


@given(st.lists(st.integers(-5, 3000)), maxima)
def test_of_prunes_what_is_over_the_maximum_and_appends_it(sizes, maximum):
    policy = BucketPolicy.of(sizes, maximum=maximum)

    assert set(policy.sizes) == {size for size in sizes if 1 <= size <= maximum} | {maximum}


@given(policies, st.integers(1, 50_000))
def test_select_is_the_smallest_bucket_that_holds_all_tokens(policy, num_tokens):
    selection = policy.select(num_tokens)

    holding = [size for size in policy.sizes if size >= num_tokens]
    if selection.bucket is None:
        assert not holding or (holding[0] > 2 * num_tokens and holding[0] > num_tokens + 3)
        assert selection.reason
    else:
        assert selection.bucket == holding[0]
        assert not selection.reason


@given(policies, st.integers(1, 50_000))
def test_padding_is_at_most_twice_or_three_rows(policy, num_tokens):
    bucket = policy.select(num_tokens).bucket

    assert bucket is None or bucket <= 2 * num_tokens or bucket - num_tokens <= 3


@given(maxima, st.data())
def test_prefill_ladder_has_no_hole(maximum, data):
    num_tokens = data.draw(st.integers(1, maximum))

    assert BucketPolicy.prefill(maximum).select(num_tokens).bucket is not None


@given(st.integers(1, 1024), st.data())
def test_decode_ladder_has_no_hole(maximum, data):
    num_seqs = data.draw(st.integers(1, maximum))

    assert BucketPolicy.decode(maximum).select(num_seqs).bucket is not None


def test_every_bucket_is_reached_by_its_own_size():
    policy = BucketPolicy.prefill(5000)

    assert [policy.select(size).bucket for size in policy.sizes] == list(policy.sizes)


def test_ladder_up_to_2048_has_the_42_sizes_of_sglang():
    sizes = BucketPolicy.prefill(2048).sizes

    assert len(sizes) == 42
    assert sizes[:9] == (4, 8, 12, 16, 20, 24, 28, 32, 48)


def test_ladder_doubles_past_4096_and_ends_at_the_maximum():
    assert BucketPolicy.prefill(20_000).sizes[-4:] == (4096, 8192, 16384, 20_000)


def test_miss_over_the_maximum_names_it():
    assert BucketPolicy.of((4, 8)).select(9).reason == "more rows than the largest bucket (8)"


def test_miss_in_a_hole_names_the_bucket():
    assert "bucket 1024 would pad" in BucketPolicy.of((4, 1024)).select(5).reason


def test_zero_tokens_are_refused():
    with pytest.raises(ValueError, match="at least one token, got 0"):
        BucketPolicy.of((4,)).select(0)


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_malformed_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="positive, sorted and unique"):
        BucketPolicy(sizes)
