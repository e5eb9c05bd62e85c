"""The projector: merged patches to the decoder's width."""

from __future__ import annotations

from torch import Tensor, nn

from .config import VisionConfig


class PatchMergerMLP(nn.Module):
    """Normalises each patch, joins those of one token, then two linear layers."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        joined = config.mm_hidden_size * config.patches_per_token
        self.pre_norm = nn.LayerNorm(config.mm_hidden_size, config.projector_ln_eps)
        self.proj = nn.Sequential(nn.Linear(joined, joined), nn.GELU(), nn.Linear(joined, config.text_hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """(num_media_tokens, patches_per_token, mm_hidden_size) to (num_media_tokens, text_hidden_size)."""
        return self.proj(self.pre_norm(x).flatten(1))
