"""x @ weight.T for a handful of rows, in Triton: what a decode step's products cost is reading the weight once.

cuBLAS picks tiles for many rows and splits the sum over two kernels. Here a program owns a few output columns and
streams their weights; one row is summed by plain arithmetic, a few rows by tensor cores. The order of a sum is fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MAX_ROWS", "linear", "skinny_linear"]

MAX_ROWS = 16


@triton.jit
def _one_row_kernel(
    x, weight, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for at in range(0, K, BLOCK_K):
        mask = (n[:, None] < N) & (at + k[None, :] < K)
        w = tl.load(weight + n[:, None].to(tl.int64) * K + at + k[None, :], mask=mask, other=0.0)
        a = tl.load(x + at + k, mask=at + k < K, other=0.0)
        acc += w.to(tl.float32) * a.to(tl.float32)[None, :]
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _few_rows_kernel(
    x, weight, out, M, N, x_stride, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, K, BLOCK_K):
        mask = (m[:, None] < M) & (at + k[None, :] < K)
        a = tl.load(x + m[:, None] * x_stride + at + k[None, :], mask=mask, other=0.0)
        mask = (n[:, None] < N) & (at + k[None, :] < K)
        w = tl.load(weight + n[:, None].to(tl.int64) * K + at + k[None, :], mask=mask, other=0.0)
        if WIDEN:  # Triton's interpreter has no product of bfloat16.
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc += tl.dot(a, tl.trans(w), input_precision="ieee")
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m[:, None] * out_stride + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


def one_row_config(columns: int, size: int) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, warps and stages of the kernel for one row: several programs for every multiprocessor."""
    block_k = min(1024, triton.next_power_of_2(size))
    block_n = max(1, min(16, 4096 // block_k))
    while block_n > 2 and columns // block_n < 400:
        block_n //= 2
    return block_n, block_k, 4, 3


def few_rows_config(columns: int, size: int) -> tuple[int, int, int, int]:
    """The same of the kernel for several rows."""
    return 16, min(512, max(16, triton.next_power_of_2(size))), 4, 4


@torch.library.custom_op("kimi_k25::skinny_linear", mutates_args=())
def skinny_linear(x: Tensor, weight: Tensor, float32: bool) -> Tensor:
    """x @ weight.T, summed in float32.

    Args:
        x: (at most MAX_ROWS, in), rows contiguous.
        weight: (out, in), contiguous.
        float32: The result's dtype is float32 instead of x's.
    """
    (rows, size), columns = x.shape, weight.shape[0]
    assert rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty(rows, columns, dtype=torch.float32 if float32 else x.dtype, device=x.device)
    if rows == 1:
        block_n, block_k, warps, stages = one_row_config(columns, size)
        _one_row_kernel[(-(-columns // block_n),)](
            x, weight, out, columns, K=size, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages
        )
        return out
    block_n, block_k, warps, stages = few_rows_config(columns, size)
    _few_rows_kernel[(-(-columns // block_n),)](
        x, weight, out, rows, columns, x.stride(0), out.stride(0),
        K=size, BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k, WIDEN=not x.is_cuda, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@skinny_linear.register_fake
def _(x: Tensor, weight: Tensor, float32: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if float32 else x.dtype)


def linear(x: Tensor, weight: Tensor, *, float32: bool = False) -> Tensor:
    """x @ weight.T by whichever product is faster at this number of rows; float32 keeps the sum unrounded."""
    if x.shape[0] <= MAX_ROWS:
        return skinny_linear(x, weight, float32)
    if not float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
