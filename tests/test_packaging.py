"""The built wheel, alone in a clean environment outside the repository."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def run(*command: object, cwd: Path) -> str:
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, text=True, stdout=subprocess.PIPE).stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with nothing in it but the wheel; the dependencies are lent to it by path."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, REPOSITORY, cwd=folder)
    venv.create(folder / "env")
    python = folder / "env/bin/python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", *folder.glob("*.whl"), cwd=folder)
    # An editable install beside the dependencies is not followed from here: its own .pth file is not read.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_answers_with_the_embedded_default(python, tmp_path):
    where = run(python, "-c", "import kimi_k25; print(kimi_k25.__file__)", cwd=tmp_path)
    picture = Path(where.strip()).parent / "tiny/demo.png"

    out = run(python, "-m", "kimi_k25.generate", "-p", "hi", "-i", picture, "-n", "3", "--json", cwd=tmp_path)

    assert str(REPOSITORY) not in where
    assert len(json.loads(out)["token_ids"]) <= 3


def test_the_wheel_has_the_aliasmix_command(python, tmp_path):
    help_text = run(python.parent / "aliasmix", "--help", cwd=tmp_path)

    assert "check" in help_text and "lint" in help_text


def test_the_wheel_registers_the_pytest_plugin(python, tmp_path):
    entry_points = run(
        python,
        "-c",
        "from importlib.metadata import entry_points; print(entry_points(group='pytest11')['aliasmix'].value)",
        cwd=tmp_path,
    )

    assert entry_points.strip() == "aliasmix.pytest_plugin"
