"""The golden outputs and what goes in: prompts, pixels, and the two tiny checkpoints as models."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from oracle_media import make_frames, make_image
from safetensors.torch import load_file

from kimi_k25 import KimiK25ForConditionalGeneration, Prompt, load_model
from kimi_k25.image_processor import load_image_processor

ORACLE = Path(__file__).parent / "data" / "oracle"
GOLDENS = json.loads((ORACLE / "goldens.json").read_text())
TENSORS = load_file(ORACLE / "goldens.safetensors")
FOLDERS = {"base": ORACLE / "tiny_bf16", "int4": ORACLE / "tiny_int4"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = ("text", "image", "two_images", "video")
IMAGES_OF = {"image": "A", "two_images": "BD", "image_A": "A", "image_E_nointerp": "E"}


def new_model(variant: str) -> KimiK25ForConditionalGeneration:
    """Of "base.fp32" to "int4.bf16"; the caller's own, to be changed at will."""
    weights, dtype = variant.split(".")
    return load_model(FOLDERS[weights], dtype=DTYPES[dtype])


@functools.cache
def shared_model(variant: str) -> KimiK25ForConditionalGeneration:
    """The same, loaded once for all tests of a file, which leave it as it is."""
    return new_model(variant)


@functools.cache
def media(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """pixel_values and grid_thws of a prompt, or of a vision golden."""
    processor = load_image_processor(FOLDERS["base"])
    if name == "video":
        items = list(processor.video(make_frames(7), 2.0, name))
    else:
        items = [processor.image(make_image(letter), letter) for letter in IMAGES_OF[name]]
    pixels = torch.cat([torch.from_numpy(item.pixel_values) for item in items])
    return pixels, torch.tensor([item.grid_thw for item in items])


def golden_prompt(name: str) -> Prompt:
    pixels, grids = (None, None) if name == "text" else media(name)
    return Prompt(input_ids=torch.tensor(GOLDENS["prompts"][name]["ids"]), pixel_values=pixels, grid_thws=grids)


@torch.no_grad()
def logits_of(model: KimiK25ForConditionalGeneration, name: str) -> torch.Tensor:
    """Logits of a whole golden prompt, (num_tokens, vocab_size)."""
    prompt = golden_prompt(name)
    return model(prompt.input_ids, pixel_values=prompt.pixel_values, grid_thws=prompt.grid_thws)


def distance(model: KimiK25ForConditionalGeneration, variant: str, name: str) -> torch.Tensor:
    """Absolute errors of the logits, in the rows that the golden holds."""
    golden = TENSORS[f"{variant}.{name}.logits"]
    return (logits_of(model, name)[-golden.shape[0] :] - golden).abs()
