"""The int4 experts' down product in Triton: a block's rows stay in shared memory while the weights stream by.

Libraries tile such a product like any other and read the rows again for every tile of columns; with 256 inputs a tile
is too short for that. SwiGLU is applied as the rows come in. layers/int4.py defines the result, layers/moe_kernels.py
the blocks. Knows no router.

In the checkpoint a word's eight values are neighbours along the input dimension. Here value 4 p + b of word 2 m + a is
input 32 (4 a + b) + 2 m + p: a tile of words is eight operand tiles, each a shift away and with one scale a row.
Suffixes as in moe_kernels.py, I inputs, W = I / 8 words a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin, launch_options
from .int4 import pack_int4, unpack_int4
from .operators import kernel_op

__all__ = ["GROUP_SIZE", "INPUTS", "down_rows", "rearrange"]

INPUTS, GROUP_SIZE = 256, 32  # One group for each of a word's eight values.
MAX_ROWS = 64  # Of a program: their activations and sums fill a multiprocessor's memory.


def rearrange(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The checkpoint's tensors in the kernel's order, with as many bytes.

    Args:
        packed: (..., H, W) int32, W = 32.
        scale: (..., H, 8) bfloat16.

    Returns:
        words (..., H, W) int32; scales (..., 4, H) int32, group g's bits below group g + 4's.
    """
    q = unpack_int4(packed).unflatten(-1, (2, 4, -1, 2)).permute(*range(packed.dim() - 1), -2, -4, -1, -3)
    low, high = scale.view(torch.int16).to(torch.int32).transpose(-1, -2).chunk(2, -2)
    return pack_int4(q.flatten(-4)), (high << 16 | low & 0xFFFF).contiguous()


@triton.constexpr_function
def _ptx(step: int) -> str:
    """Step's value of both halves of a word, times the row's scale: 128 + u is u or'd into bfloat16's mantissa.

    Operands are the two words of a pair, $1 and $2, and their row's two scales, $3.
    """
    return (
        "{.reg .b32 t, bias; mov.b32 bias, 0x43084308;"  # 136 = 128 + 8, twice
        f"shr.b32 t, ${1 + step // 4}, {4 * (step % 4)}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;"
        "sub.bf16x2 t, t, bias; mul.bf16x2 $0, t, $3;}"
    )


@triton.constexpr_function
def _ptx_twice(step: int) -> str:
    half = "0x1010" if step < 4 else "0x3232"
    return f"prmt.b32 $0, $1, $1, {half};"


