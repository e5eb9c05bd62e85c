"""RMSNorm, alone or after a residual addition. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in float32, rounded to x's dtype before the weight, as the published model rounds.

    Args:
        x: (..., hidden_size).
        weight: (hidden_size,).
    """
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a weight.

    Args:
        add_norm: Adds and normalises x that is each rank's part of a sum, an AllReduceAddRMSNorm; None: x is whole.
    """

    def __init__(self, hidden_size: int, eps: float, add_norm: AddNorm | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.add_norm = add_norm

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises x, or x + residual.

        Args:
            x: (num_tokens, hidden_size).
            residual: Same shape; the sum of all earlier blocks.

        Returns:
            The normalised x; with a residual, that of the sum, and the sum.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        if self.add_norm is not None:
            return self.add_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return rms_norm(residual, self.weight, self.eps), residual
