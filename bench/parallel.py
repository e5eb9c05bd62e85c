"""Kimi-K2.5 over 8 and 16 GPUs on paper: a rank's measured work plus what its collectives should take.

    python bench/parallel.py [--json bench/results/NAME.json]

Compute is rank_share.py's, measured on one H200 at TP8; for TP16 the floor's difference is taken off it. Collectives
are counted as the model makes them (tests/test_parallel.py counts them too) and timed by latency and bandwidth, with
figures of others. Nothing here ran on more than one GPU: it is a prediction to be held against the first run that does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import REPOSITORY, Ceilings, print_table, provenance, write_result
from published import TEXT
from rank_share import CONTEXT
from share import HIDDEN, floor_ms, share_config

LAYERS, VOCABULARY = TEXT["num_hidden_layers"], TEXT["vocab_size"]
BYTES = 2  # Of a bfloat16.
MEASURED = REPOSITORY / "bench" / "results" / "rank_share_2026-12-01.json"
PREFILL, DECODE = (64, 256, 1024, 2048, 4096), (1, 8, 64)


@dataclass(frozen=True)
class Links:
    """What ranks meet over.

    Attributes:
        nvlink_gb_per_s: What NCCL gets out of a GPU's 450 one way, without multicast
            (https://github.com/NVIDIA/nccl-tests/issues/212, measured: https://github.com/NVIDIA/nccl-tests/issues/309).
        nvlink_us: Of a fused one-shot all-reduce of a few tokens, on a newer generation
            (https://github.com/sgl-project/sglang/pull/32461); two H100 with 32 tokens, the norm included, take 10
            (https://github.com/vllm-project/vllm/pull/22086).
        infiniband_gb_per_s: One way, of a 400 Gb/s adapter, one a GPU (https://github.com/NVIDIA/nccl-tests/issues/290).
        infiniband_us: What two nodes of 8 add: NCCL's smallest all-reduce takes 46 us there, on H20 with such adapters
            (https://github.com/NVIDIA/nccl/issues/1244).
    """

    nvlink_gb_per_s: float = 370.0
    nvlink_us: float = 8.0
    infiniband_gb_per_s: float = 46.0
    infiniband_us: float = 38.0

    def all_reduce_us(self, num_bytes: int, nodes: int) -> float:
        """Scattered and gathered over the 8 GPUs of a node; between, each exchanges its eighth with the other nodes."""
        inside = self.nvlink_us + 2 * 7 / 8 * num_bytes / self.nvlink_gb_per_s / 1e3
        if nodes == 1:
            return inside
        eighth = 2 * (nodes - 1) / nodes * num_bytes / 8
        return inside + self.infiniband_us + eighth / self.infiniband_gb_per_s / 1e3


def collectives(tokens: int, seqs: int) -> list[tuple[str, int, int]]:
    """Of one step: what, how often, and bytes of the whole tensor each time."""
    return [
        ("all-reduce, two a layer", 2 * LAYERS, tokens * HIDDEN * BYTES),
        ("all-reduce, embedding", 1, tokens * HIDDEN * BYTES),
        ("all-gather, logits", 1, seqs * VOCABULARY * BYTES),
        ("broadcast, ids", 1, seqs * 8),
    ]


def sent_bytes(what: str, num_bytes: int, ranks: int) -> float:
    """By one GPU: a sum is scattered and gathered, a gather gives each rank's part to all others."""
    passes = {"all-reduce": 2, "all-gather": 1, "broadcast": 1}[what.partition(",")[0]]
    return passes * (ranks - 1) / ranks * num_bytes


def collectives_ms(links: Links, tokens: int, seqs: int, nodes: int) -> float:
    """Each as an all-reduce of its bytes, which is no less than the others take."""
    return sum(n * links.all_reduce_us(num_bytes, nodes) for _, n, num_bytes in collectives(tokens, seqs)) / 1e3


def predict(measured: dict, links: Links) -> list[dict[str, object]]:
    """A row for each step that was measured, at TP8 and TP16."""
    ceilings = Ceilings(**measured["ceilings"])
    graphs = {(r["phase"], r["tokens"]): r["median_ms"] for r in measured["rows"] if r["mode"] != "eager"}
    rows: list[dict[str, object]] = []
    for phase, tokens in [("prefill", n) for n in PREFILL] + [("decode", n) for n in DECODE]:
        seqs, context = (tokens, CONTEXT) if phase == "decode" else (1, 0)
        for tp in (8, 16):
            floors = [
                floor_ms(share_config(n, LAYERS).text_config, ceilings, tokens=tokens, seqs=seqs, context=context)
                for n in (8, tp)
            ]
            compute = graphs[phase, tokens] - (floors[0] - floors[1])
            waiting = collectives_ms(links, tokens, seqs, tp // 8)
            total = compute + waiting
            rows.append({"phase": phase, "tokens": tokens, "tp": tp, "compute_ms": compute, "collectives_ms": waiting,
                         "total_ms": total})  # fmt: skip
    return rows


def main() -> None:
    """Prints the tables, and writes the JSON where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write links, rows and where the measured part is from here")
    arguments = parser.parse_args()
    links, measured = Links(), json.loads(MEASURED.read_text())
    rows = predict(measured, links)

    print("communication of one token of one sequence; a picture adds one all-gather, 14 KiB for each of its tokens\n")
    volumes = [
        (what, n, size / 1024, n * size / 1024, n * sent_bytes(what, size, 8) / 1024)
        for what, n, size in collectives(1, 1)
    ]
    print_table(["what", "times", "KiB each", "KiB", "KiB sent by a GPU of 8"], volumes)
    print("\npredicted, ms: prefill is TTFT without the vision tower, decode is TPOT at 2048 tokens of context\n")
    print_table(["phase", "tokens", "TP", "compute", "collectives", "sum"], [list(row.values()) for row in rows])
    print(
        "\nSGLang 0.5.6.post2, 8 H200, one request at a time, 610 tokens in on average: TTFT 177 ms, TPOT 9.2 ms with\n"
        "scheduler and HTTP (https://docs.sglang.io/cookbook/autoregressive/Moonshotai/Kimi-K2.5). None found for two\n"
        "nodes of H200."
    )
    if arguments.json:
        write_result(arguments.json, {**provenance(), "compute": MEASURED.name, "links": asdict(links), "rows": rows})


if __name__ == "__main__":
    main()
