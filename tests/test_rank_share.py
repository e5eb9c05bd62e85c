"""What the rank-share benchmark does without a GPU: its files, its comparisons, its reports."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import peers
import pytest
import rank_share
import rank_share_report
import torch

LAYERS = Path(__file__).parent.parent / "kimi_k25" / "layers"
ROWS = [
    {"phase": phase, "tokens": n, "batch": n, "mode": mode, "median_ms": ms, "p10_ms": ms, "p90_ms": ms,
     "floor_ms": 1.0, "experts_hit": 5.0, "load_spread": 0.1, "repeats_bitwise": True}
    for phase, mode, n, ms in [("prefill", "eager", 64, 50.0), ("prefill", "piecewise", 64, 20.0),
                               ("prefill", "eager", 512, 40.0), ("prefill", "piecewise", 512, 30.0),
                               ("decode", "eager", 1, 50.0), ("decode", "full", 1, 5.0)]
]  # fmt: skip
KERNELS = [
    {"kernel": name, "us": us, "launches": 2.0}
    for name, us in [("void humming<X>", 8.0), ("_down_rows_kernel", 2.0), ("nvjet_sm90", 4.0),
                     ("_one_row_kernel", 2.0), ("_add_norm_kernel", 2.0), ("never seen", 1.0)]
]
TOY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """The script with everything that needs a GPU replaced: what is left is the order, the files and the report."""
    steps = SimpleNamespace(graphed=SimpleNamespace(runner=SimpleNamespace(close=lambda: None)))
    took = {"build_seconds": 1.0, "compile_seconds": 1.0, "graphs": "cuda"}
    monkeypatch.setattr(rank_share, "require_room", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(rank_share, "check", lambda *_, **__: {"moe 1": 0.01})
    monkeypatch.setattr(rank_share, "captured_share", lambda *_: (steps, None, took))
    monkeypatch.setattr(rank_share, "measure_sizes", lambda *_, **__: (ROWS, {"prefill 64": KERNELS}))
    monkeypatch.setattr(rank_share, "decode_beside_prefill", lambda *_, **__: [])
    monkeypatch.setattr(rank_share, "CONTEXT", 16)
    monkeypatch.setattr(peers, "TEXT", peers.TEXT | TOY)
    return rank_share


def test_experts_met_are_counted_from_the_blocks():
    blocks = (torch.tensor([0, 1, 9, 9, 2, 9, 9, 9]), torch.tensor([3, 3]), torch.tensor([8]))  # 3 rows of expert 3.

    class Products:
        def block_sizes(self, num_pairs):
            return 4, 4

        def gate_up(self, x, blocks, topk):
            return x

    products = Products()
    fast = SimpleNamespace(experts=[SimpleNamespace(products=products)])

    hit, spread = rank_share.experts_met(fast, lambda: products.gate_up(torch.zeros(3, 1), blocks, 3))

    load = torch.zeros(384)
    load[3] = 3
    assert hit == 1 and spread == pytest.approx((load.std() / load.mean()).item())
    assert "gate_up" not in vars(products)


def test_a_run_writes_rows_peers_and_savings(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured, "share_sizes", lambda tp: {})

    measured.main(["--json", str(tmp_path / "r.json"), "--tokens", "5", "--batch", "1", "--peer-layers", "1"])

    result = json.loads((tmp_path / "r.json").read_text())
    assert result["rows"] == ROWS and result["failures"] == {}
    assert result["ttft"][0] == {"tokens": 64, "against_own_eager": -0.6, "against_vllm_eager": -0.808}
    assert result["ttft"][1] == {"tokens": 512, "against_own_eager": -0.25}
    assert [row["phase"] for row in result["transformers"]] == ["prefill", "decode"]
    assert not any("skipped" in row for row in result["transformers"])
    shown = capsys.readouterr().out
    assert "No collectives: one rank's own work" in shown and "-60% against own eager, -81% against vllm" in shown


def test_a_part_that_fails_is_reported_and_loses_nothing_else(measured, tmp_path, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(peers, "transformers_rows", broken)

    with pytest.raises(SystemExit) as e:
        measured.main(["--json", str(tmp_path / "r.json")])

    result = json.loads((tmp_path / "r.json").read_text())
    assert e.value.code == 1 and result["rows"] == ROWS
    assert result["failures"] == {"transformers": "RuntimeError: CUDA out of memory"}
    assert "transformers failed: RuntimeError" in capsys.readouterr().err


def test_peer_times_are_scaled_to_all_layers_and_say_of_how_many():
    (row,) = peers.transformers_rows(TOY, 2, 61, [3], [], 0, torch.device("cpu"), rounds=2)

    assert row["measured_layers"] == 2
    assert row["median_ms"] == pytest.approx(row["measured_ms"] * 61 / 2, rel=1e-3)


def test_kernels_are_summed_by_what_they_are_for():
    sums = rank_share_report.by_kind(KERNELS, layers=2)

    assert {kind: us for kind, us in sums.items() if us} == {
        "experts": 5.0, "dense products": 3.0, "row sums, residual, norms": 1.0, "other": 0.5,
    }  # fmt: skip


def test_every_kernel_of_the_decoder_has_a_name_and_a_kind_of_its_own():
    files = [f for f in LAYERS.glob("*.py") if f.stem != "vision_kernels"]
    names = [name for f in files for name in re.findall(r"^def (\w*_kernel)\(", f.read_text(), re.MULTILINE)]

    sums = rank_share_report.by_kind([{"kernel": name, "us": 1.0} for name in names], layers=1)

    assert len(names) == len(set(names)) > 10
    assert sums["other"] == 0


def test_decode_is_compared_in_turns_with_and_without_prefill_graphs(monkeypatch):
    closed = []

    class Fake:
        def __init__(self, *_):
            self.runner = SimpleNamespace(capture=lambda: None, close=lambda: closed.append(self))

    class FakeSteps:
        def __init__(self, *_):
            self.model = self.cache = None

        def decode(self, batch, context):
            return batch

        def run(self, step, *, graphs):
            return lambda: step

    monkeypatch.setattr(rank_share, "GraphedDecoder", Fake)
    monkeypatch.setattr(rank_share, "Steps", FakeSteps)

    rows = rank_share.decode_beside_prefill(FakeSteps(), [1, 8], rounds=4)

    assert [(row["batch"], row["prefill_graphs"]) for row in rows] == [(1, "off"), (1, "on"), (8, "off"), (8, "on")]
    assert rows[0]["delta"] == 0 and len(closed) == 1


def test_plots_are_small_files(tmp_path):
    pytest.importorskip("matplotlib")
    result = {"rows": ROWS, "tp": 8, "layers": 61, "context": 2048, "date": "2026-12-01", "commit": "abc",
              "transformers": [{"phase": "prefill", "tokens": 64, "median_ms": 9.0}],
              "profiles": {"prefill 64": KERNELS, "decode 1": KERNELS}}  # fmt: skip

    rank_share_report.plot_times(result, tmp_path / "times.png")
    rank_share_report.plot_layer(result, tmp_path / "layer.png")

    for name in ("times.png", "layer.png"):
        assert 1000 < (tmp_path / name).stat().st_size < 60_000


def test_the_readmes_table_has_every_size_and_the_peers_there_are():
    result = {"rows": ROWS, "context": 2048, "transformers": [{"phase": "prefill", "tokens": 64, "median_ms": 201.25}]}

    lines = rank_share_report.markdown(result).splitlines()

    assert lines[2:] == [
        "| prefill | 64 | 50.0 | 20.0 | 1.00 | 104 / 29.6 | 201.2 |",
        "| prefill | 512 | 40.0 | 30.0 | 1.00 |  |  |",
        "| decode, context 2048 | 1 | 50.0 | 5.00 | 1.00 | 106 / 7.05 |  |",
    ]
