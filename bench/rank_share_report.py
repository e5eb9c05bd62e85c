"""Tables and plots of what rank_share.py measured. Knows no GPU and no model.

    python bench/rank_share_report.py bench/results/rank_share_DATE.json

prints the README's table of a result.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import print_table, pyplot
from peers import VLLM

# What a kernel is for, by a part of its name; the first that fits.
KINDS = (
    ("experts", "humming|_down_rows"),
    ("dense products", "nvjet|cublas|gemm|gemv|_linear|one_row"),
    ("attention", "Prefill|_split_kernel|_merge|_absorb|mla|MLA"),
    ("rope, cache, keys", "rope|assemble|append"),
    ("row sums, residual, norms", "norm|Norm|combine"),
    ("routing, layout", "route|align|Memset|Fill"),
    ("SwiGLU", "swiglu"),
)


def by_kind(kernels: Sequence[dict[str, Any]], layers: int) -> dict[str, float]:
    """Microseconds a layer of each kind of kernel."""
    sums = dict.fromkeys([*(kind for kind, _ in KINDS), "other"], 0.0)
    for kernel in kernels:
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, kernel["kernel"])), "other")
        sums[kind] += kernel["us"] / layers
    return sums


def plot_times(result: dict[str, Any], path: Path) -> None:
    """Prefill and decode against size: ours, the floor, and the peers'."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for panel, phase, graphs in zip(panels, ("prefill", "decode"), ("piecewise", "full"), strict=True):
        rows = [r for r in result["rows"] if r["phase"] == phase]
        for label, mode, key, style in (
            ("graphs", graphs, "median_ms", "o-C0"), ("eager", "eager", "median_ms", "o-C1"),
            ("floor", graphs, "floor_ms", "--k"),
        ):  # fmt: skip
            points = [(r["tokens"], r[key]) for r in rows if r["mode"] == mode]
            panel.plot(*zip(*points, strict=True), style, label=label) if points else None
        for place, label, style in ((0, "vLLM 0.22.1 eager", "^:C2"), (1, "vLLM 0.22.1 graphs", "^-C2")):
            points = [(n, times[place]) for n, times in VLLM[phase].items()]
            panel.plot(*zip(*points, strict=True), style, label=label)
        points = [
            (r["tokens"], r["median_ms"])
            for r in result.get("transformers", [])
            if r["phase"] == phase and "skipped" not in r
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "s:C3", label="transformers, a few layers scaled")
        panel.set(xscale="log", yscale="log", ylabel="ms", xlabel="tokens" if phase == "prefill" else "sequences")
        title = "time to first token" if phase == "prefill" else f"decode step, {result['context']} tokens before it"
        panel.set_title(title)
        sizes = sorted({r["tokens"] for r in rows})
        panel.set_xticks(sizes, labels=[str(n) for n in sizes])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.tick_params(axis="y", which="both", labelsize=7)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    figure.suptitle(
        f"rank 1 of {result['tp']}, {result['layers']} layers, no collectives; {result['date']}, {result['commit']}",
        fontsize=9,
    )
    figure.savefig(path)
    plt.close(figure)


def plot_layer(result: dict[str, Any], path: Path) -> None:
    """Where a layer's time goes, a bar for each size: microseconds of GPU time by kind of kernel."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(9, 3.6))
    parts = {name: by_kind(kernels, result["layers"]) for name, kernels in result["profiles"].items()}
    bottom = [0.0] * len(parts)
    for kind in [*(kind for kind, _ in KINDS), "other"]:
        heights = [part[kind] for part in parts.values()]
        panel.bar([*parts], heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    panel.set(ylabel="us of GPU time a layer", title="where a layer's time goes, no collectives")
    panel.tick_params(axis="x", labelsize=7)
    panel.legend(fontsize=7)
    figure.savefig(path)
    plt.close(figure)


def ttft_savings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By how much graphs shorten the time to the first token, against our own eager run and vLLM's."""
    ms = {(r["tokens"], r["mode"]): r["median_ms"] for r in rows if r["phase"] == "prefill"}
    savings = []
    for tokens in sorted({tokens for tokens, _ in ms}):
        own, graphs = ms[tokens, "eager"], ms[tokens, "piecewise"]
        vllm = VLLM["prefill"].get(tokens, (None,))[0]
        row = {"tokens": tokens, "against_own_eager": round(graphs / own - 1, 3)}
        savings.append(row | ({} if vllm is None else {"against_vllm_eager": round(graphs / vllm - 1, 3)}))
    return savings


