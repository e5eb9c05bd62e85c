"""Rotary position embedding over interleaved pairs, with YaRN's frequencies for text. Knows no attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config import TextConfig, YarnScaling
from .dtype import keeping_dtype


def yarn_inv_freq(dim: int, theta: float, scaling: YarnScaling | None) -> Tensor:
    """Inverse frequencies (dim / 2,), float32.

    Source: YaRN, arXiv 2309.00071, in DeepSeek-V3's form: dimensions that turn more than beta_fast times within the
    original context keep their frequency, those under beta_slow are stretched by factor, between them a ramp.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    extrapolated = 1.0 / theta**exponents
    if scaling is None:
        return extrapolated

    def dimension(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return extrapolated / scaling.factor * ramp + extrapolated * (1 - ramp)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of the last dimension.

    Args:
        x: (num_tokens, ..., dim).
        cos, sin: (num_tokens, dim / 2), in x's dtype.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    shape = (cos.shape[0], *(1 for _ in range(x.dim() - 2)), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class TextRope(nn.Module):
    """cos and sin of every position, once a step for all layers."""

    inv_freq: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.qk_rope_head_dim // 2), persistent=False)
        self.refresh_derived()

    def refresh_derived(self) -> None:
        """Recomputes the frequencies in place; a model built on the meta device needs it once it has storage."""
        c = self.config
        self.inv_freq.copy_(yarn_inv_freq(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TextRope:
        return super()._apply(keeping_dtype(fn, self.inv_freq), recurse)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (num_tokens, qk_rope_head_dim / 2), computed in float32 and rounded to dtype."""
        angles = positions.float()[:, None] * self.inv_freq
        factor = self.config.rope_scaling.cos_sin_factor if self.config.rope_scaling else 1.0
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
