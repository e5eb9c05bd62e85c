"""The vision benchmark's own computations, and a run of all of it on a toy."""

import json

import pytest
import torch

pytest.importorskip("triton")

import vision
from published import config

from kimi_k25.config import KimiK25Config

CPU = torch.device("cpu")


def test_a_full_hd_picture_is_2691_tokens_of_10764_patches():
    pixels, grids, _ = vision.prepared_image((1920, 1080), CPU)

    assert grids.tolist() == [[1, 78, 138]] and pixels.shape == (10764, 3, 14, 14)


def test_operations_are_those_of_the_published_sizes():
    c = KimiK25Config.from_dict(config()).vision_config

    counted = vision.operations(c, [10764], 2691)

    assert {name: round(value / 1e12, 2) for name, value in counted.items()} == {
        "products": 8.85, "attention": 14.42, "outside": 0.31,
    }  # fmt: skip


def test_every_part_runs_on_a_cpu_on_a_toy(tmp_path, capsys):
    vision.main(["--device", "cpu", "--layers", "1", "--sizes", "28x28", "--rounds", "2", "--json",
                 str(tmp_path / "r.json")])  # fmt: skip

    result = json.loads((tmp_path / "r.json").read_text())
    assert result["failures"] == {}
    assert [row["mode"] for row in result["rows"]] == ["plain", "fused"]
    assert all(row["median_ms"] > 0 for row in result["rows"])
    ran = {row["attention"]: row.get("skipped") for row in result["attention"]}
    assert ran["sdpa flash"] is None and ran["triton 64+16, 128/64/8/3/128"] is None
    assert "flashinfer fa3 192/128" in ran
    assert "image_processing_ms" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", ["1920", "axb", "0x5", "5x5,"])
def test_sizes_that_are_none_are_refused(capsys, sizes):
    with pytest.raises(SystemExit) as e:
        vision.parse_args(["--sizes", sizes])

    assert e.value.code == 2
    assert "expected widths and heights, as 1920x1080,448x448" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_needed(capsys):
    with pytest.raises(SystemExit) as e:
        vision.main([])

    assert e.value.code == 2 and "needs a CUDA device of compute capability 9.0" in capsys.readouterr().err
