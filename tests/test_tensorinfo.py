"""Headers and indices: what is read, and that nothing else than UnreadableFileError comes out of a bad one."""

# ruff: noqa: E501 - the messages are pinned as they are printed

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import expecttest
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aliasmix.errors import UnreadableFileError
from aliasmix.tensorinfo import (
    SAFETENSORS_DTYPES,
    read_checkpoint,
    read_header,
    read_index,
    scan_checkpoint,
)

ORACLE = Path(__file__).parent / "data" / "oracle"
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of two tensors each, and an index that is right."""
    save_file({"a": torch.zeros(2), "b": torch.zeros(3, 2, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(1, dtype=torch.int64), "d": torch.zeros(0, 4)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one", "b": "one", "c": "two", "d": "two"}, total_size=28.0)  # as some converters write it
    return tmp_path


def write_index(folder: Path, weight_map: dict[str, str], **metadata: object) -> None:
    files = {tensor: f"{file}.safetensors" for tensor, file in weight_map.items()}
    index = {"metadata": metadata, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def codes(folder: Path) -> list[tuple[str, str]]:
    return [(p.code, p.paths[0]) for p in scan_checkpoint(folder).problems]


def error(call: object, *args: object) -> str:
    with pytest.raises(UnreadableFileError) as e:
        call(*args)  # type: ignore[operator]
    return e.value.reason


def test_header_gives_what_safetensors_loads() -> None:
    for path in sorted(ORACLE.glob("tiny_*/*.safetensors")):
        header, tensors = read_header(path), load_file(path)

        assert header.metadata == {"format": "pt"}
        assert {n: (i.shape, i.dtype) for n, i in header.tensors.items()} == {
            n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
        }
        data = path.read_bytes()
        for name, info in header.tensors.items():
            assert data[info.begin : info.end] == tensors[name].flatten().view(torch.uint8).numpy().tobytes()


def test_every_dtype_has_torchs_name_and_shape(tmp_path: Path) -> None:
    for dtype in SAFETENSORS_DTYPES:
        tensor = torch.zeros(2, 4, dtype=torch.uint8) if dtype == "float4_e2m1fn_x2" else torch.zeros(2, 4)
        torch_dtype = getattr(torch, dtype)
        tensor = tensor.view(torch_dtype) if dtype.startswith("float4") else tensor.to(torch_dtype)
        save_file({"x": tensor}, tmp_path / "x")

        info = read_header(tmp_path / "x").tensors["x"]
        assert (info.shape, info.dtype) == ((2, 4), dtype)


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"])
def test_folder_and_its_index_are_the_same_checkpoint(folder: Path, path: str) -> None:
    checkpoint = read_checkpoint(folder / path)

    assert {n: (i.shape, i.dtype, i.file) for n, i in checkpoint.tensors.items()} == {
        "a": ((2,), "float32", "one.safetensors"),
        "b": ((3, 2), "bfloat16", "one.safetensors"),
        "c": ((1,), "int64", "two.safetensors"),
        "d": ((0, 4), "float32", "two.safetensors"),
    }
    assert checkpoint.total_size == 28
    assert checkpoint.problems == []


def test_a_file_and_a_folder_with_only_model_safetensors_need_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")

    assert read_checkpoint(tmp_path).tensors == read_checkpoint(tmp_path / "model.safetensors").tensors
    assert read_checkpoint(tmp_path).tensors["a"].file == "model.safetensors"


BAD_HEADERS = {
    "no length": (b"\x01\x02", None),
    "truncated": ({"a": entry()}, b"1234567"),
    "trailing bytes": ({"a": entry()}, b"123456789"),
    "not an object": (b"[1, 2]  ", b""),
    "not JSON": (b'{"a": ', b""),
    "not UTF-8": (b'{"\xff": 1}', b""),
    "surrogate": (b'{"\\ud800": 1}', b""),
    "duplicate": (b'{"a": 1, "a": 2}', b""),
    "fraction": (b'{"a": 1.5}', b""),
    "NaN": (b'{"a": NaN}', b""),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", b""),
    "deep": (b'{"a": ' + b"[" * 100_000, b""),
    "entry": ({"a": [1]}, b""),
    "extra field": ({"a": {**entry(), "strides": [1]}}, b""),
    "dtype": ({"a": entry("F31")}, b"12345678"),
    "dtype type": ({"a": entry(7)}, b"12345678"),
    "shape": ({"a": entry(shape=[-2])}, b"12345678"),
    "true size": ({"a": entry(shape=[1], offsets=(0, 4)), "b": entry(shape=[True], offsets=(4, 8))}, b"12345678"),
    "huge": ({"a": entry(shape=[2**40, 2**40])}, b"12345678"),
    "offsets": ({"a": entry(offsets=(0,))}, b"12345678"),
    "negative offset": ({"a": entry(offsets=(-8, 0))}, b"12345678"),
    "size": ({"a": entry(shape=[3])}, b"12345678"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "hole first": ({"a": entry(offsets=(4, 12))}, bytes(12)),
    "odd F4": ({"a": entry("F4", [2, 3], (0, 3))}, bytes(3)),
    "metadata": ({"__metadata__": {"format": 1}}, b""),
}


class TestTexts(expecttest.TestCase):
    def test_bad_headers(self) -> None:
        lines = []
        path = Path("x.safetensors")
        for case, (header, data) in BAD_HEADERS.items():
            if data is None:
                path.write_bytes(header)  # type: ignore[arg-type]
            else:
                write(path, header, data)
            lines.append(f"{case}: {error(read_header, path)}")

        self.assertExpectedInline("\n".join(lines), """\
