"""The README's Python blocks run, and print what stands below them; its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k25.generate import build_parser

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_python_block_has_its_output_below():
    assert len(BLOCKS) == README.count("```python") >= 3


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=[code.splitlines()[0] for code, _ in BLOCKS])
def test_python_block_prints_what_stands_below_it(code, output):
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=True)

    assert run.stdout == output


def test_options_that_the_readme_names_exist():
    help_text = build_parser().format_help()
    # What stands before the module is python's, or torchrun's.
    commands = [line.split("kimi_k25.generate", 1)[1] for line in README.splitlines() if "kimi_k25.generate" in line]

    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(commands)))

    assert commands and named
    assert [option for option in named if option not in help_text] == []


def test_linked_pages_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]

    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
