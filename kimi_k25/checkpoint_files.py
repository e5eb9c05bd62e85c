"""Safetensors files written so that a crash leaves the old checkpoint or the new one. Knows no model.

Everything is written under temporary names and brought to the disk first. Then shards get names that the old index
does not use, and one rename, of the index or of the only file, makes the new checkpoint the folder's. What it replaced
is deleted after that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from aliasmix.errors import UnreadableFileError
from aliasmix.tensorinfo import INDEX_NAME, SAFETENSORS_DTYPES, SINGLE_NAME, TensorInfo, read_index

# Larger elements first keep every tensor aligned; the order among equals is the safetensors package's.
_ORDER = ("float32", "int32", "bfloat16")

Tensors = Mapping[str, TensorInfo]
Read = Callable[[str], Tensor]


def has_checkpoint(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists() or (folder / SINGLE_NAME).exists()


def write_checkpoint(folder: Path, shards: list[Tensors], read: Read, side_files: Mapping[str, bytes]) -> None:
    """Replaces the folder's checkpoint, or makes its first.

    Args:
        folder: Exists.
        shards: What each file holds; one of them alone becomes model.safetensors unless the folder has an index.
        read: Gives a tensor by its name, on the CPU, when it is its turn.
        side_files: Name -> content of files that the folder does not have yet.

    Raises:
        OSError: The disk is full, or the folder cannot be written. The old checkpoint is untouched; only if what it
            left cannot be deleted is the new one in its place already.
        UnreadableFileError: The folder's index cannot be read, so what it uses is not known.
    """
    index_path = folder / INDEX_NAME
    in_use = set(read_index(index_path).weight_map.values()) if index_path.exists() else set()
    is_single = len(shards) == 1 and not index_path.exists()
    names = [SINGLE_NAME] if is_single else _unused_names(len(shards), in_use)
    created: list[Path] = []  # Deleted again if anything fails before the commit.

    def write(name: str, chunks: Iterator[bytes | memoryview]) -> None:
        created.append(temporary := folder / f"{name}.tmp")
        with open(temporary, "wb") as f:
            for chunk in chunks:
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())

    def publish(name: str) -> None:
        os.replace(folder / f"{name}.tmp", folder / name)
        created.append(folder / name)

    last = SINGLE_NAME if is_single else INDEX_NAME
    is_last_step = False
    try:
        for name, content in side_files.items():
            write(name, iter([content]))
        for name, tensors in zip(names, shards, strict=True):
            write(name, _safetensors(tensors, read))
        if not is_single:
            write(INDEX_NAME, iter([_index(names, shards)]))
        for name in [*side_files, *names]:
            if name != last:
                publish(name)
        _sync_folder(folder)
        is_last_step = True
        os.replace(folder / f"{last}.tmp", folder / last)
    except BaseException:
        if is_last_step and not (folder / f"{last}.tmp").exists():
            raise  # Interrupted right after the rename: what was created is the checkpoint now.
        for path in created:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for name in (in_use | {SINGLE_NAME}) - {*names}:
        (folder / name).unlink(missing_ok=True)


def _unused_names(count: int, in_use: set[str]) -> list[str]:
    """Names as the published checkpoint has them; a second set of them where the folder's index uses the first."""
    for suffix in ("", "-b"):
        names = [f"model-{n:05}-of-{count:06}{suffix}.safetensors" for n in range(1, count + 1)]
        if not in_use & {*names}:
            return names
    raise UnreadableFileError(INDEX_NAME, "uses both sets of shard names; save to another folder")


def _safetensors(tensors: Tensors, read: Read) -> Iterator[bytes | memoryview]:
    """A file's bytes: length, header, then one tensor after the other."""
    order = sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        info = tensors[name]
        begin, end = end, end + num_bytes(info)
        offsets = [begin, end]
        header[name] = {"dtype": SAFETENSORS_DTYPES[info.dtype], "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        tensor, info = read(name), tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, getattr(torch, info.dtype)), name
        yield tensor.contiguous().flatten().view(torch.uint8).numpy().data


def num_bytes(info: TensorInfo) -> int:
    """Of the tensor's data."""
    return torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize


def _index(names: list[str], shards: list[Tensors]) -> bytes:
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    total_size = sum(num_bytes(info) for tensors in shards for info in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _sync_folder(folder: Path) -> None:
    """Renames are on the disk only when the folder is."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