def print_report(result: dict[str, Any], profiles: dict[str, list[dict[str, Any]]]) -> None:
    """Every size's kernels, then the tables of times."""
    layers = result["layers"]
    for name, kernels in profiles.items():
        total, launches = sum(k["us"] for k in kernels), sum(k["launches"] for k in kernels)
        print(f"\n{name}: {total / 1000:.2f} ms in {launches:.0f} kernels, {launches / layers:.1f} a layer")
        print_table(
            ["us/layer", "calls/layer", "kernel"],
            [[k["us"] / layers, k["launches"] / layers, k["kernel"][:70]] for k in kernels[:24]],
        )
    if profiles:
        print("\nus of GPU time a layer, by kind of kernel")
        kinds = {name: by_kind(kernels, layers) for name, kernels in profiles.items()}
        names = [*(kind for kind, _ in KINDS), "other"]
        print_table(["kind", *kinds], [[name, *(sums[name] for sums in kinds.values())] for name in names])
    print("\nNo collectives: one rank's own work, here and wherever these numbers stand.")
    for row in result.get("transformers", []):
        print(f"transformers, {row['phase']} {row['tokens']}: ", end="")
        print(row.get("skipped") or f"{row['measured_layers']} layers {row['measured_ms']} ms, "
              f"{layers} would be {row['median_ms']} ms")  # fmt: skip
    for row in result["ttft"]:
        against = [f"{value:+.0%} {key.replace('_', ' ')}" for key, value in row.items() if key != "tokens"]
        print(f"time to first token with graphs, {row['tokens']} tokens: {', '.join(against)}")
    for row in result.get("decode_with_prefill_graphs", []):
        print(f"decode {row['batch']}, prefill graphs {row['prefill_graphs']}: {row['median_ms']:.3f} ms "
              f"({row['p10_ms']:.3f} to {row['p90_ms']:.3f}), {row['delta']:+.2%}")  # fmt: skip
    print()
    print_table(
        ["phase", "tokens", "mode", "median ms", "p10", "p90", "floor ms", "x floor", "experts", "spread", "same bits"],
        [
            [r["phase"], r["tokens"], r["mode"], r["median_ms"], r["p10_ms"], r["p90_ms"], r["floor_ms"],
             r["median_ms"] / r["floor_ms"], r["experts_hit"], r["load_spread"], r["repeats_bitwise"]]
            for r in result["rows"]
        ],
    )  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Every size's row as the README has it; transformers' times are scaled from a few layers."""
    times: dict[tuple[str, int], dict[str, Any]] = {}
    for row in result["rows"]:
        graphs = "eager" if row["mode"] == "eager" else "graphs"
        times.setdefault((row["phase"], row["tokens"]), {})[graphs] = row
    scaled = {(r["phase"], r["tokens"]): r["median_ms"] for r in result.get("transformers", []) if "skipped" not in r}
    lines = [
        "| step | tokens | eager ms | graphs ms | floor ms | vLLM 0.22.1, eager / graphs | transformers, bf16 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (phase, tokens), row in times.items():
        vllm = " / ".join(f"{ms:g}" for ms in VLLM[phase].get(tokens, ()))
        step = phase if phase == "prefill" else f"decode, context {result['context']}"
        cells = [step, tokens, _three(row["eager"]["median_ms"]), _three(row["graphs"]["median_ms"]),
                 _three(row["graphs"]["floor_ms"]), vllm, _three(scaled.get((phase, tokens)))]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _three(ms: float | None) -> str:
    """Three digits, as tables have them."""
    return "" if ms is None else f"{ms:.{2 if ms < 10 else 1 if ms < 1000 else 0}f}"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
