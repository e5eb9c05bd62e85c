"""The decoder stack on fused kernels: DeepseekV3Model.forward, layer for layer. Knows no pictures and no files.

It holds the plain modules, whose parameters it reads, and registers nothing; language_model.py defines the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .language_model import DecoderLayer, DeepseekV3Model
from .layers.allreduce_norm import AllReduceAddRMSNorm
from .layers.attention_batch import AttentionBatch
from .layers.flashinfer_ops import rmsnorm
from .layers.fused_mla import FusedLatentAttention, PrefillAttention, PrefillBuffers
from .layers.fused_moe import ExpertProducts, FusedExperts, FusedSwiGLU
from .layers.mlp import SwiGLU
from .layers.moe import Int4RoutedExperts, MixtureOfExperts
from .layers.norm import RMSNorm, rms_norm

__all__ = ["FastDecoder"]

FeedForward = Callable[[Tensor, Tensor | None], Tensor]


class FastDecoder:
    """What DeepseekV3Model calls instead of its own layers.

    Args:
        decoder: A DeepseekV3Model, on the device and in the dtype it will run in.
        prefill: Attention of prefill steps.
        products: Makes the two products of a layer's int4 experts.
    """

    def __init__(
        self,
        decoder: DeepseekV3Model,
        *,
        prefill: PrefillAttention,
        products: Callable[[Int4RoutedExperts], ExpertProducts],
    ) -> None:
        self.decoder = decoder
        self.add_norm = AllReduceAddRMSNorm(decoder.plan.group)
        first = decoder.layers[0]
        assert isinstance(first, DecoderLayer)
        buffers = PrefillBuffers(first.self_attn)
        self.attention: list[FusedLatentAttention] = []
        self.experts: list[FusedExperts] = []
        self._derived: list[FusedLatentAttention | FusedExperts | FusedSwiGLU] = []
        self._layers: list[tuple[RMSNorm, FusedLatentAttention, RMSNorm, FeedForward]] = []
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            attention = FusedLatentAttention(layer.self_attn, prefill=prefill, buffers=buffers, plans=index == 0)
            self.attention.append(attention)
            self._derived.append(attention)
            feed_forward = self._feed_forward(layer.mlp, products)
            self._layers.append((layer.input_layernorm, attention, layer.post_attention_layernorm, feed_forward))

        self._next_norms = [norm for norm, *_ in self._layers[1:]] + [decoder.norm]

    def _feed_forward(
        self, mlp: nn.Module, products: Callable[[Int4RoutedExperts], ExpertProducts]
    ) -> FeedForward:
        if isinstance(mlp, SwiGLU):
            dense = FusedSwiGLU(mlp)
            self._derived.append(dense)
            return lambda x, num_tokens: dense(x)
        assert isinstance(mlp, MixtureOfExperts)
        if not isinstance(mlp.experts, Int4RoutedExperts) or mlp.gate.config.n_group > 1:
            return mlp  # Experts that are not int4, and grouped routing, have no faster kernel here.
        experts = FusedExperts(mlp, products(mlp.experts))
        self.experts.append(experts)
        self._derived.append(experts)
        return experts

    def reserve(self, num_tokens: int) -> None:
        """Announces steps of so many tokens, the same on all ranks; see AllReduceAddRMSNorm."""
        self.add_norm.reserve(num_tokens)

    def refresh_derived(self) -> None:
        """Rebuilds joined and rearranged weights in place, after the parameters have been loaded anew."""
        for derived in self._derived:
            derived.refresh_derived()

    def __call__(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        """Arguments and result are those of DeepseekV3Model.forward."""
        rope = self.decoder.rope(batch.positions, inputs_embeds.dtype)
        first, *_ = self._layers[0]
        x, residual = _norm(inputs_embeds, first), inputs_embeds.clone()  # The norms below add to it in place.
        for (_, attention, post_norm, feed_forward), next_norm in zip(self._layers, self._next_norms, strict=True):
            x = attention(x, rope, batch)
            x, residual = self.add_norm(x, residual, post_norm.weight, post_norm.eps)
            if isinstance(feed_forward, FusedExperts) and self.add_norm.world_size == 1:
                x, residual = feed_forward.add_norm(x, batch.num_tokens, residual, next_norm.weight, next_norm.eps)
            else:
                x = feed_forward(x, batch.num_tokens)
                x, residual = self.add_norm(x, residual, next_norm.weight, next_norm.eps)
        return x


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    if x.is_cuda and x.dtype != torch.float32:
        return rmsnorm(x, norm.weight, norm.eps)
    return rms_norm(x, norm.weight, norm.eps)
