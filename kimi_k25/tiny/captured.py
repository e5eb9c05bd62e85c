"""The model's two stacks of blocks as CUDA graphs, for training batches of one shape. Knows no optimizer and no data.

A step of this small model launches some two thousand kernels; launching them takes longer than running them. The blocks
stay the model's own modules: they are recorded once, forward and backward, and replayed. In eval mode the model runs as
if this file did not exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.kv_cache import AttentionBatch
from ..model import KimiK25ForConditionalGeneration
from ..vision_tower import Grid, VisionPositionEmbedding, in_row_order, rows_by_grid, vision_rope
from .packing import BatchShape

Stack = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class VisionBlocks(nn.Module):
    """The vision tower's blocks: (num_patches, vt_hidden_size) to the same, with cos, sin and cu_seqlens as tensors."""

    def __init__(self, blocks: nn.ModuleList, max_seqlen: int) -> None:
        super().__init__()
        self.blocks, self.max_seqlen = blocks, max_seqlen

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, (cos, sin), cu_seqlens, self.max_seqlen)
        return x


class DecoderLayers(nn.Module):
    """The decoder's layers and its final norm: (num_tokens, hidden_size) to the same, likewise."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, max_seqlen: int) -> None:
        super().__init__()
        self.layers, self.norm, self.max_seqlen = layers, norm, max_seqlen

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        batch = AttentionBatch(
            positions=cu_seqlens,  # Not read: the layers are given cos and sin.
            cu_seqlens=cu_seqlens,
            max_seqlen=self.max_seqlen,
            num_query_tokens=x.shape[0],
        )
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, (cos, sin), batch)
        return self.norm(x, residual)[0]


def stacks(model: KimiK25ForConditionalGeneration, shape: BatchShape) -> tuple[VisionBlocks, DecoderLayers]:
    """Both stacks, over the model's own modules."""
    decoder = model.language_model.model
    return (
        VisionBlocks(model.vision_tower.encoder.blocks, shape.max_seqlen),
        DecoderLayers(decoder.layers, decoder.norm, shape.max_seqlen),
    )


def capture(model: KimiK25ForConditionalGeneration, shape: BatchShape) -> None:
    """Records both stacks and lets the model's forward replay them in training mode.

    Runs them a few times on random input; forward hooks inside see that.
    """
    vision, decoder = stacks(model, shape)
    weight = model.language_model.lm_head.weight

    def samples(num_rows: int, num_seqs: int, width: int, angles: int, angle_dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = torch.randn(num_rows, width, device=weight.device, dtype=weight.dtype, requires_grad=True)
        cos, sin = torch.zeros(2, num_rows, angles, device=weight.device, dtype=angle_dtype)
        bounds = torch.arange(num_seqs + 1, device=weight.device) * num_rows // num_seqs
        return x, cos, sin, bounds.int()

    c, v = model.config.text_config, model.config.vision_config
    sample_args = (
        samples(shape.num_patches, shape.num_media, v.vt_hidden_size, v.head_dim // 2, torch.float32),
        samples(shape.num_tokens, shape.num_seqs, c.hidden_size, c.qk_rope_head_dim // 2, weight.dtype),
    )
    torch.cuda.make_graphed_callables((vision, decoder), sample_args)
    install(model, vision, decoder)


def install(model: KimiK25ForConditionalGeneration, vision_blocks: Stack, decoder_layers: Stack) -> None:
    """Lets the model run these stacks in training mode, with tables that depend on grids alone computed once."""
    encoder, decoder = model.vision_tower.encoder, model.language_model.model
    plain_encoder, plain_decoder = encoder.forward, decoder.forward
    angles: dict[tuple[int, int], Tensor] = {}  # cos | sin

    def encode(x: Tensor, grids: list[Grid]) -> Tensor:
        if not encoder.training:
            return plain_encoder(x, grids)
        for _, h, w in grids:
            if (h, w) not in angles:
                angles[h, w] = torch.cat(vision_rope([(1, h, w)], encoder.head_dim, x.device), -1)
        lengths = [t * h * w for t, h, w in grids]
        rows = rows_by_grid(grids, lengths)
        turns = [angles[h, w].repeat(t * len(items), 1) for (t, h, w), items in rows.items()]
        cos, sin = in_row_order(turns, rows).chunk(2, -1)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        x = vision_blocks(x, cos, sin, cu_seqlens.to(x.device, non_blocking=True))
        return encoder.final_layernorm(x)

    def decode(inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        if not decoder.training:
            return plain_decoder(inputs_embeds, batch)
        cos, sin = decoder.rope(batch.positions, inputs_embeds.dtype)
        return decoder_layers(inputs_embeds, cos, sin, batch.cu_seqlens)

    encoder.forward, decoder.forward = encode, decode  # type: ignore[method-assign]
    _resample_by_product(model.vision_tower.patch_embed.pos_emb)


def _resample_by_product(pos_emb: VisionPositionEmbedding) -> None:
    """Resampling the table is linear: as a matrix product its gradient takes 10 us a grid instead of 1 ms."""
    plain = pos_emb.resampled
    matrices: dict[tuple[int, int], Tensor] = {}

    def resampled(height: int, width: int) -> Tensor:
        table = pos_emb.weight
        if not pos_emb.training or table.shape[:2] == (height, width):
            return plain(height, width)
        if (height, width) not in matrices:
            basis = torch.eye(table[..., 0].numel(), device=table.device).view(1, -1, *table.shape[:2])
            matrices[height, width] = F.interpolate(basis, size=(height, width), mode="bicubic")[0].flatten(1).T
        return (matrices[height, width] @ table.flatten(0, 1).float()).to(table.dtype)

    pos_emb.resampled = resampled  # type: ignore[method-assign]
