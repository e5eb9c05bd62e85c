"""The decoder on fused kernels against the plain one, on the CPU: Triton interpreted, libraries stood in for.

float32 differs by the order of sums. In bfloat16 roundings differ everywhere, so both are held against float32: the
fused path may be no further from it than five times the plain one, since Triton's interpreter truncates where a GPU
rounds, which doubles each error and gives all of them one sign.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from random_models import make_config, randomize

pytest.importorskip("triton")

from kimi_k25.checkpoint import load_model
from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.fast_decoder import FastDecoder
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.layers import mla_decode
from kimi_k25.layers.attention_batch import AttentionBatch
from kimi_k25.layers.fused_moe import FusedExperts
from kimi_k25.layers.int4 import dequantize_int4
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache
from kimi_k25.layers.moe import MixtureOfExperts
from kimi_k25.layers.packed import attend
from kimi_k25.layers.parallel import WHOLE, ParallelPlan

ORACLE = Path(__file__).parent / "data" / "oracle"


class SlowPrefill:
    """FlashInfer's contract: planned from host integers, keys aligned to the end of the queries."""

    def __init__(self, scale):
        self.scale, self.plans, self.lengths = scale, 0, []

    def plan(self, batch):
        self.plans += 1
        queries = batch.cu_seqlens.diff().tolist()
        prefix = batch.cache is not None and batch.cache.has_prefix
        self.lengths = list(zip(queries, batch.cache.seq_lens.tolist() if prefix else queries, strict=True))

    def run(self, q, k, v, out):
        at = start = 0
        for queries, keys in self.lengths:
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            one = (q[at : at + queries], k[start : start + keys], v[start : start + keys])
            out[at : at + queries] = attend(*(x[None] for x in one), mask[None, None], scale=self.scale)[0]
            at, start = at + queries, start + keys
        assert at <= q.shape[0] == out.shape[0] and start <= k.shape[0]  # Padding behind.


