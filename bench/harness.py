"""What the benchmarks share: times by CUDA events, ceilings of the card, and results that say where they are from.

Knows no model. On a CPU the same code runs, small and by the host's clock, so that tests can go through it.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "flashinfer-python", "humming-kernels", "transformers", "breakable-cuda-graphs")


def refuse(problem: str) -> NoReturn:
    """Ends a benchmark that can't run here: one line, exit 2."""
    print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def require_hopper(needed_gib: float, way_out: Callable[[float], str]) -> torch.device:
    """The current CUDA device, or exit 2 with what is missing, what is needed, and the option that makes it fit.

    Args:
        way_out: Of the GiB that are free: which options need no more than that.
    """
    if not torch.cuda.is_available():
        refuse(f"needs a CUDA device of compute capability 9.0 (H100, H200); {_why_no_cuda()}")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        refuse(f"needs compute capability 9.0 (H100, H200); {name} has {capability[0]}.{capability[1]}")
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if free < needed_gib:
        refuse(f"needs {needed_gib:.1f} GiB of GPU memory, {free:.1f} are free; {way_out(free)}")
    return device


def _why_no_cuda() -> str:
    """The driver's answer, in a line of our own where it is a known one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of it"
    try:
        torch.cuda.init()
    except RuntimeError as e:
        reason = " ".join(str(e).split())
        if "too old" in reason:
            found = re.search(r"found version (\d+)", reason)
            version = f" ({int(found[1]) // 1000}.{int(found[1]) % 1000 // 10})" if found else ""
            return (
                f"the NVIDIA driver{version} is too old for torch {torch.__version__}, which needs CUDA "
                f"{torch.version.cuda}'s: update the driver, or install a torch built for it"
            )
        return reason
    return "torch sees none"


def require_extras(*modules: tuple[str, str]) -> None:
    """Exit 2 with the first of these that can't be imported and the command that installs it.

    Args:
        modules: Package on PyPI, and what it is imported as.
    """
    from kimi_k25.layers.flashinfer_ops import import_flashinfer
    from kimi_k25.layers.gpu_libraries import MissingLibraryError, import_gpu_library

    for package, module in modules:
        try:
            import_flashinfer(module) if package == "flashinfer-python" else import_gpu_library(package, module)
        except MissingLibraryError as e:
            refuse(" ".join(str(e).split()))


def reason(error: Exception, *, most: int = 160) -> str:
    """An error as one line of at most so many characters of its own, for a row that it leaves without times."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


@contextmanager
def apart(what: str, failures: dict[str, str]) -> Iterator[None]:
    """A part whose failure must not lose what the others measured: it is reported, and noted in `failures`."""
    started = time.perf_counter()
    try:
        yield
    except Exception as e:
        failures[what] = reason(e, most=500)
        print(f"{what} failed: {failures[what]}", file=sys.stderr, flush=True)
        traceback.print_exc()
    print(f"[{what}: {time.perf_counter() - started:.1f} s]", flush=True)


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
    return Timing.of([once_ms(fn) for _ in range(rounds)])


def once_ms(fn: Callable[[], object]) -> float:
    """One call, begun on an idle GPU; without one by the host's clock."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        fn()
        return (time.perf_counter() - started) * 1000
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_in_turns(calls: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 3) -> dict[str, Timing]:
    """Several calls, a round of each after the other: a drift of the clocks meets all of them alike."""
    for fn in calls.values():
        for _ in range(warmup):
            fn()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, fn in calls.items():
            samples[name].append(once_ms(fn))
    return {name: Timing.of(of_one) for name, of_one in samples.items()}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card reaches today: bytes read and written by a copy, and operations of a bfloat16 product."""

    tb_per_s: float
    tflop_per_s: float

    @classmethod
    def measure(cls) -> Ceilings:
        """On random data: products of zeros run faster than real ones. A CPU gets small ones."""
        device, num_bytes, side = ("cuda", 2**32, 8192) if torch.cuda.is_available() else ("cpu", 2**22, 128)
        source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
        target = torch.empty_like(source)
        copy_ms = measure(lambda: target.copy_(source)).median_ms
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        product_ms = measure(lambda: a @ b).median_ms
        return cls(round(2 * num_bytes / copy_ms / 1e9, 6), round(2 * side**3 / product_ms / 1e9, 6))

    def floor_ms(self, num_bytes: float, operations: float) -> float:
        """No version runs faster than this."""
        return max(num_bytes / self.tb_per_s, operations / self.tflop_per_s) / 1e9


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def free_memory() -> None:
    """Gives the GPU what deleted models and graphs held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


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


def pyplot() -> Any:
    """matplotlib's, drawing to files, in the size of the plots in results/."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3}
    return plt


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
