import io
import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_media import IMAGE_SIZES, make_frames, make_image
from PIL import Image
from safetensors import safe_open

from aliasmix.errors import UnreadableFileError
from kimi_k25.image_processor import (
    ImageProcessor,
    MediaConfig,
    load_image_processor,
    open_image,
    resize_plan,
    sampled_frames,
    timestamp,
)

ORACLE = Path(__file__).parent / "data" / "oracle"
GOLDENS = json.loads((ORACLE / "goldens.json").read_text(encoding="utf-8"))
PROCESSOR = load_image_processor(ORACLE / "tiny_bf16")
TINY = json.loads((ORACLE / "tiny_bf16" / "preprocessor_config.json").read_text())["media_proc_cfg"]
FULL = MediaConfig.from_dict(
    TINY | {"in_patch_limit": 16384, "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096}
)


def golden(name: str) -> np.ndarray:
    with safe_open(ORACLE / "goldens.safetensors", "np") as file:
        return file.get_tensor(name)


# ------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("name", IMAGE_SIZES)
def test_padded_picture_equals_golden(name):
    padded = PROCESSOR.padded([make_image(name).convert("RGB")], TINY["in_patch_limit"])

    assert np.array_equal(padded[0], golden(f"image.{name}.padded_u8"))
    assert zlib.crc32(padded.tobytes()) == GOLDENS["images"][name]["u8_crc32"]


@pytest.mark.parametrize("name", ["A", "B", "D"])
def test_pixel_values_equal_golden_bit_for_bit(name):
    item = PROCESSOR.image(make_image(name))

    assert item.pixel_values.dtype == np.float32
    assert np.array_equal(item.pixel_values, golden(f"image.{name}.pixel_values"))


@pytest.mark.parametrize("name", IMAGE_SIZES)
def test_grid_equals_golden(name):
    item = PROCESSOR.image(make_image(name))

    assert list(item.grid_thw) == GOLDENS["images"][name]["grid_thw"]
    assert item.num_tokens == GOLDENS["images"][name]["tokens"]
    assert len(item.pixel_values) == math.prod(item.grid_thw)


def test_video_chunks_equal_golden():
    chunks = list(PROCESSOR.video(make_frames(7), 2.0))

    assert len(chunks) == 2
    assert [timestamp(chunk.start_seconds) for chunk in chunks] == ["00:00:00.000", "00:00:02.000"]
    for i, chunk in enumerate(chunks):
        expected = GOLDENS["images"][f"video_chunk{i}"]
        padded = PROCESSOR.padded(make_frames(7)[4 * i : 4 * i + 4], TINY["in_patch_limit_each_frame"])
        assert zlib.crc32(padded.tobytes()) == expected["u8_crc32"]
        assert list(chunk.grid_thw) == expected["grid_thw"]
        assert chunk.num_tokens == expected["tokens"]
        assert np.array_equal(chunk.pixel_values, PROCESSOR._patches(padded))


@pytest.mark.parametrize("seconds", GOLDENS["timestamps"])
def test_timestamp_equals_golden(seconds):
    assert timestamp(float(seconds)) == GOLDENS["timestamps"][seconds]


@pytest.mark.parametrize(
    "size, num_tokens",
    [
        ((1, 1), 1),
        ((224, 224), 64),
        ((640, 480), 414),
        ((1024, 768), 1036),
        ((1920, 1080), 2691),
        ((3000, 3000), 4225),
        ((4000, 3000), 4200),
        ((8000, 100), 1024),
    ],
)
def test_published_sizes_give_the_published_tokens(size, num_tokens):
    width, height = resize_plan(*size, FULL, FULL.in_patch_limit)

    assert -(-width // 28) * -(-height // 28) == num_tokens


def test_full_hd_video_frame_has_1032_tokens():
    item = next(ImageProcessor(FULL).video([Image.new("RGB", (1920, 1080))], 24.0))

    assert item.num_tokens == 1032


# ------------------------------------------------------------------ the rule


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_pictures_are_never_enlarged_and_stay_within_the_side(width, height):
    new_width, new_height = resize_plan(width, height, FULL, FULL.in_patch_limit)

    assert 1 <= new_width <= min(width, 512 * 14)
    assert 1 <= new_height <= min(height, 512 * 14)


def textbook_patches(padded: np.ndarray) -> np.ndarray:
    patches = []
    for frame in padded:
        for top in range(0, frame.shape[0], 14):
            for left in range(0, frame.shape[1], 14):
                patches.append(frame[top : top + 14, left : left + 14].transpose(2, 0, 1))
    return (np.stack(patches) / 255.0 - 0.5) / 0.5


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 5))
def test_patches_are_in_reading_order_frame_by_frame(width, height, num_frames):
    frames = make_frames(num_frames, width, height)
    padded = PROCESSOR.padded(frames, 32)

    patches = np.concatenate([item.pixel_values for item in PROCESSOR.video(frames, 2.0)])

    assert np.allclose(patches, textbook_patches(padded), atol=1e-6)


