"""The package's names: complete, looked up on first use, and the examples in their docstrings run."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import aliasmix

SOURCE = Path(aliasmix.__file__)


def test_every_name_is_there_for_readers_and_for_type_checkers():
    checked = {
        alias.name
        for block in ast.parse(SOURCE.read_text()).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for imported in block.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }

    assert checked == set(aliasmix.__all__) <= set(dir(aliasmix))
    assert all(getattr(aliasmix, name) is not None for name in aliasmix.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'aliasmix' has no attribute 'thinker'"):
        _ = aliasmix.thinker


def test_import_loads_no_torch():
    code = "import sys, aliasmix; dir(aliasmix); aliasmix.AliasError; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent.parent).returncode == 0


@pytest.mark.parametrize("name", ["alias", "guard", "install", "unaliased", "fold", "trace", "testing"])
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(f"aliasmix.{name}")).failed == 0
