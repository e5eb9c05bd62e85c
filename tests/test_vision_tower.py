"""MoonViT3d: positions, rotation, attention over whole items, merging, against the slow definition."""

import expecttest
import pytest
import reference
import torch
from random_models import make_config, make_pixels, randomize

from kimi_k25.vision_tower import (
    MoonViT3d,
    PatchEmbedding,
    VisionPositionEmbedding,
    in_row_order,
    merge_patches,
    rows_by_grid,
    vision_rope,
)

CPU = torch.device("cpu")
# Awkward on purpose: a single token, slivers, equal grids apart, one to four frames.
GRIDS = [(1, 2, 2), (3, 2, 6), (1, 8, 2), (1, 2, 2), (4, 4, 2), (2, 2, 6), (3, 2, 6)]
TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}


def make_tower(seed=0, **vision):
    config = make_config(vision={"patch_size": 4, **vision}).vision_config
    return randomize(MoonViT3d(config), seed).eval(), config


@torch.no_grad()
def run(module, *args):
    return module(*args)


@pytest.mark.parametrize("table", [(8, 8), (5, 3), (1, 7), (2, 2)])
@pytest.mark.parametrize("size", [(2, 2), (3, 11), (16, 2), (7, 7), (3, 5)])
def test_position_table_is_resampled_bicubically_square_or_not(table, size):
    config = make_config(vision={"init_pos_emb_height": table[0], "init_pos_emb_width": table[1]}).vision_config
    module = randomize(VisionPositionEmbedding(config))

    with torch.no_grad():
        found = module.resampled(*size)

    torch.testing.assert_close(found.double(), reference.resample(module.weight.detach(), *size), rtol=1e-5, atol=1e-5)


def test_a_grid_of_the_tables_size_takes_the_table_as_it_is():
    config = make_config(vision={"init_pos_emb_height": 6, "init_pos_emb_width": 4}).vision_config
    module = randomize(VisionPositionEmbedding(config))

    assert torch.equal(module.resampled(6, 4), module.weight.flatten(0, 1))
    assert not torch.equal(module.resampled(4, 6), module.weight.flatten(0, 1))


def test_patches_and_positions_equal_the_definition():
    tower, _ = make_tower(init_pos_emb_height=3, init_pos_emb_width=5)
    pixels = make_pixels(GRIDS, patch_size=4)

    found = run(tower.patch_embed, pixels, GRIDS)

    torch.testing.assert_close(found.double(), reference.patch_embedding(tower.patch_embed, pixels, GRIDS), **TOLERANCE)


def test_a_chunk_of_one_frame_is_an_image_and_the_first_of_two_is_not():
    config = make_config().vision_config
    module = randomize(VisionPositionEmbedding(config))

    image, pair = run(module, [(1, 2, 4)]), run(module, [(2, 2, 4)])

    torch.testing.assert_close(pair[:8] - image, torch.tensor([0.0] * 24 + [1.0] * 24).expand(8, -1))


def test_more_frames_than_the_model_knows_are_refused():
    tower, _ = make_tower(init_pos_emb_time=2)

    with pytest.raises(ValueError, match=r"^a media item has 3 frames; the model takes at most 2$"):
        tower(make_pixels([(3, 2, 2)], patch_size=4), torch.tensor([[3, 2, 2]]))


def test_rotation_turns_by_column_then_row_and_is_the_same_in_every_frame():
    cos, sin = vision_rope([(1, 2, 4), (2, 4, 2)], 12, CPU)

    places = [(r, c) for r in range(2) for c in range(4)] + [(r, c) for r in range(4) for c in range(2)] * 2
    angles = torch.tensor([reference.vision_angles(*place, 12) for place in places])
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_encoder_equals_the_definition():
    tower, config = make_tower()
    grids = GRIDS[:4]
    x = torch.randn(sum(t * h * w for t, h, w in grids), 48, generator=torch.Generator().manual_seed(0))

    found = run(tower.encoder, x, grids)

    torch.testing.assert_close(found.double(), reference.vision_encoder(tower.encoder, config, x, grids), **TOLERANCE)


@pytest.mark.parametrize("merge", [(2, 2), (1, 2), (3, 1), (1, 1)])
def test_merging_averages_frames_and_joins_windows_in_reading_order(merge):
    grids = [(t, h * merge[0], w * merge[1]) for t, h, w in [(1, 1, 1), (3, 2, 3), (1, 2, 1), (1, 1, 1), (3, 2, 3)]]
    x = torch.randn(sum(t * h * w for t, h, w in grids), 5, generator=torch.Generator().manual_seed(0))

    found = merge_patches(x, grids, merge)

    expected = reference.merge_patches(x.double(), grids, merge)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert found.shape == (1 + 6 + 2 + 1 + 6, merge[0] * merge[1], 5)


