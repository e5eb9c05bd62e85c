"""What the integrity commands take at Kimi-K2.5's size: python bench/integrity_scale.py [--json FILE]

Writes a folder of 64 files whose headers list the checkpoint's 208,550 tensors and whose data is one hole each, then
runs each command in a process of its own. Knows no weights: none of the 595 GB is there, and none is read.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import REPOSITORY, provenance, write_result

NUM_TENSORS, NUM_FILES = 208_550, 64
BYTES = {"BF16": 2, "F32": 4, "I32": 4}

Entry = tuple[str, str, list[int]]


def tensors(file_number: int) -> Iterator[Entry]:
    """Yields (name, dtype, shape) of one file: 61 decoder layers, then text ends, projector, vision tower."""
    if file_number <= 61:
        yield from _decoder_layer(file_number - 1)
    elif file_number == 62:
        yield "language_model.model.embed_tokens.weight", "BF16", [163840, 7168]
        yield "language_model.model.norm.weight", "BF16", [7168]
        yield "language_model.lm_head.weight", "BF16", [163840, 7168]
    elif file_number == 63:
        yield from _affine("mm_projector.pre_norm", [1152])
        yield from _affine("mm_projector.proj.0", [4608, 4608])
        yield from _affine("mm_projector.proj.2", [7168, 4608])
    else:
        yield from _affine("vision_tower.patch_embed.proj", [1152, 3, 14, 14])
        yield "vision_tower.patch_embed.pos_emb.weight", "BF16", [64, 64, 1152]
        for n in range(27):
            block = f"vision_tower.encoder.blocks.{n}"
            yield from _affine(f"{block}.norm0", [1152])
            yield from _affine(f"{block}.norm1", [1152])
            yield from _affine(f"{block}.wqkv", [3456, 1152])
            yield from _affine(f"{block}.wo", [1152, 1152])
            yield from _affine(f"{block}.mlp.fc0", [4304, 1152])
            yield from _affine(f"{block}.mlp.fc1", [1152, 4304])
        yield from _affine("vision_tower.encoder.final_layernorm", [1152])


def _affine(name: str, shape: list[int]) -> Iterator[Entry]:
    yield f"{name}.weight", "BF16", shape
    yield f"{name}.bias", "BF16", shape[:1]


def _decoder_layer(n: int) -> Iterator[Entry]:
    layer = f"language_model.model.layers.{n}"
    matrices = {
        "input_layernorm": [7168],
        "post_attention_layernorm": [7168],
        "self_attn.q_a_proj": [1536, 7168],
        "self_attn.q_a_layernorm": [1536],
        "self_attn.q_b_proj": [12288, 1536],
        "self_attn.kv_a_proj_with_mqa": [576, 7168],
        "self_attn.kv_a_layernorm": [512],
        "self_attn.kv_b_proj": [16384, 512],
        "self_attn.o_proj": [7168, 8192],
    }
    width, ffn = (18432, "mlp") if n == 0 else (2048, "mlp.shared_experts")
    matrices |= {f"{ffn}.gate_proj": [width, 7168], f"{ffn}.up_proj": [width, 7168], f"{ffn}.down_proj": [7168, width]}
    for name, shape in matrices.items():
        yield f"{layer}.{name}.weight", "BF16", shape
    if n > 0:
        yield f"{layer}.mlp.gate.weight", "BF16", [384, 7168]
        yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", [384]
        for expert in range(384):
            for proj, rows, columns in (("gate", 2048, 7168), ("up", 2048, 7168), ("down", 7168, 2048)):
                name = f"{layer}.mlp.experts.{expert}.{proj}_proj"
                yield f"{name}.weight_packed", "I32", [rows, columns // 8]
                yield f"{name}.weight_scale", "BF16", [rows, columns // 32]
                yield f"{name}.weight_shape", "I32", [2]


def write_folder(folder: Path) -> None:
    """Writes the files with true headers and sizes, and the index; on disk they take the headers' 31 MB."""
    weight_map: dict[str, str] = {}
    total_size = 0
    for number in range(1, NUM_FILES + 1):
        file = f"model-{number:05}-of-{NUM_FILES:06}.safetensors"
        header: dict[str, object] = {}
        end = 0
        for name, dtype, shape in tensors(number):
            begin, numel = end, 1
            for n in shape:
                numel *= n
            end = begin + numel * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(header, file)
        total_size += end
    if len(weight_map) != NUM_TENSORS:
        raise AssertionError(f"the layout has {len(weight_map):,} tensors, expected {NUM_TENSORS:,}")
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(*argv: str) -> dict[str, object]:
    """Runs one command; returns its exit code, output, wall and CPU time, and peak memory."""
    read_end, write_end = os.pipe()
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(write_end), *argv],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        pass_fds=[write_end],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = child.communicate(timeout=120)
    wall_s = time.perf_counter() - began
    os.close(write_end)
    with os.fdopen(read_end) as used:
        cpu_s, peak_mb = map(float, used.read().split())
    return {"exit": child.returncode, "out": out, "wall_s": wall_s, "cpu_s": cpu_s, "peak_mb": peak_mb}


# The child reports on itself. VmHWM is the peak since the program began; ru_maxrss has that of the parent's fork in it.
_CHILD = """
import os, re, sys, time
from aliasmix.cli import main
code = main(sys.argv[2:])
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
os.write(int(sys.argv[1]), f"{time.process_time()} {peak_kib * 1024 / 1e6}".encode())
sys.exit(code)
"""


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns the commands to run, by what they answer; the second needs what the first has written."""
    keys, moved = str(folder / "keys.json"), str(folder / "moved.json")
    return {
        "write the manifest": ("manifest", str(folder), "-o", keys),
        "check against the manifest": ("check", "--manifest", keys, "--checkpoint", str(folder)),
        "inspect": ("inspect", str(folder)),
        "diff with a moved prefix": ("diff", keys, moved),
    }


def move_prefix(folder: Path) -> None:
    """Writes a second manifest in which the decoder layers have lost a prefix, as in another checkpoint's naming."""
    text = (folder / "keys.json").read_text()
    (folder / "moved.json").write_text(text.replace('"language_model.model.layers.', '"language_model.layers.'))


def main() -> None:
    """Prints the table, then one line of JSON; writes the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder)
        for row, argv in commands(folder).items():
            if row.startswith("diff"):
                move_prefix(folder)
            best = min((measure(*argv) for _ in range(3)), key=lambda run: float(str(run["wall_s"])))
            print(f"{row:28} exit {best['exit']}  {best['wall_s']:6.2f} s wall  {best['cpu_s']:6.2f} s CPU  "
                  f"{best['peak_mb']:6.0f} MB", flush=True)  # fmt: skip
            rows[row] = {k: v for k, v in best.items() if k != "out"}
    result = {**provenance(), "num_tensors": NUM_TENSORS, "num_files": NUM_FILES, "rows": rows}
    print(json.dumps(result))
    if args.json:
        write_result(args.json, result)


if __name__ == "__main__":
    main()