no length: is 2 bytes long; a safetensors file begins with 8 bytes of header length
truncated: tensor 'a' ends at byte 8 of the data, of which there are 7; the file is truncated or its header is wrong
trailing bytes: has 1 bytes after its last tensor; expected none
not an object: has a header that does not begin with '{'
not JSON: is not JSON: Expecting value at character 6
not UTF-8: is not UTF-8 text (byte 2 of the JSON)
surrogate: is JSON that makes no sense here: key '\\ud800' is not Unicode text
duplicate: is JSON that makes no sense here: key 'a' is there twice
fraction: is JSON that makes no sense here: '1.5' is not an integer
NaN: is JSON that makes no sense here: 'NaN' is not an integer
digits: is JSON that cannot be read: nested too deeply, or a number of thousands of digits
deep: is JSON that cannot be read: nested too deeply, or a number of thousands of digits
entry: tensor 'a' is not described by exactly dtype, shape and data_offsets
extra field: tensor 'a' is not described by exactly dtype, shape and data_offsets
dtype: tensor 'a' has dtype 'F31'; known are BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, C64, F8_E4M3, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ, F8_E8M0, F4
dtype type: tensor 'a' has dtype 7 and shape [2]; expected a name and sizes of 0 or more
shape: tensor 'a' has dtype 'F32' and shape [-2]; expected a name and sizes of 0 or more
true size: tensor 'b' has dtype 'F32' and shape [True]; expected a name and sizes of 0 or more
huge: tensor 'a' has shape [1099511627776, 1099511627776]: more than 2**63 elements
offsets: tensor 'a' has data_offsets [0]; expected two byte offsets
negative offset: tensor 'a' has data_offsets [-8, 0]; expected two byte offsets
size: tensor 'a' has bytes 0 to 8, but F32 [3] takes 12
overlap: tensor 'b' at byte 4 overlaps 'a', which ends at 8
hole: tensor 'b' at byte 12 leaves a hole behind 'a', which ends at 8
hole first: tensor 'a' at byte 4 leaves a hole behind the header
odd F4: tensor 'a' has shape [2, 3]; F4 needs an even last size
metadata: __metadata__ is not an object of strings""")

    def test_lengths_that_lie(self) -> None:
        path = Path("x.safetensors")
        lines = []
        for length in (3, 1000, 2**31, 2**64 - 1):
            write(path, b"{}      ", length=length)
            lines.append(error(read_header, path))

        self.assertExpectedInline("\n".join(lines), """\
has 5 bytes after its last tensor; expected none
states a header of 1,000 bytes but is 16 bytes long; it is truncated
states a header of 2,147,483,648 bytes; at most 100,000,000 are read (is it safetensors?)
states a header of 18,446,744,073,709,551,615 bytes; at most 100,000,000 are read (is it safetensors?)""")

    def test_bad_indices(self) -> None:
        Path("f").mkdir()
        path = Path("f/model.safetensors.index.json")
        lines = []
        for index in (
            {},
            {"weight_map": []},
            {"weight_map": {"a": 1}},
            {"weight_map": {}, "metadata": 1},
            {"weight_map": {}, "metadata": {"total_size": "1"}},
            {"weight_map": {}, "metadata": {"total_size": 1.5}},
            {"weight_map": {}, "metadata": {"total_size": float("inf")}},
            *(
                {"weight_map": {"a": f"{file}.safetensors"}}
                for file in ("../x", "/etc/x", "sub/x", "..\\x", "c:x", "a\0b", "a\nb")
            ),
            {"weight_map": {"a": "pytorch_model.bin"}},
        ):
            path.write_text(json.dumps(index))
            lines.append(error(scan_checkpoint, "f"))

        self.assertExpectedInline("\n".join(lines), """\
