"""One tensor-parallel rank's share of Kimi-K2.5, for benchmarks: built, made fast, its routers even, its steps.

From the package's own classes, with heads, expert width and vocabulary divided by the number of ranks. Real shapes,
random weights of real scale; no collectives, so this is a rank's own work only. Knows no clock but the floor's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import published
import torch
from harness import Ceilings, refuse, require_extras, require_hopper
from published import INT4_BYTES, TEXT
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kimi_k25.backend import set_fast_decoder, why_not_flashinfer
from kimi_k25.config import KimiK25Config, TextConfig
from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.layers.attention_batch import AttentionBatch
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache
from kimi_k25.layers.moe import Int4RoutedExperts
from kimi_k25.model import KimiK25ForConditionalGeneration

if TYPE_CHECKING:
    from kimi_k25.layers.humming_experts import HummingExperts  # It imports triton.

HIDDEN, EXPERTS, TOPK = (TEXT[key] for key in ("hidden_size", "n_routed_experts", "num_experts_per_tok"))
INT4_STD = 4.18  # Of random_int4_'s values.
BALANCING_STEPS = 4


def share_sizes(tp: int) -> dict[str, int]:
    """What of text_config is divided over ranks."""
    if tp < 1 or 64 % tp:
        refuse(f"--tp {tp} does not divide 64 heads; choose 1, 2, 4, 8, 16, 32 or 64")
    divided = ("vocab_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
    return {key: TEXT[key] // tp for key in divided}


def share_config(tp: int, layers: int) -> KimiK25Config:
    """config.json of one rank's share; the vision tower is not measured here and as small as it can be."""
    vision = {
        "init_pos_emb_height": 1, "init_pos_emb_width": 1, "init_pos_emb_time": 1, "vt_hidden_size": 16,
        "vt_num_hidden_layers": 1, "vt_num_attention_heads": 1, "vt_intermediate_size": 16, "mm_hidden_size": 16,
    }  # fmt: skip
    return KimiK25Config.from_dict(published.config(share_sizes(tp) | {"num_hidden_layers": layers}, vision))


def random_int4_(packed: Tensor) -> None:
    """Random words of values from -7 to 7 whose mean is zero, as a trained matrix's is.

    Plain random words have -8 too, and a mean of -0.5: layers that share their experts then add up one direction, until
    all tokens choose the same ones (60 layers on a CPU: shares differ by 330% in the last, by 23% with these).
    """
    packed.random_(-(2**31), 2**31 - 1)
    some = packed | packed >> 1
    some |= some >> 2
    packed |= (~some & 0x11111111) << 3  # A value's four bits, where they are zero, become 8, which stands for zero.


@torch.no_grad()
def build(config: KimiK25Config, device: torch.device, *, expert_layers: int) -> KimiK25ForConditionalGeneration:
    """The share on the GPU. Only the first `expert_layers` MoE layers get experts' values; the others' are empty."""
    with torch.device("meta"):
        model = KimiK25ForConditionalGeneration(config)
    model.to(torch.bfloat16).to_empty(device=device)
    # What is added to the residual is small beside the embedding, as in a trained model: otherwise the layers' common
    # part outgrows what tells tokens apart, and all tokens go to the same experts.
    added = (2 * config.text_config.num_hidden_layers) ** -0.5
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name == "bias" else 1.0)
            else:
                std = 1.0 if isinstance(module, nn.Embedding) else parameter.shape[-1] ** -0.5
                parameter.normal_(std=std * (added if path.endswith(("o_proj", "down_proj")) else 1.0))
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.zero_()
        if (refresh := getattr(module, "refresh_derived", None)) is not None:
            refresh()
        if isinstance(module, Int4RoutedExperts) and expert_layers:
            expert_layers -= 1
            for name in ("gate_up_proj", "down_proj"):
                packed, scale = getattr(module, f"{name}_packed"), getattr(module, f"{name}_scale")
                random_int4_(packed)
                std = (packed.shape[-1] * 8) ** -0.5 * (added if name == "down_proj" else 1.0)
                scale.normal_(1.0, 0.1).mul_(std / INT4_STD)
    return model.eval()


