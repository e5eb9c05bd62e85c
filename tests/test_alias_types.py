"""Type checkers see the target's type through an alias, and refuse what the alias would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "data" / "alias_types.py"


def lines_with_errors(*command):
    result = subprocess.run(
        [sys.executable, "-m", *command, str(FILE)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return {int(line) for line in re.findall(rf"{FILE.name}:(\d+):(?:\d+:| -)? ?(?:\d+ - )?error", result.stdout)}


def marked():
    return {number for number, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.mark.parametrize(
    ("checker", "options"),
    [("mypy", ["--config-file", "pyproject.toml"]), ("basedpyright", ["--level", "error"])],
    ids=["mypy", "basedpyright"],
)
def test_type_checker_infers_and_refuses(checker, options):
    pytest.importorskip(checker, reason=f"{checker} is not installed")

    assert lines_with_errors(checker, *options) == marked()
