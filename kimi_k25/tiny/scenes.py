"""Drawn pictures: coloured shapes on a plain ground, noise and blanks, frames of a moving shape. Knows no questions.

Everything is drawn from a `random.Random`, so one seed is one picture. Positions are fractions of the picture's size,
radii are pixels. Colours are drawn from a box of hues around each name, wide apart from each other.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from .digits import FILTERS
from .questions import COLORS, PLACES, SHAPES

RGB = tuple[int, int, int]

# Hue in degrees, saturation, value: each a range.
_HUES = {
    "red": ((-8, 8), (0.8, 1.0), (0.7, 1.0)),
    "orange": ((26, 36), (0.88, 1.0), (0.92, 1.0)),
    "yellow": ((54, 62), (0.8, 1.0), (0.88, 1.0)),
    "green": ((95, 150), (0.7, 1.0), (0.4, 0.9)),
    "blue": ((205, 242), (0.75, 1.0), (0.55, 1.0)),
    "purple": ((274, 300), (0.6, 1.0), (0.45, 0.85)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.1)),
    "white": ((0, 360), (0.0, 0.03), (0.95, 1.0)),
}
MIN_SIDE, MAX_SIDE, MAX_FRAME_SIDE = 56, 224, 112
CROWD = 4  # So many shapes, or more, are a crowd.
MIN_SEVERAL_SIDE, MIN_CROWD_SIDE = 84, 112  # Of a picture with several shapes, and with a crowd.
CELL = 28
MIN_CONTRAST = 110  # Distance in RGB between a shape and its ground.
_OVERSAMPLING = 4
_COLUMNS = (0.2, 0.5, 0.8)


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape of a picture, centred at the fractions (x, y), `radius` pixels from its centre to its corners."""

    shape: str
    color: str
    x: float
    y: float
    radius: float

    def matches(self, shape: str, color: str) -> bool:
        """Whether this is meant; "shape" is any shape, "" any color."""
        return shape in ("shape", self.shape) and color in ("", self.color)


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's contents."""

    width: int
    height: int
    things: tuple[Thing, ...]

    def count(self, shape: str, color: str) -> int:
        """How many things match; "shape" is any shape, "" any color."""
        return sum(t.matches(shape, color) for t in self.things)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where a picture's size comes from.

    Attributes:
        cells: Squares of 28 pixels (one token each) across and down, one of which every picture fills, up to padding
            on its last ones. None: any size, small ones more often, six in ten square. A batch of few grids is much
            faster to encode.
    """

    cells: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def few(cls, rng: random.Random, count: int, most: int = MAX_SIDE) -> Sizes:
        """`count` grids for a batch, some of them small enough for a video, some large enough for a crowd."""
        bounds = [(MIN_CROWD_SIDE, most), (MIN_SIDE, min(most, MAX_FRAME_SIDE)), *[(MIN_SIDE, most)] * (count - 2)]
        sizes = [cls().draw(rng, *bound) for bound in bounds]
        return cls(tuple((-(-width // CELL), -(-height // CELL)) for width, height in sizes))

    def draw(self, rng: random.Random, least: int = MIN_SIDE, most: int = MAX_SIDE) -> tuple[int, int]:
        """Width and height in pixels, each from `least` to `most`."""
        if self.cells is not None:
            fitting = [cell for cell in self.cells if least <= CELL * min(cell) and CELL * max(cell) <= most]
            width, height = (CELL * n for n in rng.choice(fitting))
            if rng.random() < 0.5:  # A picture need not be a multiple of 28.
                width, height = (max(least, extent - rng.randrange(CELL)) for extent in (width, height))
            return width, height
        width = least + int((most - least + 1) * rng.random() ** 2)
        height = width if rng.random() < 0.6 else least + int((most - least + 1) * rng.random() ** 2)
        return width, height


def single(rng: random.Random, size: tuple[int, int], *, place: str | None = None) -> Scene:
    """One shape: large and anywhere, or in the named place."""
    width, height = size
    side = min(width, height)
    if place is None:
        radius = side * rng.uniform(0.2, 0.45)
        spread = 0.5 - radius / side
        x, y = (0.5 + rng.uniform(-spread, spread) * side / extent for extent in (width, height))
    else:
        radius = max(9.0, side * rng.uniform(0.11, 0.19))
        row, column = divmod(PLACES.index(place), 3)
        x, y = (_COLUMNS[i] + rng.uniform(-0.05, 0.05) for i in (column, row))
    return Scene(width, height, (Thing(rng.choice(SHAPES), rng.choice(COLORS), x, y, radius),))


def several(rng: random.Random, size: tuple[int, int], kinds: Sequence[tuple[str, str]]) -> Scene:
    """Shapes of the given (shape, color) kinds, none touching another."""
    width, height = size
    side = min(width, height)
    most = side * (0.2 if len(kinds) <= 3 else 0.15)
    while True:
        things: list[Thing] = []
        for shape, color in kinds:
            for _ in range(30):
                radius = rng.uniform(8.0, max(9.0, most))
                x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
                if all(math.hypot(x - t.x * width, y - t.y * height) > radius + t.radius + 3 for t in things):
                    things.append(Thing(shape, color, x / width, y / height, radius))
                    break
        if len(things) == len(kinds):
            return Scene(width, height, tuple(things))
        most *= 0.9  # Too crowded: smaller shapes.


def random_kinds(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` pairs (shape, color) out of few shapes and colors, so that some repeat."""
    shapes, colors = rng.sample(SHAPES, rng.randint(1, 3)), rng.sample(COLORS, rng.randint(1, 3))
    return [(rng.choice(shapes), rng.choice(colors)) for _ in range(count)]


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """The picture, through a random camera: some are resized, noisy, or saved as JPEG on the way."""
    colors = [rgb(t.color, rng) for t in scene.things]
    ground = ground_color(colors, rng)
    scale = rng.uniform(0.75, 1.8) if rng.random() < 0.25 else 1.0
    size = (max(1, round(scene.width * scale)), max(1, round(scene.height * scale)))
    picture = Image.new("RGB", size, ground)
    for thing, color in zip(scene.things, colors, strict=True):
        x, y = thing.x * size[0], thing.y * size[1]
        paste(picture, thing.shape, color, x, y, thing.radius * scale, tilt(thing.shape, rng))
    if scale != 1.0:
        picture = picture.resize((scene.width, scene.height), rng.choice(FILTERS))
    return camera(picture, rng)


