"""What is known of tensors without their data, from safetensors headers and the index over them. Knows no module.

Neither torch nor the safetensors package is imported. Nothing here trusts a file: a length is compared with what is
there before it is used, and whatever the format does not allow is an UnreadableFileError, never another exception.
Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import (
    MAX_JSON_BYTES,
    file_mode,
    kind_of,
    parse_object,
    quote,
    read_bytes,
    read_object,
    refuse,
    regular_size,
)
from aliasmix.report import Finding, finding

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_INT = frozenset({int})
LISTED = 5  # Problems that an error spells out before it counts the rest.

# The format's name of a dtype -> torch's name, bits of one element.
_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
}
# torch's name -> the format's.
SAFETENSORS_DTYPES: Mapping[str, str] = {name: code for code, (name, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One named tensor.

    Attributes:
        shape: Its shape, as torch shows it (two float4 values to an element).
        dtype: torch's name without the prefix: "bfloat16", "int32".
        kind: "param", "buffer", or "tensor" where it is not known (a checkpoint does not say).
        file: Name of the file that holds it, relative to the checkpoint; "" for a live module.
        begin, end: Byte range in that file, counted from the file's start.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "tensor"
    file: str = ""
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What one safetensors file says of itself.

    Attributes:
        path: The file.
        tensors: In the order of their bytes.
        metadata: The free text under `__metadata__`.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Index:
    """What model.safetensors.index.json claims; whether it is so is seen in the headers.

    Attributes:
        path: The file.
        weight_map: Tensor name -> name of a file beside the index.
        total_size: Bytes of all tensors; None where it is not stated.
    """

    path: Path
    weight_map: dict[str, str]
    total_size: int | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A safetensors file, or a folder of them with an index, by its headers alone.

    Attributes:
        path: As given: what errors name.
        folder: Where its files lie.
        index: None for a single file.
        headers: File name -> header, of every file that is there and can be read.
        tensors: Every tensor under its name, where the index says it is, else where it was found.
        problems: Where index and files disagree. None of severity "error" from `read_checkpoint`.
    """

    path: Path
    folder: Path
    index: Index | None
    headers: dict[str, Header]
    tensors: dict[str, TensorInfo]
    problems: list[Finding] = field(default_factory=list)

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, by the headers."""
        return sum(info.end - info.begin for info in self.tensors.values())


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads all headers of a checkpoint in which index and files must agree.

    Args:
        path: A .safetensors file, a folder that holds an index or one model.safetensors, or an index.

    Raises:
        UnreadableFileError: A file cannot be trusted, or the index disagrees with the files: a file or tensor is
            missing, misplaced or not listed. A wrong total_size and stray files stay in `problems`.
    """
    checkpoint = scan_checkpoint(path)
    errors = [problem for problem in checkpoint.problems if problem.severity == "error"]
    if errors:
        where = checkpoint.index.path if checkpoint.index else checkpoint.path
        raise UnreadableFileError(where, listing(f"{name(problem)}: {problem.detail}" for problem in errors))
    return checkpoint


def name(problem: Finding) -> str:
    """The tensor or file that a finding is about."""
    return problem.paths[0]


def listing(lines: Iterable[str]) -> str:
    """The first five lines joined, then how many more there are."""
    lines = list(lines)
    more = len(lines) - LISTED
    return "; ".join(lines[:LISTED]) + (f"; and {more:,} more" if more > 0 else "")


