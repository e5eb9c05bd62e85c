"""Triton kernels of the vision tower: addition and LayerNorm, rotation in place, and attention over whole items.

Each is a torch operator; vision_tower.py defines what they compute. Sums and rotations are float32, results rounded
where the plain code rounds. Knows no configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operators import kernel_op

__all__ = ["QUERIES", "add_layer_norm", "item_attention", "item_tiles", "rotate_queries_and_keys"]

QUERIES = 128  # Of one program of item_attention.
ROTATED_ROWS, ROTATED_COLUMNS = 8, 256  # Of one program.


@triton.jit
def _add_layer_norm_kernel(residual, x, weight, bias, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                           ADDS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    dtype = out.dtype.element_ty
    total = tl.load(residual + row + i, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (total + tl.load(x + row + i, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + row + i, rounded, mask=mask)
        total = rounded.to(tl.float32)
    centred = tl.where(mask, total - tl.sum(total, 0) / SIZE, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + i, (normed * w + b).to(dtype), mask=mask)


@kernel_op(mutates_args=("residual",))
def add_layer_norm(residual: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """residual += x, in place, then its LayerNorm.

    Args:
        residual: (num_rows, dim), contiguous.
        x: Same shape; None adds nothing.
        weight, bias: (dim,).
    """
    num_rows, dim = residual.shape
    assert residual.is_contiguous() and (x is None or x.is_contiguous())
    out = torch.empty_like(residual)
    _add_layer_norm_kernel[(num_rows,)](
        residual, residual if x is None else x, weight, bias, out, eps,
        SIZE=dim, BLOCK=triton.next_power_of_2(dim), ADDS=x is not None,
    )  # fmt: skip
    return out


@add_layer_norm.register_fake
def _(residual: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(residual)


@triton.jit
def _rotate_kernel(qkv, cos, sin, num_rows, row_stride, WIDTH: tl.constexpr, HALF: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    pair = (tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2))[None, :]
    place, mask = qkv + row * row_stride + column, (row < num_rows) & (column < WIDTH)
    angle, angle_mask = row * HALF + pair % HALF, (row < num_rows) & (2 * pair < WIDTH)
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    c, s = tl.load(cos + angle, mask=angle_mask, other=0.0), tl.load(sin + angle, mask=angle_mask, other=0.0)
    turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (ROWS, COLUMNS))
    tl.store(place, turned.to(qkv.dtype.element_ty), mask=mask)


@kernel_op(mutates_args=("qkv",))
def rotate_queries_and_keys(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """rotate_pairs on queries and keys, in place; the values stay.

    Args:
        qkv: (num_rows, 3 * num_heads * head_dim), contiguous: queries, keys, values.
        cos, sin: (num_rows, head_dim / 2) float32.
    """
    num_rows, size = qkv.shape
    assert qkv.is_contiguous() and cos.dtype == torch.float32 and size % (6 * cos.shape[1]) == 0
    width = size // 3 * 2
    grid = (triton.cdiv(num_rows, ROTATED_ROWS), triton.cdiv(width, ROTATED_COLUMNS))
    _rotate_kernel[grid](
        qkv, cos, sin, num_rows, size, WIDTH=width, HALF=cos.shape[1], ROWS=ROTATED_ROWS, COLUMNS=ROTATED_COLUMNS
    )


@rotate_queries_and_keys.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


def item_tiles(lengths: Sequence[int], device: torch.device, queries: int = QUERIES) -> Tensor:
    """What each program of item_attention computes: first query, and first row and end of its item.

    Args:
        lengths: Rows of each item, packed in this order.
        queries: Of one program.

    Returns:
        (num_tiles, 3) int32; the longest items first, so that no long one is left for the end.
    """
    bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    longest_first = sorted(bounds, key=lambda item: item[0] - item[1])
    tiles = [(start, begin, end) for begin, end in longest_first for start in range(begin, end, queries)]
    return torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True)


@triton.jit
def _columns(place, columns, rows_inside, D: tl.constexpr, HAS_END: tl.constexpr, WIDEN: tl.constexpr):
    """A head's columns of some rows, zero outside of both."""
    if HAS_END:
        x = tl.load(place + columns, mask=rows_inside & (columns < D), other=0.0)
    else:
        x = tl.load(place + columns, mask=columns < D, other=0.0)
    if WIDEN:  # Triton's interpreter has no product of bfloat16.
        x = x.to(tl.float32)
    return x


