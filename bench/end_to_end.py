"""From files on a disk to tokens: loading, an image's first token, and a seed row, on one GPU.

    python bench/end_to_end.py [--moe-layers 1] [--folder DIR] [--json bench/results/end_to_end_DATE.json]

Writes a checkpoint in the original int4 layout with the published widths (64 heads, 384 experts, the whole vocabulary,
the whole vision tower) and few layers, random weights, 16 GB with one MoE layer, to a temporary folder in DIR. Then:

- loading: bytes a second of load_model, and of its reading and copying alone, beside what dd reads of the same files.
  Both find the files in the page cache. Rearranging the experts for the fast kernels is timed apart.
- the same tokens with graphs and without, in deterministic mode.
- an image of 1920x1080 and a question: time to the first token, by its parts.
- the seed row: 2048 tokens in, 128 out: time to first token, time per token after it, and the whole.

No collectives, and a depth of a few layers: times are of these layers, not of the published model. Needs the `gpu`
extra; exit 2 says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import published
import torch
from harness import (
    REPOSITORY,
    apart,
    free_memory,
    print_table,
    provenance,
    refuse,
    require_extras,
    require_hopper,
    write_result,
)
from share import build

sys.path.insert(0, str(REPOSITORY))
from kimi_k25.backend import use_backend
from kimi_k25.checkpoint import load_model, save_checkpoint
from kimi_k25.config import load_config
from kimi_k25.decoder_graphs import graphed_engine
from kimi_k25.engine import Engine, Prompt, SamplingParams
from kimi_k25.file_reader import FileReader
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.model import KimiK25ForConditionalGeneration
from kimi_k25.processor import Processor, load_processor

TINY = REPOSITORY / "kimi_k25" / "tiny"  # Whose tokenizer and template the prompt is made with.
CHUNK = 2048
TOY_TEXT = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "num_attention_heads": 2, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 1024,
}  # fmt: skip
TOY_VISION = {
    "vt_hidden_size": 48, "vt_num_attention_heads": 4, "vt_intermediate_size": 64, "vt_num_hidden_layers": 2,
    "mm_hidden_size": 48,
}  # fmt: skip


def checkpoint_bytes(moe_layers: int) -> float:
    """About what the files of the published widths take."""
    text = published.TEXT
    expert = 3 * text["hidden_size"] * text["moe_intermediate_size"]
    expert_layer = text["n_routed_experts"] * expert * published.INT4_BYTES
    return moe_layers * (expert_layer + 0.3e9) + 1.1e9 + 4.7e9 + 1.1e9


def write_side_files(folder: Path, moe_layers: int, *, is_toy: bool) -> None:
    """config.json and what a processor reads: the tiny default's tokenizer, the published limits on pictures."""
    tiny = json.loads((TINY / "config.json").read_text())
    text = (TOY_TEXT if is_toy else {}) | {"num_hidden_layers": 1 + moe_layers, "eos_token_id": 900}
    kept = ("media_placeholder_token_id", "pad_token_id", "video_placeholder")
    outer = {key: tiny[key] for key in kept} | {"eos_token_id": 900}
    raw = published.config(text, TOY_VISION if is_toy else {}, **outer)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": published.MEDIA}))
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder / name)


@contextmanager
def without_fsync() -> Iterator[None]:
    """Writing is not what is measured here, and the files are deleted at the end."""
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        yield


