"""A model out of a checkpoint, and back into one. Knows the folder and no text.

Headers are compared with the configuration before any tensor is read. Tensors are then copied straight into their
places, out of mapped files or, on the way to a GPU, by a FileReader: loading needs the model's memory, little more.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from aliasmix.collection import paused_collection
from aliasmix.errors import UnreadableFileError
from aliasmix.integrity import compare_tensors
from aliasmix.tensorinfo import INDEX_NAME, Checkpoint, TensorInfo, listing, read_checkpoint

from .checkpoint_files import Tensors, has_checkpoint, num_bytes, write_checkpoint
from .config import NO_FOLDER, KimiK25Config, load_config
from .config_json import config_json
from .file_reader import FileReader
from .layers.parallel import WHOLE, ParallelPlan
from .model import KimiK25ForConditionalGeneration
from .placement import packed_layers_of, place_all
from .tensor_names import (
    INT4_PER_WORD,
    SUPPORTED,
    canonical_names,
    expected_tensors,
    find_packed_layers,
    refuse_other_formats,
)

MAX_SINGLE_BYTES = 4 * 2**30  # A new checkpoint is split into shards from this size on.
_SOURCE = "checkpoint_folder"  # Attribute of a loaded model: whose side files save_checkpoint copies.
_TOLD_APART_BY, _LAST_BYTES = (".safetensors", ".json", ".jinja", ".model"), 4096
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".tmp")


def fingerprint(checkpoint: str | os.PathLike[str]) -> str:
    """The same for copies of one checkpoint, told by its small files, and of large ones by sizes and last bytes:
    training on moves all weights, so a few of them tell. "unreadable" is left for loading to explain."""
    digest = hashlib.sha256()
    try:
        for path in sorted(p for p in Path(checkpoint).iterdir() if p.suffix in _TOLD_APART_BY):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with open(path, "rb") as f:
                if path.suffix == ".safetensors":
                    f.seek(-min(_LAST_BYTES, path.stat().st_size), os.SEEK_END)
                digest.update(f.read())
    except OSError:
        return "unreadable"
    return digest.hexdigest()[:12]


@paused_collection()  # 0.1 s each time the collector would walk all of torch's objects, for every so many new names
def load_model(
    checkpoint: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    plan: ParallelPlan = WHOLE,
) -> KimiK25ForConditionalGeneration:
    """Loads a model from a checkpoint in the original layout.

    Args:
        checkpoint: A folder with config.json and model.safetensors, or shards and their index.
        device: Where the model will be.
        dtype: Of all but the int4 experts and the routers' correction bias; None: float32 on the CPU, the
            checkpoint's own elsewhere.
        plan: This rank's share; no more than that is copied out of the files.

    Returns:
        The model, in eval mode. Peak host memory is the model's, if it is on the CPU, plus less than 200 MB; the
        files' mapped pages are the system's to drop.

    Raises:
        UnreadableFileError: Files that cannot be trusted, or tensors that are not those that the configuration asks
            for; nothing is dropped or made up.
        ConfigError: A configuration that this package does not compute.
        ValueError: A dtype that the model does not run in, a device that is not there, or a plan that does not divide
            the model.

    Example:
        >>> model = load_model("Kimi-K2.5", device="cuda")
    """
    device = _present_device(device)
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype!r}; supported: torch.float32, torch.bfloat16")
    if not Path(checkpoint).exists():
        raise UnreadableFileError(checkpoint, NO_FOLDER)
    files = read_checkpoint(checkpoint)
    if (files.folder / "hf_quant_config.json").exists():
        reason = f"marks a ModelOpt (NVFP4) checkpoint; {SUPPORTED}"
        raise UnreadableFileError(files.folder / "hf_quant_config.json", reason)
    config = load_config(files.folder)
    spelled, expected, packed_layers = _verify(files, config)

    with torch.device("meta"), _WithoutRandomWeights():
        model = KimiK25ForConditionalGeneration(config, packed_layers=packed_layers, plan=plan)
    model.to(dtype or (torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)))
    # Not to_empty(): its empty_like() on meta imports sympy (0.5 s).
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    _fill(model, files, expected, {file_name: name for name, file_name in spelled.items()})
    for module in model.modules():
        if (refresh := getattr(module, "refresh_derived", None)) is not None:
            refresh()
    setattr(model, _SOURCE, files.folder)
    return model.eval()


def _present_device(device: str | torch.device) -> torch.device:
    """torch's own errors on the way come late, are no ValueErrors, and one is 15,000 characters long."""
    try:
        present = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; supported: cpu, cuda, cuda:N") from None
    if present.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; supported: cpu, cuda, cuda:N")
    if present.type == "cuda" and (present.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {str(present)!r}; CUDA devices that torch sees: {count}")
    return present


class _WithoutRandomWeights(TorchFunctionMode):
    """Leaves weights as they are made: on meta nothing is drawn, but torch imports its compiler for it (1.3 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _verify(files: Checkpoint, config: KimiK25Config) -> tuple[dict[str, str], dict[str, TensorInfo], frozenset[int]]:
    """Compares headers with the configuration.

    Returns:
        Original spelling -> name in the files; what each tensor is; layers with int4 experts.
    """
    path = files.index.path if files.index else files.path
    try:
        spelled = canonical_names(files.tensors)
        packed_layers = find_packed_layers(spelled, config.text_config)
        expected = expected_tensors(config, packed_layers)
        refuse_other_formats(name for name in spelled if name not in expected)
    except ValueError as e:
        raise UnreadableFileError(path, str(e)) from None
    found = {name: files.tensors[file_name] for name, file_name in spelled.items()}
    for name, info in found.items():
        if name.endswith(".weight_shape") and info.dtype == "int64":  # compressed-tensors' own; Moonshot's are int32.
            found[name] = replace(info, dtype="int32")
    if findings := compare_tensors(expected, found):
        lines = [f"{finding.names()}: {finding.detail}" for finding in findings]
        raise UnreadableFileError(path, f"does not fit config.json: {listing(lines)}")
    return spelled, expected, packed_layers


@torch.no_grad()
def _fill(
    model: KimiK25ForConditionalGeneration,
    files: Checkpoint,
    expected: Tensors,
    canonical: Mapping[str, str],
) -> None:
    """Copies every tensor, or what of it is this rank's, to its place, in the order of the files' bytes.

    A mapped file is copied to the GPU at a third of the speed of the page cache, so what is in one piece in the file
    and in its place goes through a FileReader.
    """
    placements = place_all(expected, model)
    device = model.language_model.lm_head.weight.device
    kept, state = set(placements), model.state_dict()
    total = files.total_size
    is_shown = model.plan.rank == 0 and sys.stderr is not None and sys.stderr.isatty()
    with (
        tqdm(total=total, desc="loading", unit="B", unit_scale=True, leave=False, disable=not is_shown) as bar,
        FileReader(device) if device.type == "cuda" else nullcontext() as reader,
    ):
        for file, header in sorted(files.headers.items()):
            whole: list[tuple[int, Tensor]] = []
            with safe_open(files.folder / file, "pt") as f:
                for file_name, info in header.tensors.items():
                    name = canonical[file_name]
                    if placement := placements.pop(name, None):
                        part, target = placement.part, placement.view(state)
                        first = _first_byte(info, part)
                        is_same = str(target.dtype) == f"torch.{info.dtype}" and target.is_contiguous()
                        if reader and first is not None and is_same:
                            whole.append((first, target))
                            bar.update(info.end - info.begin - target.nbytes)
                            continue
                        tensor = f.get_slice(file_name)[part] if part else f.get_tensor(file_name)
                        target.copy_(tensor)
                    elif name.removesuffix("_shape") + "_packed" in kept:
                        _check_shape(header.path, name, f.get_tensor(file_name), expected)
                    bar.update(info.end - info.begin)
            if reader:
                reader.fill(files.folder / file, whole, bar.update)
    assert not placements, f"not filled: {list(placements)[:5]}"


def _first_byte(info: TensorInfo, part: tuple[slice, ...]) -> int | None:
    """Where a tensor, or a part of it that is whole rows, begins in its file; None if the part is in pieces."""
    if len(part) > 1:
        return None
    rows = part[0].indices(info.shape[0]) if part else (0,)
    return info.begin + rows[0] * ((info.end - info.begin) // info.shape[0]) if info.shape else info.begin


def _check_shape(path: Path, name: str, tensor: Tensor, expected: Tensors) -> None:
    """A weight_shape must be that of the packed words beside it."""
    packed = expected[name.removesuffix("_shape") + "_packed"]
    shape = _true_shape(packed)
    if tensor.tolist() != shape:
        raise UnreadableFileError(path, f"{name} is {tensor.tolist()}; the packed words beside it are of {shape}")


def _true_shape(packed: TensorInfo) -> list[int]:
    return [packed.shape[0], packed.shape[1] * INT4_PER_WORD]


def save_checkpoint(model: KimiK25ForConditionalGeneration, path: str | os.PathLike[str]) -> None:
    """Writes a model as a checkpoint in the original layout: what load_model read comes back bit for bit.

    A model from load_model keeps its layout (one file, or a shard for each layer and three for the rest) and takes the
    other files of its checkpoint along: tokenizer, template, configuration. Another model gets one file up to 4 GiB,
    and a config.json unless the folder has one. A crash leaves the folder's old checkpoint or the new one.

    Args:
        path: A folder; it is made if need be. An old checkpoint in it is replaced if its other files are the same.

    Raises:
        FileExistsError: The folder has other files of the same names, or another model's checkpoint; nothing is
            written.
        OSError: The folder cannot be written, or the disk is full.
        ValueError: The model is one rank's share.
    """
    if model.plan.tp > 1:
        raise ValueError(f"the model is the share of one of {model.plan.tp} ranks; load all of it to save it")
    folder = Path(path)
    source: Path | None = getattr(model, _SOURCE, None)
    side_files = _side_files(model.config, source, folder)
    packed_layers = packed_layers_of(model)
    expected = expected_tensors(model.config, packed_layers)
    placements = place_all(expected, model)
    state = model.state_dict()

    def read(name: str) -> Tensor:
        if name not in placements:
            return torch.tensor(_true_shape(expected[name.removesuffix("_shape") + "_packed"]), dtype=torch.int32)
        return placements[name].view(state).to("cpu", getattr(torch, expected[name].dtype))

    folder.mkdir(parents=True, exist_ok=True)
    is_small = sum(map(num_bytes, expected.values())) <= MAX_SINGLE_BYTES
    is_sharded = (folder / INDEX_NAME).exists() or (not is_small if source is None else (source / INDEX_NAME).exists())
    write_checkpoint(folder, _shards(expected) if is_sharded else [expected], read, side_files)


def _shards(expected: Tensors) -> list[Tensors]:
    """As published: one for each decoder layer, then the decoder's rest, the projector, the vision tower."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    rest: dict[str, dict[str, TensorInfo]] = {"language_model": {}, "mm_projector": {}, "vision_tower": {}}
    for name, info in expected.items():
        parts = name.split(".", 4)
        shard = layers.setdefault(int(parts[3]), {}) if parts[2] == "layers" else rest[parts[0]]
        shard[name] = info
    return [*layers.values(), *rest.values()]


def _side_files(config: KimiK25Config, source: Path | None, folder: Path) -> dict[str, bytes]:
    """The files beside the weights that the folder still needs.

    Renaming several files is not one step: so that a crash cannot leave the new configuration with the old weights,
    a folder that has weights must have the same other files already.
    """
    if source is None:
        if (folder / "config.json").exists():
            there = replace(load_config(folder), stop_token_ids=config.stop_token_ids)
            if there != config:
                raise FileExistsError(f"{folder / 'config.json'}: describes another model; save to another folder")
            return {}
        wanted = {"config.json": config_json(config)}
    else:
        # The embedded default lies in a Python package, whose modules are not the checkpoint's.
        skipped = (*_WEIGHTS, ".py") if (source / "__init__.py").exists() else _WEIGHTS
        names = sorted(p.name for p in source.iterdir() if p.is_file() and not p.name.endswith(skipped))
        wanted = {name: (source / name).read_bytes() for name in names if not name.startswith(".")}
    missing = {name: data for name, data in wanted.items() if not (folder / name).exists()}
    differing = [n for n, data in wanted.items() if n not in missing and (folder / n).read_bytes() != data]
    if has_checkpoint(folder):
        differing += missing
    if differing:
        what = f"is not the same checkpoint: its {listing(differing)} is another or not there"
        raise FileExistsError(f"{folder}: {what}; save to another folder")
    return missing
