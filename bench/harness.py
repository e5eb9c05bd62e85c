"""What the benchmarks share: times by CUDA events, ceilings of the card, and results that say where they are from.

Knows no model.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "flashinfer-python", "humming-kernels", "transformers", "breakable-cuda-graphs")


def refuse(problem: str) -> NoReturn:
    """Ends a benchmark that can't run here: one line, exit 2."""
    print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def require_hopper(needed_gib: float, way_out: str) -> torch.device:
    """The current CUDA device, or exit 2 with what is missing, what is needed, and the option that makes it fit."""
    if not torch.cuda.is_available():
        refuse("needs a CUDA device of compute capability 9.0 (H100, H200); torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        refuse(f"needs compute capability 9.0 (H100, H200); {name} has {capability[0]}.{capability[1]}")
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if free < needed_gib:
        refuse(f"needs {needed_gib:.1f} GiB of GPU memory, {free:.1f} are free; {way_out}")
    return device


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds over the rounds of one measurement."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Median and deciles of these milliseconds."""
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(round(statistics.median(samples), 4), round(deciles[0], 4), round(deciles[-1], 4))


def measure(fn: Callable[[], object], *, rounds: int = 20, warmup: int = 3) -> Timing:
    """Times whole calls, each begun on an idle GPU: launching is in it, as a request meets it."""
    for _ in range(warmup):
        fn()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return Timing.of(samples)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card reaches today: bytes read and written by a copy, and operations of a bfloat16 product."""

    tb_per_s: float
    tflop_per_s: float

    @classmethod
    def measure(cls) -> Ceilings:
        """On random data: products of zeros run faster than real ones."""
        source = torch.empty(2**32 // 4, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        copy_ms = measure(lambda: target.copy_(source)).median_ms
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product_ms = measure(lambda: a @ b).median_ms
        return cls(round(2 * 2**32 / copy_ms / 1e9, 3), round(2 * 8192**3 / product_ms / 1e9, 1))

    def floor_ms(self, num_bytes: float, operations: float) -> float:
        """No version runs faster than this."""
        return max(num_bytes / self.tb_per_s, operations / self.tflop_per_s) / 1e9


def provenance() -> dict[str, Any]:
    """Date, machine, versions, commit and command of a result. COMMIT says it where there is no checkout."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {machine}"
        versions["cuda"] = str(torch.version.cuda)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "versions": versions,
        "commit": os.environ.get("COMMIT") or git.stdout.strip() or "unknown",
        "command": "python " + shlex.join(Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv),
    }


def _cpu_name() -> str:
    """As Linux has it; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_result(path: Path, result: dict[str, Any]) -> None:
    """One JSON object a run, its keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Right-aligned columns on stdout."""
    texts = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    for row in texts:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def profile_kernels(fn: Callable[[], object], *, calls: int) -> list[dict[str, Any]]:
    """Kernels of one call, by GPU time: name, launches and microseconds a call."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key, "launches": event.count / calls, "us": event.self_device_time_total / calls}
        for event in prof.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])
