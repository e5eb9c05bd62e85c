"""What the rank-share benchmark computes without a GPU: the share, the floor, balanced routers, and its refusal."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def rank_share(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import rank_share

    return rank_share


def test_the_share_divides_heads_expert_width_and_vocabulary(rank_share):
    text = rank_share.share_config(8, 61).text_config

    assert (text.num_attention_heads, text.moe_intermediate_size, text.vocab_size) == (8, 256, 20480)
    assert (text.hidden_size, text.n_routed_experts, text.num_hidden_layers) == (7168, 384, 61)


@pytest.mark.parametrize(
    ("tokens", "context", "floor"),
    [(64, 0, 13.3), (256, 0, 17.6), (1024, 0, 17.65), (2048, 0, 25.9), (4096, 0, 53.5), (1, 2048, 1.4), (8, 2048, 3.9)],
)
def test_the_floor_is_bytes_or_operations_of_the_whole_share(rank_share, tokens, context, floor):
    from harness import Ceilings

    text = rank_share.share_config(8, 61).text_config
    seqs = tokens if context else 1

    found = rank_share.floor_ms(text, Ceilings(4.3, 779), tokens=tokens, seqs=seqs, context=context)

    assert found == pytest.approx(floor, abs=0.05)


def test_balanced_bias_gives_every_expert_its_share_though_scores_differ_in_mean_and_spread(rank_share):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2048, 96, generator=generator) * (0.3 + torch.rand(96, generator=generator))
    scores = (logits + 2 * torch.randn(96, generator=generator)).sigmoid()

    bias = rank_share.balanced_bias(scores, 4)

    chosen = (scores + bias).topk(4, -1).indices
    load = torch.bincount(chosen.flatten(), minlength=96) / (2048 * 4 / 96)
    unbalanced = torch.bincount(scores.topk(4, -1).indices.flatten(), minlength=96)
    assert (unbalanced == 0).sum() > 48
    assert load.min() > 0.6 and load.max() < 1.5


def test_percentiles_are_those_of_the_rounds(rank_share):
    from harness import Timing

    assert Timing.of([float(n) for n in range(1, 12)]) == Timing(6.0, 2.0, 10.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_needed():
    done = subprocess.run([sys.executable, str(BENCH / "rank_share.py")], capture_output=True, text=True)

    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "rank_share.py: error: needs a CUDA device of compute capability 9.0 (H100, H200); torch sees none\n"
    )