@torch.library.custom_op("kimi_k25_test::block_product", mutates_args=())
def block_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_rows: torch.Tensor,
    topk: int,
    size: int,
) -> torch.Tensor:
    """humming's indexed product: row r of a block reads row sorted_ids[r] // topk of x, and writes sorted_ids[r]."""
    out = x.new_full((x.shape[0] * topk, packed.shape[1]), float("nan"))
    for block in range(int(num_rows) // size):
        rows = sorted_ids[block * size : (block + 1) * size].long()
        rows = rows[rows < out.shape[0]]
        weight = dequantize_int4(packed[expert_ids[block]], scale[expert_ids[block]]).to(x.dtype)
        out[rows] = x[rows // topk] @ weight.T
    return out


class SlowProducts:
    """The contract of HummingExperts, over the checkpoint's own words."""

    def __init__(self, experts, sizes=(8, 8)):
        self.experts, self.sizes, self.repacks = experts, sizes, 0

    def repack(self):
        self.repacks += 1

    def block_sizes(self, num_pairs):
        return self.sizes

    def gate_up(self, x, blocks, topk):
        e = self.experts
        return block_product(x, e.gate_up_proj_packed, e.gate_up_proj_scale, *blocks, topk, self.sizes[0])

    def down(self, gate_up, blocks):
        gate, up = gate_up.chunk(2, -1)
        hidden, e = torch.nn.functional.silu(gate) * up, self.experts
        return block_product(hidden, e.down_proj_packed, e.down_proj_scale, *blocks, 1, self.sizes[1])


def load(dtype, weights="tiny_int4", plan=WHOLE):
    return load_model(ORACLE / weights, dtype=dtype, plan=plan).language_model


def make_fast(language_model, sizes=(8, 8)):
    scale = language_model.model.layers[0].self_attn.softmax_scale
    return FastDecoder(
        language_model.model, prefill=SlowPrefill(scale), products=lambda experts: SlowProducts(experts, sizes)
    )


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    monkeypatch.setattr(mla_decode, "NUM_PROGRAMS", 4)  # The interpreter runs them one after another.
    torch.manual_seed(0)


CONFIG = load_model(ORACLE / "tiny_int4", dtype=torch.float32).config.text_config


def new_cache(dtype):
    return PagedKVCache(CONFIG, max_seqs=3, max_seq_len=48, page_size=8, dtype=dtype, device="cpu")


@torch.no_grad()
def run_conversation(decoder, dtype):
    """Two prompts, the longer in two chunks, then three decode steps: the hidden states of every step."""
    cache = new_cache(dtype)
    generator = torch.Generator().manual_seed(1)
    sequences = [CachedSequence(), CachedSequence()]
    outputs = []
    for lengths in ([5, 9], [3, 12], [1, 1], [1, 1]):
        batch = cache.step(sequences, lengths)
        embeds = torch.randn(sum(lengths), CONFIG.hidden_size, generator=generator).to(dtype)
        before = embeds.clone()
        outputs.append(decoder(embeds, batch).float())
        assert torch.equal(embeds, before)  # The norms work in place, but not on what the caller gave.
    return torch.cat(outputs), cache.layers.float()


@pytest.mark.parametrize("sizes", [(8, 8), (16, 8)])
def test_float32_equals_the_plain_decoder(sizes):
    plain = load(torch.float32)
    fast = make_fast(load(torch.float32), sizes)

    expected, expected_cache = run_conversation(plain, torch.float32)
    hidden, cache = run_conversation(fast, torch.float32)

    torch.testing.assert_close(hidden, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=2e-5)


def test_bfloat16_stays_as_near_to_float32_as_truncation_allows():
    exact, _ = run_conversation(load(torch.float32), torch.float32)
    plain, _ = run_conversation(load(torch.bfloat16), torch.bfloat16)
    fast, _ = run_conversation(make_fast(load(torch.bfloat16)), torch.bfloat16)

    def distance(x):
        return ((x - exact).norm() / exact.norm()).item()

    assert distance(fast) < 5 * distance(plain)


def test_unquantised_experts_keep_the_plain_module():
    plain = load(torch.float32, "tiny_bf16")
    fast = make_fast(load(torch.float32, "tiny_bf16"))
    batch = AttentionBatch.without_cache([7, 3], device=torch.device("cpu"))
    embeds = torch.randn(10, CONFIG.hidden_size)

    with torch.no_grad():
        hidden = fast(embeds, batch)

        torch.testing.assert_close(hidden, plain.model(embeds, batch), rtol=0, atol=2e-5)
    assert not fast.experts


def share_of(whole, config, plan):
    """One rank's part of a mixture of experts with random weights."""
    part = MixtureOfExperts(config, group_size=32, plan=plan)
    first, num_local = part.first_expert or 0, part.experts.num_experts
    share = {}
    for name, tensor in whole.state_dict().items():
        kind, _, rest = name.partition(".")
        if kind == "experts":
            tensor = tensor[first : first + num_local]
        if rest.startswith("gate_up_proj"):  # Rows of both, then their share.
            tensor = tensor.unflatten(1, (2, plan.expert_tp, -1))[:, :, plan.rank % plan.expert_tp].flatten(1, 2)
        elif kind != "gate":
            parts, dim = (plan.expert_tp, -1) if kind == "experts" else (plan.tp, int(rest.startswith("down_proj")))
            tensor = tensor.chunk(parts, dim)[plan.rank % parts]
        share[name] = tensor.clone()
    part.load_state_dict(share)
    return part


@torch.no_grad()
@pytest.mark.parametrize("favoured", [None, 3], ids=["all groups", "last group"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("sizes", [(8, 8), (16, 8)])
def test_groups_of_experts_are_the_plain_modules_and_add_up_to_the_whole(tp, ep, sizes, favoured):
    config = make_config(int4=True, moe_intermediate_size=128, n_routed_experts=16).text_config
    whole = randomize(MixtureOfExperts(config, group_size=32)).eval()
    if favoured is not None:  # Three experts a token, all of one quarter: groups without it get no pair.
        whole.gate.e_score_correction_bias[4 * favoured : 4 * favoured + 4] += 9.0
    x, num_tokens = torch.randn(9, config.hidden_size), torch.tensor(7, dtype=torch.int32)

    total = torch.zeros(9, config.hidden_size)
    for rank in range(tp):
        plain = share_of(whole, config, ParallelPlan(tp=tp, ep=ep, rank=rank))
        part = FusedExperts(plain, SlowProducts(plain.experts, sizes))(x, num_tokens)
        torch.testing.assert_close(part, plain(x, num_tokens), rtol=0, atol=2e-5)
        total += part

    torch.testing.assert_close(total, whole(x, num_tokens), rtol=0, atol=2e-5)


def conversation_of_a_rank(rank, ep):
    plan = ParallelPlan(tp=ep, ep=ep, rank=rank, group=dist.group.WORLD)
    hidden, _ = run_conversation(make_fast(load(torch.float32, plan=plan)), torch.float32)
    return hidden.numpy()


def test_ranks_with_their_own_experts_give_the_plain_decoder_of_one():
    expected, _ = run_conversation(load(torch.float32), torch.float32)

    for hidden in run_ranks(2, conversation_of_a_rank, 2):
        torch.testing.assert_close(torch.from_numpy(hidden), expected, rtol=0, atol=2e-5)


def test_attention_is_planned_once_a_step_for_all_layers():
    fast = make_fast(load(torch.float32))

    run_conversation(fast, torch.float32)

    assert fast.attention[0].prefill.plans == 2  # Two prefill steps; decode needs no plan.


def test_nothing_is_registered_and_derived_weights_follow_a_reload_at_the_same_address():
    language_model = load(torch.float32)
    before = list(language_model.state_dict())
    fast = make_fast(language_model)
    language_model.model.fast = fast
    assert list(language_model.state_dict()) == before
    joined = [attention.qkv_a for attention in fast.attention] + [e.router_and_shared for e in fast.experts]
    addresses = [weight.data_ptr() for weight in joined]
    stale, _ = run_conversation(fast, torch.float32)

    language_model.load_state_dict(
        {name: x * 1.25 if x.is_floating_point() else x for name, x in language_model.state_dict().items()}
    )  # The same call rebuilds what is derived.

    hidden, _ = run_conversation(language_model.model, torch.float32)
    language_model.model.fast = None
    expected, _ = run_conversation(language_model.model, torch.float32)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=2e-5)
    assert not torch.allclose(hidden, stale, atol=1e-2)
    assert [weight.data_ptr() for weight in joined] == addresses
    assert all(experts.products.repacks == 2 for experts in fast.experts)


def test_fused_kernels_replay_on_the_tape_bitwise_and_buffers_cross_breaks_without_a_copy():
    language_model = load(torch.float32)
    language_model.model.fast = make_fast(language_model)
    cache = new_cache(torch.float32)
    plan = GraphPlan(
        backend="tape", poison=True, strict=True, prefill=BucketPolicy.of((8, 24)), decode=BucketPolicy.decode(2)
    )
    graphed = GraphedDecoder(language_model, cache, plan)
    with graphed.runner, torch.no_grad():
        graphed.runner.capture()
        sequence = [CachedSequence()]
        for lengths in ([19], [5], [1], [1]):
            batch = cache.step(sequence, lengths)
            embeds = torch.randn(lengths[0], CONFIG.hidden_size)

            replayed = graphed(embeds, batch)

            assert torch.equal(replayed, graphed.run_eager(embeds, batch))
            plain = language_model.model.fast
            language_model.model.fast = None
            expected = language_model(embeds, batch)
            language_model.model.fast = plain
            torch.testing.assert_close(replayed, expected, rtol=0, atol=2e-5)
        report = graphed.runner.memory_report()
    assert report.bridge_bytes == 0


def test_graphs_announce_their_largest_prefill_to_the_workspace_of_the_norms():
    language_model = load(torch.float32)
    language_model.model.fast = fast = make_fast(language_model)

    GraphedDecoder(
        language_model, new_cache(torch.float32), GraphPlan(backend="eager", prefill=BucketPolicy.of((8, 4096)))
    )

    assert fast.add_norm.capacity == 4096
