"""Mixture of experts: who is chosen, what is summed, and which rows no expert may see."""

import itertools

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_models import make_config, randomize
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k25.config import ConfigError
from kimi_k25.layers.int4 import dequantize_int4
from kimi_k25.layers.mlp import SwiGLU
from kimi_k25.layers.moe import Int4RoutedExperts, MixtureOfExperts, RoutedExperts, Router, sort_by_expert

SHAPES = {
    "tiny": {},
    "groups": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "one of three groups": {"n_routed_experts": 9, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 2},
    "every group": {"n_routed_experts": 8, "n_group": 2, "topk_group": 2},
    "no shared expert": {"n_shared_experts": 0, "num_experts_per_tok": 1},
    "two shared experts": {"n_shared_experts": 2, "num_experts_per_tok": 8},
    "weights as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
}


def make_x(num_tokens, seed=0):
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(seed))


def make_moe(shape=None, *, int4=False, seed=0):
    config = make_config(int4=int4, **(shape or {})).text_config
    return randomize(MixtureOfExperts(config, group_size=32 if int4 else None), seed).eval(), config


@torch.no_grad()
def run(module, *args):
    return module(*args)


# -- router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_router_chooses_and_weighs_as_defined(shape):
    moe, config = make_moe(shape)
    x = make_x(40)

    weights, ids = run(moe.gate, x)

    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    expected = reference.route(moe.gate, config, x)
    found = [dict(zip(i, w, strict=True)) for i, w in zip(ids.tolist(), weights.tolist(), strict=True)]
    assert [set(f) for f in found] == [set(e) for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert f == pytest.approx(e, rel=1e-5)


def test_excluded_groups_lose_even_to_negative_scores():
    config = make_config(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2).text_config
    gate = Router(config)
    gate.weight.data.zero_()
    gate.e_score_correction_bias.copy_(torch.tensor([-5.0, -6.0, -4.0, -9.0]))  # Best two: -11 against -13.

    _, ids = run(gate, make_x(3))

    assert [sorted(row) for row in ids.tolist()] == [[0, 1]] * 3


def test_the_bias_chooses_and_does_not_weigh():
    config = make_config(n_routed_experts=4, num_experts_per_tok=1, norm_topk_prob=False).text_config
    gate = Router(config)
    gate.weight.data.zero_()
    gate.e_score_correction_bias[2] = 0.01

    weights, ids = run(gate, make_x(2))

    assert ids.tolist() == [[2], [2]]
    torch.testing.assert_close(weights, torch.full((2, 1), 0.5 * 2.827))


def test_the_bias_stays_float32_in_a_bfloat16_model_and_keeps_its_bits():
    moe, _ = make_moe()
    before = moe.gate.e_score_correction_bias.clone()
    assert not torch.equal(before, before.bfloat16().float())

    moe.to(torch.bfloat16)

    assert moe.gate.weight.dtype == torch.bfloat16
    assert moe.gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(moe.gate.e_score_correction_bias, before)
    assert moe.bfloat16().half().float().gate.e_score_correction_bias.dtype == torch.float32
    assert "gate.e_score_correction_bias" in moe.state_dict()


def test_scores_are_float32_in_a_bfloat16_model():
    moe, config = make_moe()
    moe.to(torch.bfloat16)
    x = make_x(40).bfloat16()

    weights, ids = run(moe.gate, x)

    assert weights.dtype == torch.float32
    expected = reference.route(moe.gate, config, x)
    for i, w, e in zip(ids.tolist(), weights.tolist(), expected, strict=True):
        assert dict(zip(i, w, strict=True)) == pytest.approx(e, rel=1e-5)


# -- sorting ------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=9))
def test_sorting_is_stable_and_offsets_are_ends(rows):
    """Id 5 is none of the five experts: padding."""
    topk_ids = torch.tensor(rows)

    order, offsets = sort_by_expert(topk_ids, 5)

    flat = topk_ids.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: flat[pair])
    assert offsets.tolist() == list(itertools.accumulate(flat.count(e) for e in range(5)))
    assert offsets.dtype == torch.int32


