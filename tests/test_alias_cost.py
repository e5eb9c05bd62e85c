"""The cost of an alias, with limits wide enough for a busy machine; bench/alias_cost.py has the figures."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench" / "alias_cost.py"


@pytest.fixture(scope="module")
def ns():
    spec = importlib.util.spec_from_file_location("alias_cost", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure(num_rounds=100)


def test_alias_read_is_faster_than_a_plain_submodule_read(ns):
    assert ns["guarded.model"] < ns["plain.language_model"]
    assert ns["guarded.inner"] < ns["plain.language_model.model"]


def test_submodule_read_costs_no_more_than_without_the_mixin(ns):
    assert ns["guarded.language_model"] < 1.1 * ns["plain.language_model"]


@pytest.mark.parametrize("name", ["weight", "scale", "count"])
def test_other_reads_cost_little_more(ns, name):
    assert ns[f"guarded.{name}"] - ns[f"plain.{name}"] < 500


@pytest.mark.parametrize("write", ["count = 1", "vision_tower = submodule", "weight = parameter", "scale = buffer"])
def test_guard_adds_little_to_a_write(ns, write):
    assert ns[f"guarded.{write}"] - ns[f"plain.{write}"] < 500