@triton.jit
def _attend(
    q1, q2, keys, row_stride, dim, first, end, d1, d2, largest, total, out1, out2, scale,
    D: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr, HAS_END: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One block of keys and values, in the running softmax; HAS_END: the item ends in it."""
    row = first + tl.arange(0, BLOCK)
    place, inside = keys + row.to(tl.int64)[:, None] * row_stride, (row < end)[:, None]
    scores = tl.dot(q1, _columns(place, d1, inside, D, HAS_END, WIDEN).T, input_precision="ieee")
    if D > D1:
        scores = tl.dot(q2, _columns(place, d2, inside, D, HAS_END, WIDEN).T, scores, input_precision="ieee")
    if HAS_END:
        scores = tl.where((row < end)[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    shrunk = tl.exp2(largest - new_largest)
    total = total * shrunk + tl.sum(weights, 1)
    weights = weights.to(keys.dtype.element_ty).to(q1.dtype)
    v1 = _columns(place + dim, d1, inside, D, HAS_END, WIDEN)
    out1 = tl.dot(weights, v1, out1 * shrunk[:, None], input_precision="ieee")
    if D > D1:
        v2 = _columns(place + dim, d2, inside, D, HAS_END, WIDEN)
        out2 = tl.dot(weights, v2, out2 * shrunk[:, None], input_precision="ieee")
    return new_largest, total, out1, out2


@triton.jit
def _item_attention_kernel(
    qkv, tiles, out, row_stride, dim, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1) * D
    start, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = (start + tl.arange(0, QUERIES))[:, None].to(tl.int64)
    d1, d2 = tl.arange(0, D1)[None, :], D1 + tl.arange(0, D2)[None, :]
    place = qkv + row * row_stride + head
    q1, q2 = _columns(place, d1, row < end, D, True, WIDEN), _columns(place, d2, row < end, D, True, WIDEN)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out1, out2 = tl.zeros((QUERIES, D1), tl.float32), tl.zeros((QUERIES, D2), tl.float32)
    keys = qkv + dim + head
    whole_end = begin + (end - begin) // BLOCK * BLOCK
    for first in range(begin, whole_end, BLOCK):
        largest, total, out1, out2 = _attend(
            q1, q2, keys, row_stride, dim, first, end, d1, d2, largest, total, out1, out2, scale, D, D1, BLOCK,
            False, WIDEN,
        )
    if whole_end < end:
        largest, total, out1, out2 = _attend(
            q1, q2, keys, row_stride, dim, whole_end, end, d1, d2, largest, total, out1, out2, scale, D, D1,
            BLOCK, True, WIDEN,
        )
    dtype = out.dtype.element_ty
    target = out + row * dim + head
    tl.store(target + d1, (out1 / total[:, None]).to(dtype), mask=(row < end) & (d1 < D))
    if D > D1:
        tl.store(target + d2, (out2 / total[:, None]).to(dtype), mask=(row < end) & (d2 < D))


@kernel_op()
def item_attention(
    qkv: Tensor, tiles: Tensor, head_dim: int, queries: int = QUERIES, block: int = 64, num_warps: int = 8,
    num_stages: int = 3, max_registers: int | None = 128,
) -> Tensor:  # fmt: skip
    """Bidirectional attention in which no item sees another, in one launch.

    A head's columns go to the tensor cores as the largest power of two in them and the rest, at least 16: 72 as
    64 + 16, a tenth of the products for nothing, where libraries pad to 96 or 128.

    Args:
        qkv: (num_rows, 3 * num_heads * head_dim), contiguous: rotated queries, rotated keys, values.
        tiles: From item_tiles, for as many queries.
        block: Keys at a time; with num_warps, num_stages and max_registers of a thread, the kernel's tuning. 128
            registers let two programs of eight warps share a multiprocessor, so that one's exponentials run beside the
            other's products.

    Returns:
        (num_rows, num_heads * head_dim).
    """
    num_rows, size = qkv.shape
    dim = size // 3
    assert qkv.is_contiguous()
    first = max(16, triton.next_power_of_2(head_dim + 1) // 2)
    rest = max(16, triton.next_power_of_2(head_dim - first)) if head_dim > first else 16
    out = qkv.new_empty(num_rows, dim)
    _item_attention_kernel[(tiles.shape[0], dim // head_dim)](
        qkv, tiles, out, size, dim, head_dim**-0.5 * 1.4426950408889634,  # exp(x) is exp2(x * log2(e)).
        D=head_dim, D1=first, D2=rest, QUERIES=queries, BLOCK=block,
        WIDEN=not qkv.is_cuda, num_warps=num_warps, num_stages=num_stages, maxnreg=max_registers,
    )  # fmt: skip
    return out


@item_attention.register_fake
def _(
    qkv: Tensor, tiles: Tensor, head_dim: int, queries: int = QUERIES, block: int = 64, num_warps: int = 8,
    num_stages: int = 3, max_registers: int | None = 128,
) -> Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
