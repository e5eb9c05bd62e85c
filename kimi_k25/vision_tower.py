"""MoonViT3d: a vision transformer over the patches of images and short video chunks, packed. Knows no text.

Patches lie in raster order, frame after frame, item after item. Attention is bidirectional over a whole item (all its
frames) and never crosses items.
Source: Moonshot's modeling_kimi_k25; Kimi-VL, arXiv 2504.07491.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import VisionConfig
from .layers.packed import packed_attention
from .layers.rope import rotate_pairs

ROPE_THETA = 10000.0
LAYER_NORM_EPS = 1e-5

Grid = tuple[int, int, int]


def rows_by_grid(grids: list[Grid], lengths: list[int]) -> dict[Grid, Tensor]:
    """Where the items of each grid lie in a packed tensor, so that equal ones are computed together.

    A batch has far fewer grids than items.

    Args:
        lengths: Rows of each item.

    Returns:
        Row numbers, (number of items, rows of one), on the CPU.
    """
    starts: dict[Grid, list[int]] = {}
    length_of = dict(zip(grids, lengths, strict=True))
    for grid, start in zip(grids, itertools.accumulate([0, *lengths[:-1]]), strict=True):
        starts.setdefault(grid, []).append(start)
    return {grid: torch.tensor(s)[:, None] + torch.arange(length_of[grid]) for grid, s in starts.items()}


def in_row_order(parts: list[Tensor], rows: dict[Grid, Tensor]) -> Tensor:
    """Puts rows that were computed grid by grid, one part a grid, back into their packed order."""
    packed = torch.cat(parts)
    return torch.empty_like(packed).index_copy_(0, row_numbers(rows, packed.device), packed)


def row_numbers(rows: dict[Grid, Tensor], device: torch.device) -> Tensor:
    """Every row number, grid by grid, on a device; the host does not wait for the copy."""
    return torch.cat([r.flatten() for r in rows.values()]).to(device, non_blocking=True)


class VisionPositionEmbedding(nn.Module):
    """A learned table of rows and columns, resampled to each item's grid; items of several frames add sinusoids."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        height, width = config.init_pos_emb_height, config.init_pos_emb_width
        self.max_frames = config.init_pos_emb_time
        self.weight = nn.Parameter(torch.empty(height, width, config.vt_hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def resampled(self, height: int, width: int) -> Tensor:
        """The table at another size, (height * width, vt_hidden_size)."""
        if self.weight.shape[:2] == (height, width):
            return self.weight.flatten(0, 1)
        table = F.interpolate(self.weight.permute(2, 0, 1)[None], size=(height, width), mode="bicubic")[0]
        return table.flatten(1).T

    def frame_sinusoids(self, frames: int) -> Tensor:
        """(frames, 1, vt_hidden_size): sines, then cosines."""
        dim = self.weight.shape[-1]
        exponents = torch.arange(dim // 2, dtype=torch.float32, device=self.weight.device) / (dim / 2)
        angles = torch.arange(frames, device=self.weight.device)[:, None] / 10000.0**exponents
        return torch.cat((angles.sin(), angles.cos()), -1).to(self.weight.dtype)[:, None]

    def forward(self, grids: list[Grid]) -> Tensor:
        """Every patch's position, (num_patches, vt_hidden_size).

        Raises:
            ValueError: An item has more frames than the model was made for.
        """
        tables = {size: self.resampled(*size) for size in {grid[1:] for grid in grids}}
        rows = rows_by_grid(grids, [t * h * w for t, h, w in grids])
        parts = []
        for (frames, height, width), items in rows.items():
            table = tables[height, width]
            if frames > self.max_frames:
                raise ValueError(f"a media item has {frames} frames; the model takes at most {self.max_frames}")
            if frames > 1:  # An image gets no frame sinusoids at all, not those of frame 0.
                table = (table + self.frame_sinusoids(frames)).flatten(0, 1)
            parts.append(table.expand(len(items), -1, -1).flatten(0, 1))
        return in_row_order(parts, rows)


class PatchEmbedding(nn.Module):
    """Pixels of each patch to a vector, plus its position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.vt_hidden_size, config.patch_size, config.patch_size)
        self.pos_emb = VisionPositionEmbedding(config)

    def forward(self, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
        """(num_patches, 3, patch_size, patch_size) to (num_patches, vt_hidden_size)."""
        x = F.linear(pixel_values.flatten(1), self.proj.weight.flatten(1), self.proj.bias)
        return x + self.pos_emb(grids)


def vision_rope(grids: list[Grid], head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each (num_patches, head_dim / 2) float32: pairs turn by column and row in turn, frames alike."""
    freqs = 1.0 / ROPE_THETA ** (torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim)
    angles = {}
    for height, width in {grid[1:] for grid in grids}:
        rows, columns = torch.meshgrid(
            torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
        )
        pairs = torch.stack((columns.flatten()[:, None] * freqs, rows.flatten()[:, None] * freqs), -1)
        angles[height, width] = pairs.flatten(1)
    packed = torch.cat([angles[grid[1:]] for grid in grids for _ in range(grid[0])])
    return packed.cos(), packed.sin()


class VisionMLP(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(num_patches, vt_hidden_size) to the same."""
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim = config.vt_hidden_size
        self.head_dim = config.head_dim
        self.norm0 = nn.LayerNorm(dim, LAYER_NORM_EPS)
        self.norm1 = nn.LayerNorm(dim, LAYER_NORM_EPS)
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(dim, dim)
        self.mlp = VisionMLP(config)

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Bidirectional within each item; arguments and result are those of forward, x normalised."""
        q, k, v = self.wqkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q, k = (rotate_pairs(t.float(), *rope).to(t.dtype) for t in (q, k))
        out = packed_attention(q, k, v, cu_seqlens, max_seqlen, causal=False, scale=self.head_dim**-0.5)
        return self.wo(out.flatten(1))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """
        Args:
            x: (num_patches, vt_hidden_size).
            rope: cos and sin, each (num_patches, head_dim / 2) float32.
            cu_seqlens: First patch of each item, then num_patches, (num_media + 1,) int32.
            max_seqlen: Patches of the largest item.

        Returns:
            (num_patches, vt_hidden_size).
        """
        x = x + self.attention(self.norm0(x), rope, cu_seqlens, max_seqlen)
        return x + self.mlp(self.norm1(x))


class FastBlocks(Protocol):
    """VisionEncoder.forward on other kernels: see fast_vision.py."""

    def __call__(self, x: Tensor, grids: list[Grid]) -> Tensor: ...


class VisionEncoder(nn.Module):
    """The blocks and the norm behind them.

    Attributes:
        fast: What computes them instead; None: the modules themselves.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fast: FastBlocks | None = None
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.vt_hidden_size, LAYER_NORM_EPS)

    def forward(self, x: Tensor, grids: list[Grid]) -> Tensor:
        """(num_patches, vt_hidden_size) to the same."""
        if self.fast is not None:
            return self.fast(x, grids)
        lengths = torch.tensor([0, *(t * h * w for t, h, w in grids)], dtype=torch.int32)
        cu_seqlens, max_seqlen = lengths.cumsum(0, dtype=torch.int32).to(x.device), int(lengths.max())
        rope = vision_rope(grids, self.head_dim, x.device)
        for block in self.blocks:
            x = block(x, rope, cu_seqlens, max_seqlen)
        return self.final_layernorm(x)


def merge_patches(x: Tensor, grids: list[Grid], merge: tuple[int, int]) -> Tensor:
    """Averages each item's frames and brings together the patches that form one token.

    Args:
        x: (num_patches, dim).
        merge: Rows and columns of patches to a token.

    Returns:
        (num_media_tokens, merge[0] * merge[1], dim).
    """
    rows = rows_by_grid(grids, [t * h * w for t, h, w in grids])
    grouped = x.index_select(0, row_numbers(rows, x.device))
    parts = []
    for (t, h, w), patches in zip(rows, grouped.split([r.numel() for r in rows.values()]), strict=True):
        windows = patches.unflatten(0, (-1, t, h // merge[0], merge[0], w // merge[1], merge[1])).mean(1)
        parts.append(windows.transpose(2, 3).flatten(3, 4).flatten(0, 2))
    return in_row_order(parts, rows_by_grid(grids, [h * w // (merge[0] * merge[1]) for _, h, w in grids]))


class MoonViT3d(nn.Module):
    """The vision tower, up to the merged but not yet projected features."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.encoder = VisionEncoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Features of every media token, not yet projected. Syncs with the host once, for the grids.

        Args:
            pixel_values: (num_patches, 3, patch_size, patch_size), any float dtype.
            grid_thws: Frames, rows and columns of patches of each media item, (num_media, 3), integers.

        Returns:
            (num_media_tokens, patches_per_token, vt_hidden_size).

        Raises:
            ValueError: The grids do not describe these patches, or do not fit the merge window.
        """
        grids = self.checked_grids(pixel_values, grid_thws)
        x = self.patch_embed(pixel_values.to(self.patch_embed.proj.weight.dtype), grids)
        return merge_patches(self.encoder(x, grids), grids, self.config.merge_kernel_size)

    def checked_grids(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Grid]:
        """The grids on the host; arguments and errors are those of forward."""
        patch = (3, self.config.patch_size, self.config.patch_size)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != patch:
            expected = ", ".join(map(str, patch))
            raise ValueError(f"pixel_values has shape {tuple(pixel_values.shape)}; expected (num_patches, {expected})")
        if grid_thws.dim() != 2 or grid_thws.shape[1] != 3 or not grid_thws.shape[0]:
            raise ValueError(f"grid_thws has shape {tuple(grid_thws.shape)}; expected (num_media, 3)")
        grids = [(t, h, w) for t, h, w in grid_thws.tolist()]  # The one host sync: shapes follow from it.
        described = sum(t * h * w for t, h, w in grids)
        if described != pixel_values.shape[0]:
            listed = [list(grid) for grid in grids]
            raise ValueError(
                f"pixel_values has {pixel_values.shape[0]} patches but grid_thws {listed} describes {described}."
            )
        rows, columns = self.config.merge_kernel_size
        for t, h, w in grids:
            if min(t, h, w) < 1 or h % rows or w % columns:
                raise ValueError(f"grid_thws has {[t, h, w]}; expected positive multiples of {[1, rows, columns]}")
        return grids