def test_padding_becomes_minus_one_at_the_right_and_the_bottom():
    item = PROCESSOR.image(Image.new("RGB", (15, 15), "white"))

    assert item.grid_thw == (1, 2, 2)
    assert item.pixel_values[3, :, 0, 0].tolist() == [1, 1, 1]
    assert (item.pixel_values[3, :, 1:, :] == -1).all()
    assert (item.pixel_values[3, :, :, 1:] == -1).all()


def test_alpha_is_dropped_not_blended():
    item = PROCESSOR.image(Image.new("RGBA", (28, 28), (255, 0, 0, 0)))

    assert item.pixel_values[0, :, 0, 0].tolist() == [1, -1, -1]


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_every_mode_is_read(mode):
    assert PROCESSOR.image(Image.new(mode, (20, 20))).grid_thw == (1, 2, 2)


def test_mean_and_std_come_from_the_file():
    config = MediaConfig.from_dict(TINY | {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4]})

    item = ImageProcessor(config).image(Image.new("RGB", (28, 28), (255, 255, 255)))

    assert item.pixel_values[0, :, 0, 0].tolist() == pytest.approx([0.9, 0.4, 0.175])


def test_merge_kernel_size_may_be_a_list():
    assert MediaConfig.from_dict(TINY | {"merge_kernel_size": [2, 2]}) == MediaConfig.from_dict(TINY)


# ------------------------------------------------------------------ video


@pytest.mark.parametrize(
    "num_frames, fps, indices",
    [
        (7, 2.0, [0, 1, 2, 3, 4, 5, 6]),
        (1, 30.0, [0]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (30, 10.0, [0, 6, 12, 17, 23, 29]),
        (100, 50.0, [0, 33, 66, 99]),
        (3, 1000.0, [0]),
    ],
)
def test_two_frames_a_second_are_sampled(num_frames, fps, indices):
    assert sampled_frames(num_frames, fps, PROCESSOR.config) == indices


def test_most_frames_of_a_video():
    config = MediaConfig.from_dict(TINY | {"max_num_frames_each_video": 3})

    assert sampled_frames(9, 2.0, config) == [0, 4, 8]


def test_patches_of_a_chunk_are_limited_together():
    config = MediaConfig.from_dict(TINY | {"in_patch_limit_video": 16})

    chunks = list(ImageProcessor(config).video(make_frames(5, 112, 112), 2.0))

    assert [chunk.grid_thw for chunk in chunks] == [(4, 2, 2), (1, 4, 4)]


def test_chunk_starts_at_its_first_frame():
    chunks = list(PROCESSOR.video(make_frames(30), 10.0))

    assert [chunk.start_seconds for chunk in chunks] == [0.0, 2.3]


@pytest.mark.parametrize("fps", [0, -1.0, math.inf, math.nan, "2", None, True])
def test_fps_that_is_no_rate_is_refused(fps):
    with pytest.raises(ValueError, match=r"video 3 has fps .*; a positive number is expected"):
        list(PROCESSOR.video(make_frames(2), fps, "video 3"))


def test_frames_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="frame 1 of the video has 5x6 while frame 0 has 40x33; one size is expected"):
        list(PROCESSOR.video([*make_frames(1), Image.new("RGB", (5, 6))], 2.0))


def test_video_without_frames_is_refused():
    with pytest.raises(ValueError, match="the video has no frames"):
        list(PROCESSOR.video([], 2.0))


def test_what_is_no_picture_is_refused():
    with pytest.raises(TypeError, match=r"image 1 is a str; a PIL\.Image\.Image is expected"):
        PROCESSOR.image("cat.png", "image 1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image 1 has 0x5 pixels"):
        PROCESSOR.image(Image.new("RGB", (0, 5)), "image 1")


# ------------------------------------------------------------------ files


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    make_frames(1, width, height)[0].save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is enormous."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_picture_of_every_kind_opens(tmp_path, kind):
    make_image("A").save(tmp_path / "a", kind)

    image = open_image(tmp_path / "a")

    assert image.size == (61, 45)
    assert image.convert("RGB").getpixel((60, 44)) is not None
    if kind == "PNG":
        assert image.tobytes() == make_image("A").tobytes()


