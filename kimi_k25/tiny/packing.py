"""Lessons as packed tensors: token ids with their targets, and the patches of all pictures. Knows no model.

A faster way to what the processor makes of the same conversation; a test holds the two equal. Pixels stay uint8 until
they are on the device.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..image_processor import timestamp
from ..tokenizer import Tokenizer
from .lessons import Lesson, Teacher, Turn, Video
from .questions import MAX_COUNT
from .scenes import MAX_SIDE, MIN_CROWD_SIDE, Sizes

PATCH, MERGED = 14, 28  # Pixels of a patch's side, and of the square that becomes one token.
CHUNK_FRAMES = 4
NO_TARGET = -100
GRIDS_IN_A_BATCH = 10
GROWN_AT = 6000  # The batch from which on pictures have all sizes and all numbers of shapes.
FIRST_THINGS = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations packed end to end.

    Attributes:
        input_ids: (num_tokens,) int64.
        targets: (num_tokens,) int64: the token after this one where an answer is being learned, elsewhere NO_TARGET.
        positions: (num_tokens,) int64.
        cu_seqlens: (num_seqs + 1,) int32.
        patches: (num_patches, 3, 14, 14) uint8.
        grid_thws: (num_media, 3) int64.
    """

    input_ids: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    patches: Tensor
    grid_thws: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device; copies from pinned memory don't wait. What states sizes stays on the host."""
        on_device = {name: getattr(self, name).to(device, non_blocking=True) for name in _DEVICE_TENSORS}
        return replace(self, **on_device)

    def pin_memory(self) -> Batch:
        """The same in pinned memory; the DataLoader asks for it."""
        return Batch(*(getattr(self, name).pin_memory() for name in self.__slots__))

    def pixel_values(self, dtype: torch.dtype) -> Tensor:
        """(num_patches, 3, 14, 14) in [-1, 1]."""
        return (self.patches.float() / 255 - 0.5).mul_(2).to(dtype)


_DEVICE_TENSORS = ("input_ids", "targets", "positions", "patches")


@dataclass(slots=True)
class Packed:
    """One conversation on the way into a batch."""

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)  # Whether this id is to be predicted.
    patches: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, learned: bool = False) -> None:
        """Appends ids, all of them to be predicted or none."""
        self.ids.extend(ids)
        self.learned.extend([learned] * len(ids))