def camera(picture: Image.Image, rng: random.Random) -> Image.Image:
    """Noise on one picture in eight, JPEG on one in sixteen."""
    r = rng.random()
    if r < 1 / 8:
        strength = rng.randint(1, 15)
        noise = _numpy(rng).integers(-strength, strength + 1, (picture.height, picture.width, 3), np.int8)
        return Image.fromarray((np.asarray(picture, np.int16) + noise).clip(0, 255).astype(np.uint8))
    if r < 3 / 16:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=rng.randint(60, 95))
        return Image.open(buffer).convert("RGB")
    return picture


def place_name(x: float, y: float) -> str:
    """The ninth of a picture that the fractions (x, y) fall into."""
    return PLACES[3 * min(2, int(3 * y)) + min(2, int(3 * x))]


def moving(direction: str, rng: random.Random, size: tuple[int, int]) -> tuple[str, list[str], list[Image.Image]]:
    """A shape's name, the places it is at, and 4 to 8 frames in which it goes in one direction at a steady pace."""
    width, height = size
    shape, color = rng.choice(SHAPES), rgb(rng.choice(COLORS), rng)
    ground, angle = ground_color([color], rng), tilt(shape, rng)
    radius = min(width, height) * rng.uniform(0.13, 0.22)
    num_frames = rng.randint(4, 8)
    extent, cross = (width, height) if direction in ("left", "right") else (height, width)
    track = rng.uniform(0.5, 1.0) * (extent - 2 * radius)
    start = radius + rng.uniform(0, extent - 2 * radius - track)
    side, drift = rng.uniform(radius, cross - radius), rng.uniform(-0.1, 0.1) * track
    places, frames = [], []
    for k in range(num_frames):
        share = k / (num_frames - 1)
        along = start + track * (share if direction in ("right", "down") else 1 - share)
        across = side + drift * (share - 0.5)
        x, y = (along, across) if direction in ("left", "right") else (across, along)
        places.append(place_name(x / width, y / height))
        frame = Image.new("RGB", (width, height), ground)
        paste(frame, shape, color, x, y, radius, angle)
        frames.append(frame)
    return shape, places, frames


