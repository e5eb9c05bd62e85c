"""Handwritten digits: scikit-learn's bundled 8x8 scans, split once, drawn at any size and polarity. Knows no questions.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository
(CC BY 4.0), whose test half scikit-learn carries: 1,797 scans with 17 grey levels.
"""

from __future__ import annotations

import functools
import random

import numpy as np
from PIL import Image

SPLIT_SEED = 20260101
TEST_SHARE = 0.2
FILTERS = (
    Image.Resampling.NEAREST,
    Image.Resampling.BOX,
    Image.Resampling.BILINEAR,
    Image.Resampling.HAMMING,
    Image.Resampling.BICUBIC,
    Image.Resampling.LANCZOS,
)


@functools.cache
def split(part: str) -> tuple[np.ndarray, np.ndarray]:
    """The scans of one part, "train" or "test": ((n, 8, 8) uint8 from 0 to 255, (n,) labels).

    One in five scans of every digit is for testing. The split depends on nothing but SPLIT_SEED.
    """
    from sklearn.datasets import load_digits  # An extra: needed for training and testing only.

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    rng = np.random.default_rng(SPLIT_SEED)
    chosen = []
    for digit in range(10):
        order = rng.permutation(np.flatnonzero(labels == digit))
        at = round(len(order) * TEST_SHARE)
        chosen.append(order[:at] if part == "test" else order[at:])
    index = np.sort(np.concatenate(chosen))
    return images[index], labels[index]


def distort(scan: np.ndarray, rng: random.Random) -> np.ndarray:
    """A training scan as another hand might have written it: turned, sheared, stretched, shifted, thicker or thinner.

    Works at 32x32 and scans again at 8x8 and 17 levels, so that the result looks like the data.
    """
    large = Image.fromarray(scan).resize((32, 32), Image.Resampling.BICUBIC)
    angle, shear = rng.uniform(-0.26, 0.26), rng.uniform(-0.2, 0.2)
    sx, sy = rng.uniform(0.82, 1.2), rng.uniform(0.82, 1.2)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = cos / sx, (sin + shear) / sx
    d, e = -sin / sy, cos / sy
    cx, cy = 16 + rng.uniform(-3, 3), 16 + rng.uniform(-2, 2)
    moved = large.transform(
        (32, 32),
        Image.Transform.AFFINE,
        (a, b, 16 - a * cx - b * cy, d, e, 16 - d * cx - e * cy),
        Image.Resampling.BILINEAR,
    )
    small = np.asarray(moved.resize((8, 8), Image.Resampling.BOX), np.float32) / 255
    small = small ** rng.uniform(0.65, 1.5)
    small = small * rng.uniform(0.85, 1.15) + np.random.default_rng(rng.getrandbits(64)).normal(0, 0.03, (8, 8))
    return (np.round(np.clip(small, 0, 1) * 16) * (255 / 16)).astype(np.uint8)


def draw(scan: np.ndarray, width: int, height: int, rng: random.Random) -> Image.Image:
    """An RGB picture of one scan: light on dark or dark on light, any resampling, with some margin."""
    side = max(24, int(min(width, height) * rng.uniform(0.7, 1.0)))
    large = Image.fromarray(scan).resize((side, side), rng.choice(FILTERS))
    paper, ink = rng.uniform(0, 70), rng.uniform(175, 255)
    if rng.random() < 0.5:
        paper, ink = 255 - paper, 255 - ink
    table = [round(paper + (ink - paper) * level / 255) for level in range(256)]
    picture = Image.new("L", (width, height), round(paper))
    picture.paste(large.point(table), (rng.randint(0, width - side), rng.randint(0, height - side)))
    return picture.convert("RGB")
