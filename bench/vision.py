"""MoonViT3d and the projector of Kimi-K2.5 on one GPU: an image's features, and the attention that takes most of it.

    python bench/vision.py [--sizes 1920x1080,896x896,448x448] [--json bench/results/vision_DATE.json]

Real sizes (27 layers, 1152 wide, 16 heads of 72), random weights. Each row is timed from pixels on the GPU to features
in the decoder's width; its share is of the bfloat16 product measured in the same run, and its operations are those of
the products and of attention at 72 columns a head, whatever a kernel pads them to. Before that, the fused tower is
compared with the plain one in float32, on the first size and on images and video chunks together. --jit also measures
FlashInfer at 128 columns, which it compiles for a minute. Needs triton; exit 2 says what is missing.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import (
    REPOSITORY,
    Ceilings,
    apart,
    measure,
    print_table,
    profile_kernels,
    provenance,
    reason,
    refuse,
    relative,
    require_extras,
    require_hopper,
    write_result,
)
from published import MEDIA, config
from torch import Tensor, nn

sys.path.insert(0, str(REPOSITORY))
from kimi_k25.config import KimiK25Config, VisionConfig
from kimi_k25.image_processor import ImageProcessor, MediaConfig
from kimi_k25.projector import PatchMergerMLP
from kimi_k25.vision_tower import Grid, MoonViT3d, vision_rope

MIXED: list[Grid] = [(1, 20, 34), (4, 12, 16), (1, 2, 2), (4, 12, 16), (3, 8, 30)]
# Queries a program, keys at a time, warps, stages, most registers: what compiles for Hopper without spilling them.
TUNINGS = (
    (128, 64, 8, 3, 128), (128, 64, 8, 2, 128), (128, 32, 8, 3, 128), (128, 64, 4, 3, None), (128, 128, 8, 2, None),
    (64, 64, 4, 2, 128), (64, 64, 4, 3, None), (256, 64, 8, 2, None),
)  # fmt: skip
TOY = {"vt_hidden_size": 144, "vt_num_attention_heads": 2, "vt_intermediate_size": 64, "mm_hidden_size": 144}


class Encode(nn.Module):
    """What model.encode_media computes, without a decoder beside it."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision_tower, self.mm_projector = MoonViT3d(vision), PatchMergerMLP(vision)

    def forward(self, pixel_values: Tensor, grids: Tensor) -> Tensor:
        """(num_media_tokens, text_hidden_size)."""
        features: Tensor = self.mm_projector(self.vision_tower(pixel_values, grids))
        return features


@torch.no_grad()
def build(layers: int, device: torch.device) -> tuple[Encode, VisionConfig]:
    """The tower in bfloat16, with weights under which every layer changes its input about as much."""
    toy: dict[str, Any] = {} if device.type == "cuda" else TOY
    text = {} if device.type == "cuda" else {"hidden_size": 64}
    vision = KimiK25Config.from_dict(config(text, toy | {"vt_num_hidden_layers": layers})).vision_config
    with torch.device("meta"):
        model = Encode(vision)
    model.to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
        else:
            is_table = name.endswith("pos_emb.weight")
            parameter.normal_(std=1.0 if is_table else (parameter.numel() / parameter.shape[0]) ** -0.5)
    return model.eval(), vision


def operations(c: VisionConfig, lengths: Sequence[int], tokens: int) -> dict[str, float]:
    """Multiplications and additions of the blocks' products, of their attention, and of embedding and projector."""
    rows, dim, joined = sum(lengths), c.vt_hidden_size, c.mm_hidden_size * c.patches_per_token
    products = 2.0 * rows * dim * (4 * dim + 2 * c.vt_intermediate_size)
    attention = sum(4.0 * n * n * dim for n in lengths)
    outside = 2.0 * rows * dim * 3 * c.patch_size**2 + 2.0 * tokens * joined * (joined + c.text_hidden_size)
    layers = c.vt_num_hidden_layers
    return {"products": layers * products, "attention": layers * attention, "outside": outside}