class Packer:
    """Packs lessons with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.special_ids
        self.padding_ids = tokenizer.special_ids["<|media_pad|>"], tokenizer.special_ids["[PAD]"]
        self._encode = functools.lru_cache(maxsize=50_000)(lambda text: tuple(tokenizer.encode(text)))

    def pack(self, lessons: Iterable[Lesson]) -> Batch:
        """Whole lessons, every answer to be learned."""
        return self.join([self.pack_one(lesson) for lesson in lessons])

    def join(self, packed: Sequence[Packed]) -> Batch:
        """Conversations end to end, in this order."""
        ids = np.concatenate([p.ids for p in packed]).astype(np.int64)
        learned = np.concatenate([p.learned for p in packed])
        targets = np.where(np.append(learned[1:], False), np.append(ids[1:], 0), NO_TARGET)
        patches = [chunk for p in packed for chunk in p.patches]
        empty = np.zeros((0, 3, PATCH, PATCH), np.uint8)
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(targets),
            torch.from_numpy(np.concatenate([np.arange(len(p.ids)) for p in packed])),
            torch.from_numpy(np.cumsum([0, *(len(p.ids) for p in packed)]).astype(np.int32)),
            torch.from_numpy(np.concatenate(patches) if patches else empty),
            torch.tensor([grid for p in packed for grid in p.grids], dtype=torch.int64).reshape(-1, 3),
        )

    def pack_one(self, lesson: Lesson, *, with_last_answer: bool = True) -> Packed:
        """One conversation; without its last answer it is a prompt."""
        out = Packed()
        if lesson.system is not None:
            self._open(out, "<|im_system|>", "system")
            out.add((*self._encode(lesson.system), self._special["<|im_end|>"]))
        for number, turn in enumerate(lesson.turns, start=1):
            is_last = number == len(lesson.turns)
            self._ask(out, turn)
            out.add((self._special["<think>"],))
            if not (lesson.thinking and is_last):
                out.add((self._special["</think>"],))
            if is_last and not with_last_answer:
                break
            if lesson.thinking and is_last:
                out.add(self._encode(turn.question.reasoning), learned=True)
                out.add((self._special["</think>"],), learned=True)
            out.add((*self._encode(turn.question.answer), self._special["<|im_end|>"]), learned=True)
        return out

    def _open(self, out: Packed, tag: str, role: str) -> None:
        out.add((self._special[tag], *self._encode(role), self._special["<|im_middle|>"]))

    def _ask(self, out: Packed, turn: Turn) -> None:
        self._open(out, "<|im_user|>", "user")
        before, after = (turn.question.text, "") if turn.text_first else ("", turn.question.text)
        for item in turn.media:
            # A text ends where a control token begins; the newline after a picture begins the next text.
            if isinstance(item, Video):
                for start in range(0, len(item.frames), CHUNK_FRAMES):
                    out.add(self._encode(before + timestamp(start / item.fps)))
                    self._show(out, "video", item.frames[start : start + CHUNK_FRAMES])
                    before = ""
            else:
                out.add(self._encode(before))
                self._show(out, "image", [item])
            before = "\n"
        out.add(self._encode(before + after))
        out.add((self._special["<|im_end|>"],))
        self._open(out, "<|im_assistant|>", "assistant")

    def _show(self, out: Packed, name: str, frames: Sequence[Image.Image]) -> None:
        patches, grid = patchify(frames)
        out.patches.append(patches)
        out.grids.append(grid)
        num_tokens = grid[1] * grid[2] // 4
        out.add((self._special["<|media_begin|>"], *self._encode(name), self._special["<|media_content|>"]))
        out.add((self._special["<|media_pad|>"],) * num_tokens)
        out.add((self._special["<|media_end|>"],))


def patchify(frames: Sequence[Image.Image]) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Frames of one size, small enough not to be shrunk, as (t * h * w, 3, 14, 14) uint8 and the grid (t, h, w).

    image_processor.py's arithmetic over again, without its resizing and in uint8, for speed.
    """
    width, height = frames[0].size
    padded = (len(frames), height + -height % MERGED, width + -width % MERGED, 3)
    pixels = np.zeros(padded, np.uint8)
    for at, frame in enumerate(frames):
        pixels[at, :height, :width] = np.asarray(frame if frame.mode == "RGB" else frame.convert("RGB"))
    t, h, w = len(frames), pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
    cut = pixels.reshape(t, h, PATCH, w, PATCH, 3).transpose(0, 1, 3, 5, 2, 4)
    return cut.reshape(t * h * w, 3, PATCH, PATCH), (t, h, w)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes that every training batch has exactly, so that its kernels can be captured once.

    Attributes:
        num_lessons: Conversations at most; fewer if their pictures are large.
        num_seqs: Those, and sequences of padding.
        num_tokens, num_patches, num_media: Padding included.
        max_seqlen: Tokens of the longest conversation; longer ones are left out. Also patches of the largest item.
    """

    num_lessons: int
    num_seqs: int
    num_tokens: int
    num_patches: int
    num_media: int
    max_seqlen: int = 256

    @classmethod
    def of(cls, num_lessons: int) -> BatchShape:
        """For batches of at most so many lessons: their means, with some room."""
        return cls(
            num_lessons=num_lessons,
            num_seqs=num_lessons + num_lessons // 8 + 4,
            num_tokens=104 * num_lessons + 256,
            num_patches=132 * num_lessons + 256,
            num_media=num_lessons * 7 // 4 + 8,
        )

    def fill(self, lessons: Iterable[Packed], placeholder: int, pad: int) -> list[Packed]:
        """As many lessons as fit, ordered by their grids, then padding to the exact sizes; nothing in it is learned.

        The padding is black pictures, their placeholders, and pad tokens.
        """
        taken: list[Packed] = []
        seqs, tokens, patches, media = self.num_seqs, self.num_tokens, self.num_patches, self.num_media  # Left.
        for one in itertools.islice(lessons, self.num_lessons):
            seqs, tokens, media = seqs - 1, tokens - len(one.ids), media - len(one.grids)
            patches -= sum(len(p) for p in one.patches)
            # Every sequence of padding needs a token, every picture of it 2 x 2 patches and their placeholder.
            if patches < 4 * media or tokens < patches // 4 + seqs:
                seqs, tokens, media = seqs + 1, tokens + len(one.ids), media + len(one.grids)
                patches += sum(len(p) for p in one.patches)
                break
            taken.append(one)
        assert max(tokens / seqs, patches / media) <= self.max_seqlen, "too much padding; the sizes of `of` are off"
        ids = [placeholder] * (patches // 4) + [pad] * (tokens - patches // 4)
        padding = [Packed() for _ in range(seqs)]
        at = 0
        for one, length in zip(padding, _even_parts(tokens, seqs), strict=True):
            one.add(ids[at : at + length])
            at += length
        for units in _even_parts(patches // 4, media):
            padding[0].patches.append(np.zeros((4 * units, 3, PATCH, PATCH), np.uint8))
            padding[0].grids.append((1, 2, 2 * units))
        return [*sorted(taken, key=lambda one: one.grids), *padding]


def _even_parts(total: int, count: int) -> list[int]:
    """`total` in `count` parts that differ by one at most, the larger first."""
    return [total // count + (k < total % count) for k in range(count)]


class LessonBatches(torch.utils.data.Dataset[Batch]):
    """Training batches by number; batch k is the same on any machine with any number of workers.

    A batch's pictures share a few grids: the vision tower encodes equal ones at once. The first batches have small
    pictures, of up to 112 pixels, with up to FIRST_THINGS shapes; both limits grow until GROWN_AT. Small ones teach the
    same things sooner.
    """

    def __init__(self, packer: Packer, shape: BatchShape, *, seed: int, num_batches: int) -> None:
        self._packer, self._shape, self._seed, self._num_batches = packer, shape, seed, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, k: int) -> Batch:
        rng = random.Random(f"lessons {self._seed} {k}")
        grown = min(1.0, k / GROWN_AT)
        most = round(MIN_CROWD_SIDE + (MAX_SIDE - MIN_CROWD_SIDE) * grown)
        most_things = FIRST_THINGS + int((MAX_COUNT - FIRST_THINGS) * grown)
        teacher = Teacher(rng, sizes=Sizes.few(rng, GRIDS_IN_A_BATCH, most), most_things=most_things)
        packed = (self._packer.pack_one(teacher.lesson()) for _ in itertools.count())
        short = (one for one in packed if len(one.ids) <= self._shape.max_seqlen)
        return self._packer.join(self._shape.fill(short, *self._packer.padding_ids))
