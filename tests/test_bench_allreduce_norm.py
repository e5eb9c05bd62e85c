"""The benchmark of the end of a tensor-parallel block: as a toy over gloo, and what it says without ranks or GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import allreduce_norm
import pytest

SCRIPT = Path(allreduce_norm.__file__)


def test_a_toy_on_two_ranks_measures_both_ways_and_they_agree(tmp_path):
    result = tmp_path / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(SCRIPT)]

    command = [*launch, "--device", "cpu", "--rounds", "2", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [(row["tokens"], row["way"]) for row in rows] == [
        (tokens, way) for tokens in (1, 5) for way in ("fused", "reduced, then normed")
    ]
    assert all(row["distance"] < 2**-7 and row["eager_us"] > 0 for row in rows)
    assert "not fused because: rank 0: RuntimeError: the fused kernel needs CUDA" in done.stdout


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "starts on several ranks: torchrun --nproc-per-node 2"),
        ({"WORLD_SIZE": "512", "LOCAL_WORLD_SIZE": "512"}, "512 ranks need as many GPUs, torch sees "),
    ],
)
def test_what_is_missing_is_said_in_a_line(environment, message):
    without = {key: value for key, value in os.environ.items() if "WORLD_SIZE" not in key}

    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=without | environment)

    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