def write_checkpoint(folder: Path, moe_layers: int, device: torch.device) -> dict[str, Any]:
    """Random weights in the original layout; what was written and how long it took."""
    began = time.perf_counter()
    write_side_files(folder, moe_layers, is_toy=device.type == "cpu")
    torch.manual_seed(0)
    model = build(load_config(folder), device, expert_layers=moe_layers)
    with without_fsync():
        save_checkpoint(model, folder)
    del model
    free_memory()
    files = sorted(folder.glob("*.safetensors"))
    return {
        "files": len(files), "gb": round(sum(file.stat().st_size for file in files) / 1e9, 3),
        "write_seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def dd_gb_per_s(folder: Path) -> list[float]:
    """What dd reads of the same files, three times over; the first time brings them into the page cache."""
    rates = []
    for _ in range(3):
        total, seconds = 0, 0.0
        for file in sorted(folder.glob("*.safetensors")):
            began = time.perf_counter()
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M", "status=none"], check=True)
            seconds += time.perf_counter() - began
            total += file.stat().st_size
        rates.append(round(total / seconds / 1e9, 3))
    return rates


def loaded(folder: Path, device: torch.device) -> tuple[KimiK25ForConditionalGeneration, dict[str, Any]]:
    """The model, and GB a second of the whole of loading and of reading and copying alone."""
    reading = [0.0]
    fill = FileReader.fill

    def timed(self: FileReader, *args: Any) -> None:
        began = time.perf_counter()
        fill(self, *args)
        reading[0] += time.perf_counter() - began

    gb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
    began = time.perf_counter()
    with mock.patch.object(FileReader, "fill", timed):
        model = load_model(folder, device, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    row = {"load_seconds": round(seconds, 3), "load_gb_per_s": round(gb / seconds, 3)}
    if reading[0]:
        row |= {"read_seconds": round(reading[0], 3), "read_gb_per_s": round(gb / reading[0], 3)}
    return model, row


def fast(model: KimiK25ForConditionalGeneration, *, deterministic: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """Puts the model on its fast kernels where there is a GPU, and compiles them for steps of these sizes."""
    began = time.perf_counter()
    backend = "flashinfer" if model.language_model.lm_head.weight.is_cuda else "torch"
    line = use_backend(model, backend, deterministic=deterministic)  # type: ignore[arg-type]
    if backend == "torch":
        return {"backend": line}
    torch.cuda.synchronize()
    row = {"backend": line, "repack_seconds": round(time.perf_counter() - began, 3)}
    began = time.perf_counter()
    topk = model.config.text_config.num_experts_per_tok
    products: Any = model.language_model.model.fast.experts[0].products  # type: ignore[union-attr]
    products.prepare([size * topk for size in sizes])
    return row | {"compile_seconds": round(time.perf_counter() - began, 2)}


@contextmanager
def engines(model: KimiK25ForConditionalGeneration, prefill: Sequence[int]) -> Iterator[dict[str, Engine]]:
    """Without graphs and with them, for prefill steps of exactly these sizes: so both compute the same shapes."""
    is_cuda = model.language_model.lm_head.weight.is_cuda
    plan = GraphPlan(
        backend="cuda" if is_cuda else "tape", prefill=BucketPolicy.of(prefill), decode=BucketPolicy.of([1]),
        strict=True,
    )  # fmt: skip
    longest = 2 * CHUNK + 1024
    graphed, runner = graphed_engine(model, plan=plan, max_seq_len=longest)
    print(runner.describe(), flush=True)
    graphed.prefill_chunk = CHUNK
    try:
        yield {"off": Engine(model, prefill_chunk=CHUNK), "on": graphed}
    finally:
        runner.close()


def generate(engine: Engine, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
    """One greedy answer: its ids, and milliseconds to the first, between the others, and in all."""
    began, times, ids = time.perf_counter(), [], []
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    for token in engine.generate([prompt], sampling):
        times.append(time.perf_counter())
        ids.append(token.token_id)
    return {
        "ids": ids, "ttft_ms": (times[0] - began) * 1000, "end_to_end_ms": (times[-1] - began) * 1000,
        "tpot_ms": (times[-1] - times[0]) * 1000 / max(len(times) - 1, 1), **engine.timings_ms,
    }  # fmt: skip


def medians(runs: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, float]:
    """Of several runs."""
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in keys}


def image_prompt(processor: Processor, size: tuple[int, int]) -> tuple[Prompt, float]:
    """A picture of noise with a question, and the milliseconds that making ids and pixels took."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    began = time.perf_counter()
    batch = processor("What is in this picture?", images=[image])
    elapsed_ms = (time.perf_counter() - began) * 1000
    return Prompt(
        input_ids=batch.input_ids, pixel_values=batch.pixel_values, grid_thws=batch.grid_thws
    ), elapsed_ms


def steps_of(num_tokens: int) -> list[int]:
    """Sizes of the prefill steps of a prompt."""
    return [CHUNK] * (num_tokens // CHUNK) + [num_tokens % CHUNK] * bool(num_tokens % CHUNK)


def same_tokens(model: KimiK25ForConditionalGeneration, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
    """Whether graphs change the answer; the model is on deterministic kernels."""
    with engines(model, steps_of(prompt.input_ids.shape[0])) as by_graphs:
        ids = {name: generate(engine, prompt, new_tokens)["ids"] for name, engine in by_graphs.items()}
        again = generate(by_graphs["on"], prompt, new_tokens)["ids"]
    return {
        "tokens": len(ids["on"]), "different_ids": len({*ids["on"]}),
        "graphs_equal_eager": ids["on"] == ids["off"], "repeat_equals": ids["on"] == again,
    }  # fmt: skip


def measure_prompts(
    model: KimiK25ForConditionalGeneration, processor: Processor, size: tuple[int, int], seed_row: tuple[int, int], *,
    rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each prompt with graphs off and on: medians over the rounds, after one that is not counted."""
    picture, _ = image_prompt(processor, size)
    vocabulary = model.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(0)
    seed = Prompt(input_ids=torch.randint(1000, vocabulary, (seed_row[0],), generator=generator))
    process_ms = [image_prompt(processor, size)[1] for _ in range(rounds)]
    prompts = {"image": (picture, 16), "seed row": (seed, seed_row[1])}
    sizes = {step for prompt, _ in prompts.values() for step in steps_of(prompt.input_ids.shape[0])}
    rows = []
    with engines(model, sorted(sizes)) as by_graphs:
        for name, (prompt, new_tokens) in prompts.items():
            for graphs, engine in by_graphs.items():
                generate(engine, prompt, new_tokens)
                runs = [generate(engine, prompt, new_tokens) for _ in range(rounds)]
                row: dict[str, Any] = {
                    "prompt": name, "graphs": graphs, "tokens_in": prompt.input_ids.shape[0],
                    "tokens_out": len(runs[0]["ids"]),
                    **medians(runs, ("ttft_ms", "embed", "prefill", "sample", "tpot_ms", "end_to_end_ms")),
                }  # fmt: skip
                process = round(statistics.median(process_ms), 3) if name == "image" else 0.0
                row |= {"process": process, "ttft_ms": round(row["ttft_ms"] + process, 3)}
                rows.append(row | {"end_to_end_ms": round(row["end_to_end_ms"] + process, 3)})
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe-layers", type=int, default=1, help="9.8 GB each")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is for a while (default: the system's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a toy, to show that it runs")
    parser.add_argument("--json", type=Path, help="where the result goes")
    args = parser.parse_args(argv)
    if args.moe_layers < 1 or args.rounds < 1:
        refuse(f"--moe-layers {args.moe_layers} and --rounds {args.rounds} must be at least 1")
    args.folder = args.folder or Path(tempfile.gettempdir())
    if not args.folder.is_dir():
        refuse(f"--folder {args.folder} is not a folder; name one with room for the checkpoint")
    return args


def require(args: argparse.Namespace) -> torch.device:
    """The device, if model and files fit; else exit 2."""
    if args.device == "cpu":
        return torch.device("cpu")
    num_bytes = checkpoint_bytes(args.moe_layers)
    needed_gib = (num_bytes + 11e9) / 2**30 + 6  # One layer's experts twice while they are rearranged; caches.
    fewer = args.moe_layers - 1
    way_out = f"--moe-layers {fewer} needs less" if fewer else "free some of it, or use another GPU"
    device = require_hopper(needed_gib, lambda free: way_out)
    require_extras(("flashinfer-python", "flashinfer"), ("triton", "triton"), ("humming-kernels", "humming.layer"))
    free = shutil.disk_usage(args.folder).free
    if free < 1.05 * num_bytes:
        refuse(
            f"needs {1.05 * num_bytes / 1e9:.1f} GB of disk in {args.folder}, {free / 1e9:.1f} are free; "
            "name another --folder" + (f", or --moe-layers {fewer}" if fewer else "")
        )
    return device


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the checkpoint, measures, deletes it; writes the JSON where one is asked for, prints the tables."""
    args = parse_args(argv)
    device = require(args)
    is_toy = device.type == "cpu"
    size, seed_row, new_tokens = ((56, 56), (40, 8), 6) if is_toy else ((1920, 1080), (2048, 128), 32)
    failures: dict[str, str] = {}
    result: dict[str, Any] = {
        **provenance(), "moe_layers": args.moe_layers, "collectives": "none", "cache": "files in the page cache",
        "failures": failures,
    }  # fmt: skip

    def save(name: str, measured: Any) -> None:
        result[name] = measured
        print(f"{name}: {measured}", flush=True)
        if args.json:
            write_result(args.json, result)

    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        save("checkpoint", write_checkpoint(folder, args.moe_layers, device))
        processor = load_processor(folder)
        with apart("dd", failures):
            save("dd_gb_per_s", dd_gb_per_s(folder))
        prompt, _ = image_prompt(processor, size)
        sizes = [*{*steps_of(prompt.input_ids.shape[0]), *steps_of(seed_row[0]), 1}]

        def part(name: str, measured: Callable[[KimiK25ForConditionalGeneration], Any], *, deterministic: bool) -> None:
            with apart(name, failures):
                model, row = loaded(folder, device)
                save(f"load, {name}", row | fast(model, deterministic=deterministic, sizes=sizes))
                save(name, measured(model))
                del model
            free_memory()

        part("same tokens", lambda model: same_tokens(model, prompt, new_tokens), deterministic=True)
        part(
            "rows",
            lambda model: measure_prompts(model, processor, size, seed_row, rounds=args.rounds),
            deterministic=False,
        )
    report(result)
    if args.json:
        write_result(args.json, result)
    if failures:
        raise SystemExit(1)


def report(result: dict[str, Any]) -> None:
    """The tables; parts that failed are missing."""
    warm = max(result.get("dd_gb_per_s", [0.0]))
    print_table(
        ["load", "seconds", "GB/s", "reading and copying GB/s", "dd GB/s", "of dd", "repack s"],
        [
            [name, row["load_seconds"], row["load_gb_per_s"], row.get("read_gb_per_s", ""), warm,
             row["load_gb_per_s"] / warm if warm else "", row.get("repack_seconds", "")]
            for name, row in result.items() if name.startswith("load, ")
        ],
    )  # fmt: skip
    columns = ("prompt", "graphs", "tokens_in", "tokens_out", "ttft_ms", "process", "embed", "prefill", "sample",
               "tpot_ms", "end_to_end_ms")  # fmt: skip
    print_table(columns, [[row[column] for column in columns] for row in result.get("rows", [])])
    print("embed is the vision tower, projector and embeddings; of these few layers, and without collectives")


if __name__ == "__main__":
    main()