@triton.jit
def _weights(words, scales, w, STEP: tl.constexpr, PTX: tl.constexpr):
    """Step's tile of the weight: (BLOCK_H, W) words and (BLOCK_H, 1) scales to (BLOCK_H, W)."""
    if PTX:
        # Takes words 2 m and 2 m + 1 from one thread, as the operand layout of a bfloat16 product has them.
        twice = tl.inline_asm_elementwise(_ptx_twice(STEP), "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1)
        weight = tl.inline_asm_elementwise(
            _ptx(STEP), "=r,r,r,r,r", [words, tl.broadcast_to(twice, words.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        own = tl.broadcast_to(((w & ~1) + STEP // 4)[None, :], words.shape)
        q = ((tl.gather(words, own, 1) >> (16 * (w & 1) + 4 * (STEP % 4))[None, :]) & 15) - 8
        scale = ((scales >> (16 * (STEP // 4))) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        weight = (q.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    return weight


@triton.jit
def _activation(gate_up, offsets, mask, STEP: tl.constexpr, I: tl.constexpr, PTX: tl.constexpr):
    at = gate_up + offsets + STEP * (I // 8)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=mask, other=0.0).to(tl.float32)
    x = (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty)
    return x if PTX else x.to(tl.float32)  # Triton's interpreter has no product of bfloat16.


@triton.jit
def _down_rows_kernel(
    gate_up, words, scales, sorted_ids, expert_ids, num_rows, out, P, H,
    I: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, BLOCK_H: tl.constexpr,
    TILES: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block = tl.program_id(1)  # Of SIZE rows: a block of the layout, or one of its PARTS.
    if block * SIZE >= tl.load(num_rows):
        return
    if tl.load(sorted_ids + block * SIZE) >= P:
        return
    W: tl.constexpr = I // 8
    expert = tl.load(expert_ids + block // PARTS).to(tl.int64)
    m = tl.arange(0, M)
    rows = tl.load(sorted_ids + block * SIZE + m, mask=m < SIZE, other=P)[None, :]
    real = rows < P
    w = tl.arange(0, W)
    offsets = rows * (2 * I) + w[:, None]
    x0 = _activation(gate_up, offsets, real, 0, I, PTX)
    x1 = _activation(gate_up, offsets, real, 1, I, PTX)
    x2 = _activation(gate_up, offsets, real, 2, I, PTX)
    x3 = _activation(gate_up, offsets, real, 3, I, PTX)
    x4 = _activation(gate_up, offsets, real, 4, I, PTX)
    x5 = _activation(gate_up, offsets, real, 5, I, PTX)
    x6 = _activation(gate_up, offsets, real, 6, I, PTX)
    x7 = _activation(gate_up, offsets, real, 7, I, PTX)
    xs = (x0, x1, x2, x3, x4, x5, x6, x7)
    words += expert * H * W
    scales += expert * H * 4
    for tile in range(TILES):
        start = (tl.program_id(0) * TILES + tile) * BLOCK_H
        h = tl.arange(0, BLOCK_H)
        tile_words = tl.load(words + start * W + (h[:, None] * W + w[None, :]))
        s0 = tl.load(scales + start + h)
        s1 = tl.load(scales + start + H + h)
        s2 = tl.load(scales + start + 2 * H + h)
        s3 = tl.load(scales + start + 3 * H + h)
        ss = (s0, s1, s2, s3)
        acc = tl.zeros((BLOCK_H, M), tl.float32)
        for step in tl.static_range(8):
            weight = _weights(tile_words, ss[step % 4][:, None], w, step, PTX)
            acc = tl.dot(weight, xs[step], acc, input_precision="ieee")
        tl.store(out + start + (rows * H + h[:, None]), acc.to(out.dtype.element_ty), mask=real)


@kernel_op()
def down_rows(
    gate_up: Tensor, words: Tensor, scales: Tensor, sorted_ids: Tensor, expert_ids: Tensor, num_rows: Tensor
) -> Tensor:
    """silu(gate) * up of every pair's row, times its expert's down weight.

    Args:
        gate_up: (P, 2 I), contiguous, I = 256.
        words, scales: From rearrange, of (E, H, ...).
        sorted_ids, expert_ids, num_rows: The blocks, from align_blocks.

    Returns:
        (P, H) in gate_up's dtype; rows of no block are undefined.
    """
    (num_pairs, width), (_, hidden_size, _) = gate_up.shape, words.shape
    size = sorted_ids.numel() // expert_ids.numel()
    parts = -(-size // MAX_ROWS)
    assert width == 2 * INPUTS and gate_up.is_contiguous() and num_pairs * hidden_size < 2**31 and size % parts == 0
    num_blocks, rows = expert_ids.numel() * parts, max(16, triton.next_power_of_2(size // parts))
    block_h = min(64 if rows == MAX_ROWS else 128, hidden_size & -hidden_size)
    tiles = _tiles_a_program(num_blocks, hidden_size // block_h, most=14 if rows == 16 else 28)
    out = gate_up.new_empty(num_pairs, hidden_size)
    _down_rows_kernel[(hidden_size // (block_h * tiles), num_blocks)](
        gate_up, words, scales, sorted_ids, expert_ids, num_rows, out, num_pairs, hidden_size,
        I=INPUTS, SIZE=size // parts, PARTS=parts, M=rows, BLOCK_H=block_h, TILES=tiles,
        PTX=gate_up.is_cuda and gate_up.dtype == torch.bfloat16, num_warps=4, num_stages=3,
        **launch_options(gate_up),
    )  # fmt: skip
    return out


def _tiles_a_program(num_blocks: int, num_tiles: int, most: int) -> int:
    """As many tiles in a row as leave each multiprocessor its three programs: their rows are read once for all."""
    enough = 3 * 132
    fitting = [n for n in range(1, most + 1) if num_tiles % n == 0 and num_blocks * num_tiles // n >= enough]
    return max(fitting, default=1)


@down_rows.register_fake
def _(
    gate_up: Tensor, words: Tensor, scales: Tensor, sorted_ids: Tensor, expert_ids: Tensor, num_rows: Tensor
) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], words.shape[1])

