"""Frames out of a video file, through PyAV if it is installed. Knows no sampling, no patches and no model.

Kimi-K2.5's own decoder is not public; frames that were decoded elsewhere go to the processor as a list, without this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from aliasmix.errors import UnreadableFileError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**26  # of one frame; 8K has half of it


class VideoFrames(Sequence["Image"]):
    """The frames of a file, decoded when asked for; reading them in order decodes the file once.

    Args:
        path: The file.
        num_frames: How many it has.
    """

    def __init__(self, path: Path, num_frames: int) -> None:
        self.path = path
        self._num_frames = num_frames
        self._decoded: Iterator[Any] = iter(())
        self._next = num_frames  # index of the frame that comes next; past the end: start over

    def __len__(self) -> int:
        return self._num_frames

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Image]: ...
    def __getitem__(self, index: int | slice) -> Image | Sequence[Image]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"frame {index} of {self.path}, which has {len(self)}")
        if index < self._next:
            self._decoded, self._next = _decode(self.path), 0
        for frame in self._decoded:
            self._next += 1
            if self._next > index:
                return frame.to_image()
        raise UnreadableFileError(self.path, f"ended before frame {index} of {len(self)}; it changed meanwhile")


def open_video(path: str | Path) -> tuple[VideoFrames, float]:
    """Returns the frames of a video file and how many of them one second has, as the processor takes them.

    Frames are counted by decoding the file once: what a header says of their number is often missing or wrong.

    Raises:
        ImportError: PyAV is not installed.
        UnreadableFileError: The file is missing, has no video, or cannot be decoded.
    """
    path = Path(path)
    if not path.is_file():
        raise UnreadableFileError(path, "is not a file" if path.exists() else "there is no such file")
    fps, num_frames = _frame_rate(path), 0
    for frame in _decode(path):
        if frame.width * frame.height > MAX_PIXELS:
            reason = f"has frames of {frame.width}x{frame.height} pixels; at most {MAX_PIXELS} are decoded"
            raise UnreadableFileError(path, reason)
        num_frames += 1
    if num_frames == 0:
        raise UnreadableFileError(path, "has no frames")
    return VideoFrames(path, num_frames), fps


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ImportError(
            "video files are read by PyAV, which is not installed: `pip install av`, or pass the frames as pictures"
        ) from None
    return av


def _frame_rate(path: Path) -> float:
    av = _av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UnreadableFileError(path, "has no video in it")
            rate = container.streams.video[0].average_rate
    except av.error.FFmpegError as e:
        raise UnreadableFileError(path, f"is not a video that can be decoded: {e.strerror}") from e
    if not rate:
        raise UnreadableFileError(path, "does not say how many frames a second has")
    return float(rate)


def _decode(path: Path) -> Iterator[Any]:
    av = _av()
    try:
        with av.open(str(path)) as container:
            yield from container.decode(video=0)
    except av.error.FFmpegError as e:
        raise UnreadableFileError(path, f"is not a video that can be decoded: {e.strerror}") from e
