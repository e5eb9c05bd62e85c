"""Routed experts on the int4 grid: rounding while training, packing a finished checkpoint. Knows no model.

`python -m kimi_k25.tiny.quantize SOURCE TARGET` writes the packed variant of a one-file bfloat16 checkpoint.
Values that lie on a group's grid already come back exactly, so a checkpoint trained on the grid loses nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..layers.int4 import pack_int4
from .architecture import QUANTIZATION_CONFIG

GROUP_SIZE = 32
# A group's largest value in steps of its scale, and by how many units in its last place the scale is then moved. 7.5 is
# compressed-tensors' choice. Values on a grid have 7 or 8 as their largest; rounding may have moved 7 times the scale.
_CANDIDATES = ((7.5, 0), (8.0, 0), (7.0, 0), (7.0, 1), (7.0, -1))
_EXPERT_WEIGHT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest symmetric int4 values in groups of 32 along the last dimension, of a few scales the best.

    Args:
        weight: (..., out, in), in a multiple of 32.

    Returns:
        q: (..., out, in) int8 in [-8, 7].
        scale: (..., out, in / 32) bfloat16.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1, keepdim=True)
    best_q, best_scale = torch.zeros_like(groups), torch.ones_like(largest, dtype=torch.bfloat16)
    best_error = torch.full_like(largest, torch.inf)
    for levels, ulps in _CANDIDATES:
        scale = ((largest / levels).bfloat16().view(torch.int16) + ulps).view(torch.bfloat16)
        scale = torch.where(largest == 0, 1.0, scale)  # An empty group: any scale will do.
        q = (groups / scale.float()).round().clamp(-8, 7)
        error = ((q.bfloat16() * scale).float() - groups).square().sum(-1, keepdim=True)
        better = error < best_error
        best_q, best_scale = torch.where(better, q, best_q), torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_q.flatten(-2).to(torch.int8), best_scale.squeeze(-1)


def on_grid(weight: Tensor) -> Tensor:
    """The weight after packing and unpacking, bfloat16, same shape."""
    q, scale = quantize(weight)
    return (q.bfloat16().unflatten(-1, (-1, GROUP_SIZE)) * scale.unsqueeze(-1)).flatten(-2)


def pack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors with every routed expert's matrix replaced by packed words, scales and shape."""
    out = {}
    for name, tensor in tensors.items():
        if not _EXPERT_WEIGHT.fullmatch(name):
            out[name] = tensor
            continue
        q, scale = quantize(tensor)
        out[f"{name}_packed"], out[f"{name}_scale"] = pack_int4(q), scale
        out[f"{name}_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    return out


def quantize_checkpoint(source: Path, target: Path) -> None:
    """Writes the packed variant of a checkpoint with one model.safetensors, side files included."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    packed = pack_experts(load_file(source / "model.safetensors"))
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    for name in ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    for name in ("tiktoken.model", "chat_template.jinja"):
        shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["quantization_config"] = QUANTIZATION_CONFIG
    (target / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """The command."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m kimi_k25.tiny.quantize", description=about)
    parser.add_argument("source", type=Path, help="folder of a bfloat16 checkpoint with one model.safetensors")
    parser.add_argument("target", type=Path, help="folder to write")
    args = parser.parse_args()
    quantize_checkpoint(args.source, args.target)


if __name__ == "__main__":
    main()
