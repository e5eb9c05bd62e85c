"""docs/integrity-in-ci.md: every command in it is run, in the project that the page describes."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import save_file

from aliasmix.cli import EXIT_CODES
from aliasmix.report import CODES

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(request):
    return (request.config.rootpath / "docs" / "integrity-in-ci.md").read_text()


@pytest.fixture(scope="module")
def blocks(page):
    """(language, text) of each block; one that begins with a comment is the file of that name."""
    return BLOCK.findall(page)


@pytest.fixture(scope="module")
def project(blocks, request, tmp_path_factory):
    """The page's project, with the command `aliasmix` on its path, and a shell in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / ".bin").mkdir()
    command = folder / ".bin" / "aliasmix"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aliasmix "$@"\n')
    command.chmod(0o755)
    path = f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(request.config.rootpath), "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("CI", None)

    def shell(line):
        return subprocess.run(
            ["bash", "-ec", line], cwd=folder, env=environ, timeout=120, text=True, capture_output=True
        )

    write(folder, blocks, "# my_wrapper.py\n")
    shell("aliasmix manifest my_wrapper:build -o keys.json")
    shell.folder = folder
    return shell


def write(folder, blocks, first_line):
    text = next(text for _, text in blocks if text.startswith(first_line))
    (folder / first_line[2:].split(",")[0].strip()).write_text(text)


def test_consoles_show_what_is_printed(blocks, project):
    consoles = [text for language, text in blocks if language == "console"]
    assert len(consoles) == 2

    for number, console in enumerate(consoles):
        write(project.folder, blocks, ("# my_wrapper.py\n", "# my_wrapper.py, broken\n")[number])
        said = ""
        for line in console.splitlines():
            if line.startswith("$ "):
                done = project(line[2:])
                said += f"{line}\n{done.stdout}{done.stderr}"
                assert done.returncode == number
        assert said == console
    write(project.folder, blocks, "# my_wrapper.py\n")


def test_every_step_of_the_workflows_passes_and_fails_when_it_should(blocks, project):
    import torch

    steps = []
    for language, text in blocks:
        if language == "yaml" and "- run:" in text:
            content = yaml.safe_load(text)
            steps += content["jobs"]["keys"]["steps"] if isinstance(content, dict) else content
    lines = [step["run"] for step in steps if "run" in step]
    installs = [line for line in lines if line.startswith("pip install ")]
    lines = [line for line in lines if line not in installs]
    folder = project.folder / "checkpoints" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    keys = yaml.safe_load((project.folder / "keys.json").read_text())["keys"]
    save_file({name: torch.zeros(info["shape"]) for name, info in keys.items()}, folder / "model.safetensors")

    assert installs[-1] == "pip install aliasmix" and len(lines) == 4
    for line in lines:
        done = project(line)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr

    write(project.folder, blocks, "# my_wrapper.py, broken\n")
    failed = [project(line) for line in lines[:2]]
    write(project.folder, blocks, "# my_wrapper.py\n")
    assert [done.returncode for done in failed] == [1, 1]
    assert failed[0].stdout.startswith("::error file=my_wrapper.py,line=17,title=aliasmix SECOND_REGISTRATION::")
    assert failed[1].stdout.startswith("::error title=aliasmix DUP_MODULE::language_model = model: ")


def test_every_hook_passes_and_fails_when_it_should(blocks, project):
    config = yaml.safe_load(next(text for _, text in blocks if text.startswith("# .pre-commit-config.yaml")))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]

    def run(hook):
        files = "" if hook.get("pass_filenames") is False else " my_wrapper.py"
        return project(hook["entry"] + files).returncode

    assert all(hook["language"] == "system" for hook in hooks)
    assert [run(hook) for hook in hooks] == [0, 0]
    write(project.folder, blocks, "# my_wrapper.py, broken\n")
    failed = [run(hook) for hook in hooks]
    write(project.folder, blocks, "# my_wrapper.py\n")
    assert failed == [1, 1]


def test_the_pytest_file_passes(blocks, project):
    write(project.folder, blocks, "# test_my_wrapper.py\n")

    plugin = "-p no:aliasmix -p aliasmix.pytest_plugin -p no:cacheprovider"
    done = project(f"{shlex.quote(sys.executable)} -m pytest -q {plugin} test_my_wrapper.py")

    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_tables_are_complete(page):
    rows = re.findall(r"^\| ([A-Z_]+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)

    assert {code: (severity, meaning) for code, severity, meaning in rows} == CODES
    assert re.findall(r"^\| (\d) \|", page, re.MULTILINE) == ["0", "1", "2", "3", "4"]
    assert all(f"{code} " in EXIT_CODES for code in range(5))
