"""The golden outputs, and proof that they notice deliberate mistakes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from golden import (
    FOLDERS,
    GOLDENS,
    PROMPTS,
    TENSORS,
    distance,
    golden_prompt,
    logits_of,
    media,
    new_model,
    shared_model,
)
from oracle_media import make_frames, make_image
from torch import nn

from kimi_k25 import load_processor, vision_tower
from kimi_k25.layers import int4, moe
from kimi_k25.layers.rope import yarn_inv_freq

# float32: sums in another order differ by 7e-5 at most; the smallest mistake that matters by 2.4e-4.
FP32_ATOL = 1.5e-4
VISION_ATOL = 1e-5
# bfloat16: roundings in another order; the logits' standard deviation is 8.
BF16_MEAN, BF16_MAX = 0.25, 1.2


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("weights", ["base", "int4"])
def test_float32_logits(weights, name):
    assert distance(shared_model(f"{weights}.fp32"), f"{weights}.fp32", name).max() <= FP32_ATOL


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("weights", ["base", "int4"])
def test_bfloat16_logits(weights, name):
    error = distance(shared_model(f"{weights}.bf16"), f"{weights}.bf16", name)

    assert error.mean() <= BF16_MEAN
    assert error.max() <= BF16_MAX


@pytest.mark.parametrize("name", ["text", "image"])
@torch.no_grad()
def test_hidden_states_after_each_layer(name):
    model, prompt = shared_model("base.fp32"), golden_prompt(name)
    found = [model.embed(prompt.input_ids, prompt.pixel_values, prompt.grid_thws)]
    decoder = model.language_model.model
    keep = [layer.register_forward_hook(lambda _m, _a, out: found.append(sum(out))) for layer in decoder.layers[:-1]]
    keep.append(decoder.norm.register_forward_hook(lambda _m, _a, out: found.append(out[0])))

    logits_of(model, name)

    for hook in keep:
        hook.remove()
    assert len(found) == 4
    for i, hidden in enumerate(found):
        golden = TENSORS[f"base.fp32.{name}.hidden.{i}"]
        torch.testing.assert_close(hidden, golden, rtol=0, atol=5e-5)


@pytest.mark.parametrize("layer", [1, 2])
def test_router_picks_and_weights(layer):
    model = shared_model("base.fp32")
    found = []
    gate = model.language_model.model.layers[layer].mlp.gate
    hook = gate.register_forward_hook(lambda _m, _a, out: found.append(out))

    logits_of(model, "text")

    hook.remove()
    ((weights, ids),) = found
    ids, order = ids.sort(-1)
    assert torch.equal(ids.int(), TENSORS[f"base.fp32.text.router.{layer}.indices"])
    golden = TENSORS[f"base.fp32.text.router.{layer}.weights"]
    torch.testing.assert_close(weights.gather(-1, order), golden, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["image_A", "image_E_nointerp", "two_images", "video"])
@torch.no_grad()
def test_vision_features(name):
    model, (pixels, grids) = shared_model("base.fp32"), media(name)
    tower = model.vision_tower
    listed = [tuple(grid) for grid in grids.tolist()]
    found = {"patch_embed": tower.patch_embed(pixels, listed), "projected": model.encode_media(pixels, grids)}
    found["encoder_out"] = tower.encoder(found["patch_embed"], listed)

    goldens = {k: TENSORS[key] for k in found if (key := f"base.fp32.vision.{name}.{k}") in TENSORS}

    assert len(goldens) == (3 if name in ("image_A", "video") else 1)
    for stage, golden in goldens.items():
        torch.testing.assert_close(found[stage], golden, rtol=0, atol=VISION_ATOL)


@pytest.mark.parametrize("name", ["image_A", "image_E_nointerp", "two_images", "video"])
@torch.no_grad()
def test_vision_features_in_bfloat16(name):
    model, (pixels, grids) = shared_model("base.bf16"), media(name)

    found = model.encode_media(pixels, grids)

    golden = TENSORS[f"base.bf16.vision.{name}.projected"]
    assert found.dtype == torch.bfloat16
    assert (found.float() - golden).abs().mean() < 0.02 * golden.std()


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_the_processor_makes_the_golden_prompts_of_messages(folder):
    processor = load_processor(folder)
    pictures = {letter: make_image(letter) for letter in "ABD"}

    batches = {
        "text": processor("What is the answer? 你好世界"),
        "image": processor("Describe this picture.", images=[pictures["A"]]),
        "two_images": processor("the other thing", images=[pictures["B"], pictures["D"]], thinking=False),
        "video": processor("What is the video?", videos=[(make_frames(7), 2.0)]),
    }

    for name, batch in batches.items():
        prompt = golden_prompt(name)
        assert torch.equal(batch.input_ids, prompt.input_ids)
        if name == "text":
            assert batch.pixel_values is None and batch.grid_thws is None
            continue
        assert torch.equal(batch.pixel_values, prompt.pixel_values)
        assert torch.equal(batch.grid_thws, prompt.grid_thws)


def test_prompts_are_those_of_the_goldens():
    for name in PROMPTS[1:]:
        assert media(name)[1].tolist() == GOLDENS["prompts"][name]["grids"]
    for letter in "ABD":
        pixels = media({"A": "image", "B": "two_images", "D": "two_images"}[letter])[0]
        golden = TENSORS[f"image.{letter}.pixel_values"]
        rows = slice(len(pixels) - len(golden), None) if letter == "D" else slice(0, len(golden))
        assert torch.equal(pixels[rows], golden)


# -- deliberate mistakes: each must leave the tolerance ------------------------------------------------------------


def lora_norms_with_the_block_eps(model, _monkeypatch):
    for layer in model.language_model.model.layers:
        layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = 1e-5


def yarn_beta_fast_of_k2(model, _monkeypatch):
    rope, scaling = model.language_model.model.rope, model.config.text_config.rope_scaling
    values = {name: getattr(scaling, name) for name in type(scaling).__slots__} | {"beta_fast": 1.0 + 1e-9}
    rope.inv_freq.copy_(yarn_inv_freq(8, 50000.0, type(scaling)(**values)))


def plain_softmax_scale(model, _monkeypatch):
    for layer in model.language_model.model.layers:
        layer.self_attn.softmax_scale = 24**-0.5


def no_correction_bias(model, _monkeypatch):
    for layer in model.language_model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.zero_()


def biased_scores_as_weights(_model, monkeypatch):
    original = moe.Router.forward

    def forward(self, x):
        _, ids = original(self, x)
        biased = F.linear(x, self.weight).sigmoid() + self.e_score_correction_bias
        weights = biased.gather(-1, ids)
        return weights / weights.sum(-1, keepdim=True) * 2.827, ids

    monkeypatch.setattr(moe.Router, "forward", forward)


def shared_expert_scaled_too(model, _monkeypatch):
    for layer in model.language_model.model.layers[1:]:
        layer.mlp.shared_experts.down_proj.weight.data.mul_(2.827)


def erf_gelu_in_the_tower(_model, monkeypatch):
    monkeypatch.setattr(vision_tower.VisionMLP, "forward", lambda self, x: self.fc1(F.gelu(self.fc0(x))))


def tanh_gelu_in_the_projector(model, _monkeypatch):
    model.mm_projector.proj[1] = nn.GELU("tanh")


def tower_eps_1e_6(model, _monkeypatch):
    for module in model.vision_tower.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6


def time_embedding_for_images_too(model, _monkeypatch):
    table = model.vision_tower.patch_embed.pos_emb
    table.register_forward_hook(lambda self, _args, out: out + self.frame_sinusoids(1)[0])


def merge_window_transposed(_model, monkeypatch):
    original = vision_tower.merge_patches
    transposed = [0, 2, 1, 3]
    monkeypatch.setattr(vision_tower, "merge_patches", lambda *args: original(*args)[:, transposed])


def position_table_aligned_at_its_corners(_model, monkeypatch):
    aligned = functools.partial(F.interpolate, align_corners=True)
    monkeypatch.setattr(vision_tower.F, "interpolate", aligned)


def rope_of_rows_before_columns(_model, monkeypatch):
    original = vision_tower.vision_rope

    def swapped(grids, head_dim, device):
        return tuple(t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for t in original(grids, head_dim, device))

    monkeypatch.setattr(vision_tower, "vision_rope", swapped)


def pictures_that_see_each_other(_model, monkeypatch):
    original = vision_tower.packed_attention

    def joined(q, k, v, cu_seqlens, max_seqlen, **options):
        return original(q, k, v, cu_seqlens[[0, -1]], q.shape[0], **options)

    monkeypatch.setattr(vision_tower, "packed_attention", joined)


def int4_without_its_offset(_model, monkeypatch):
    original = int4.unpack_int4
    monkeypatch.setattr(int4, "unpack_int4", lambda packed: original(packed) + 8)


def int4_high_nibble_first(_model, monkeypatch):
    original = int4.unpack_int4
    flipped = lambda packed: original(packed).unflatten(-1, (-1, 8)).flip(-1).flatten(-2)  # noqa: E731
    monkeypatch.setattr(int4, "unpack_int4", flipped)


def int4_dequantised_in_float32(_model, monkeypatch):
    def dequantize(packed, scale):
        groups = int4.unpack_int4(packed).float().unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.float().unsqueeze(-1)).flatten(-2)

    monkeypatch.setattr(int4, "dequantize_int4", dequantize)


MISTAKES = [
    (lora_norms_with_the_block_eps, "base", "text"),
    (yarn_beta_fast_of_k2, "base", "image"),
    (plain_softmax_scale, "base", "text"),
    (no_correction_bias, "base", "text"),
    (biased_scores_as_weights, "base", "text"),
    (shared_expert_scaled_too, "base", "text"),
    (erf_gelu_in_the_tower, "base", "image"),
    (tanh_gelu_in_the_projector, "base", "image"),
    (tower_eps_1e_6, "base", "image"),
    (time_embedding_for_images_too, "base", "image"),
    (merge_window_transposed, "base", "image"),
    (position_table_aligned_at_its_corners, "base", "image"),
    (rope_of_rows_before_columns, "base", "image"),
    (pictures_that_see_each_other, "base", "two_images"),
    (int4_without_its_offset, "int4", "text"),
    (int4_high_nibble_first, "int4", "text"),
    (int4_dequantised_in_float32, "int4", "text"),
]


@pytest.mark.parametrize(("mistake", "weights", "name"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_a_deliberate_mistake_is_noticed(mistake, weights, name, monkeypatch):
    model = new_model(f"{weights}.fp32")

    mistake(model, monkeypatch)

    assert distance(model, f"{weights}.fp32", name).max() > 1.2 * FP32_ATOL


def test_the_bfloat16_tolerances_notice_a_mistake():
    model = new_model("base.bf16")

    no_correction_bias(model, None)

    error = distance(model, "base.bf16", "text")
    assert error.mean() > BF16_MEAN and error.max() > BF16_MAX