def scan_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads all headers of a checkpoint, with whatever is wrong between index and files listed as `problems`.

    Args:
        path: As for `read_checkpoint`.

    Raises:
        UnreadableFileError: There is no checkpoint in the safetensors format, the index is not one, or a name in it
            leads out of the folder. A single file's header that cannot be read is raised as well.
    """
    path = Path(path)
    mode = file_mode(path)
    if mode is None:
        refuse(path, "there is no such file or folder")
    if not stat.S_ISDIR(mode):
        if path.name.endswith(".json"):
            return _scan_index(path, path)
        return _single(path, path)
    if file_mode(path / INDEX_NAME) is not None:
        return _scan_index(path, path / INDEX_NAME)
    if file_mode(path / SINGLE_NAME) is not None:
        _resolve_inside(path, SINGLE_NAME, blame=path)
        return _single(path, path / SINGLE_NAME)
    refuse(path, _why_no_checkpoint(path))


def _single(path: Path, file: Path) -> Checkpoint:
    header = read_header(file)
    return Checkpoint(path, file.parent, None, {file.name: header}, header.tensors)


def _why_no_checkpoint(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        return f"cannot be listed: {e.strerror}"
    expected = f"expected {INDEX_NAME} or {SINGLE_NAME}"
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if any(n.endswith(".safetensors") for n in names):
        return f"holds safetensors files but no index over them; {expected}"
    if pickled:
        return (
            f"holds {pickled[0]}, a pickle, which can run code and is never opened here; "
            f"{expected}: convert it where you trust it"
        )
    return f"holds no checkpoint; {expected}"


def _scan_index(path: Path, index_path: Path) -> Checkpoint:
    index = read_index(index_path)
    folder = index_path.parent
    problems: list[Finding] = []
    headers: dict[str, Header] = {}
    listed_count = Counter(index.weight_map.values())
    for file in sorted(listed_count):
        _resolve_inside(folder, file, blame=index_path)
        if file_mode(folder / file) is None:
            count = listed_count[file]
            detail = f"is not there; the index puts {count:,} tensor{'s' if count > 1 else ''} in it"
            problems.append(finding("INDEX_SHARD_MISSING", (file,), detail, "download it again", count=count))
            continue
        try:
            headers[file] = read_header(folder / file)
        except UnreadableFileError as e:
            problems.append(finding("HEADER_BAD", (file,), e.reason, "download it again"))

    tensors: dict[str, TensorInfo] = {}
    weight_map = index.weight_map
    doubles: list[tuple[str, TensorInfo]] = []  # In a file that is not the one that the index names.
    for file, header in headers.items():
        for tensor, info in header.tensors.items():
            if weight_map.get(tensor) == file:
                tensors[tensor] = info
            else:
                doubles.append((tensor, info))
    for tensor, info in doubles:
        if (listed := weight_map.get(tensor)) is None:
            problems.append(finding("INDEX_UNLISTED", (tensor,), f"is in {info.file}, but the index does not list it"))
        elif tensor in tensors:
            detail = f"is in {listed}, as the index says, and in {info.file} too"
            problems.append(finding("INDEX_UNLISTED", (tensor,), detail))
            continue
        else:
            detail = f"is in {info.file}; the index says {listed}"
            problems.append(finding("INDEX_TENSOR_MISPLACED", (tensor,), detail))
        tensors[tensor] = info
    if len(tensors) < len(weight_map) or problems:
        for tensor, file in weight_map.items():
            if tensor not in tensors and file in headers:
                detail = f"is not in {file}, where the index puts it, nor in another file"
                problems.append(finding("INDEX_TENSOR_MISSING", (tensor,), detail))

    checkpoint = Checkpoint(path, folder, index, headers, tensors, problems)
    if index.total_size is not None and not problems and index.total_size != checkpoint.total_size:
        detail = f"total_size is {index.total_size:,}; the tensors have {checkpoint.total_size:,} bytes"
        problems.append(finding("INDEX_TOTAL_SIZE", (index_path.name,), detail))
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors") and file not in listed_count:
            problems.append(finding("STRAY_FILE", (file,), "is in the folder, but the index does not name it"))
    return checkpoint


def read_index(path: str | os.PathLike[str]) -> Index:
    """Reads an index as data; the files that it names are not looked at.

    Raises:
        UnreadableFileError: It is no JSON object of the right shape, or a file name in it is not a plain name.
    """
    path = Path(path)
    raw = read_object(path, fractions=True)
    weight_map, metadata = raw.get("weight_map"), raw.get("metadata", {})
    if not isinstance(weight_map, dict):
        refuse(path, f"weight_map is {kind_of(weight_map)}; expected an object of tensor names to file names")
    if not isinstance(metadata, dict):
        refuse(path, f"metadata is {kind_of(metadata)}; expected an object")
    for tensor, file in weight_map.items():
        if type(file) is not str:
            refuse(path, f"weight_map puts {quote(tensor)} in {kind_of(file)}; expected a file name")
    for file in set(weight_map.values()):
        # One rule for "../x", "/x", "a\\..\\x", "c:x" and names that no file system takes: a plain name, or nothing.
        if not file.endswith(".safetensors") or set(file) & set("/\\:\0") or not file.isprintable() or len(file) > 255:
            refuse(path, f"names the file {quote(file)}; expected the plain name of a .safetensors file beside it")
    total_size = metadata.get("total_size")
    if total_size is None:
        return Index(path, weight_map, None)
    if type(total_size) not in (int, float) or total_size < 0 or total_size % 1:  # Some converters write 28.0.
        refuse(path, f"metadata.total_size is {quote(total_size)}; expected a number of bytes")
    return Index(path, weight_map, int(total_size))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads and checks one file's header; no byte of a tensor is read.

    Raises:
        UnreadableFileError: The file is not there, or is not exactly what its header says: see the module.
    """
    path = Path(path)
    size = regular_size(path)
    if size < 8:
        refuse(path, f"is {size} bytes long; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(read_bytes(path, 0, 8), "little")
    if length > MAX_JSON_BYTES:
        refuse(path, f"states a header of {length:,} bytes; at most {MAX_JSON_BYTES:,} are read (is it safetensors?)")
    if 8 + length > size:
        refuse(path, f"states a header of {length:,} bytes but is {size:,} bytes long; it is truncated")
    text = read_bytes(path, 8, length)
    if not text.startswith(b"{"):
        refuse(path, "has a header that does not begin with '{'")
    raw = parse_object(path, text)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        refuse(path, "__metadata__ is not an object of strings")
    return Header(path, _tensors(path, raw, 8 + length, size), metadata)


def _tensors(path: Path, raw: dict[str, Any], data_begin: int, size: int) -> dict[str, TensorInfo]:
    file = path.name
    data_size = size - data_begin
    layouts: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    found: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for tensor, entry in raw.items():
        if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
            refuse(path, f"tensor {quote(tensor)} is not described by exactly dtype, shape and data_offsets")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(code) is not str or not _is_sizes(shape):
            what = f"has dtype {quote(code)} and shape {quote(shape)}; expected a name and sizes of 0 or more"
            refuse(path, f"tensor {quote(tensor)} {what}")
        if not _is_sizes(offsets) or len(offsets) != 2:
            refuse(path, f"tensor {quote(tensor)} has data_offsets {quote(offsets)}; expected two byte offsets")
        key = (code, tuple(shape))
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = _layout(path, tensor, *key)
        dtype, torch_shape, nbytes = layout
        begin, end = offsets
        if end - begin != nbytes:
            what = f"has bytes {begin} to {end}, but {code} {quote(shape)} takes {nbytes}"
            refuse(path, f"tensor {quote(tensor)} {what}")
        if end > data_size:
            refuse(
                path,
                f"tensor {quote(tensor)} ends at byte {end} of the data, of which there are {data_size}; "
                "the file is truncated or its header is wrong",
            )
        found.append((begin, end, tensor, dtype, torch_shape))
    found.sort()
    tensors: dict[str, TensorInfo] = {}
    expected, last = 0, ""
    for begin, end, tensor, dtype, torch_shape in found:
        if begin != expected:
            what = "overlaps" if begin < expected else "leaves a hole behind"
            before = f"{quote(last)}, which ends at {expected}" if last else "the header"
            refuse(path, f"tensor {quote(tensor)} at byte {begin} {what} {before}")
        tensors[tensor] = TensorInfo(torch_shape, dtype, "tensor", file, data_begin + begin, data_begin + end)
        expected, last = end, tensor
    if expected != data_size:
        refuse(path, f"has {data_size - expected} bytes after its last tensor; expected none")
    return tensors


def _is_sizes(value: Any) -> bool:
    # By exact type: True equals 1, and would find the layout of a tensor of size 1.
    return type(value) is list and (not value or (_INT.issuperset(map(type, value)) and min(value) >= 0))


def _layout(path: Path, tensor: str, code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """torch's dtype and shape, and the number of bytes."""
    if code not in _DTYPES:
        refuse(path, f"tensor {quote(tensor)} has dtype {quote(code)}; known are {', '.join(_DTYPES)}")
    dtype, bits = _DTYPES[code]
    numel = 0 if 0 in shape else 1
    for n in shape:
        numel *= n
        if numel >= 2**63:
            refuse(path, f"tensor {quote(tensor)} has shape {quote(list(shape))}: more than 2**63 elements")
    if bits == 4:
        if not shape or shape[-1] % 2:
            refuse(path, f"tensor {quote(tensor)} has shape {quote(list(shape))}; F4 needs an even last size")
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape, numel * bits // 8


def _resolve_inside(folder: Path, file: str, *, blame: Path) -> None:
    """Refuses a link that leaves the folder: what is read must be what was downloaded or written there.

    Hugging Face's cache is let through: its snapshots/REVISION/ holds nothing but links into blobs/ two levels up.
    """
    root = os.path.realpath(folder)
    target = os.path.realpath(os.path.join(root, file))
    blobs = os.path.join(os.path.dirname(os.path.dirname(root)), "blobs")
    is_cache = os.path.basename(os.path.dirname(root)) == "snapshots" and os.path.dirname(target) == blobs
    if not target.startswith(os.path.join(root, "")) and not is_cache:
        refuse(blame, f"the file {quote(file)} is a link to {target}, outside the folder; copy it there instead")
