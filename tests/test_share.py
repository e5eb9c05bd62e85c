"""The share that benchmarks measure, without a GPU: its sizes and values, the floor, balanced routers."""

import pytest
import share
import torch
from harness import Ceilings

from kimi_k25.layers.int4 import unpack_int4


def test_the_share_divides_heads_expert_width_and_vocabulary():
    text = share.share_config(8, 61).text_config

    assert (text.num_attention_heads, text.moe_intermediate_size, text.vocab_size) == (8, 256, 20480)
    assert (text.hidden_size, text.n_routed_experts, text.num_hidden_layers) == (7168, 384, 61)


@pytest.mark.parametrize(
    ("tokens", "context", "floor"),
    [(64, 0, 13.3), (256, 0, 17.6), (1024, 0, 17.65), (2048, 0, 25.9), (4096, 0, 53.5), (1, 2048, 1.4), (8, 2048, 3.9)],
)
def test_the_floor_is_bytes_or_operations_of_the_whole_share(tokens, context, floor):
    text = share.share_config(8, 61).text_config
    seqs = tokens if context else 1

    found = share.floor_ms(text, Ceilings(4.3, 779), tokens=tokens, seqs=seqs, context=context)

    assert found == pytest.approx(floor, abs=0.05)


def test_random_values_are_from_minus_seven_to_seven_with_mean_zero():
    packed = torch.empty(64, 1024, dtype=torch.int32)

    share.random_int4_(packed)

    values = unpack_int4(packed).float()
    assert set(values.unique().tolist()) == set(range(-7, 8))
    assert abs(values.mean()) < 0.02 and abs(values.std() - share.INT4_STD) < 0.02


def test_balanced_bias_gives_every_expert_its_share_though_scores_differ_in_mean_and_spread():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2048, 96, generator=generator) * (0.3 + torch.rand(96, generator=generator))
    scores = (logits + 2 * torch.randn(96, generator=generator)).sigmoid()

    bias = share.balanced_bias(scores, 4)

    chosen = (scores + bias).topk(4, -1).indices
    load = torch.bincount(chosen.flatten(), minlength=96) / (2048 * 4 / 96)
    unbalanced = torch.bincount(scores.topk(4, -1).indices.flatten(), minlength=96)
    assert (unbalanced == 0).sum() > 48
    assert load.min() > 0.6 and load.max() < 1.5


def test_routers_balanced_over_several_steps_are_more_even_on_other_tokens(monkeypatch):
    pytest.importorskip("triton")
    from kimi_k25.layers import fused_moe

    routed = []
    original = lambda logits, bias, *rest: routed.append((len(logits), rest))  # noqa: E731
    monkeypatch.setattr(fused_moe, "route", original)
    monkeypatch.setattr(share, "TOPK", 4)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randn(2, 96, generator=generator)
    steps = [offsets[:, None] + torch.randn(2, 512, 96, generator=generator) for _ in range(4)]
    unseen = (offsets[0] + torch.randn(16384, 96, generator=generator)).sigmoid()

    def balanced(steps):
        biases = torch.ones(2, 96)

        def forward(step):
            for logits, bias in zip(step, biases, strict=True):
                fused_moe.route(torch.cat([logits, torch.zeros(512, 8)], 1), bias, None, 4)

        share.balance_routers(*(lambda step=step: forward(step) for step in steps))
        return biases

    def unevenness(bias):
        return torch.bincount((unseen + bias).topk(4, -1).indices.flatten(), minlength=96).float().std() / (16384 / 24)

    one, four = balanced(steps[:1]), balanced(steps)
    single = [share.balanced_bias(step[1].sigmoid(), 4) for step in steps]

    assert unevenness(four[0]) < 0.65 * unevenness(one[0])
    torch.testing.assert_close(four[1], sum(single) / 4)
    assert torch.equal(balanced(steps), four)
    assert routed == [(512, (None, 4))] * 18 and fused_moe.route is original


def test_one_layers_experts_are_rearranged_and_all_others_hold_its_words(monkeypatch):
    pytest.importorskip("triton")
    from kimi_k25.layers import humming_experts
    from kimi_k25.layers.moe import Int4RoutedExperts

    rearranged = []

    def repack(self, packed, scale):
        rearranged.append(packed.shape)
        return packed.flatten().flip(0).view(4, 4, -1), scale.flip(0)

    monkeypatch.setattr(humming_experts._Product, "repack", repack)
    layers = [Int4RoutedExperts(4, 64, 32, 32) for _ in range(3)]
    for layer in layers:
        for buffer in layer.buffers():
            buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) % 251)
    for buffer in layers[2].buffers():
        buffer.zero_()  # As those that `build` leaves empty.
    expected = [layers[0].gate_up_proj_packed.flatten().flip(0), layers[0].down_proj_scale.flip(0)]
    make = share.copied_experts()

    products = [make(layer) for layer in layers]
    for product in products:
        product.repack()

    assert len(rearranged) == 2  # One layer's gate_up_proj and down_proj.
    for layer, product in zip(layers, products, strict=True):
        assert product.is_repacked and product.weights["down_proj"][0].shape == (4, 4, 64)
        assert product.weights["down_proj"][0].data_ptr() == layer.down_proj_packed.data_ptr()
        assert torch.equal(layer.gate_up_proj_packed.flatten(), expected[0])
        assert torch.equal(layer.down_proj_scale, expected[1])
