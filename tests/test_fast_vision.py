"""The vision encoder on fused kernels against the plain one, through Triton's interpreter where there is no GPU.

Tolerances: float32 differs by the order of sums (1e-5 of the largest value, 3e-5 after some blocks). In bfloat16 each
kernel is held to one rounding, twice that in the interpreter, which truncates where a GPU rounds; the encoder to
float32, from which it may be no further than five times the plain one.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from random_models import make_config, make_pixels, randomize

from kimi_k25.fast_vision import FastVisionEncoder, linear_gelu
from kimi_k25.layers.packed import packed_attention
from kimi_k25.layers.rope import rotate_pairs
from kimi_k25.layers.vision_kernels import add_layer_norm, item_attention, item_tiles, rotate_queries_and_keys
from kimi_k25.vision_tower import MoonViT3d

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
GRIDS = [(1, 2, 2), (3, 2, 6), (1, 8, 2), (1, 4, 6), (4, 4, 2)]


def close(actual, expected):
    tolerance = 2**-6 if expected.dtype == torch.bfloat16 else 1e-5
    atol = tolerance * expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=atol)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [48, 64, 1152])
def test_add_layer_norm_adds_in_place_and_normalises_the_sum(dim, dtype):
    residual, x = randn(5, dim, dtype=dtype) + 3, randn(5, dim, dtype=dtype)
    weight, bias = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    total = residual + x

    normed = add_layer_norm(residual, x, weight, bias, 1e-5)
    alone = add_layer_norm(total, None, weight, bias, 1e-5)

    close(residual, total)
    close(normed, F.layer_norm(total, (dim,), weight, bias, 1e-5))
    close(alone, F.layer_norm(total, (dim,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 4), (17, 3, 12), (9, 16, 72)])
def test_rotation_turns_queries_and_keys_in_place_and_leaves_values(rows, heads, head_dim, dtype):
    qkv = randn(rows, 3 * heads * head_dim, dtype=dtype)
    angles = randn(rows, head_dim // 2)
    q, k, v = qkv.clone().unflatten(-1, (3, heads, head_dim)).unbind(1)
    turned = [rotate_pairs(x.float(), angles.cos(), angles.sin()).to(dtype) for x in (q, k)]

    rotate_queries_and_keys(qkv, angles.cos(), angles.sin())

    close(qkv, torch.stack((*turned, v), 1).flatten(1))
    assert torch.equal(qkv.unflatten(-1, (3, -1))[:, 2], v.flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [12, 16, 72])
@pytest.mark.parametrize(("lengths", "queries"), [([1], 128), ([64, 130, 3], 128), ([3, 130], 64)])
def test_items_attend_to_themselves_alone(lengths, queries, head_dim, dtype):
    heads, total = 2, sum(lengths)
    qkv = randn(total, 3 * heads * head_dim, dtype=dtype)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)
    q, k, v = qkv.float().unflatten(-1, (3, heads, head_dim)).unbind(1)
    expected = packed_attention(q, k, v, cu_seqlens, max(lengths), causal=False, scale=head_dim**-0.5)

    found = item_attention(qkv, item_tiles(lengths, qkv.device, queries), head_dim, queries)

    close(found, expected.flatten(1).to(dtype))


def test_scores_of_any_size_stay_finite():
    qkv = 300 * randn(70, 3 * 16)

    found = item_attention(qkv, item_tiles([70], qkv.device), 16)

    q, k, v = qkv.unflatten(-1, (3, 1, 16)).unbind(1)
    close(found, packed_attention(q, k, v, torch.tensor([0, 70]), 70, causal=False, scale=0.25).flatten(1))


def test_tiles_cover_each_item_once_and_begin_with_the_longest():
    tiles = item_tiles([130, 5, 300], torch.device("cpu"))

    assert tiles.tolist() == [[135, 135, 435], [263, 135, 435], [391, 135, 435], [0, 0, 130], [128, 0, 130],
                              [130, 130, 135]]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu_is_the_linear_layer_and_the_approximated_gelu(dtype):
    layer = torch.nn.Linear(24, 40, device=DEVICE, dtype=dtype)
    x = 3 * randn(7, 24, dtype=dtype)

    with torch.no_grad():
        close(linear_gelu(x, layer), F.gelu(layer(x), approximate="tanh"))


def make_tower(dtype, head_dim):
    vision = {"patch_size": 4, "vt_num_attention_heads": 4, "vt_hidden_size": 4 * head_dim}
    config = make_config(vision=vision | {"mm_hidden_size": 4 * head_dim}).vision_config
    return randomize(MoonViT3d(config)).eval().to(DEVICE, dtype)


@torch.no_grad()
def test_the_tower_gives_the_same_features_for_images_and_videos():
    head_dim = 72
    pixels, grids = make_pixels(GRIDS, patch_size=4).to(DEVICE), torch.tensor(GRIDS)
    tower = make_tower(torch.float32, head_dim)
    exact = tower(pixels, grids)
    plain = make_tower(torch.bfloat16, head_dim)(pixels, grids)

    tower.encoder.fast = FastVisionEncoder(tower.encoder)
    close_to_exact = tower(pixels, grids)
    half = make_tower(torch.bfloat16, head_dim)
    half.encoder.fast = FastVisionEncoder(half.encoder)
    rounded = half(pixels, grids)

    scale = exact.abs().max()
    assert (close_to_exact - exact).abs().max() < 3e-5 * scale
    assert float((rounded - exact).norm()) < 5 * float((plain - exact).norm())


@torch.no_grad()
def test_the_encoder_leaves_its_input_as_it_was():
    tower = make_tower(torch.float32, 12)
    x = randn(24, 48)
    before = x.clone()

    FastVisionEncoder(tower.encoder)(x, [(1, 4, 6)])

    assert torch.equal(x, before)
