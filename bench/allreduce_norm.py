"""All-reduce, residual addition and RMSNorm on the ranks of one host: fused by FlashInfer, or NCCL and then the norm.

    torchrun --nproc-per-node 2 bench/allreduce_norm.py [--json bench/results/allreduce_norm_DATE.json]
    torchrun --nproc-per-node 2 bench/allreduce_norm.py --device cpu    # a toy over gloo, to show that it runs

Hidden size 7168, bfloat16. Each size is timed eagerly and as a graph, one way after the other, and compared with sums
in float32; then sizes go up and down over the one workspace. GB/s are those that a ring puts on each link, the tensor
2 (W - 1) / W times, beside NVLink's 450 a direction. Only FlashInfer's trtllm backend: others take NVLink multicast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import once_ms, print_table, provenance, refuse, relative, require_extras, write_result
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kimi_k25.layers.allreduce_norm import AllReduceAddRMSNorm
from kimi_k25.layers.norm import rms_norm

TOKENS = tuple(2**n for n in range(14))
FLUCTUATING = (1, 2048, 7, 900, 2048, 4096, 3)
NVLINK_GB_PER_S = 450  # Of a GPU's 18 links, one direction. Source: NVIDIA H200 data sheet, 900 GB/s both ways.
EPS, CALLS = 1e-5, 20

End = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class CountingComm:
    """flashinfer.comm, its workspaces counted."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.num_workspaces = comm, 0

    def create_allreduce_fusion_workspace(self, **options: Any) -> Any:
        self.num_workspaces += 1
        return self._comm.create_allreduce_fusion_workspace(**options)

    def allreduce_fusion(self, **options: Any) -> Any:
        return self._comm.allreduce_fusion(**options)


def inputs(num_tokens: int, hidden_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's part, the residual, the weight, and the sum of all parts in float32: the same on every rank."""
    options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(num_tokens), "device": device}
    parts = torch.randn(dist.get_world_size(), num_tokens, hidden_size, **options).bfloat16()
    residual = torch.randn(num_tokens, hidden_size, **options).bfloat16()
    weight = torch.rand(hidden_size, **options).bfloat16()
    return parts[dist.get_rank()].clone(), residual, weight, parts.float().sum(0)


def distance(end: End, num_tokens: int, hidden_size: int, device: torch.device) -> float:
    """Of an end's norm and sum from those in float32; the larger of the two."""
    part, residual, weight, total = inputs(num_tokens, hidden_size, device)
    added = total + residual.float()
    normed, sum_ = end(part, residual, weight)
    return max(relative(normed, rms_norm(added, weight.float(), EPS)), relative(sum_, added))


def call_us(run: Callable[[], object], *, rounds: int, calls: int = CALLS) -> float:
    """Microseconds a call, the median over rounds of `calls` in a row, which all ranks begin together."""

    def in_a_row() -> None:
        for _ in range(calls):
            run()

    samples = []
    for _ in range(rounds + 1):  # The first one warms up.
        dist.barrier()
        samples.append(once_ms(in_a_row) * 1000 / calls)
    return statistics.median(samples[1:])


def in_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """CALLS calls as one graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph


def measure(
    ends: dict[str, End], tokens: Sequence[int], hidden_size: int, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """A row for each size and way: distance from float32, microseconds eagerly and in a graph, GB/s in the latter."""
    rows = []
    world_size = dist.get_world_size()
    for num_tokens in tokens:
        for name, end in ends.items():
            row: dict[str, Any] = {"tokens": num_tokens, "way": name}
            row["distance"] = round(distance(end, num_tokens, hidden_size, device), 6)
            # Zeros: sums in place stay what they are, however often they are made.
            x, residual = torch.zeros(2, num_tokens, hidden_size, dtype=torch.bfloat16, device=device)
            weight = torch.ones(hidden_size, dtype=torch.bfloat16, device=device)
            run = lambda end=end, x=x, residual=residual, weight=weight: end(x, residual, weight)  # noqa: E731
            row["eager_us"] = us = round(call_us(run, rounds=rounds), 2)
            if device.type == "cuda":
                graph = in_graph(run)
                us = round(call_us(graph.replay, rounds=rounds, calls=1) / CALLS, 2)
                row["graph_us"] = us
                graph.reset()
            gb_per_s = 2 * (world_size - 1) / world_size * x.nbytes / us / 1000
            rows.append(row | {"gb_per_s": round(gb_per_s, 2), "of_nvlink": round(gb_per_s / NVLINK_GB_PER_S, 4)})
    return rows


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a toy, to show that it runs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where the result goes")
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        refuse("starts on several ranks: torchrun --nproc-per-node 2 bench/allreduce_norm.py")
    if args.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        found, ranks = torch.cuda.device_count(), os.environ["LOCAL_WORLD_SIZE"]
        refuse(f"{ranks} ranks need as many GPUs, torch sees {found}; start fewer, or --device cpu for a toy")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measures on all ranks; the first one prints and writes."""
    args = parse_args(argv)
    device, tokens, hidden_size = torch.device("cpu"), (1, 5), 64
    comm = None
    if args.device == "cuda":
        require_extras(("flashinfer-python", "flashinfer"), ("flashinfer-python", "flashinfer.comm"))
        import flashinfer.comm

        device, tokens, hidden_size = torch.device("cuda", int(os.environ["LOCAL_RANK"])), TOKENS, 7168
        torch.cuda.set_device(device)
        comm = CountingComm(flashinfer.comm)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    fused = AllReduceAddRMSNorm(dist.group.WORLD, comm=comm)
    fused.reserve(max(tokens))
    fused.prepare(torch.ones(hidden_size, dtype=torch.bfloat16, device=device))
    alone = AllReduceAddRMSNorm(None)

    def reduce_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x)
        return alone(x, residual, weight, EPS)

    ends: dict[str, End] = {"fused": lambda x, r, w: fused(x, r, w, EPS), "reduced, then normed": reduce_then_norm}
    rows = measure(ends, tokens, hidden_size, device, args.rounds)
    fluctuating = [distance(ends["fused"], n, hidden_size, device) for n in FLUCTUATING if n <= fused.capacity]
    result = {
        **provenance(), "ranks": dist.get_world_size(), "hidden_size": hidden_size, "why_unfused": fused.why_unfused,
        "rows": rows, "fluctuating_tokens": list(FLUCTUATING), "fluctuating_distance": round(max(fluctuating), 6),
        "workspaces": comm.num_workspaces if comm else 0,
    }  # fmt: skip
    if dist.get_rank() == 0:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print(f"workspaces made: {result['workspaces']}; not fused because: {fused.why_unfused or 'it is'}")
        if args.json:
            write_result(args.json, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