def copied_experts(*, deterministic: bool = False) -> Callable[[Int4RoutedExperts], HummingExperts]:
    """Makes HummingExperts of equal layers: the first one's words are rearranged, and all others copy them."""
    from kimi_k25.layers.humming_experts import HummingExperts

    first: list[HummingExperts] = []

    class CopiedExperts(HummingExperts):
        def rearrange(self, name: str) -> tuple[Tensor, Tensor]:
            if not first:
                first.append(self)
            return super().rearrange(name) if first[0] is self else first[0].weights[name]

    return lambda experts: CopiedExperts(experts, deterministic=deterministic)


def set_fast(model: KimiK25ForConditionalGeneration, *, deterministic: bool = False) -> Any:
    """use_backend(model, "flashinfer"), but for one layer's rearranged experts, which all others copy."""
    if trouble := why_not_flashinfer(model):
        refuse(trouble)
    return set_fast_decoder(model, copied_experts(deterministic=deterministic))


def floor_ms(c: TextConfig, ceilings: Ceilings, *, tokens: int, seqs: int, context: int) -> float:
    """Weights of the experts hit once and everything else once, or all operations, whichever takes longer."""
    layers, heads = c.num_hidden_layers, c.num_attention_heads
    attention = HIDDEN * (c.q_lora_rank + c.kv_cache_dim) + c.q_lora_rank * heads * c.qk_head_dim
    attention += heads * (c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) + HIDDEN * c.v_head_dim)
    expert = 3 * HIDDEN * c.moe_intermediate_size
    dense = 3 * HIDDEN * c.intermediate_size
    head = HIDDEN * c.vocab_size
    hit = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** tokens)
    moe_layer = 2 * (attention + HIDDEN * EXPERTS + expert) + hit * expert * INT4_BYTES
    num_bytes = (layers - 1) * moe_layer + 2 * (attention + dense + head)
    num_bytes += layers * seqs * context * c.kv_cache_dim * 2
    per_token = layers * attention + (layers - 1) * (HIDDEN * EXPERTS + (TOPK + 1) * expert) + dense
    operations = 2 * tokens * per_token + 2 * seqs * head
    if context:
        operations += 2 * layers * seqs * context * heads * (c.kv_cache_dim + c.kv_lora_rank)
    else:
        operations += layers * tokens * tokens * heads * (c.qk_head_dim + c.v_head_dim)
    return ceilings.floor_ms(num_bytes, operations)


def balanced_bias(scores: Tensor, topk: int, *, rounds: int = 30) -> Tensor:
    """A correction bias under which every expert gets its share of these tokens.

    Each expert's threshold is what it exceeds as often as it should be chosen; then the busy ones step down and the
    idle ones up, as in training. Equal mean scores would not do: who varies most would be chosen most.

    Args:
        scores: Sigmoids, (num_tokens, num_experts).
    """
    share = topk / scores.shape[1]
    bias = -scores.float().quantile(1 - share, dim=0)
    for i in range(rounds):
        biased = scores + bias
        least_chosen = biased.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
        load = (biased >= least_chosen).float().mean(0) / share  # No count of indices: that would wait for the GPU.
        bias = bias - 0.02 * (1 - i / rounds) * (load - 1).clamp(-1, 1)
    return bias - bias.mean()


