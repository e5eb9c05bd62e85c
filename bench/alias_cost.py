"""What an alias and its guard cost: python bench/alias_cost.py [--json bench/results/alias_cost_DATE.json]

Every row is one attribute read or write, timed in rounds that visit all rows in turn, so that a slow moment of the
machine hits all of them; the clock is the thread's CPU time, and a row's figure is its fastest round. Knows no model.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import provenance, write_result
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from aliasmix import GuardedSetattrMixin, ReadOnlyAlias

REPEATS = 100  # short, so that many a round meets no interruption
NUM_ROUNDS = 300


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = Inner()
        self.vision_tower = nn.Linear(1, 1)
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))
        self.count = 0


class HandWritten(Plain):
    """The property and the __setattr__ that engines wrote by hand."""

    @property
    def model(self):  # type: ignore[no-untyped-def]
        return self.language_model

    def __setattr__(self, name, value):  # type: ignore[no-untyped-def]
        if name == "model":
            return
        super().__setattr__(name, value)


class Guarded(GuardedSetattrMixin, Plain):
    model = ReadOnlyAlias("language_model")
    inner = ReadOnlyAlias("language_model.model")


def rows() -> dict[str, Callable[[], None]]:
    """The statements under test, each run REPEATS times by one call."""
    plain, hand, guarded = Plain(), HandWritten(), Guarded()
    submodule, parameter, buffer = nn.Linear(1, 1), nn.Parameter(torch.ones(1)), torch.ones(1)
    names = {"plain": plain, "hand": hand, "guarded": guarded}
    names |= {"submodule": submodule, "parameter": parameter, "buffer": buffer}

    def loop(statement: str) -> Callable[[], None]:
        scope = dict(names)
        # Locals, as in a forward; a global would add its own look-up to every row.
        arguments = ", ".join(f"{name}={name}" for name in names)
        exec(f"def run({arguments}):\n for _ in range({REPEATS}):\n  {statement}", scope)
        return scope["run"]  # type: ignore[return-value]

    return {
        statement: loop(statement)
        for statement in (
            "pass",
            "plain.language_model",
            "plain.language_model.model",
            "hand.model",
            "guarded.model",
            "guarded.inner",
            "guarded.language_model",
            "plain.weight",
            "guarded.weight",
            "plain.scale",
            "guarded.scale",
            "plain.count",
            "guarded.count",
            "plain.count = 1",
            "hand.count = 1",
            "guarded.count = 1",
            "plain.vision_tower = submodule",
            "hand.vision_tower = submodule",
            "guarded.vision_tower = submodule",
            "plain.weight = parameter",
            "hand.weight = parameter",
            "guarded.weight = parameter",
            "plain.scale = buffer",
            "hand.scale = buffer",
            "guarded.scale = buffer",
            "guarded.model = guarded.model",
        )
    }


def measure(num_rounds: int = NUM_ROUNDS) -> dict[str, float]:
    """Nanoseconds of each row, less the empty loop."""
    functions = rows()
    best = dict.fromkeys(functions, float("inf"))
    gc.collect()
    gc.disable()  # as timeit does; what else the process holds is not the row's cost
    try:
        for _ in range(num_rounds):
            for name, run in functions.items():
                start = time.thread_time_ns()
                run()
                best[name] = min(best[name], (time.thread_time_ns() - start) / REPEATS)
    finally:
        gc.enable()
    return {name: ns - best["pass"] for name, ns in best.items() if name != "pass"}


def table(ns: dict[str, float]) -> str:
    """The rows as bench/README.md shows them, each beside what it is compared with."""
    lines = ["| statement | ns | compared with | ns | difference |", "| --- | ---: | --- | ---: | ---: |"]
    for row, base in {
        "guarded.model": "plain.language_model",
        "guarded.inner": "plain.language_model.model",
        "hand.model": "plain.language_model",
        "guarded.language_model": "plain.language_model",
        "guarded.weight": "plain.weight",
        "guarded.scale": "plain.scale",
        "guarded.count": "plain.count",
        "guarded.count = 1": "plain.count = 1",
        "guarded.vision_tower = submodule": "plain.vision_tower = submodule",
        "guarded.weight = parameter": "plain.weight = parameter",
        "guarded.scale = buffer": "plain.scale = buffer",
        "hand.count = 1": "plain.count = 1",
        "hand.vision_tower = submodule": "plain.vision_tower = submodule",
        "hand.weight = parameter": "plain.weight = parameter",
        "hand.scale = buffer": "plain.scale = buffer",
        "guarded.model = guarded.model": "guarded.model",
    }.items():
        lines.append(f"| `{row}` | {ns[row]:.0f} | `{base}` | {ns[base]:.0f} | {ns[row] - ns[base]:+.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and writes the JSON where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write date, machine, versions, commit, command and rows here")
    arguments = parser.parse_args()

    ns = measure()
    print(table(ns))
    if arguments.json:
        result = {
            **provenance(),
            "unit": f"ns, fastest of {NUM_ROUNDS} interleaved rounds, thread CPU time",
            "rows": {name: round(value, 1) for name, value in ns.items()},
        }
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
