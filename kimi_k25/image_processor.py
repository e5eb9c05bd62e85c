"""Pictures and video frames to patches, by the checkpoint's preprocessor_config.json. Knows no tokens and no model.

The arithmetic is the published one, step by step, because a picture that differs by one grey level is a picture the
model never saw: PIL's bicubic on 8-bit RGB (alpha dropped, not blended), zero padding at the right and the bottom,
then normalisation, which turns the padding into -1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import quote, read_object

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

MAX_PIXELS = 2**27  # of a file: 400 MB once decoded; the largest picture the model sees has 52 million
MAX_COUNT = 2**20  # of any limit in the configuration; the published ones reach 2**14
# Pillow reads more, some by starting other programs (EPS) and some that are documents; these are pictures.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """media_proc_cfg of preprocessor_config.json, in its spelling.

    Attributes:
        in_patch_limit: Most patches of an image, before padding.
        in_patch_limit_each_frame: Most patches of a video frame; None is as for an image.
        in_patch_limit_video: Most patches of the frames of one chunk together; None is no such limit.
        patch_limit_on_one_side: Most patches along a side.
        merge_kernel_size: Patches along each side that become one token.
        temporal_merge_kernel_size: Frames that are one chunk, and one media item.
        sample_fps: Frames taken of each second of a video.
        max_num_frames_each_video: Most frames taken of a video; None is no limit.
    """

    patch_size: int
    merge_kernel_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    in_patch_limit: int
    patch_limit_on_one_side: int
    in_patch_limit_each_frame: int | None
    in_patch_limit_video: int | None
    sample_fps: float
    max_num_frames_each_video: int | None
    temporal_merge_kernel_size: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> MediaConfig:
        """Reads media_proc_cfg.

        Raises:
            ValueError: Names the field that is missing, out of range, or of a kind that is not implemented.
        """
        for field, supported in (("fixed_output_tokens", None), ("timestamp_mode", "hh:mm:ss.fff")):
            if raw.get(field, supported) != supported:
                raise ValueError(f"{field} is {quote(raw[field])}; only {supported!r} is supported")
        merge = raw.get("merge_kernel_size")
        if isinstance(merge, list | tuple):
            if not merge or any(side != merge[0] for side in merge):
                raise ValueError(f"merge_kernel_size is {quote(merge)}; only squares are supported")
            raw = {**raw, "merge_kernel_size": merge[0]}
        return cls(
            patch_size=_count(raw, "patch_size", most=1024),
            merge_kernel_size=_count(raw, "merge_kernel_size", most=64),
            image_mean=_three_numbers(raw, "image_mean"),
            image_std=_three_numbers(raw, "image_std", least=1e-6),
            in_patch_limit=_count(raw, "in_patch_limit"),
            patch_limit_on_one_side=_count(raw, "patch_limit_on_one_side", most=2**14),
            in_patch_limit_each_frame=_count_or_none(raw, "in_patch_limit_each_frame"),
            in_patch_limit_video=_count_or_none(raw, "in_patch_limit_video"),
            sample_fps=_number(raw.get("sample_fps"), "sample_fps", least=1e-6),
            max_num_frames_each_video=_count_or_none(raw, "max_num_frames_each_video"),
            temporal_merge_kernel_size=_count(raw, "temporal_merge_kernel_size", most=1024),
        )

    @property
    def tokens_side(self) -> int:
        """Pixels along each side that become one token."""
        return self.patch_size * self.merge_kernel_size


def _count(raw: Mapping[str, Any], field: str, *, most: int = MAX_COUNT) -> int:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        found = f"is {quote(value)}" if field in raw else "is missing"
        raise ValueError(f"{field} {found}; a whole number from 1 to {most} is expected")
    return value


def _count_or_none(raw: Mapping[str, Any], field: str) -> int | None:
    return None if raw.get(field) is None else _count(raw, field)


def _number(value: Any, field: str, *, least: float = -1e6) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e6:
        raise ValueError(f"{field} is {quote(value)}; a number from {least:g} to 1e+06 is expected")
    return float(value)


def _three_numbers(raw: Mapping[str, Any], field: str, *, least: float = -1e6) -> tuple[float, float, float]:
    values = raw.get(field)
    if not isinstance(values, list | tuple) or len(values) != 3:
        raise ValueError(f"{field} is {quote(values)}; three numbers are expected, for red, green and blue")
    red, green, blue = (_number(value, f"{field}[{i}]", least=least) for i, value in enumerate(values))
    return red, green, blue


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, or one chunk of a video: what takes the place of one placeholder.

    Attributes:
        pixel_values: (t * h * w, 3, patch_size, patch_size) float32, frame by frame, patches in reading order.
        grid_thw: Frames, and patches down and across.
        num_tokens: Tokens that it becomes; the frames of a chunk are pooled, so t does not count.
        start_seconds: Where a video chunk starts in its video; None for an image.
    """

    pixel_values: np.ndarray
    grid_thw: tuple[int, int, int]
    num_tokens: int
    start_seconds: float | None = None