def balance_routers(*calls: Callable[[], object]) -> None:
    """Sets every router's correction bias so that the experts share the tokens, as training leaves it.

    Random layers give all tokens a common part, which random routers turn into favourites. Each step, layer by layer
    as it goes, moves a router's bias to the mean of what balances the tokens of the steps so far. The bias of one step
    of 4,096 tokens fits the chance in it, 85 tokens an expert: on other tokens shares differ by 11%, with the mean of
    four steps by 6%. The same steps give the same biases.

    Args:
        calls: Steps of different random tokens, too many for route_to_pair_blocks.
    """
    from kimi_k25.layers import fused_moe

    route = fused_moe.route
    try:
        for i, call in enumerate(calls, 1):

            def balanced(logits: Tensor, bias: Tensor, *args: Any, weight: float = 1 / i) -> Any:
                bias.lerp_(balanced_bias(logits[:, : bias.shape[0]].sigmoid(), TOPK), weight)
                return route(logits, bias, *args)

            fused_moe.route = balanced  # type: ignore[assignment]
            call()
    finally:
        fused_moe.route = route


class Steps:
    """Prefill and decode steps of the share, by size, each ready to be run again and again."""

    def __init__(self, model: KimiK25ForConditionalGeneration, cache: PagedKVCache, decoder: GraphedDecoder) -> None:
        self.model, self.cache, self.graphed = model, cache, decoder
        self.device = cache.layers.device

    def prefill(self, tokens: int) -> tuple[Tensor, AttentionBatch]:
        """One new sequence: (tokens,) ids and the step that describes them."""
        sequence = CachedSequence()
        batch = self.cache.step([sequence], [tokens])
        self.cache.release(sequence)
        return torch.randint(2, self.model.config.text_config.vocab_size, (tokens,), device=self.device), batch

    def decode(self, seqs: int, context: int) -> tuple[Tensor, AttentionBatch]:
        """One token of each of `seqs` sequences that are `context` long after it."""
        sequences = [CachedSequence() for _ in range(seqs)]
        self.cache.step(sequences, [context - 1] * seqs)
        batch = self.cache.step(sequences, [1] * seqs)
        for sequence in sequences:
            self.cache.release(sequence)
        return torch.randint(2, self.model.config.text_config.vocab_size, (seqs,), device=self.device), batch

    def run(self, step: tuple[Tensor, AttentionBatch], *, graphs: bool) -> Callable[[], Tensor]:
        """From token ids to the logits of the last tokens."""
        ids, batch = step
        language_model = self.model.language_model
        last = batch.cu_seqlens[1:].long() - 1

        @torch.inference_mode()
        def call() -> Tensor:
            embeds = language_model.model.embed_tokens(ids)
            hidden = self.graphed(embeds, batch) if graphs else language_model(embeds, batch)
            return language_model.compute_logits(hidden.index_select(0, last))

        return call


def share_gib(tp: int, layers: int) -> float:
    """GPU memory of a share: int4 experts, and a third of a GiB a layer for the rest."""
    experts = (layers - 1) * EXPERTS * 3 * HIDDEN * (TEXT["moe_intermediate_size"] / tp) * INT4_BYTES / 2**30
    return experts * 1.05 + 0.33 * layers


def what_fits(tp: int, layers: int, free_gib: float) -> str:
    """Which options make the share fit in so much."""
    fewer = max((n for n in range(2, layers) if share_gib(tp, n) <= free_gib), default=0)
    larger = next((n for n in (2, 4, 8, 16, 32) if n > tp and share_gib(n, layers) <= free_gib), 0)
    ways = [f"--layers {fewer}"] * bool(fewer) + [f"--tp {larger}"] * bool(larger)
    return f"{' or '.join(ways)} fits" if ways else "no --layers fits at any --tp"


def require_room(tp: int, layers: int, *, spare_gib: float) -> torch.device:
    """The GPU, if the share fits on it beside `spare_gib` of caches, graphs and ceilings; else exit 2."""
    needed_gib = share_gib(tp, layers) + spare_gib
    device = require_hopper(needed_gib, lambda free: what_fits(tp, layers, free - spare_gib))
    require_extras(("flashinfer-python", "flashinfer"), ("triton", "triton"), ("humming-kernels", "humming.layer"))
    return device