weight_map is nothing; expected an object of tensor names to file names
weight_map is a list; expected an object of tensor names to file names
weight_map puts 'a' in a number; expected a file name
metadata is a number; expected an object
metadata.total_size is '1'; expected a number of bytes
metadata.total_size is 1.5; expected a number of bytes
metadata.total_size is inf; expected a number of bytes
names the file '../x.safetensors'; expected the plain name of a .safetensors file beside it
names the file '/etc/x.safetensors'; expected the plain name of a .safetensors file beside it
names the file 'sub/x.safetensors'; expected the plain name of a .safetensors file beside it
names the file '..\\\\x.safetensors'; expected the plain name of a .safetensors file beside it
names the file 'c:x.safetensors'; expected the plain name of a .safetensors file beside it
names the file 'a\\x00b.safetensors'; expected the plain name of a .safetensors file beside it
names the file 'a\\nb.safetensors'; expected the plain name of a .safetensors file beside it
names the file 'pytorch_model.bin'; expected the plain name of a .safetensors file beside it""")

    def test_folders_without_a_checkpoint(self) -> None:
        lines = [error(read_checkpoint, "nowhere")]
        for file in ("config.json", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
            folder = Path(file + ".d")
            folder.mkdir()
            (folder / file).touch()
            lines.append(error(read_checkpoint, folder))

        self.assertExpectedInline("\n".join(lines), """\