def attention_alternatives(
    qkv: Tensor, lengths: Sequence[int], head_dim: int, *, jit: bool
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """By name, what prepares a call of attention over equally long items, (num_rows, dim)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from kimi_k25.layers.vision_kernels import item_attention, item_tiles

    rows, dim = qkv.shape[0], qkv.shape[1] // 3
    scale = head_dim**-0.5

    def triton(queries: int, *tuning: Any) -> Callable[[], Tensor]:
        tiles = item_tiles(lengths, qkv.device, queries)
        return lambda: item_attention(qkv, tiles, head_dim, queries, *tuning)

    def sdpa(backend: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa_items(qkv, len(lengths), head_dim)

        return call

    def flashinfer(qk_dim: int, vo_dim: int) -> Callable[[], Tensor]:
        from kimi_k25.layers.flashinfer_ops import WORKSPACE_BYTES, import_flashinfer

        heads = dim // head_dim
        q, k, v = qkv.unflatten(-1, (3, heads, head_dim)).unbind(1)
        q, k, v = (F.pad(x, (0, to - head_dim)) for x, to in ((q, qk_dim), (k, qk_dim), (v, vo_dim)))
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=qkv.device)
        wrapper = import_flashinfer().BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
        wrapper.plan(
            bounds, bounds, num_qo_heads=heads, num_kv_heads=heads, head_dim_qk=qk_dim, head_dim_vo=vo_dim,
            causal=False, sm_scale=scale, q_data_type=qkv.dtype, kv_data_type=qkv.dtype,
        )  # fmt: skip
        out = torch.empty(rows, heads, vo_dim, dtype=qkv.dtype, device=qkv.device)

        def call() -> Tensor:
            wrapper.run(q, k, v, out=out)
            return out[..., :head_dim].flatten(1)

        return call

    tunings = TUNINGS if qkv.is_cuda else TUNINGS[:1]
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "triton 64+16, " + "/".join(str(n or "-") for n in tuning): partial(triton, *tuning) for tuning in tunings
    }
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        found[f"sdpa {name.split('_')[0].lower()}"] = partial(sdpa, getattr(SDPBackend, name))
    found["flashinfer fa3 192/128"] = partial(flashinfer, 192, 128)
    if jit:
        found["flashinfer fa3 128/128"] = partial(flashinfer, 128, 128)
    return found


def sdpa_items(qkv: Tensor, num_items: int, head_dim: int) -> Tensor:
    """scaled_dot_product_attention of equally long items, without a copy: (num_rows, dim)."""
    q, k, v = qkv.view(num_items, -1, 3, qkv.shape[1] // 3 // head_dim, head_dim).transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(qkv.shape[0], -1)


@torch.inference_mode()
def measure_attention(
    lengths: Sequence[int], c: VisionConfig, ceilings: Ceilings, device: torch.device, *, rounds: int, jit: bool
) -> list[dict[str, Any]]:
    """A row for each alternative on one layer's attention, the fastest first; what can't run says why."""
    qkv = torch.randn(sum(lengths), 3 * c.vt_hidden_size, device=device, dtype=torch.bfloat16)
    expected = sdpa_items(qkv.float(), len(lengths), c.head_dim)
    done = sum(4.0 * n * n * c.vt_hidden_size for n in lengths)
    rows = []
    for name, prepare in attention_alternatives(qkv, lengths, c.head_dim, jit=jit).items():
        row: dict[str, Any] = {"items": len(lengths), "patches": sum(lengths), "attention": name}
        try:
            call = prepare()
            row["distance"] = round(relative(call(), expected), 5)
            row |= asdict(measure(call, rounds=rounds))
            row["tflop_per_s"] = round(done / row["median_ms"] / 1e9, 1)
            row["share"] = round(row["tflop_per_s"] / ceilings.tflop_per_s, 3)
            if not row["distance"] < 1e-2:
                row["skipped"] = "WRONG"
        except Exception as e:
            row["skipped"] = reason(e)
        rows.append(row)
    return sorted(rows, key=lambda row: ("skipped" in row, row.get("median_ms", 0)))


def prepared_image(size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Pixels and grid of a picture of noise, on the device, and the milliseconds that the processor took."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    processor = ImageProcessor(MediaConfig.from_dict(MEDIA))
    started = time.perf_counter()
    item = processor.image(Image.fromarray(noise))
    elapsed_ms = (time.perf_counter() - started) * 1000
    return torch.from_numpy(item.pixel_values).to(device), torch.tensor([item.grid_thw]), elapsed_ms


@torch.inference_mode()
def check(model: Encode, fast: Any, pixels: Tensor, grids: Tensor) -> dict[str, float]:
    """Distances to the plain tower in float32, of the plain and the fused one in bfloat16."""
    encoder = model.vision_tower.encoder
    encoder.fast = None
    exact = copy.deepcopy(model).float()(pixels, grids)
    plain = model(pixels, grids)
    encoder.fast = fast
    fused = model(pixels, grids)
    found = {"plain": round(relative(plain, exact), 5), "fused": round(relative(fused, exact), 5)}
    print(f"  distance to float32: {found}, {list(map(list, grids.tolist()))}", flush=True)
    if not found["fused"] < 2 * found["plain"] + 1e-3:
        print("the fused tower differs from plain PyTorch", file=sys.stderr)
        raise SystemExit(1)
    return found


def blocks_in_one_graph(model: Encode, fast: Any, pixels: Tensor, grids: Tensor) -> Callable[[], object]:
    """Replays the encoder's blocks, without embedding, merging and projector, for this one grid."""
    from kimi_k25.layers.vision_kernels import item_tiles

    tower = model.vision_tower
    listed = tower.checked_grids(pixels, grids)
    x = tower.patch_embed(pixels.to(torch.bfloat16), listed)
    rope = vision_rope(listed, tower.encoder.head_dim, x.device)
    tiles = item_tiles([t * h * w for t, h, w in listed], x.device)
    fast.blocks(x, rope, tiles)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = fast.blocks(x, rope, tiles)
    keep = (x, rope, tiles, out)
    return lambda: (graph.replay(), keep)


@torch.inference_mode()
def measure_size(
    model: Encode, c: VisionConfig, size: tuple[int, int], ceilings: Ceilings, device: torch.device, *, rounds: int,
    cudnn: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each way through the tower."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from kimi_k25.fast_vision import FastVisionEncoder

    encoder = model.vision_tower.encoder
    pixels, grids, process_ms = prepared_image(size, device)
    patches, tokens = pixels.shape[0], pixels.shape[0] // c.patches_per_token
    counted = operations(c, [patches], tokens)
    fast = FastVisionEncoder(encoder)

    def through_cudnn(qkv: Tensor, tiles: Tensor, head_dim: int) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa_items(qkv, 1, head_dim)

    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "plain": lambda: lambda: model(pixels, grids),
        "fused": lambda: lambda: model(pixels, grids),
        "fused, cuDNN attention": lambda: lambda: model(pixels, grids),
        "fused blocks, one graph": lambda: blocks_in_one_graph(model, fast, pixels, grids),
    }
    if not cudnn:
        del ways["fused, cuDNN attention"], ways["fused blocks, one graph"]
    rows = []
    for name, prepare in ways.items():
        encoder.fast = FastVisionEncoder(encoder, through_cudnn) if "cuDNN" in name else fast
        if name == "plain":
            encoder.fast = None
        done = sum(counted.values()) - (counted["outside"] if "blocks" in name else 0.0)
        row: dict[str, Any] = {"size": f"{size[0]}x{size[1]}", "patches": patches, "tokens": tokens, "mode": name}
        try:
            timing = measure(prepare(), rounds=rounds)
        except Exception as e:
            rows.append(row | {"skipped": reason(e)})
            continue
        tflop_per_s = done / timing.median_ms / 1e9
        rows.append(
            row | asdict(timing) | {
                "tflop": round(done / 1e12, 3), "tflop_per_s": round(tflop_per_s, 1),
                "share": round(tflop_per_s / ceilings.tflop_per_s, 3), "image_processing_ms": round(process_ms, 1),
            }
        )  # fmt: skip
    encoder.fast = fast
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1920x1080,896x896,448x448", help="of the images, in pixels")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a toy, to show that it runs")
    parser.add_argument("--jit", action="store_true", help="also what FlashInfer has to compile")
    parser.add_argument("--json", type=Path, help="where the result goes")
    args = parser.parse_args(argv)
    try:
        args.sizes = [tuple(int(side) for side in size.split("x", 1)) for size in args.sizes.split(",")]
        if any(len(size) != 2 or min(size) < 1 for size in args.sizes):
            raise ValueError
    except ValueError:
        refuse(f"--sizes is {args.sizes!r}; expected widths and heights, as 1920x1080,448x448")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Checks, measures; writes the JSON where one is asked for, prints the tables."""
    args = parse_args(argv)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = require_hopper(16, lambda free: "leave out the largest of --sizes, or use another GPU")
    require_extras(("triton", "triton"))
    from kimi_k25.fast_vision import FastVisionEncoder

    ceilings = Ceilings.measure()
    print(f"ceilings: {ceilings.tb_per_s:.2f} TB/s copied, {ceilings.tflop_per_s:.0f} TFLOP/s bfloat16", flush=True)
    model, vision = build(args.layers, device)
    fast = FastVisionEncoder(model.vision_tower.encoder)
    distances = {}
    pixels, grids, _ = prepared_image(args.sizes[0], device)
    patches = pixels.shape[0]
    distances["first size"] = check(model, fast, pixels, grids)
    mixed = torch.tensor(MIXED if device.type == "cuda" else [(2, 2, 2), (1, 2, 2)])
    noise = torch.rand(int(mixed.prod(1).sum()), 3, vision.patch_size, vision.patch_size, device=device) * 2 - 1
    distances["images and videos"] = check(model, fast, noise, mixed)

    failures: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    attention: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    counted = operations(vision, [patches], patches // vision.patches_per_token)
    result = {
        **provenance(), "ceilings": asdict(ceilings), "layers": args.layers, "distance_to_float32": distances,
        "tflop": {key: round(value / 1e12, 3) for key, value in counted.items()}, "rows": rows,
        "attention": attention, "profile": kernels, "failures": failures,
    }  # fmt: skip

    def save() -> None:
        if args.json:
            write_result(args.json, result)

    for size in args.sizes:
        with apart(f"tower {size[0]}x{size[1]}", failures):
            rows += measure_size(
                model, vision, size, ceilings, device, rounds=args.rounds, cudnn=device.type == "cuda"
            )
        save()
    for lengths in ([patches], [2304] * 8) if device.type == "cuda" else ([8, 8],):
        with apart(f"attention over {len(lengths)} items", failures):
            attention += measure_attention(
                lengths, vision, ceilings, device, rounds=args.rounds, jit=args.jit
            )
        save()
    if device.type == "cuda":
        with apart("profile", failures), torch.inference_mode():
            kernels += profile_kernels(lambda: model(pixels, grids), calls=2)[:16]
    save()
    print_table(["us", "launches", "kernel"], [[k["us"], k["launches"], k["kernel"][:70]] for k in kernels])
    columns = ("items", "patches", "attention", "distance", "median_ms", "tflop_per_s", "share", "skipped")
    print_table(columns, [[r.get(column, "") for column in columns] for r in attention])
    columns = ("size", "tokens", "mode", "median_ms", "p10_ms", "p90_ms", "tflop_per_s", "share", "image_processing_ms",
               "skipped")  # fmt: skip
    print_table(columns, [[r.get(column, "") for column in columns] for r in rows])
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