def outside(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A picture with nothing in it that has a name: blank, noise of several kinds, stripes, a gradient."""
    width, height = size
    kind = rng.choice(("blank", "blank", "grain", "grain", "blotches", "grey", "speckles", "stripes", "gradient"))
    noise = _numpy(rng)
    pixels: np.ndarray
    if kind == "blank":
        color = tuple(rng.randrange(256) for _ in range(3)) if rng.random() < 0.6 else (rng.choice((0, 255)),) * 3
        return camera(Image.new("RGB", (width, height), color), rng)
    if kind == "grain":
        pixels = noise.integers(0, 256, (height, width, 3))
    elif kind == "grey":
        pixels = np.repeat(noise.normal(rng.uniform(80, 170), rng.uniform(30, 90), (height, width, 1)), 3, 2)
    elif kind == "blotches":
        cells = noise.integers(0, 256, (rng.randint(6, 24), rng.randint(6, 24), 3)).astype(np.uint8)
        return Image.fromarray(cells).resize((width, height), rng.choice(FILTERS))
    elif kind == "speckles":
        pixels = np.repeat(noise.random((height, width, 1)) < rng.uniform(0.05, 0.5), 3, 2) * 255
    else:
        across = np.linspace(0, 1, width) if rng.random() < 0.5 else np.linspace(0, 1, height)[:, None]
        share = across if kind == "gradient" else (across * rng.randint(4, 12)) % 1 < 0.5
        first, second = (np.array([rng.randrange(256) for _ in range(3)], np.float64) for _ in range(2))
        pixels = first + (second - first) * np.broadcast_to(share, (height, width))[..., None].astype(np.float64)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def rgb(color: str, rng: random.Random) -> RGB:
    """One of the colours that go by this name."""
    hue, saturation, value = (rng.uniform(*bounds) for bounds in _HUES[color])
    r, g, b = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(r * 255), round(g * 255), round(b * 255)


def ground_color(colors: Sequence[RGB], rng: random.Random) -> RGB:
    """A grey or pale ground on which every one of `colors` stands out."""
    for _ in range(20):
        if rng.random() < 0.7:
            ground = (rng.choice((0, 255, rng.randrange(256))),) * 3
        else:
            r, g, b = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.05, 0.25), rng.uniform(0.2, 1.0))
            ground = (round(r * 255), round(g * 255), round(b * 255))
        if all(math.dist(ground, color) > MIN_CONTRAST for color in colors):
            return ground
    return (128, 128, 128)


def tilt(shape: str, rng: random.Random) -> float:
    """A small turn, in radians; circles don't need one."""
    return 0.0 if shape == "circle" else rng.uniform(-0.16, 0.16)


def paste(picture: Image.Image, shape: str, color: RGB, x: float, y: float, radius: float, angle: float) -> None:
    """Draws one shape, smooth at its edges, centred at pixel (x, y)."""
    left, top = math.floor(x - radius) - 1, math.floor(y - radius) - 1
    side = math.ceil(2 * radius) + 3
    mask = Image.new("L", (side * _OVERSAMPLING, side * _OVERSAMPLING), 0)
    cx, cy, r = (x - left) * _OVERSAMPLING, (y - top) * _OVERSAMPLING, radius * _OVERSAMPLING
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=255)
    else:
        cos, sin = math.cos(angle) * r, math.sin(angle) * r
        pen.polygon([(cx + u * cos - v * sin, cy + u * sin + v * cos) for u, v in _outline(shape)], fill=255)
    picture.paste(color, (left, top), mask.reduce(_OVERSAMPLING))


@functools.cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corners on or inside the unit circle, the y axis pointing down."""
    if shape == "square":
        s = math.sqrt(0.5)
        return ((-s, -s), (s, -s), (s, s), (-s, s))
    if shape == "triangle":
        return tuple((math.sin(a), -math.cos(a)) for a in (0, math.tau / 3, 2 * math.tau / 3))
    if shape == "star":
        spokes = ((1.0 if k % 2 == 0 else 0.42, k * math.tau / 10) for k in range(10))
        return tuple((r * math.sin(a), -r * math.cos(a)) for r, a in spokes)
    w = 0.3  # Half the width of a cross's beam.
    e = math.sqrt(1 - w * w)
    quarter = ((w, -w), (w, -e), (-w, -e))
    corners = [(u, v) for u, v in quarter]
    for _ in range(3):
        corners += [(v, -u) for u, v in corners[-3:]]
    return tuple(corners)


def _numpy(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(64))