there is no such file or folder
holds no checkpoint; expected model.safetensors.index.json or model.safetensors
holds pytorch_model.bin, a pickle, which can run code and is never opened here; expected model.safetensors.index.json or model.safetensors: convert it where you trust it
holds safetensors files but no index over them; expected model.safetensors.index.json or model.safetensors""")

    def test_stale_index(self) -> None:
        shards = Path("s")
        shards.mkdir()
        save_file({f"t{i}": torch.zeros(1) for i in range(8)}, shards / "one.safetensors")
        write_index(shards, {f"t{i}": "one" for i in range(1)} | {"z": "two"})

        self.assertExpectedInline(error(read_checkpoint, shards), """two.safetensors: is not there; the index puts 1 tensor in it; t1: is in one.safetensors, but the index does not list it; t2: is in one.safetensors, but the index does not list it; t3: is in one.safetensors, but the index does not list it; t4: is in one.safetensors, but the index does not list it; and 3 more""")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_lengths_are_not_allocated_before_they_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": entry(shape=[2**20] * 3, offsets=(0, 2**62))}, length=90_000_000)
    tracemalloc.start()

    error(read_header, path)

    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_missing_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()

    assert codes(folder) == [("INDEX_SHARD_MISSING", "two.safetensors")]
    assert sorted(scan_checkpoint(folder).tensors) == ["a", "b"]
    assert "two.safetensors: is not there; the index puts 2 tensors in it" in error(read_checkpoint, folder)


def test_bad_shard(folder: Path) -> None:
    os.truncate(folder / "one.safetensors", 40)

    assert codes(folder) == [("HEADER_BAD", "one.safetensors")]
    assert "truncated" in error(read_checkpoint, folder)


def test_tensor_that_no_shard_holds(folder: Path) -> None:
    write_index(folder, {"a": "one", "b": "one", "c": "two", "d": "two", "e": "one"})

    assert codes(folder) == [("INDEX_TENSOR_MISSING", "e")]


def test_tensor_in_another_shard(folder: Path) -> None:
    write_index(folder, {"a": "two", "b": "one", "c": "two", "d": "two"})

    assert codes(folder) == [("INDEX_TENSOR_MISPLACED", "a")]
    assert scan_checkpoint(folder).tensors["a"].file == "one.safetensors"
    assert "a: is in one.safetensors; the index says two.safetensors" in error(read_checkpoint, folder)


def test_tensor_that_the_index_omits(folder: Path) -> None:
    write_index(folder, {"a": "one", "c": "two", "d": "two"})

    assert codes(folder) == [("INDEX_UNLISTED", "b")]
    assert sorted(scan_checkpoint(folder).tensors) == ["a", "b", "c", "d"]
    assert "b: is in one.safetensors, but the index does not list it" in error(read_checkpoint, folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    save_file({"a": torch.ones(2), "c": torch.zeros(1, dtype=torch.int64), "d": torch.zeros(0, 4)}, "two.safetensors")

    assert codes(folder) == [("INDEX_UNLISTED", "a")]
    assert scan_checkpoint(folder).tensors["a"].file == "one.safetensors"


def test_total_size_and_stray_files_are_warnings(folder: Path) -> None:
    write_index(folder, {"a": "one", "b": "one", "c": "two", "d": "two"}, total_size=27)
    save_file({"z": torch.zeros(1)}, folder / "three.safetensors")

    assert [(p.code, p.severity) for p in read_checkpoint(folder).problems] == [
        ("INDEX_TOTAL_SIZE", "warning"),
        ("STRAY_FILE", "warning"),
    ]


@pytest.mark.parametrize("file", ["one.safetensors", "model.safetensors"])
def test_link_that_leaves_the_folder_is_refused(folder: Path, file: str) -> None:
    outside = folder / "one.safetensors"
    inner = folder / "inner"
    inner.mkdir()
    (inner / file).symlink_to(outside)
    if file == "one.safetensors":
        write_index(inner, {"a": "one", "b": "one"})

    assert "outside the folder" in error(scan_checkpoint, inner)


def test_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "one.safetensors").rename(folder / "real.bin")
    (folder / "one.safetensors").symlink_to("real.bin")

    assert sorted(read_checkpoint(folder).tensors) == ["a", "b", "c", "d"]


def test_hugging_face_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(("one.safetensors", "two.safetensors", "model.safetensors.index.json")):
        (folder / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(f"../../blobs/{number}")

    assert sorted(read_checkpoint(snapshot).tensors) == ["a", "b", "c", "d"]


def test_pipe_is_refused_and_not_waited_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")

    assert error(read_checkpoint, tmp_path) == "is not a regular file"


def test_neither_torch_nor_safetensors_is_imported() -> None:
    code = (
        "import sys, aliasmix.tensorinfo as t; t.read_checkpoint(sys.argv[1]);"
        "sys.exit(bool({'torch', 'safetensors'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code, ORACLE / "tiny_int4"], cwd=Path(__file__).parents[1], check=True)


def check_header(path: Path) -> None:
    """The file is refused, or safetensors agrees with what was read."""
    try:
        header = read_header(path)
    except UnreadableFileError as e:
        assert str(e).isprintable()
        return
    with safe_open(path, "pt") as f:
        assert set(f.keys()) == set(header.tensors)
        for name, info in header.tensors.items():
            if info.dtype != "float4_e2m1fn_x2":
                assert f.get_slice(name).get_shape() == list(info.shape)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ONE_DEEP = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(), LEAVES, max_size=3)
JSON = ONE_DEEP | st.lists(ONE_DEEP, max_size=3) | st.dictionaries(st.text(), ONE_DEEP, max_size=3)
SIZES = st.lists(st.integers(0, 3) | st.integers() | st.booleans(), max_size=3)
DTYPES = st.sampled_from(["U8", "F4", "F32", "X"])
ENTRIES = st.fixed_dictionaries({"dtype": DTYPES, "shape": SIZES, "data_offsets": SIZES})


@FUZZ
@given(st.binary(max_size=64))
def test_any_bytes_as_a_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)

    check_header(tmp_path / "x")


@FUZZ
@given(st.binary(max_size=64) | JSON.map(lambda v: json.dumps(v).encode()), st.binary(max_size=8), st.integers(-2, 2))
def test_any_header(tmp_path: Path, header: bytes, data: bytes, off: int) -> None:
    check_header(write(tmp_path / "x", header, data, length=max(0, len(header) + off)))


@FUZZ
@given(st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3), st.integers(0, 16))
def test_any_entries(tmp_path: Path, tensors: dict[str, object], size: int) -> None:
    check_header(write(tmp_path / "x", tensors, bytes(size)))


@FUZZ
@given(st.data())
def test_any_flip_in_a_good_file(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray((ORACLE / "tiny_int4" / "model-00005-of-000006.safetensors").read_bytes())
    for place in data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=4)):
        good[place] = data.draw(st.integers(0, 255))
    (tmp_path / "x").write_bytes(good)

    check_header(tmp_path / "x")


FILES = st.text(max_size=4).map(lambda s: s + ".safetensors")
INDICES = st.fixed_dictionaries(
    {
        "weight_map": st.dictionaries(st.text(max_size=2), FILES | JSON, max_size=3),
        "metadata": st.fixed_dictionaries({"total_size": JSON}),
    }
)


@FUZZ
@given(st.binary(max_size=64) | (JSON | INDICES).map(lambda v: json.dumps(v).encode()))
def test_any_index(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text)

    try:
        index = read_index(path)
        scan_checkpoint(tmp_path)
    except UnreadableFileError as e:
        assert str(e).isprintable()
    else:
        assert all(Path(file).name == file for file in index.weight_map.values())
