"""Small configurations and models with random weights, none of whose sizes are equal, so that transposes show.

Knows no checkpoint: weights are drawn in place, at scales that keep float32 well conditioned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kimi_k25.config import KimiK25Config
from kimi_k25.layers.int4 import pack_int4
from kimi_k25.model import KimiK25ForConditionalGeneration

TINY = Path(__file__).parent / "data" / "oracle"


def make_config(*, int4: bool = False, vision: dict[str, Any] | None = None, **text: Any) -> KimiK25Config:
    """The tiny oracle's configuration with other fields in text_config and vision_config."""
    raw = json.loads((TINY / ("tiny_int4" if int4 else "tiny_bf16") / "config.json").read_text())
    raw["text_config"] |= {"num_key_value_heads": text.get("num_attention_heads", 4), **text}
    raw["vision_config"] |= {"text_hidden_size": raw["text_config"]["hidden_size"], **(vision or {})}
    return KimiK25Config.from_dict(raw)


@torch.no_grad()
def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draws every weight of a model or layer: norms around one, biases that matter, products of unit size."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("_packed"):
            values = torch.randint(-8, 8, (*tensor.shape[:-1], tensor.shape[-1] * 8), generator=generator)
            tensor.copy_(pack_int4(values))
        elif name.endswith("_scale"):
            tensor.copy_(noise.abs() * 0.02 + 0.01)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.5 * noise)
        elif "norm" in name and name.endswith("weight"):
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif name.endswith(("embed_tokens.weight", "pos_emb.weight")):
            tensor.copy_(0.7 * noise)
        elif tensor.dim() > 1:
            fan_in = tensor[0].numel() if tensor.dim() != 3 else tensor.shape[-1]
            tensor.copy_(noise * fan_in**-0.5)
    return module


def make_model(config: KimiK25Config | None = None, seed: int = 0) -> KimiK25ForConditionalGeneration:
    """A model in eval mode with random weights."""
    model = KimiK25ForConditionalGeneration(config or make_config())
    randomize(model, seed)
    return model.eval()


def make_pixels(grids: list[tuple[int, int, int]], seed: int = 0, patch_size: int = 14) -> torch.Tensor:
    """(num_patches, 3, patch_size, patch_size), in [-1, 1]."""
    num_patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_patches, 3, patch_size, patch_size, generator=generator) * 2 - 1


def make_ids(config: KimiK25Config, length: int, seed: int = 0) -> torch.Tensor:
    """(length,) text tokens: never the media placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.media_placeholder_token_id, (length,), generator=generator)
