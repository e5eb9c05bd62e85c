"""RMSNorm against its definition, with its two roundings."""

import pytest
import reference
import torch

from kimi_k25.layers.norm import RMSNorm, rms_norm


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("hidden_size", [1, 24, 257])
def test_equals_the_definition(num_tokens, hidden_size):
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, hidden_size) * 3, torch.randn(hidden_size)

    out = rms_norm(x, weight, 1e-5)

    torch.testing.assert_close(out.double(), reference.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_eps_decides_for_small_rows_and_zeros_stay_zeros():
    x = torch.stack((torch.full((8,), 1e-3), torch.zeros(8)))

    out = rms_norm(x, torch.ones(8), 1e-6)

    torch.testing.assert_close(out[0], torch.full((8,), 0.5**0.5))  # 1e-3 / sqrt(1e-6 + 1e-6)
    assert not out[1].any()


def test_bfloat16_is_rounded_before_the_weight_and_after_it():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).bfloat16() * 40, torch.randn(64).bfloat16()

    out = rms_norm(x, weight, 1e-5)

    normed = reference.rms_norm(x, torch.ones(64), 1e-5).bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, normed * weight)


def test_rows_beyond_half_precision_do_not_overflow():
    x = torch.full((1, 4), 1e15).bfloat16()

    assert torch.equal(rms_norm(x, torch.ones(4).bfloat16(), 1e-5), torch.ones(1, 4).bfloat16())


def test_with_a_residual_the_sum_is_normalised_and_returned_and_the_arguments_stay():
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-5)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    kept = x.clone(), residual.clone()

    out, total = norm(x, residual)

    assert torch.equal(total, x + residual)
    assert torch.equal(out, norm(x + residual))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


def test_gradients_equal_those_in_float64():
    torch.manual_seed(0)
    # Statistics are float32 whatever comes in, so gradcheck's small steps would see nothing.
    x, weight = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))

    found = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), (x, weight))

    normed = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = torch.autograd.grad((normed * exact_weight).square().sum(), (exact_x, exact_weight))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-5)
