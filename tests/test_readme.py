"""README.md and docs/aliasmix.md: their Python blocks run and print what stands below them; README's commands too."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k25.generate import build_parser

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = README + (REPOSITORY / "docs" / "aliasmix.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)
NUMBER = r"\d+(\.\d+)?"


def test_every_python_block_has_its_output_below():
    assert len(BLOCKS) == PAGES.count("```python") >= 4


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=[code.splitlines()[0] for code, _ in BLOCKS])
def test_python_block_prints_what_stands_below_it(code, output):
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=True)

    assert run.stdout == output


def test_the_demo_prints_what_stands_below_it():
    """But for the numbers of the last line, which are the machine's."""
    shown = re.search(r"^    \$ make demo\n((?:    .*\n)+)", README, re.MULTILINE)[1]
    command, *lines = [line.removeprefix("    ") for line in shown.splitlines()]
    arguments = shlex.split(command.removeprefix(".venv/bin/python "))

    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )

    *said, statistics, next_command, activate = lines
    printed = run.stdout.splitlines()
    assert printed[:-1] == said
    assert re.sub(NUMBER, "0", printed[-1]) == re.sub(NUMBER, "0", statistics)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    assert f"@echo '{next_command}'\n\t@echo '{activate}'\n" in makefile


def test_the_aliasmix_commands_on_bundled_files_run():
    """Those without a factory of the reader's; `diff` finds what is different and ends with 1."""
    commands = re.findall(r"^    aliasmix (\w+)((?: [\w./]+)+?)(?:  .*)?$", README, re.MULTILINE)
    ended = {
        name: subprocess.run(
            [sys.executable, "-m", "aliasmix", name, *paths.split()], cwd=REPOSITORY, stdout=subprocess.PIPE
        ).returncode
        for name, paths in commands
    }

    assert ended == {"inspect": 0, "diff": 1, "lint": 0}


def test_options_that_the_readme_names_exist():
    help_text = build_parser().format_help()
    # What stands before the module is python's, or torchrun's.
    commands = [line.split("kimi_k25.generate", 1)[1] for line in README.splitlines() if "kimi_k25.generate" in line]

    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(commands)))

    assert commands and named
    assert [option for option in named if option not in help_text] == []


def test_linked_pages_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]

    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