def resize_plan(width: int, height: int, config: MediaConfig, patch_limit: int) -> tuple[int, int]:
    """Returns the width and height, in pixels, to which a picture is shrunk before it is padded; never enlarged.

    The limit on patches is checked before sides are padded up to whole tokens, so the grid can exceed it a little.
    """
    patch, longest = config.patch_size, config.patch_limit_on_one_side * config.patch_size
    num_patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(patch_limit / num_patches), longest / width, longest / height)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)


def sampled_frames(num_frames: int, fps: float, config: MediaConfig) -> list[int]:
    """Returns the indices of the frames that are looked at: `sample_fps` a second, spread evenly from first to last."""
    import numpy as np

    num_sampled = max(round(num_frames * min(config.sample_fps, fps) / fps), 1)
    if config.max_num_frames_each_video is not None:
        num_sampled = min(num_sampled, config.max_num_frames_each_video)
    return [int(i) for i in np.linspace(0, num_frames - 1, num_sampled).round()]


def timestamp(seconds: float) -> str:
    """Returns hh:mm:ss.fff, the fraction cut off (not rounded)."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


class ImageProcessor:
    """Turns pictures and videos into media items.

    Args:
        config: What the checkpoint states.
    """

    def __init__(self, config: MediaConfig) -> None:
        self.config = config

    def image(self, image: Image, name: str = "the image") -> MediaItem:
        """Returns the item of one picture, of any mode and size; transparency is dropped, EXIF rotation not applied.

        Raises:
            TypeError, ValueError: `name` is no picture, or has no pixels.
        """
        return self._item([_rgb(image, name)], self.config.in_patch_limit)

    def video(self, frames: Sequence[Image], fps: float, name: str = "the video") -> Iterator[MediaItem]:
        """Yields one item for each chunk of up to `temporal_merge_kernel_size` sampled frames.

        Args:
            frames: All frames, of one size; only the sampled ones are looked at, in order.
            fps: How many of `frames` one second has.

        Raises:
            TypeError, ValueError: There are no frames, they differ in size, or fps is not a positive number.
        """
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise ValueError(f"{name} has fps {fps!r}; a positive number is expected")
        if len(frames) == 0:
            raise ValueError(f"{name} has no frames")
        config = self.config
        indices = sampled_frames(len(frames), fps, config)
        for start in range(0, len(indices), config.temporal_merge_kernel_size):
            chunk = indices[start : start + config.temporal_merge_kernel_size]
            pictures = [_rgb(frames[i], f"frame {i} of {name}") for i in chunk]
            for i, picture in zip(chunk, pictures, strict=True):
                if picture.size != pictures[0].size:
                    sizes = "{}x{} while frame {} has {}x{}".format(*picture.size, chunk[0], *pictures[0].size)
                    raise ValueError(f"frame {i} of {name} has {sizes}; one size is expected")
            limit = config.in_patch_limit_each_frame or config.in_patch_limit
            if config.in_patch_limit_video is not None:
                limit = min(max(1, round(config.in_patch_limit_video / len(chunk))), limit)
            yield self._item(pictures, limit, start_seconds=chunk[0] / fps)

    def _item(self, pictures: list[Image], patch_limit: int, start_seconds: float | None = None) -> MediaItem:
        padded = self.padded(pictures, patch_limit)
        config, (t, height, width, _) = self.config, padded.shape
        h, w = height // config.patch_size, width // config.patch_size
        return MediaItem(
            pixel_values=self._patches(padded),
            grid_thw=(t, h, w),
            num_tokens=h * w // config.merge_kernel_size**2,
            start_seconds=start_seconds,
        )

    def padded(self, pictures: list[Image], patch_limit: int) -> np.ndarray:
        """Returns RGB `pictures` of one size, shrunk and padded to whole tokens: (t, height, width, 3) uint8."""
        import numpy as np
        from PIL.Image import Resampling

        width, height = resize_plan(*pictures[0].size, self.config, patch_limit)
        side = self.config.tokens_side
        frames = [np.asarray(picture.resize((width, height), Resampling.BICUBIC)) for picture in pictures]
        return np.pad(np.stack(frames), ((0, 0), (0, -height % side), (0, -width % side), (0, 0)))

    def _patches(self, padded: np.ndarray) -> np.ndarray:
        """What `padded` returns, normalised: (t * h * w, 3, patch_size, patch_size) float32, in reading order."""
        import numpy as np

        # A value depends on grey level and channel alone: the steps are done on a table of all of them, and looked up.
        table = (np.arange(256)[:, None].repeat(3, 1) / 255.0).astype(np.float32)
        table -= np.array(self.config.image_mean)  # in float64, each step rounded to float32, as in the original
        table *= 1.0 / np.array(self.config.image_std)
        patch, (t, height, width, _) = self.config.patch_size, padded.shape
        levels = padded.reshape(t, height // patch, patch, width // patch, patch, 3)
        levels = np.ascontiguousarray(levels.transpose(0, 1, 3, 5, 2, 4)).reshape(-1, 3, patch, patch)
        pixels = np.empty(levels.shape, np.float32)
        for channel in range(3):
            pixels[:, channel] = table[:, channel][levels[:, channel]]
        return pixels


def _rgb(image: Any, name: str) -> Image:
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise TypeError(f"{name} is a {type(image).__name__}; a PIL.Image.Image is expected (see open_image)")
    if 0 in image.size:
        raise ValueError(f"{name} has {image.width}x{image.height} pixels; at least one is expected")
    return image.convert("RGB")


def open_image(path: str | Path) -> Image:
    """Returns the picture in a file, decoded; of an animation, its first frame.

    Raises:
        UnreadableFileError: The file is missing, no picture, cut off, or has more than MAX_PIXELS.
    """
    from PIL import Image, UnidentifiedImageError

    path = Path(path)
    if not path.is_file():
        raise UnreadableFileError(path, "is not a file" if path.exists() else "there is no such file")
    if path.stat().st_size == 0:
        raise UnreadableFileError(path, "is empty; a picture is expected")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, and about a size that is judged below
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    size = f"{image.width}x{image.height} pixels"
                    raise UnreadableFileError(path, f"has {size}; at most {MAX_PIXELS} are decoded")
                image.load()
                return image
    except UnreadableFileError:
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise UnreadableFileError(path, f"is not a picture of a kind that is read ({kinds})") from None
    except Image.DecompressionBombError:
        raise UnreadableFileError(path, f"has too many pixels; at most {MAX_PIXELS} are decoded") from None
    except Exception as e:  # decoders of broken files raise whatever their parsing runs into
        raise UnreadableFileError(path, f"cannot be decoded: {' '.join(str(e).split()) or type(e).__name__}") from e


def load_image_processor(checkpoint: str | Path) -> ImageProcessor:
    """Reads preprocessor_config.json of a checkpoint folder.

    Raises:
        UnreadableFileError: It is missing or broken; names the field.
    """
    path = Path(checkpoint) / "preprocessor_config.json"
    raw = read_object(path, fractions=True).get("media_proc_cfg")
    if not isinstance(raw, dict):
        found = "is missing" if raw is None else f"is a {type(raw).__name__}"
        raise UnreadableFileError(path, f"media_proc_cfg {found}; an object is expected")
    try:
        return ImageProcessor(MediaConfig.from_dict(raw))
    except ValueError as e:
        raise UnreadableFileError(path, f"media_proc_cfg.{e}") from None
