"""The vision encoder on fused kernels: VisionEncoder.forward, block for block. Knows no pixels and no files.

It holds the plain modules, whose parameters it reads, and registers and derives nothing; vision_tower.py defines the
result. A block is eight kernels: two norms with the addition before them, four products (GELU is the epilogue of the
wide one), rotation and attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers.vision_kernels import add_layer_norm, item_attention, item_tiles, rotate_queries_and_keys
from .vision_tower import Grid, VisionBlock, VisionEncoder, vision_rope

__all__ = ["FastVisionEncoder", "linear_gelu"]

Attention = Callable[[Tensor, Tensor, int], Tensor]


def linear_gelu(x: Tensor, layer: nn.Linear) -> Tensor:
    """GELU, approximated by tanh, of a linear layer; on CUDA inside the product, before its result is rounded."""
    if not x.is_cuda:
        return F.gelu(layer(x), approximate="tanh")
    return torch.ops.aten._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)


class FastVisionEncoder:
    """What VisionEncoder calls instead of its own blocks.

    Args:
        encoder: A VisionEncoder, on the device and in the dtype it will run in.
        attention: Of (qkv, item_tiles, head_dim), as item_attention has it.
    """

    def __init__(self, encoder: VisionEncoder, attention: Attention = item_attention) -> None:
        self.encoder = encoder
        self._attention = attention

    def __call__(self, x: Tensor, grids: list[Grid]) -> Tensor:
        """Arguments and result are those of VisionEncoder.forward."""
        tiles = item_tiles([t * h * w for t, h, w in grids], x.device)
        return self.blocks(x, vision_rope(grids, self.encoder.head_dim, x.device), tiles)

    def blocks(self, x: Tensor, rope: tuple[Tensor, Tensor], tiles: Tensor) -> Tensor:
        """What of the call a CUDA graph can hold.

        Args:
            x: (num_patches, vt_hidden_size).
            rope: From vision_rope.
            tiles: From item_tiles.
        """
        residual, added = x.clone(), None  # The norms below add to it in place.
        for block in self.encoder.blocks:
            assert isinstance(block, VisionBlock)
            qkv = block.wqkv(_add_norm(residual, added, block.norm0))
            rotate_queries_and_keys(qkv, *rope)
            added = block.wo(self._attention(qkv, tiles, block.head_dim))
            added = block.mlp.fc1(linear_gelu(_add_norm(residual, added, block.norm1), block.mlp.fc0))
        return _add_norm(residual, added, self.encoder.final_layernorm)


def _add_norm(residual: Tensor, x: Tensor | None, norm: nn.LayerNorm) -> Tensor:
    return add_layer_norm(residual, x, norm.weight, norm.bias, norm.eps)
