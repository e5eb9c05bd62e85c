"""Rotary embedding: YaRN's frequencies against the formula and the published model's numbers, and the pairs."""

import dataclasses
import math

import pytest
import reference
import torch
from random_models import make_config

from kimi_k25.layers.rope import TextRope, rotate_pairs, yarn_inv_freq

PUBLISHED = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "rope_theta": 50000.0}


def test_published_model_keeps_eight_frequencies_and_stretches_the_last_twelve():
    text = make_config(**PUBLISHED).text_config
    plain = torch.tensor([50000.0 ** (-i / 32) for i in range(32)])

    found = yarn_inv_freq(64, text.rope_theta, text.rope_scaling)

    torch.testing.assert_close(found[:9], plain[:9], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[20:], plain[20:] / 64, rtol=1e-6, atol=0)
    assert ((found[9:20] < plain[9:20]) & (found[9:20] > plain[9:20] / 64)).all()
    ratio = 1 - 4 / 12 * 63 / 64  # Pair 12 lies 4 of 12 steps up the ramp.
    assert found[12] / plain[12] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("dim", [2, 8, 64])
@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 64.0},
        {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "original_max_position_embeddings": 100},
        {"factor": 2.5, "beta_fast": 1.0001, "beta_slow": 1.0},
    ],
)
def test_frequencies_equal_the_formula(dim, scaling):
    raw = {"type": "yarn", "original_max_position_embeddings": 4096, **scaling}
    text = make_config(qk_rope_head_dim=dim, rope_scaling=raw).text_config

    found = yarn_inv_freq(dim, text.rope_theta, text.rope_scaling)

    torch.testing.assert_close(
        found.double(), torch.tensor(reference.inverse_frequencies(text)).double(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.0), (0.707, 1.3)])
def test_length_factor_and_softmax_scale(factors):
    mscale, mscale_all_dim = factors
    raw = {"type": "yarn", "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    text = make_config(rope_scaling=raw | {"original_max_position_embeddings": 4096}).text_config

    cos, sin = TextRope(text)(torch.tensor([5]), torch.float32)

    assert text.softmax_scale == pytest.approx(reference.softmax_scale(text))
    lengths = (cos.square() + sin.square()).sqrt()
    torch.testing.assert_close(lengths, torch.full((1, 4), reference.rope_length(text)), rtol=1e-6, atol=0)


def test_without_scaling_nothing_is_stretched():
    text = make_config(rope_scaling=None).text_config

    cos, sin = TextRope(text)(torch.tensor([0, 3]), torch.float32)

    angles = torch.tensor([3.0 * 50000.0 ** (-i / 4) for i in range(4)])
    assert torch.equal(cos[0], torch.ones(4)) and not sin[0].any()
    torch.testing.assert_close(cos[1], angles.cos())
    torch.testing.assert_close(sin[1], angles.sin())
    assert text.softmax_scale == pytest.approx(24**-0.5)


def test_pairs_are_neighbours_for_any_number_of_heads():
    torch.manual_seed(0)
    x, angles = torch.randn(3, 2, 8), torch.randn(3, 4)

    out = rotate_pairs(x, angles.cos(), angles.sin())

    for token in range(3):
        for head in range(2):
            expected = reference.turn(x[token, head], angles[token].tolist())
            torch.testing.assert_close(out[token, head].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(rotate_pairs(x[:, 0], angles.cos(), angles.sin()), out[:, 0])


def test_products_depend_on_the_distance_alone():
    rope = TextRope(make_config(**PUBLISHED).text_config)
    torch.manual_seed(0)
    q, k = torch.randn(1, 64), torch.randn(1, 64)

    def product(at_q, at_k):
        return (
            rotate_pairs(q, *rope(torch.tensor([at_q]), q.dtype))
            * rotate_pairs(k, *rope(torch.tensor([at_k]), k.dtype))
        ).sum()

    torch.testing.assert_close(product(7, 3), product(1007, 1003), rtol=0, atol=1e-3)
    assert (product(7, 3) - product(7, 4)).abs() > 1e-2


def test_angles_are_computed_in_float32_and_rounded_once():
    rope = TextRope(make_config(**PUBLISHED).text_config).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 255, 257, 262143])

    cos, sin = rope(positions, torch.bfloat16)

    assert rope.inv_freq.dtype == torch.float32
    exact = positions.double()[:, None] * torch.tensor(reference.inverse_frequencies(rope.config)).double()
    # float32 angles of up to 2**18 are off by 2**-6 at most; bfloat16 holds 8 bits.
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=0, atol=0.02)
    torch.testing.assert_close(sin.double(), exact.sin(), rtol=0, atol=0.02)


def test_frequencies_come_back_after_a_build_on_meta():
    text = make_config().text_config
    with torch.device("meta"):
        rope = TextRope(text)
    rope.to_empty(device="cpu").inv_freq.fill_(math.nan)

    rope.refresh_derived()

    assert torch.equal(rope.inv_freq, TextRope(text).inv_freq)
    assert not rope.state_dict()


def test_a_scaling_with_its_ramp_before_the_first_pair():
    text = make_config(rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 3}).text_config
    plain = dataclasses.replace(text, rope_scaling=None)

    stretched = torch.tensor(reference.inverse_frequencies(text))

    torch.testing.assert_close(yarn_inv_freq(8, text.rope_theta, text.rope_scaling), stretched)
    assert stretched[-1] == pytest.approx(reference.inverse_frequencies(plain)[-1] / 8)


def test_the_range_of_the_ramp_is_where_pairs_turn_beta_fast_and_beta_slow_times():
    """Counted, not solved for: the published 8 and 20."""
    scaling = make_config(**PUBLISHED).text_config.rope_scaling

    def turns(pair):
        return scaling.original_max_position_embeddings / (2 * math.pi * 50000.0 ** (2 * pair / 64))

    assert max(pair for pair in range(32) if turns(pair) >= scaling.beta_fast) == 8
    assert min(pair for pair in range(32) if turns(pair) <= scaling.beta_slow) == 20


@pytest.mark.parametrize("convert", [torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double])
def test_no_conversion_changes_a_bit_of_the_frequencies(convert):
    rope = TextRope(make_config(**PUBLISHED).text_config)
    before = rope.inv_freq.clone()

    convert(rope).float()

    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, before)


def test_rotation_keeps_the_norm_of_every_pair():
    torch.manual_seed(0)
    x, positions = torch.randn(4, 3, 8), torch.tensor([0, 1, 4096, 262143])

    out = rotate_pairs(x, *TextRope(make_config().text_config)(positions, x.dtype))

    torch.testing.assert_close(out.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1))
    assert torch.equal(out[0], x[0])