def test_items_of_one_batch_equal_each_alone():
    tower, config = make_tower()
    pixels = make_pixels(GRIDS, patch_size=4)

    together = run(tower, pixels, torch.tensor(GRIDS))

    parts = pixels.split([t * h * w for t, h, w in GRIDS])
    alone = [run(tower, part, torch.tensor([grid])) for part, grid in zip(parts, GRIDS, strict=True)]
    assert together.shape == (sum(h * w // 4 for _, h, w in GRIDS), config.patches_per_token, 48)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_whole_tower_equals_the_definition():
    tower, config = make_tower(vt_num_attention_heads=3, vt_num_hidden_layers=1, vt_intermediate_size=20)
    grids = [(1, 2, 2), (2, 4, 2), (1, 2, 2)]
    pixels = make_pixels(grids, patch_size=4)

    found = run(tower, pixels, torch.tensor(grids))

    x = reference.patch_embedding(tower.patch_embed, pixels, grids)
    x = reference.merge_patches(reference.vision_encoder(tower.encoder, config, x, grids), grids, (2, 2))
    torch.testing.assert_close(found.double(), x, **TOLERANCE)


def test_pixels_of_any_float_dtype_are_taken():
    tower, _ = make_tower()
    pixels, grids = make_pixels([(1, 2, 4)], patch_size=4), torch.tensor([[1, 2, 4]])

    exact = run(tower, pixels.double(), grids.int())
    rounded = run(tower.to(torch.bfloat16), pixels, grids)

    assert exact.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.1)


def test_items_computed_grid_by_grid_come_back_in_their_order():
    grids = [(1, 1, 2), (1, 3, 1), (1, 1, 2)]

    rows = rows_by_grid(grids, [2, 3, 2])

    assert {grid: r.tolist() for grid, r in rows.items()} == {(1, 1, 2): [[0, 1], [5, 6]], (1, 3, 1): [[2, 3, 4]]}
    packed = in_row_order([torch.tensor([0, 1, 5, 6]), torch.tensor([2, 3, 4])], rows)
    assert packed.tolist() == list(range(7))


def test_what_does_not_fit_together_is_refused_with_both_sides():
    tower, _ = make_tower()
    good, messages = make_pixels([(1, 4, 6)], patch_size=4), []
    for pixels, grids in [
        (good[:20], [[1, 4, 6]]),
        (good, [[1, 4, 2], [2, 4, 4]]),
        (good[:, :1], [[1, 4, 6]]),
        (good.flatten(1), [[1, 4, 6]]),
        (make_pixels([(1, 2, 2)]), [[1, 2, 2]]),
        (good, [1, 4, 6]),
        (good, [[4, 6]]),
        (good[:0], torch.zeros(0, 3, dtype=torch.int64).tolist()),
        (good, [[1, 3, 8]]),
        (good, [[1, 8, 3]]),
        (good, [[-1, -4, 6]]),
        (good[:0], [[0, 4, 6]]),
    ]:
        with pytest.raises(ValueError) as caught:
            tower(pixels, torch.tensor(grids))
        messages.append(str(caught.value))

    expecttest.assert_expected_inline(
        "\n".join(messages),
        """\
pixel_values has 20 patches but grid_thws [[1, 4, 6]] describes 24.
pixel_values has 24 patches but grid_thws [[1, 4, 2], [2, 4, 4]] describes 40.
pixel_values has shape (24, 1, 4, 4); expected (num_patches, 3, 4, 4)
pixel_values has shape (24, 48); expected (num_patches, 3, 4, 4)
pixel_values has shape (4, 3, 14, 14); expected (num_patches, 3, 4, 4)
grid_thws has shape (3,); expected (num_media, 3)
grid_thws has shape (1, 2); expected (num_media, 3)
grid_thws has shape (0,); expected (num_media, 3)
grid_thws has [1, 3, 8]; expected positive multiples of [1, 2, 2]
grid_thws has [1, 8, 3]; expected positive multiples of [1, 2, 2]
grid_thws has [-1, -4, 6]; expected positive multiples of [1, 2, 2]
grid_thws has [0, 4, 6]; expected positive multiples of [1, 2, 2]""",
    )


def test_gradients_reach_pixels_and_every_weight():
    tower, _ = make_tower()
    grids = [(1, 2, 4), (3, 2, 2), (1, 2, 4)]
    pixels = make_pixels(grids, patch_size=4).requires_grad_()

    run_out = tower(pixels, torch.tensor(grids))
    grads = torch.autograd.grad(run_out.square().sum(), [pixels, *tower.parameters()])

    for (name, _), grad in zip([("pixels", None), *tower.named_parameters()], grads, strict=True):
        assert grad.isfinite().all() and grad.any(), name
    assert (grads[0].flatten(1).norm(dim=1) > 0).all()


def test_embedding_is_a_convolution():
    config = make_config(vision={"patch_size": 4}).vision_config
    module = randomize(PatchEmbedding(config))
    pixels = make_pixels([(1, 2, 2)], patch_size=4)

    with torch.no_grad():
        expected = module.proj(pixels).flatten(1) + module.pos_emb([(1, 2, 2)])

    torch.testing.assert_close(run(module, pixels, [(1, 2, 2)]), expected, rtol=1e-5, atol=1e-5)