# -- experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("ends", [[1, 2, 3], [0, 7, 7], [0, 0, 7], [7, 7, 7], [2, 3, 7]])
def test_experts_take_their_own_rows(ends, int4):
    experts = Int4RoutedExperts(3, 64, 96, 32) if int4 else RoutedExperts(3, 64, 96)
    randomize(experts)
    x = make_x(7)

    out = run(experts, x, torch.tensor(ends, dtype=torch.int32))

    assert out.shape == x.shape
    for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
        for row in range(a, b):
            expected = reference.swiglu(x[row], *reference.expert_matrices(experts, e))
            torch.testing.assert_close(out[row].double(), expected.detach(), rtol=1e-4, atol=2e-5)


def test_int4_experts_equal_dense_experts_with_the_dequantised_weights_bit_for_bit():
    packed, _ = make_moe(int4=True)
    dense, _ = make_moe()
    dense.load_state_dict({k: v for k, v in packed.state_dict().items() if not k.startswith("experts.")}, strict=False)
    for name in ("gate_up_proj", "down_proj"):
        weights = dequantize_int4(getattr(packed.experts, f"{name}_packed"), getattr(packed.experts, f"{name}_scale"))
        getattr(dense.experts, name).data.copy_(weights)
    x = make_x(33)

    torch.testing.assert_close(run(packed, x), run(dense, x), rtol=1e-6, atol=1e-6)
    x = x.bfloat16()
    found, expected = run(packed.to(torch.bfloat16), x), run(dense.to(torch.bfloat16), x)
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=8e-3)  # One rounding of the last bit.


def test_int4_scales_stay_bfloat16_and_words_int32():
    moe, _ = make_moe(int4=True)
    before = {name: t.clone() for name, t in moe.experts.state_dict().items()}

    moe.to(torch.float32).half().to(torch.float64).float()

    assert {t.dtype for n, t in moe.experts.state_dict().items() if n.endswith("scale")} == {torch.bfloat16}
    assert {t.dtype for n, t in moe.experts.state_dict().items() if n.endswith("packed")} == {torch.int32}
    assert all(torch.equal(t, before[name]) for name, t in moe.experts.state_dict().items())


