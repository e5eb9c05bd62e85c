"""The end-to-end benchmark on a toy, all of it but the fast kernels, and what it says where it can't run."""

import json
import shutil
from types import SimpleNamespace

import end_to_end
import pytest
import torch

CPU = torch.device("cpu")


def refusal(capsys, call, *args):
    with pytest.raises(SystemExit) as e:
        call(*args)

    assert e.value.code == 2
    return capsys.readouterr().err.split("error: ")[1].rstrip()


def test_every_part_runs_on_a_cpu_on_a_toy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(end_to_end, "CHUNK", 16)  # Prompts take several steps, as the real ones do.
    end_to_end.main(["--device", "cpu", "--rounds", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "r.json")])

    result = json.loads((tmp_path / "r.json").read_text())
    assert result["failures"] == {}
    assert result["same tokens"]["graphs_equal_eager"] and result["same tokens"]["repeat_equals"]
    assert [(row["prompt"], row["graphs"]) for row in result["rows"]] == [
        ("image", "off"), ("image", "on"), ("seed row", "off"), ("seed row", "on"),
    ]  # fmt: skip
    for row in result["rows"]:
        parts = row["process"] + row["embed"] + row["prefill"] + row["sample"]
        assert 0 < parts <= row["ttft_ms"] <= row["end_to_end_ms"]
    assert result["rows"][2]["tokens_in"] == 40 and result["rows"][2]["tokens_out"] == 8
    assert [*tmp_path.iterdir()] == [tmp_path / "r.json"]  # The checkpoint is gone.
    assert "end_to_end_ms" in capsys.readouterr().out


def test_a_load_that_fails_keeps_what_was_measured_before(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(end_to_end, "loaded", broken)

    with pytest.raises(SystemExit) as e:
        end_to_end.main(["--device", "cpu", "--folder", str(tmp_path), "--json", str(tmp_path / "r.json")])

    result = json.loads((tmp_path / "r.json").read_text())
    assert e.value.code == 1 and set(result["failures"]) == {"same tokens", "rows"}
    assert result["checkpoint"]["files"] == 1 and len(result["dd_gb_per_s"]) == 3


def test_a_prompt_takes_whole_chunks_and_a_rest():
    assert end_to_end.steps_of(2721) == [2048, 673]
    assert end_to_end.steps_of(4096) == [2048, 2048]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--moe-layers", "0"], "--moe-layers 0 and --rounds 5 must be at least 1"),
        (["--folder", "/nowhere"], "--folder /nowhere is not a folder; name one with room for the checkpoint"),
    ],
)
def test_arguments_are_judged_before_any_device(capsys, arguments, expected):
    assert refusal(capsys, end_to_end.parse_args, arguments) == expected


@pytest.mark.parametrize(
    ("layers", "way_out"), [("1", "name another --folder"), ("2", "name another --folder, or --moe-layers 1")]
)
def test_a_full_disk_names_what_is_needed_and_the_way_out(monkeypatch, capsys, tmp_path, layers, way_out):
    monkeypatch.setattr(end_to_end, "require_hopper", lambda *_: CPU)
    monkeypatch.setattr(end_to_end, "require_extras", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3e9))
    args = end_to_end.parse_args(["--folder", str(tmp_path), "--moe-layers", layers])

    line = refusal(capsys, end_to_end.require, args)

    needed = 1.05 * end_to_end.checkpoint_bytes(int(layers)) / 1e9
    assert line.startswith(f"needs {needed:.1f} GB of disk in {tmp_path}")
    assert line.endswith(f"3.0 are free; {way_out}")


def test_too_little_memory_names_the_option_that_needs_less(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**37))

    line = refusal(capsys, end_to_end.require, end_to_end.parse_args(["--moe-layers", "2"]))

    assert line.endswith("8.0 are free; --moe-layers 1 needs less")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_needed(capsys):
    assert refusal(capsys, end_to_end.main, []).startswith("needs a CUDA device of compute capability 9.0")
