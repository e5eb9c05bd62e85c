"""The share on a GPU, two layers deep: fused kernels against plain PyTorch, and the same bits twice when asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [(), ("--deterministic",)])
def test_two_layers_equal_plain_pytorch(options, tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCH / "rank_share.py"), "--layers", "2", "--tokens", "64,512", "--batch", "1,8",
               "--peer-layers", "0"]  # fmt: skip

    done = subprocess.run([*command, "--rounds", "3", "--json", str(result), *options], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert {row["mode"] for row in rows} == {"eager", "piecewise", "full"}
    if options:
        assert all(row["repeats_bitwise"] for row in rows)
