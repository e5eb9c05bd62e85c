"""Buckets: the padded sizes that graphs are captured for. Pure functions of integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["BucketPolicy", "Selection"]

# (largest size, step up to it): 42 sizes up to 2048, as SGLang's piecewise runner captures them.
_LADDER = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
_MAX_PAD_RATIO = 2
_MAX_PAD_ROWS = 3


def _is_close(num_tokens: int, bucket: int) -> bool:
    """Whether padding `num_tokens` up to `bucket` stays within 2x or 3 rows."""
    return bucket <= _MAX_PAD_RATIO * num_tokens or bucket - num_tokens <= _MAX_PAD_ROWS


@dataclass(frozen=True, slots=True)
class Selection:
    """A bucket, or None with the reason. A reason names no token count: reasons are counted, so they are few."""

    bucket: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """Sizes in rows: sorted, unique, the last one the maximum.

    Raises:
        ValueError: no sizes, or sizes that are not positive, sorted and unique; `of` sorts and prunes.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"bucket sizes must be positive, sorted and unique, got {list(self.sizes)}")

    @classmethod
    def of(cls, sizes: Iterable[int], *, maximum: int | None = None) -> BucketPolicy:
        """These sizes up to `maximum`, which is itself a size; what no count of tokens can reach is dropped."""
        wanted = {int(size) for size in sizes}
        top = max(wanted, default=0) if maximum is None else maximum
        return cls(tuple(sorted({size for size in wanted if 1 <= size <= top} | {top})))

    @classmethod
    def prefill(cls, maximum: int) -> BucketPolicy:
        """The ladder for prefill: 4..32 by 4, ..256 by 16, ..512 by 32, ..1024 by 64, ..4096 by 256, then doubling."""
        sizes: list[int] = []
        for top, step in _LADDER:
            sizes.extend(range((sizes[-1] if sizes else 0) + step, top + 1, step))
        while sizes[-1] < maximum:
            sizes.append(sizes[-1] * _MAX_PAD_RATIO)
        return cls.of(sizes, maximum=maximum)

    @classmethod
    def decode(cls, maximum: int) -> BucketPolicy:
        """The ladder for decode, in sequences: 1, 2, 4, then by 8. A single sequence is never padded."""
        return cls.of((1, 2, 4, *range(8, maximum, 8)), maximum=maximum)

    @property
    def maximum(self) -> int:
        return self.sizes[-1]

    def select(self, num_tokens: int) -> Selection:
        """The smallest bucket that holds `num_tokens` rows, or a miss with its reason.

        Raises:
            ValueError: `num_tokens` is below 1; an empty step is the caller's mistake, not a miss.
        """
        if num_tokens < 1:
            raise ValueError(f"a step needs at least one token, got {num_tokens}")
        if num_tokens > self.maximum:
            return Selection(None, f"more rows than the largest bucket ({self.maximum})")
        bucket = self.sizes[bisect_left(self.sizes, num_tokens)]
        if not _is_close(num_tokens, bucket):
            return Selection(None, f"bucket {bucket} would pad by more than {_MAX_PAD_RATIO}x and {_MAX_PAD_ROWS} rows")
        return Selection(bucket)