# -- layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_equals_the_definition(shape, num_tokens, int4):
    moe, config = make_moe(shape, int4=int4)
    x = make_x(num_tokens)

    out = run(moe, x)

    torch.testing.assert_close(out.double(), reference.mixture_of_experts(moe, config, x), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("int4", [False, True])
def test_all_tokens_on_the_same_experts_and_the_others_idle(int4):
    moe, config = make_moe(int4=int4)
    moe.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 9, 0, 0, 9, 0, 0, 9]))
    x = make_x(19)

    out = run(moe, x)

    assert {e for row in reference.route(moe.gate, config, x) for e in row} == {1, 4, 7}
    torch.testing.assert_close(out.double(), reference.mixture_of_experts(moe, config, x), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("dirt", [0.0, 1e4, float("inf"), float("nan")])
def test_rows_of_padding_reach_no_routed_expert_and_change_no_real_row(dirt, int4, monkeypatch, uninitialised_is_nan):
    moe, _ = make_moe(int4=int4)
    x = make_x(12)
    clean = run(moe, x[:7])
    x[7:] = dirt
    seen = []
    original = type(moe.experts).forward
    spy = lambda self, rows, offsets: seen.append((rows, offsets)) or original(self, rows, offsets)  # noqa: E731
    monkeypatch.setattr(type(moe.experts), "forward", spy)

    out = run(moe, x, torch.tensor(7))

    ((rows, offsets),) = seen
    assert rows.shape == (12 * 3, 64) and offsets[-1] == 7 * 3  # A static shape; the rest belongs to no expert.
    torch.testing.assert_close(out[:7], clean, rtol=1e-6, atol=1e-6)
    shared = run(moe.shared_experts, x[7:])
    torch.testing.assert_close(out[7:], shared, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("int4", [False, True])
def test_no_real_token_at_all(int4, uninitialised_is_nan):
    moe, _ = make_moe({"n_shared_experts": 0}, int4=int4)

    assert not run(moe, make_x(4), torch.tensor([0])).any()


@pytest.mark.parametrize("int4", [False, True])
def test_gradients_with_respect_to_tokens_and_weights(int4):
    moe, config = make_moe(int4=int4)
    moe.gate.e_score_correction_bias[5] = -9  # An idle expert.
    x = make_x(9).requires_grad_()
    direction = make_x(9, seed=3)

    grads = torch.autograd.grad((moe(x) * direction).sum(), [x, *moe.parameters()])

    parameters = [p.detach().requires_grad_() for p in moe.parameters()]
    names = [name for name, _ in moe.named_parameters()]
    dense = dict(zip(names, parameters, strict=True))
    tokens = x.detach().requires_grad_()
    scores = (tokens @ dense["gate.weight"].T).sigmoid()
    ids = (scores + moe.gate.e_score_correction_bias).topk(config.num_experts_per_tok, -1).indices
    weights = torch.zeros_like(scores).scatter(-1, ids, scores.gather(-1, ids))
    weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
    shared = [dense[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
    total = (F.silu(tokens @ shared[0].T) * (tokens @ shared[1].T)) @ shared[2].T
    for e in range(config.n_routed_experts):
        if int4:
            gate, up, down = (m.float() for m in reference.expert_matrices(moe.experts, e))
        else:
            (gate, up), down = dense["experts.gate_up_proj"][e].chunk(2), dense["experts.down_proj"][e]
        total = total + weights[:, e : e + 1] * ((F.silu(tokens @ gate.T) * (tokens @ up.T)) @ down.T)
    expected = torch.autograd.grad((total * direction).sum(), [tokens, *parameters])
    for name, found, wanted in zip(["x", *names], grads, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    if not int4:
        assert not grads[1 + names.index("experts.gate_up_proj")][5].any()


@pytest.mark.parametrize("int4", [False, True])
def test_shapes_follow_without_data(int4):
    config = make_config(int4=int4).text_config
    with torch.device("meta"):
        moe = MixtureOfExperts(config, group_size=32 if int4 else None).to(torch.bfloat16)

        out = moe(torch.empty(5, 64, dtype=torch.bfloat16), torch.empty((), dtype=torch.int32))

    assert out.is_meta and out.shape == (5, 64) and out.dtype == torch.bfloat16
    torch.set_default_dtype(torch.bfloat16)  # torch knows the shape of a grouped product of no other dtype.
    try:
        with FakeTensorMode():
            assert MixtureOfExperts(config, group_size=32 if int4 else None)(torch.empty(5, 64)).shape == (5, 64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_sizes_come_from_the_weights():
    """A rank's slice of the intermediate size: the partial outputs add up to the whole."""
    moe, _ = make_moe({"n_shared_experts": 0})
    x = make_x(11)
    whole = run(moe, x)
    gate, up = moe.experts.gate_up_proj.data.chunk(2, 1)
    down, parts = moe.experts.down_proj.data, []

    for columns in (slice(0, 32), slice(32, 96)):
        moe.experts.gate_up_proj.data = torch.cat((gate[:, columns], up[:, columns]), 1)
        moe.experts.down_proj.data = down[..., columns].contiguous()
        parts.append(run(moe, x))

    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 8), (24, 40), (72, 8)])
def test_the_smallest_and_the_oddest_sizes_that_are_taken(sizes, dtype):
    hidden_size, intermediate_size = sizes
    config = make_config(hidden_size=hidden_size, moe_intermediate_size=intermediate_size).text_config
    moe = randomize(MixtureOfExperts(config, group_size=None))
    x = torch.randn(5, hidden_size, generator=torch.Generator().manual_seed(0))
    expected = reference.mixture_of_experts(moe, config, x)

    out = run(moe.to(dtype), x.to(dtype))

    tolerance = {"rtol": 1e-4, "atol": 5e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(out.double(), expected, **tolerance)


@pytest.mark.parametrize(("field", "size"), [("hidden_size", 60), ("moe_intermediate_size", 20)])
def test_sizes_that_grouped_products_do_not_take_are_refused_at_construction(field, size):
    with pytest.raises(ConfigError, match=rf"^text_config.{field} is {size}; expected a multiple of 8$"):
        make_config(**{field: size})

    dense = make_config(first_k_dense_replace=3, **{field: size}).text_config  # Without MoE layers any size will do.
    assert getattr(dense, field) == size


def test_swiglu_equals_the_definition():
    mlp, x = randomize(SwiGLU(64, 20)), make_x(3)

    torch.testing.assert_close(run(mlp, x).double(), reference.swiglu_module(mlp, x).detach(), rtol=1e-5, atol=1e-5)


def test_a_bias_that_bfloat16_would_round_away_decides():
    moe, _ = make_moe({"num_experts_per_tok": 1})
    moe.gate.weight.data.zero_()  # All scores are one half.
    moe.gate.e_score_correction_bias.fill_(1.0)
    moe.gate.e_score_correction_bias[5] = 1.0 + 2**-12

    _, ids = run(moe.to(torch.bfloat16).gate, make_x(3).bfloat16())

    assert ids.tolist() == [[5]] * 3


def test_groups_change_who_is_chosen():
    groups = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    moe, _ = make_moe(groups)
    free, _ = make_moe({"n_routed_experts": 16})

    (_, grouped), (_, ungrouped) = run(moe.gate, make_x(257)), run(free.gate, make_x(257))

    assert all(len({e // 4 for e in row}) <= 2 for row in grouped.tolist())
    assert any(len({e // 4 for e in row}) == 3 for row in ungrouped.tolist())


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 257])
def test_permuted_tokens_give_permuted_outputs_equal_to_the_definition(num_tokens, int4):
    moe, config = make_moe(int4=int4)
    x, order = make_x(num_tokens), torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))

    out = run(moe, x[order])

    torch.testing.assert_close(out, run(moe, x)[order], rtol=1e-5, atol=2e-5)
    expected = reference.mixture_of_experts(moe, config, x[order])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=5e-5)


def test_bfloat16_rounds_the_sum_over_experts_once():
    moe, config = make_moe({"n_shared_experts": 0, "num_experts_per_tok": 8})
    moe, x = moe.to(torch.bfloat16), make_x(33).bfloat16()
    outputs = []
    moe.experts.register_forward_hook(lambda module, args, out: outputs.append((out, args[1])))

    found = run(moe, x)

    weights, ids = run(moe.gate, x)
    order, _ = sort_by_expert(ids, 8)
    rows = torch.empty_like(outputs[0][0]).index_copy_(0, order, outputs[0][0]).unflatten(0, (33, 8))
    exact = (rows.double() * weights.double()[..., None]).sum(1)
    # Half a unit in the last place of 8 bits, and float32's own error where terms cancel.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-5).all()
    assert config.n_shared_experts == 0 and found.dtype == torch.bfloat16


@pytest.mark.parametrize("int4", [False, True])
def test_padding_sends_no_gradient_anywhere(int4, uninitialised_is_nan):
    moe, _ = make_moe(int4=int4)
    x = make_x(8).requires_grad_()

    found = torch.autograd.grad(moe(x, torch.tensor(5))[:5].square().sum(), [x, *moe.parameters()])

    expected = torch.autograd.grad(moe(x[:5]).square().sum(), [x, *moe.parameters()])
    assert not found[0][5:].any()
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4)


def test_every_weight_has_a_gradient():
    moe, _ = make_moe()
    moe.gate.e_score_correction_bias.zero_()  # No expert is idle.
    x = make_x(257).requires_grad_()

    moe(x).square().sum().backward()

    for name, parameter in moe.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name
    assert all(e.any() for p in moe.experts.parameters() for e in p.grad)
    assert (x.grad.norm(dim=1) > 0).all()
