"""Sampling: the distribution that is drawn from, and its edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_k25.layers.sampling import NOT_FINITE, sample

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def draws(logits, count=4000, **options):
    generator = torch.Generator().manual_seed(0)
    ids = sample(logits.expand(count, -1), generator=generator, **{"temperature": 1.0, "top_p": 1.0} | options)
    return torch.bincount(ids, minlength=logits.shape[1]) / count


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [float("-inf"), -9.0, -5.0]])

    assert sample(logits, temperature=0, top_p=0.5).tolist() == [1, 2]


# Of 4000 draws a frequency of 0.5 has a standard deviation of 0.008: four of them.
def test_frequencies_are_the_softmax():
    torch.testing.assert_close(draws(LOGITS), LOGITS[0].exp(), rtol=0, atol=0.032)


def test_temperature_sharpens_and_flattens():
    torch.testing.assert_close(draws(LOGITS, temperature=0.5), (LOGITS[0] / 0.5).softmax(-1), rtol=0, atol=0.032)
    torch.testing.assert_close(draws(LOGITS, temperature=3.0), (LOGITS[0] / 3.0).softmax(-1), rtol=0, atol=0.032)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.81, 3), (0.99, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    found = draws(LOGITS, top_p=top_p)

    expected = LOGITS[0].exp() * (torch.arange(4) < kept)
    torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.032)


def test_top_p_is_counted_from_the_likeliest_of_each_row_wherever_it_lies():
    logits = torch.stack((LOGITS[0], LOGITS[0].flip(0), LOGITS[0][[1, 0, 2, 3]]))

    assert sample(logits, temperature=1.0, top_p=0.4).tolist() == [0, 3, 1]


def test_a_banned_id_is_never_drawn():
    logits = torch.zeros(4000, 3)
    logits[:, 1] = float("-inf")

    assert set(sample(logits, temperature=1e6, top_p=1.0).tolist()) == {0, 2}


def test_a_generator_makes_draws_repeat():
    logits = torch.zeros(50, 100)

    first, second, other = (
        sample(logits, temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )

    assert torch.equal(first, second) and not torch.equal(first, other)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=8),
    st.floats(0, 1.7e308, exclude_min=True),
    st.floats(0, 1, exclude_min=True),
)
def test_any_temperature_and_top_p_draw_an_allowed_id(values, temperature, top_p):
    logits = torch.tensor([[*values, float("-inf")]])

    (token_id,) = sample(logits, temperature=temperature, top_p=top_p).tolist()

    assert token_id < len(values)


def test_the_coldest_temperature_takes_the_likeliest():
    logits = torch.tensor([[1.0, 1000.0, 999.0, float("-inf")]])

    for temperature in (1e-3, 1e-30, 5e-324):
        assert sample(logits, temperature=temperature, top_p=1.0).tolist() == [1]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_the_others_are_drawn(broken, temperature):
    logits = torch.full((3, 4), float("-inf"))
    logits[0, 2] = logits[1, 1] = logits[2, 3] = 5.0
    logits[1, 2] = broken

    assert sample(logits, temperature=temperature, top_p=0.9).tolist() == [2, NOT_FINITE, 3]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_without_any_allowed_id_is_not_finite(temperature):
    logits = torch.full((1, 4), float("-inf"))

    assert sample(logits, temperature=temperature, top_p=1.0).tolist() == [NOT_FINITE]
