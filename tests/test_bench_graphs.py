"""The graph benchmark from end to end without a GPU: tapes for graphs, clocks for events, a tiny model for the share.

Only its times mean nothing here.
"""

import functools
import json
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from kimi_k25.checkpoint import load_model
from kimi_k25.graphs import BucketPolicy, GraphPlan

ROOT = Path(__file__).parent.parent
LAYERS = 3


class Event:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3 + 1e-6


class Library:
    """breakable_cuda_graphs, as far as the benchmark calls it: a replay does nothing, so the output stays."""

    class BreakableCUDAGraph:
        def __init__(self, pool=None):
            self.replays = 0

        def pool(self):
            return "pool"

        def replay(self):
            self.replays += 1

        def reset(self):
            pass

    @staticmethod
    @contextmanager
    def breakable_graph(graph, stream=None):
        yield

    @staticmethod
    def no_graph(fn):
        return fn


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import graphs

    for name, stand_in in {
        "synchronize": lambda *args: None, "empty_cache": lambda: None, "Event": Event, "Stream": MagicMock,
        "CUDAGraph": MagicMock, "graph": lambda graph, stream: nullcontext(), "_sleep": lambda cycles: None,
        "memory_snapshot": lambda pool: [{"total_size": 2**20}],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    plots = MagicMock()
    plots.subplots.return_value = MagicMock(), (MagicMock(), MagicMock())
    monkeypatch.setattr(graphs, "pyplot", lambda: plots)
    monkeypatch.setitem(sys.modules, "breakable_cuda_graphs", Library)
    monkeypatch.setattr(graphs, "GraphPlan", lambda **plan: GraphPlan(**{**plan, "backend": "tape"}))
    monkeypatch.setattr(graphs, "require_room", lambda tp, layers, spare_gib: torch.device("cpu"))
    model = load_model(ROOT / "tests/data/oracle/tiny_int4", dtype=torch.bfloat16)
    assert len(model.language_model.model.layers) == LAYERS
    monkeypatch.setattr(graphs, "share_config", lambda tp, layers: model.config)
    monkeypatch.setattr(graphs, "build", lambda config, device, expert_layers: model)
    fast = SimpleNamespace(attention=[SimpleNamespace(plans=True)], experts=[])
    monkeypatch.setattr(graphs, "set_fast", lambda model, deterministic: fast)
    monkeypatch.setattr(graphs, "balance_routers", lambda *calls: [call() for call in calls])
    monkeypatch.setattr(graphs, "PagedKVCache", functools.partial(graphs.PagedKVCache, page_size=8))
    for name, value in {
        "TOKENS": (8, 16), "ORDERED": (4, 8, 12), "LADDER": BucketPolicy.of((4, 8)), "DECODE": BucketPolicy.of((1, 2)),
        "CONTEXT": 16, "BALANCED": 16, "CHURNED": (1 << 12,),
    }.items():  # fmt: skip
        monkeypatch.setattr(graphs, name, value)
    return graphs


def test_the_benchmark_runs_through_and_writes_what_it_promises(bench, monkeypatch, tmp_path, capsys):
    path = tmp_path / "graphs.json"
    arguments = ["--layers", str(LAYERS), "--rounds", "3", "--json", str(path), "--plot", str(tmp_path / "plot.png")]
    monkeypatch.setattr(sys, "argv", ["graphs.py", *arguments])

    bench.main()

    result = json.loads(path.read_text())
    promised = """date capture_seconds capture_gib piecewise_over_full decode_delta decode_speedup host_us_per_layer
        bitwise breakable_cuda_graphs""".split()
    assert set(promised) <= set(result)
    assert list(result["bitwise"].values()) == [True] * 6
    assert result["failures"] == {}
    assert result["breakable_cuda_graphs"]["survives_churn"] is True
    assert result["piecewise_over_full"].keys() == {"8", "16"}
    split = result["host_at_8"]
    assert 0 < result["host_us_per_layer"] == split["whole_bucket"]["us_per_layer"]
    for where in ("whole_bucket", "with_padding", "without_branches"):
        parts = "before_first_launch graph_launches first_attention other_attention after_last_launch".split()
        found = [split[where][f"{part}_us"] for part in parts]
        assert min(found) > 0
        assert split[where]["parts_us"] * 0.8 < sum(found) <= split[where]["parts_us"] + 1
    assert split["without_branches"]["ms"].keys() == {"pieces", "full", "branched pieces", "branched full"}
    assert "pieces/full" in capsys.readouterr().out
