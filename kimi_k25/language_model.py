"""The decoder stack and its LM head: embeddings in, hidden states out, logits apart. Knows no pictures.

Source: DeepSeek-V3, arXiv 2412.19437, with Kimi-K2's sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor, nn

from .config import KimiK25Config, TextConfig
from .layers.allreduce_norm import AllReduceAddRMSNorm
from .layers.attention_batch import AttentionBatch
from .layers.mla import MultiHeadLatentAttention
from .layers.mlp import SwiGLU
from .layers.moe import MixtureOfExperts
from .layers.norm import AddNorm, RMSNorm
from .layers.parallel import WHOLE, ParallelPlan, VocabularyEmbedding
from .layers.rope import TextRope


class DecoderLayer(nn.Module):
    """Attention and a feed-forward block, each behind a norm; the residual runs beside them."""

    def __init__(
        self,
        config: TextConfig,
        layer: int,
        *,
        group_size: int | None,
        plan: ParallelPlan = WHOLE,
        add_norm: AddNorm | None = None,
    ) -> None:
        """
        Args:
            group_size: Of int4 routed experts; None keeps them in the model's dtype.
            add_norm: Where ranks add up the block before: see RMSNorm.
        """
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, add_norm)
        self.self_attn = MultiHeadLatentAttention(config, layer, plan)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, add_norm)
        self.mlp = (
            MixtureOfExperts(config, group_size=group_size, plan=plan)
            if config.is_moe_layer(layer)
            else SwiGLU(config.hidden_size, config.intermediate_size // plan.tp)
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: The block before's output, (num_tokens, hidden_size); of several ranks, each one's part of it.
            residual: Sum of all blocks before that; None in the first layer.

        Returns:
            This layer's output, not yet added, and the sum before it.
        """
        x, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm(x, residual)
        x = self.self_attn(x, rope, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x, batch.num_tokens) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(x)
        return x, residual


class FastStack(Protocol):
    """DeepseekV3Model.forward on other kernels, with weights derived from its parameters: see fast_decoder.py."""

    def __call__(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor: ...
    def reserve(self, num_tokens: int) -> None: ...
    def refresh_derived(self) -> None: ...


class DeepseekV3Model(nn.Module):
    """Token embedding, decoder layers, final norm."""

    def __init__(
        self,
        config: TextConfig,
        *,
        packed_layers: Collection[int],
        group_size: int | None,
        plan: ParallelPlan = WHOLE,
    ) -> None:
        super().__init__()
        self.plan = plan
        add_norm = AllReduceAddRMSNorm(plan.group, fuse=False) if plan.tp > 1 else None
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, plan)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config, layer, group_size=group_size if layer in packed_layers else None, plan=plan, add_norm=add_norm
            )
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, add_norm)
        self.rope = TextRope(config)
        # The same function on other kernels: backend.use_backend sets it, visibly. It registers nothing.
        self.fast: FastStack | None = None
        self.register_load_state_dict_post_hook(lambda module, keys: self.refresh_derived())

    def refresh_derived(self) -> None:
        """Rebuilds what the fast kernels derive from the parameters, in place; every load calls it."""
        if self.fast is not None:
            self.fast.refresh_derived()

    def forward(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        """
        Args:
            inputs_embeds: (num_tokens, hidden_size).

        Returns:
            Hidden states after the final norm, (num_tokens, hidden_size).
        """
        if self.fast is not None:
            return self.fast(inputs_embeds, batch)
        rope = self.rope(batch.positions, inputs_embeds.dtype)
        x, residual = inputs_embeds, None
        for layer in self.layers:
            x, residual = layer(x, residual, rope, batch)
        return self.norm(x, residual)[0]


class DeepseekV3ForCausalLM(nn.Module):
    """The decoder with its LM head. Its own attribute `model` is the decoder: the layers are at `.model.layers`."""

    def __init__(
        self, config: KimiK25Config, *, packed_layers: Collection[int], plan: ParallelPlan = WHOLE
    ) -> None:
        """
        Args:
            packed_layers: MoE layers whose routed experts are int4.
            plan: What of the decoder is on this rank.
        """
        super().__init__()
        self.plan = plan
        text, quantization = config.text_config, config.quantization_config
        self.model = DeepseekV3Model(
            text, packed_layers=packed_layers, group_size=quantization.group_size if quantization else None, plan=plan
        )
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size // plan.tp, bias=False)

    def forward(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states, (num_tokens, hidden_size); see DeepseekV3Model."""
        return self.model(inputs_embeds, batch)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden_size) to (..., vocab_size) float32, on every rank."""
        logits = self.lm_head(hidden_states)
        if self.plan.tp > 1:
            logits = self.plan.all_gather(logits).movedim(0, -2).flatten(-2)
        return logits.float()
