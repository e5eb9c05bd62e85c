"""Reading into tensors by several threads, on the CPU: the same code without pinned memory."""

import os
import time
from pathlib import Path

import pytest
import torch

from aliasmix.errors import UnreadableFileError
from kimi_k25 import checkpoint
from kimi_k25.checkpoint import load_model
from kimi_k25.file_reader import FileReader
from kimi_k25.layers.parallel import ParallelPlan

CPU = torch.device("cpu")
ORACLE = Path(__file__).parent / "data" / "oracle"


@pytest.fixture
def data(tmp_path):
    content = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    (tmp_path / "data").write_bytes(content.numpy().tobytes())
    return tmp_path / "data", content


@pytest.mark.parametrize("piece_bytes", [1, 64, 1 << 20])
def test_tensors_of_any_type_and_shape_get_their_bytes(data, piece_bytes):
    path, content = data
    stacked = torch.zeros(3, 4, 6, dtype=torch.bfloat16)
    places = [(7, stacked[1, :2]), (100, torch.zeros(5, dtype=torch.int32)), (9_999, torch.zeros((), dtype=torch.int8))]
    arrived = []

    with FileReader(CPU, num_threads=3, piece_bytes=piece_bytes) as reader:
        reader.fill(path, places, arrived.append)

    for begin, tensor in places:
        found = tensor.flatten().view(torch.uint8)
        assert torch.equal(found, content[begin : begin + tensor.nbytes])
    assert sum(arrived) == sum(tensor.nbytes for _, tensor in places)
    assert not stacked[0].any() and not stacked[2].any() and not stacked[1, 2:].any()


def test_a_file_that_ends_inside_a_tensor_is_named_with_the_byte(data):
    path, _ = data

    with FileReader(CPU) as reader, pytest.raises(UnreadableFileError, match="data: ends at byte 10000, inside a"):
        reader.fill(path, [(0, torch.zeros(100)), (9_990, torch.zeros(4))], lambda _: None)


def test_an_error_of_the_caller_ends_all_reading_before_the_file_is_closed(data, monkeypatch):
    path, _ = data
    events, read, close = [], os.preadv, os.close

    def slowly(*args):
        time.sleep(0.02)
        events.append("read")
        return read(*args)

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slowly)
    monkeypatch.setattr(os, "close", lambda descriptor: (events.append("close"), close(descriptor)))
    with FileReader(CPU, num_threads=2, piece_bytes=8) as reader, pytest.raises(KeyboardInterrupt):
        reader.fill(path, [(0, torch.zeros(2_000))], stop)

    assert events[-1] == "close" and events.count("close") == 1
    assert len(events) < 100  # Of 1,000 pieces; some are read while others are still handed out.


def test_a_strided_tensor_is_not_filled_as_a_copy(data):
    path, _ = data

    with FileReader(CPU) as reader, pytest.raises(AssertionError, match="a copy would be filled"):
        reader.fill(path, [(0, torch.zeros(4, 4)[:, :2])], lambda _: None)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("tiny_int4", ParallelPlan()),  # Groups of 32 do not divide its experts' width.
        ("tiny_bf16", ParallelPlan()),
        ("tiny_bf16", ParallelPlan(tp=2, rank=1)),
        ("tiny_bf16", ParallelPlan(tp=2, rank=1, ep=2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_loaded_through_it_is_the_same(monkeypatch, name, plan, dtype):
    expected = load_model(ORACLE / name, dtype=dtype, plan=plan).state_dict()
    filled = []

    class Counted(FileReader):
        def fill(self, path, places, done):
            places = list(places)
            filled.extend(tensor.nbytes for _, tensor in places)
            super().fill(path, places, done)

    monkeypatch.setattr(checkpoint, "nullcontext", lambda: Counted(CPU))  # What a load on a CPU does without.
    found = load_model(ORACLE / name, dtype=dtype, plan=plan).state_dict()

    assert all(torch.equal(found[key], expected[key]) for key in expected)
    whole = sum(tensor.nbytes for tensor in expected.values())
    if dtype == torch.bfloat16:
        assert sum(filled) == whole if plan.tp == 1 else 0.6 * whole < sum(filled) < whole


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_int4"])
def test_a_model_on_a_gpu_has_the_files_bytes(name):
    expected = load_model(ORACLE / name, dtype=torch.bfloat16).state_dict()

    found = load_model(ORACLE / name, "cuda").state_dict()

    assert all(torch.equal(found[key].cpu(), expected[key]) for key in expected)
