"""Kimi-K2.5's 208,550 tensors, as bench/integrity_scale.py measures them; limits are twice what was promised."""

import importlib.util
import json

import pytest


@pytest.fixture(scope="module")
def bench(request):
    path = request.config.rootpath / "bench" / "integrity_scale.py"
    spec = importlib.util.spec_from_file_location("integrity_scale", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(bench, tmp_path_factory):
    """Every command once, on a folder of the checkpoint's own size."""
    folder = tmp_path_factory.mktemp("kimi")
    bench.write_folder(folder)
    runs = {}
    for row, argv in bench.commands(folder).items():
        if row.startswith("diff"):
            bench.move_prefix(folder)
        runs[row] = bench.measure(*argv)
    lines = (folder / "keys.json").read_text().splitlines()
    yield runs, lines
    for path in folder.iterdir():
        path.unlink()


def test_the_checkpoint_agrees_with_its_manifest(results):
    run = results[0]["check against the manifest"]

    assert (run["exit"], run["out"]) == (0, "clean; 208,550 expected, 208,550 tensors, 64 files\n")
    assert run["cpu_s"] < 6 and run["peak_mb"] < 600


def test_inspect_is_quick(results):
    run = results[0]["inspect"]

    assert run["exit"] == 0
    assert "clean; 64 files, 208,550 tensors, 595,148,192,736 bytes" in run["out"]
    assert run["cpu_s"] < 4 and run["peak_mb"] < 600


def test_a_moved_prefix_is_one_finding_of_a_diff(results):
    run = results[0]["diff with a moved prefix"]

    assert run["exit"] == 1
    assert run["out"].startswith(
        "error KEY_MOVED language_model.model.layers.* -> language_model.layers.* (208,212 keys)\n"
    )
    assert run["out"].endswith("\n1 error; 208,550 keys\n")
    assert run["cpu_s"] < 10 and run["peak_mb"] < 600


def test_a_manifest_has_a_line_a_key_in_natural_order(results):
    lines = [line for line in results[1] if '"kind": "tensor"' in line]

    layers = [int(line.split(".")[3]) for line in lines if line.startswith('  "language_model.model.layers.')]
    assert len(lines) == 208_550
    assert layers == sorted(layers) and layers[-1] == 60
    assert json.loads("{" + lines[0].rstrip(",") + "}") == {
        "language_model.lm_head.weight": {"kind": "tensor", "shape": [163840, 7168], "dtype": "bfloat16"}
    }
