"""SwiGLU, the feed-forward block of dense layers and shared experts. Knows no router."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of (..., 2 * intermediate_size), gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """down(silu(gate x) * (up x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, hidden_size) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
