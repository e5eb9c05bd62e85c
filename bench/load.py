"""Time and memory of load_model beside the least that loading can be: load_file, then a clone of every tensor.

    python bench/load.py [--layers N] [--rounds N] [--json bench/results/load_DATE.json]

Each round of each row is a fresh process with one thread over the same shards, which the page cache holds; rows take
turns. Anonymous memory is sampled every 2 ms from /proc, so this runs on Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import REPOSITORY, provenance, write_result
from safetensors.torch import load_file

sys.path.insert(0, str(REPOSITORY))
from kimi_k25 import KimiK25Config, KimiK25ForConditionalGeneration, load_model, save_checkpoint

ROWS = ("load_file + clone", "load_model", "load_model, float32")


def make_checkpoint(folder: Path, *, int4: bool, num_layers: int) -> None:
    """Random weights in shards: 201 MB of bfloat16 or 57 MB of int4 experts a layer, and 150 MB beside them."""
    oracle = REPOSITORY / "tests" / "data" / "oracle" / ("tiny_int4" if int4 else "tiny_bf16")
    raw = json.loads((oracle / "config.json").read_text())
    raw["text_config"] |= {
        "num_hidden_layers": 1 + num_layers,
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 16,
        "vocab_size": 16384,
    }
    raw["vision_config"] |= {"text_hidden_size": 2048}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # Asks for shards.
    torch.manual_seed(0)
    with torch.device("meta"):
        model = KimiK25ForConditionalGeneration(KimiK25Config.from_dict(raw))
    model.to(torch.bfloat16).to_empty(device="cpu")
    for tensor in model.state_dict().values():
        if tensor.dtype == torch.int32:
            tensor.random_(-(2**31), 2**31 - 1)
        else:
            tensor.normal_()
    save_checkpoint(model, folder)


@contextmanager
def peak_anonymous_bytes() -> Iterator[list[int]]:
    """Yields a list; afterwards it holds by how much RssAnon rose at most."""

    def anonymous() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError("/proc/self/status has no RssAnon; Linux 4.5 or newer is needed")

    def sample() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous() - before)

    before, peak, done = anonymous(), [0], threading.Event()
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], anonymous() - before)


def measure(row: str, folder: Path) -> dict[str, float]:
    """One load in this process."""
    torch.set_num_threads(1)
    start, cpu_start = time.perf_counter(), time.process_time()
    with peak_anonymous_bytes() as peak:
        if row == ROWS[0]:
            shards = sorted(folder.glob("*.safetensors"))
            tensors = [tensor.clone() for shard in shards for tensor in load_file(shard).values()]
        else:
            model = load_model(folder, dtype=torch.float32 if row == ROWS[2] else torch.bfloat16)
            tensors = [*model.state_dict().values()]
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    loaded = sum(tensor.nbytes for tensor in tensors)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loaded_bytes": loaded, "peak_bytes": peak[0]}


def measure_rows(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Of each row the fastest run's times, and the largest memory of all runs."""
    runs: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    for _ in range(rounds):
        for row in ROWS:
            command = [sys.executable, __file__, "--one", row, str(folder)]
            runs[row].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    return {
        row: {key: (min if "seconds" in key else max)(run[key] for run in of_row) for key in of_row[0]}
        for row, of_row in runs.items()
    }


def main() -> None:
    """Prints a table a checkpoint, and writes the JSON where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="MoE layers of the checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each row (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write date, machine, versions, commit, command and rows here")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "FOLDER"), help="one run of one row, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], Path(arguments.one[1]))))
        return

    rows = {}
    print("| checkpoint | row | s | times load_file | CPU s | times load_file | tensors, MB | peak above them, MB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in ("bfloat16", "int4"):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            make_checkpoint(folder, int4=name == "int4", num_layers=arguments.layers)
            rows[name] = measured = measure_rows(folder, arguments.rounds)
        for row, run in measured.items():
            cells = [name, row]
            for key in ("seconds", "cpu_seconds"):
                cells += [f"{run[key]:.3f}", f"{run[key] / measured[ROWS[0]][key]:.2f}"]
            cells += [f"{run['loaded_bytes'] / 1e6:.0f}", f"{(run['peak_bytes'] - run['loaded_bytes']) / 1e6:.0f}"]
            print(f"| {' | '.join(cells)} |")
    if arguments.json:
        result = {
            **provenance(),
            "unit": f"fastest times and largest memory of {arguments.rounds} processes, one thread, page cache warm",
            "rows": rows,
        }
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
