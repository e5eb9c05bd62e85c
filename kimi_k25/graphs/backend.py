"""Backend: what a capture asks of a way to record and replay operators, such as cuda.py and tape.py. Knows neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

__all__ = ["Backend"]


class Backend(Protocol):
    """What turns the operators between `begin` and `end` into one call that replays them."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes that all segments hold."""

    def warming(self) -> AbstractContextManager[None]:
        """One eager forward as the capture will meet it."""

    def recording(self) -> AbstractContextManager[None]:
        """One forward. Segments begin and end inside."""

    def begin(self) -> None:
        """Open a segment."""

    def end(self) -> Callable[[], None]:
        """Close it; the result replays it. Raises CaptureError for work that nobody waited for."""

    def abort(self) -> None:
        """Drop an open segment after an error; the error itself is the caller's to raise."""

    def outside(self) -> AbstractContextManager[None]:
        """Inside the block nothing belongs to the segment, though one is open."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether some recording made the memory of this tensor."""

    def close(self) -> None:
        """Drop all segments together."""