BROKEN = {
    "empty": (b"", "is empty; a picture is expected"),
    "text": (b"hello, I am a picture", "is not a picture of a kind that is read"),
    "truncated": (png(60, 40)[:-200], "cannot be decoded: "),
    "only a header": (png(60, 40)[:40], "cannot be decoded: |is not a picture"),
    "bomb": (bomb(20_000, 20_000), "has too many pixels; at most 134217728 are decoded"),
    "small bomb": (bomb(12_000, 12_000), "has 12000x12000 pixels; at most 134217728 are decoded"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a picture of a kind that is read"),
    "pickle": (b"\x80\x04\x95", "is not a picture of a kind that is read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_picture_is_one_line_that_names_it(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "cat.png"
    path.write_bytes(content)

    with pytest.raises(UnreadableFileError, match=rf"cat\.png: ({message})") as error:
        open_image(path)
    assert "\n" not in str(error.value)


def test_missing_picture_and_folder_are_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"cat\.png: there is no such file"):
        open_image(tmp_path / "cat.png")
    with pytest.raises(UnreadableFileError, match=r"is not a file"):
        open_image(tmp_path)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_picture_is_an_error_or_a_picture(tmp_path_factory, data):
    raw = bytearray(png(9, 7))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.png"
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])

    try:
        image = open_image(path)
    except UnreadableFileError as e:
        assert str(e).startswith(str(path))
    else:
        assert image.width > 0


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch_size": 0}, "patch_size is 0; a whole number from 1 to 1024 is expected"),
        ({"patch_size": -14}, "patch_size is -14"),
        ({"patch_size": 10**9}, "patch_size is 1000000000"),
        ({"patch_size": "14"}, "patch_size is '14'"),
        ({"patch_size": True}, "patch_size is True"),
        ({"patch_size": 14.0}, "patch_size is 14.0"),
        ({"patch_size": None}, "patch_size is None"),
        ({"merge_kernel_size": [2, 4]}, r"merge_kernel_size is \[2, 4\]; only squares are supported"),
        ({"merge_kernel_size": [[]]}, r"merge_kernel_size is \[\]; a whole number"),
        ({"merge_kernel_size": []}, r"merge_kernel_size is \[\]; only squares are supported"),
        ({"merge_kernel_size": 0}, "merge_kernel_size is 0"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean is \[0.5, 0.5\]; three numbers are expected"),
        ({"image_mean": [0.5, "x", 0.5]}, r"image_mean\[1\] is 'x'; a number"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"image_std\[1\] is 0.0; a number from 1e-06"),
        ({"image_std": [0.5, math.nan, 0.5]}, r"image_std\[1\] is nan"),
        ({"image_std": 0.5}, "image_std is 0.5; three numbers are expected"),
        ({"in_patch_limit": -1}, "in_patch_limit is -1"),
        ({"in_patch_limit": 10**30}, "in_patch_limit is 10+"),
        ({"in_patch_limit_each_frame": 0}, "in_patch_limit_each_frame is 0"),
        ({"in_patch_limit_video": -5}, "in_patch_limit_video is -5"),
        ({"patch_limit_on_one_side": 0}, "patch_limit_on_one_side is 0"),
        ({"sample_fps": 0}, "sample_fps is 0; a number"),
        ({"sample_fps": math.inf}, "sample_fps is inf"),
        ({"max_num_frames_each_video": 0}, "max_num_frames_each_video is 0"),
        ({"temporal_merge_kernel_size": 0}, "temporal_merge_kernel_size is 0"),
        ({"fixed_output_tokens": 256}, "fixed_output_tokens is 256; only None is supported"),
        ({"timestamp_mode": "frames"}, "timestamp_mode is 'frames'; only 'hh:mm:ss.fff' is supported"),
    ],
)
def test_absurd_value_is_refused_by_name(tmp_path, change, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": TINY | change}))

    with pytest.raises(UnreadableFileError, match=rf"preprocessor_config\.json: media_proc_cfg\.{message}"):
        load_image_processor(tmp_path)


@pytest.mark.parametrize("field", ["patch_size", "merge_kernel_size", "image_mean", "in_patch_limit", "sample_fps"])
def test_missing_value_is_refused_by_name(tmp_path, field):
    config = {key: value for key, value in TINY.items() if key != field}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": config}))

    with pytest.raises(UnreadableFileError, match=rf"media_proc_cfg\.{field} is "):
        load_image_processor(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"media_proc_cfg": 5}', "[]", "", "{"])
def test_broken_preprocessor_config_is_named(tmp_path, content):
    (tmp_path / "preprocessor_config.json").write_text(content)

    with pytest.raises(UnreadableFileError, match=r"preprocessor_config\.json: "):
        load_image_processor(tmp_path)
