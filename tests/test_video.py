"""PyAV is not needed to run these: a stand-in of its few calls decodes "files" of numbered frames."""

import sys
import types
from fractions import Fraction
from pathlib import Path

import pytest
from oracle_media import make_frames

from aliasmix.errors import UnreadableFileError
from kimi_k25.video import open_video


class FakeError(Exception):
    strerror = "Invalid data found"


class FakeFrame:
    def __init__(self, number, width=40, height=33):
        self.number, self.width, self.height = number, width, height

    def to_image(self):
        return make_frames(self.number + 1)[-1]


class FakeContainer:
    """`content` is "rate;number of frames", or "broken"."""

    num_opened = 0

    def __init__(self, path):
        content = Path(path).read_text()
        if content == "broken":
            raise FakeError
        rate, self.num_frames = content.split(";")
        stream = types.SimpleNamespace(average_rate=Fraction(rate) if rate else None)
        self.streams = types.SimpleNamespace(video=[] if self.num_frames == "" else [stream])

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def decode(self, video):
        type(self).num_opened += 1
        for i in range(int(self.num_frames)):
            yield FakeFrame(i, width=2**20 if self.num_frames == "99" else 40, height=2**10)


@pytest.fixture
def video(tmp_path, monkeypatch):
    FakeContainer.num_opened = 0
    fake = types.SimpleNamespace(open=FakeContainer, error=types.SimpleNamespace(FFmpegError=FakeError))
    monkeypatch.setitem(sys.modules, "av", fake)
    return tmp_path / "cat.mp4"


def test_frames_and_rate_are_read(video):
    video.write_text("24000/1001;3")

    frames, fps = open_video(video)

    assert fps == pytest.approx(23.976, abs=1e-3)
    assert len(frames) == 3
    assert [frame.tobytes() for frame in frames] == [frame.tobytes() for frame in make_frames(3)]


def test_reading_in_order_decodes_once_and_going_back_starts_over(video):
    video.write_text("2;9")
    frames, _ = open_video(video)
    assert FakeContainer.num_opened == 1  # the count

    assert [frames[i].tobytes() for i in (1, 4, 8)] == [make_frames(i + 1)[-1].tobytes() for i in (1, 4, 8)]
    assert FakeContainer.num_opened == 2
    assert frames[4].tobytes() == make_frames(5)[-1].tobytes()
    assert FakeContainer.num_opened == 3
    assert len(frames[2:4]) == 2


def test_frame_past_the_end_is_an_index_error(video):
    video.write_text("2;3")

    with pytest.raises(IndexError, match=r"frame 3 of .*cat\.mp4, which has 3"):
        open_video(video)[0][3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("broken", "is not a video that can be decoded: Invalid data found"),
        ("2;", "has no video in it"),
        (";3", "does not say how many frames a second has"),
        ("2;0", "has no frames"),
        ("2;99", "has frames of 1048576x1024 pixels; at most 67108864 are decoded"),
    ],
)
def test_broken_file_is_named(video, content, message):
    video.write_text(content)

    with pytest.raises(UnreadableFileError, match=rf"cat\.mp4: {message}"):
        open_video(video)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"cat\.mp4: there is no such file"):
        open_video(tmp_path / "cat.mp4")


def test_without_pyav_the_error_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "cat.mp4").write_text("x")
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(ImportError, match="which is not installed: `pip install av`, or pass the frames as pictures"):
        open_video(tmp_path / "cat.mp4")
