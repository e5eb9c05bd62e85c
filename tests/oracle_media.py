"""The pictures behind the golden outputs, as integer formulas, so that no image file travels along.

Knows nothing of how they are processed. The formulas are part of the goldens: changing one invalidates them.
"""

import numpy as np
from PIL import Image

# name: (width, height, mode): plain, with alpha, grey and shrunk, a sliver, one that needs no resampling
IMAGE_SIZES = {
    "A": (61, 45, "RGB"),
    "B": (37, 90, "RGBA"),
    "C": (201, 117, "L"),
    "D": (5, 400, "RGB"),
    "E": (112, 100, "RGB"),
}


def _picture(*channels: np.ndarray) -> Image.Image:
    array = np.stack([channel % 256 for channel in channels], axis=-1).astype(np.uint8)
    return Image.fromarray(array[..., 0] if len(channels) == 1 else array)


def make_image(name: str) -> Image.Image:
    """Returns golden image "A" to "E" in its own mode (RGB, RGBA or L)."""
    width, height, mode = IMAGE_SIZES[name]
    y, x = np.mgrid[:height, :width].astype(np.int64)
    k = ord(name)
    red = 7 * x + 3 * y + 11 * k
    if mode == "L":
        return _picture(red)

    green = x**2 + 5 * y + k
    blue = 13 * (x // 3 + y // 2) + 5 * k
    alpha = 3 * x + y
    return _picture(red, green, blue, alpha) if mode == "RGBA" else _picture(red, green, blue)


def make_frames(num_frames: int, width: int = 40, height: int = 33) -> list[Image.Image]:
    """Returns the first `num_frames` frames of the golden video (the goldens use 7 at 2 frames a second)."""
    y, x = np.mgrid[:height, :width].astype(np.int64)
    return [_picture(5 * x + 31 * t, 6 * y + 17 * t, x * y + 7 * t) for t in range(num_frames)]
