"""What others need for the same share: vLLM, measured by hand on the same kind of card, and transformers' layers here.

Knows nothing of our model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from harness import free_memory, measure, reason
from published import TEXT
from torch import Tensor

# vLLM 0.22.1 on an H200, the same shapes: Marlin int4 experts, FlashAttention 3, torch.compile, piecewise and full
# graphs. Its times include its scheduler, about 2 ms. Tokens (prefill) or sequences (decode) -> ms eager, with graphs.
VLLM: dict[str, dict[int, tuple[float, float]]] = {
    "prefill": {
        64: (104.0, 29.6), 256: (104.1, 40.8), 1024: (94.0, 68.6), 2048: (108.8, 104.3), 4096: (216.5, 212.5),
    },
    "decode": {1: (106.0, 7.05), 8: (99.0, 10.8)},
}  # fmt: skip


class TransformersLayers:
    """A few MoE layers of transformers' DeepseekV3Model, experts in bfloat16 since it has no int4 ones.

    Args:
        sizes: Of text_config, of one rank's share.
    """

    def __init__(self, sizes: dict[str, Any], layers: int, device: torch.device) -> None:
        from transformers import DeepseekV3Config, DeepseekV3Model

        dropped = ("quantization_config", "rope_scaling")
        text = {key: value for key, value in (TEXT | sizes).items() if key not in dropped}
        text |= {
            "num_hidden_layers": layers, "first_k_dense_replace": 0, "vocab_size": 1024, "n_group": 1, "topk_group": 1,
            "num_key_value_heads": text["num_attention_heads"], "norm_topk_prob": True, "pad_token_id": None,
        }  # fmt: skip
        config = DeepseekV3Config(**text, dtype=torch.bfloat16, attn_implementation="sdpa")
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        with device:
            self.model = DeepseekV3Model._from_config(config, dtype=torch.bfloat16).eval()
        self.config, self.layers, self.device = config, layers, device

    def inputs(self, seqs: int, tokens: int) -> Tensor:
        """Random embeddings, (seqs, tokens, hidden_size)."""
        shape = (seqs, tokens, self.config.hidden_size)
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def prefill(self, tokens: int) -> Callable[[], Tensor]:
        """One new sequence, its keys and values kept."""
        embeds = self.inputs(1, tokens)
        return lambda: self.model(inputs_embeds=embeds, use_cache=True).last_hidden_state

    def decode(self, seqs: int, context: int) -> Callable[[], Tensor]:
        """One token of each sequence behind a context of random tokens."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        parameters = inspect.signature(type(self.model).forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"  # The older name of the two.
        self.model(inputs_embeds=self.inputs(seqs, context - 1), use_cache=True, **{name: cache})
        embeds = self.inputs(seqs, 1)

        def call() -> Tensor:
            out: Tensor = self.model(inputs_embeds=embeds, **{name: cache}).last_hidden_state
            cache.crop(-1)
            return out

        return call


@torch.inference_mode()
def transformers_rows(
    sizes: dict[str, Any], layers: int, all_layers: int, tokens: Sequence[int], batches: Sequence[int], context: int,
    device: torch.device, *, rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows as the share's own, times of `layers` layers scaled to `all_layers`; one that fails says why."""
    peer = TransformersLayers(sizes, layers, device)
    rows = []
    for phase, size in [("prefill", n) for n in tokens] + [("decode", n) for n in batches]:
        row: dict[str, Any] = {"phase": phase, "tokens": size, "batch": size if phase == "decode" else 1}
        try:
            call = peer.prefill(size) if phase == "prefill" else peer.decode(size, context)
            out = call()
            if not out.isfinite().all():
                raise ValueError("its hidden states are not finite")
            timing = measure(call, rounds=rounds)
        except Exception as e:
            rows.append(row | {"skipped": reason(e)})
            continue
        scaled = {key: round(value * all_layers / layers, 3) for key, value in asdict(timing).items()}
        rows.append(row | scaled | {"measured_ms": timing.median_ms, "measured_layers": layers})
    del peer
    free_memory()
    return rows
