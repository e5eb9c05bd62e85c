"""The model's two stacks of blocks as CUDA graphs, for training batches of one shape. Knows no optimizer and no data.

A step of this small model launches some two thousand kernels; launching them takes longer than running them. The blocks
stay the model's own modules: they are recorded once, forward and backward, and replayed. What lies around them is
gathered by row number, so that the host never waits for the device and launches little. In eval mode the model runs as
if this file did not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import vision_tower
from ..layers import mla
from ..layers.attention_batch import AttentionBatch
from ..model import KimiK25ForConditionalGeneration
from .media_rows import GridPlaces, Layout
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


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """An AttentionBatch as far as the plain layers read one, without lengths: a recording serves steps of any.

    Attributes:
        max_seqlen: Most tokens that a sequence may have, of whatever step.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    num_query_tokens: int
    num_tokens: None = None
    cache: None = None


class DecoderLayers(nn.Module):
    """The decoder's layers and its final norm: (num_tokens, hidden_size) to the same, likewise."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, max_seqlen: int) -> None:
        super().__init__()
        self.layers, self.norm, self.max_seqlen = layers, norm, max_seqlen

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        batch = RecordedBatch(cu_seqlens, self.max_seqlen, num_query_tokens=x.shape[0])
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
    with attention_by(varlen_attention):
        torch.cuda.make_graphed_callables((vision, decoder), sample_args)
    install(model, vision, decoder)


@contextmanager
def attention_by(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Both stacks attend by another function than packed_attention; a recording made meanwhile keeps it."""
    plain = mla.packed_attention
    vision_tower.packed_attention = mla.packed_attention = attention
    try:
        yield
    finally:
        vision_tower.packed_attention = mla.packed_attention = plain


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool, scale: float
) -> Tensor:
    """packed_attention by PyTorch's flash kernel for sequences of many lengths, which computes no padding.

    Needs a GPU and half precision. A training batch padded to its longest sequence would be four times as large.
    """
    v_head_dim = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - v_head_dim))  # The kernel knows one width of heads.
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False, scale=scale)[0]
    return out[..., :v_head_dim]


def install(model: KimiK25ForConditionalGeneration, vision_blocks: Stack, decoder_layers: Stack) -> None:
    """Lets the model run these stacks in training mode, and all around them without waiting for the device."""
    tower, encoder, decoder = model.vision_tower, model.vision_tower.encoder, model.language_model.model
    plain_tower, plain_decoder, plain_embed = tower.forward, decoder.forward, model.embed
    places = GridPlaces(tower.patch_embed.pos_emb, encoder.head_dim)

    def see(pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        if not tower.training:
            return plain_tower(pixel_values, grid_thws)
        layout = Layout(grid_thws.numpy(), places.first_row)
        device = pixel_values.device
        place, frame, patch, token = _to_device(
            np.concatenate((layout.place, layout.frame, layout.patch, layout.token)), device
        ).split([len(layout.place), len(layout.frame), len(layout.patch), len(layout.token)])
        weight = tower.patch_embed.proj.weight
        x = F.linear(pixel_values.flatten(1), weight.flatten(1), tower.patch_embed.proj.bias)
        x = x + places.embedding().index_select(0, place).to(x.dtype) + places.sinusoids.index_select(0, frame)
        cos, sin = places.angles.index_select(0, place).chunk(2, -1)
        x = vision_blocks(x, cos, sin, _to_device(layout.cu_seqlens, device))
        windows = encoder.final_layernorm(x).index_select(0, patch).unflatten(0, (-1, 4))
        if layout.num_tokens == len(layout.token):  # No videos.
            return windows
        share = _to_device(layout.share, device)[:, None, None]
        mean = torch.zeros(layout.num_tokens, *windows.shape[1:], device=device)
        return mean.index_add(0, token, windows.float() * share).to(windows.dtype)

    def embed(
        input_ids: Tensor, pixel_values: Tensor | None = None, grid_thws: Tensor | None = None
    ) -> Tensor:
        if not model.training or pixel_values is None or grid_thws is None:
            return plain_embed(input_ids, pixel_values, grid_thws)
        embeds, features = decoder.embed_tokens(input_ids), model.encode_media(pixel_values, grid_thws)
        is_media = input_ids == model.config.media_placeholder_token_id  # Not counted: that would wait.
        place = is_media.cumsum(0).sub(1).clamp(min=0)
        return torch.where(is_media[:, None], features.index_select(0, place), embeds)

    def decode(inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        if not decoder.training:
            return plain_decoder(inputs_embeds, batch)
        cos, sin = decoder.rope(batch.positions, inputs_embeds.dtype)
        return decoder_layers(inputs_embeds, cos, sin, batch.cu_seqlens)

    tower.forward, decoder.forward, model.embed = see, decode, embed  # type: ignore[method-assign]


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
