"""HummingExperts with a library that stands in for humming-kernels: words rearranged in place, and refused by name."""

from types import SimpleNamespace

import pytest
import torch
from random_models import make_config, randomize

from kimi_k25.layers import humming_experts
from kimi_k25.layers.humming_experts import HummingExperts, RepackedWeightsError
from kimi_k25.layers.moe import Int4RoutedExperts, MixtureOfExperts
from kimi_k25.layers.parallel import ParallelPlan

GROUP = 32


class FakeConfig:
    def to_str(self):
        return "{}"


class FakeLayer(torch.nn.Module):
    """HummingLayer: takes the checkpoint's layout, and after transform() has its own."""

    def __init__(self, shape_n, shape_k, num_experts, weight_config, torch_dtype):
        super().__init__()
        assert weight_config["group_size"] == GROUP and weight_config["num_bits"] == 4
        self.shape_n, self.shape_k, self.num_experts = shape_n, shape_k, num_experts
        self.weight_shape = torch.nn.Parameter(torch.empty(2), requires_grad=False)

    def transform(self):
        assert not hasattr(self, "weight_shape")
        shape = (self.num_experts, self.shape_k // 16, self.shape_n * 2)
        self.weight = torch.nn.Parameter(self.weight_packed.flatten().flip(0).view(shape), requires_grad=False)
        scale = self.weight_scale.transpose(1, 2).contiguous()
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        self.humming_config = FakeConfig()


@pytest.fixture
def library(monkeypatch):
    """What was compiled and launched."""
    seen = SimpleNamespace(compiled=[], launched=[])

    def heuristics(config, *, shape_m, gemm_type, use_batch_invariant, device):
        assert gemm_type == "indexed"
        return {"block_shape": (8 if shape_m < 100 else 64, 128, 64), "invariant": use_batch_invariant}

    def prepare(layer, compute, intervals, device):
        seen.compiled.append(len(intervals))
        rows = [[low, high, 100 + i, 0] for i, (low, high, _) in enumerate(intervals)]
        return torch.tensor(rows).flatten()

    def launch(**kwargs):
        seen.launched.append(kwargs)
        return kwargs["inputs"].new_zeros(kwargs["inputs"].shape[0] * kwargs["top_k"], 4)

    modules = {
        "humming.layer": SimpleNamespace(HummingLayer=FakeLayer),
        "humming.tune": SimpleNamespace(get_heuristics_config=heuristics),
        "humming.kernel.humming": SimpleNamespace(HummingKernel=SimpleNamespace(prepare_kernels=prepare)),
        "humming.ops": SimpleNamespace(launch_kernel=launch),
    }
    monkeypatch.setattr(humming_experts, "import_gpu_library", lambda package, module: modules[module])
    humming_experts._product.cache_clear()
    yield seen
    humming_experts._product.cache_clear()


def make_experts():
    experts = Int4RoutedExperts(4, 64, 32, GROUP)
    for buffer in experts.buffers():
        if buffer.dtype == torch.int32:
            buffer.random_(-(2**31), 2**31 - 1)
        else:
            buffer.normal_()
    return experts


def test_words_are_rearranged_in_place_at_the_same_address(library):
    experts = make_experts()
    before = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in experts.named_buffers()}

    HummingExperts(experts).repack()

    for name, buffer in experts.named_buffers():
        address, words = before[name]
        assert buffer.data_ptr() == address and (buffer.shape[-1] == 1 or not torch.equal(buffer, words))
    expected = before["gate_up_proj_packed"][1].flatten().flip(0)
    assert torch.equal(experts.gate_up_proj_packed.flatten(), expected)


def test_state_dict_refuses_rearranged_words_by_name_and_a_load_makes_them_the_checkpoints_again(library):
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": make_experts()})})
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    products = HummingExperts(model["mlp"]["experts"])
    products.repack()
    rearranged = model["mlp"]["experts"].down_proj_packed.clone()

    with pytest.raises(RepackedWeightsError, match=r"mlp\.experts\.gate_up_proj_packed, .*backend='torch'") as error:
        model.state_dict()
    assert len(error.value.names) == 4
    model.load_state_dict(original)

    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    products.repack()
    assert torch.equal(model["mlp"]["experts"].down_proj_packed, rearranged)


def test_rearranging_twice_changes_nothing(library):
    experts = make_experts()
    products = HummingExperts(experts)
    products.repack()
    before = [buffer.clone() for buffer in experts.buffers()]

    products.repack()

    assert all(torch.equal(a, b) for a, b in zip(experts.buffers(), before, strict=True))


def test_sizes_are_compiled_together_and_once_for_all_layers(library):
    first, second = HummingExperts(make_experts()), HummingExperts(make_experts())
    first.repack()
    second.repack()

    first.prepare([8, 16, 800])
    second.prepare([8, 16, 800])
    x, blocks = torch.zeros(5, 64), tuple(torch.zeros(1, dtype=torch.int32) for _ in range(3))
    second.gate_up(x, blocks, 3)
    second.down(torch.zeros(300, 32), blocks)

    assert library.compiled == [2, 2]  # Two block sizes of two shapes.
    gate_up, down = library.launched
    assert gate_up["configs"].tolist()[2] == 100 and gate_up["top_k"] == 3 and gate_up["valid_shape_m"] == 15
    assert down["configs"].tolist()[2] == 101 and down["top_k"] == 1 and down["valid_shape_m"] == 300
    assert first.block_sizes(8) == (8, 8) and first.block_sizes(800) == (64, 64)


def test_divided_experts_are_tuned_for_their_share_of_the_pairs_and_sized_for_all(library):
    products = HummingExperts(make_experts(), ep=4)
    products.repack()

    blocks = tuple(torch.zeros(1, dtype=torch.int32) for _ in range(3))
    products.gate_up(torch.zeros(50, 64), blocks, 3)

    assert products.block_sizes(396) == (8, 8) and products.block_sizes(397) == (64, 64)
    assert library.launched[0]["valid_shape_m"] == 150


def test_deterministic_asks_for_kernels_that_do_not_depend_on_the_batch(library):
    products = HummingExperts(make_experts(), deterministic=True)
    products.repack()

    assert products._products["down_proj"].tuning(8)["invariant"] is True


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("favoured", [None, 3], ids=["all groups", "last group"])
@pytest.mark.parametrize("num_tokens", [1, 8, 300])  # Blocks of one pair, and blocks of an expert.
@pytest.mark.parametrize("intermediate_size", [256, 512])  # int4_down's width, and the library's.
def test_groups_of_experts_on_a_gpu_are_the_plain_modules(intermediate_size, num_tokens, favoured):
    from test_fast_decoder import share_of

    from kimi_k25.layers.fused_moe import FusedExperts

    config = make_config(
        int4=True, hidden_size=1024, moe_intermediate_size=intermediate_size, n_routed_experts=32, num_experts_per_tok=8
    ).text_config  # fmt: skip
    whole = randomize(MixtureOfExperts(config, group_size=GROUP))
    if favoured is not None:  # All of one quarter: the other groups get no pair.
        whole.gate.e_score_correction_bias[8 * favoured : 8 * favoured + 8] += 9.0
    x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)

    for rank in range(4):
        plain = share_of(whole, config, ParallelPlan(tp=4, ep=4, rank=rank)).to("cuda", torch.bfloat16)
        expected = plain(x).float()  # Before its words are rearranged.
        rows = FusedExperts(plain, HummingExperts(plain.experts, ep=4))(x).float()
        # The median: a token whose eighth and ninth expert score alike may choose another one.
        assert ((rows - expected).norm(dim=1) / expected.norm(dim=1)).median() < 2e-2
        assert rows.isfinite().all()  # No row that nobody wrote was read.
