"""x @ weight.T for a single row, in Triton: what a decode step's products cost is reading the weight once.

cuBLAS picks tiles for many rows and splits the sum over two kernels. Here a program owns one to four output columns
and streams their weights past one row, in a fixed order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin, launch_options
from .operators import kernel_op

__all__ = ["linear", "one_row_linear"]


@triton.jit
def _one_row_kernel(
    x, weight, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for at in range(0, K, BLOCK_K):
        mask = (n[:, None] < N) & (at + k[None, :] < K)
        w = tl.load(weight + n[:, None].to(tl.int64) * K + at + k[None, :], mask=mask, other=0.0)
        a = tl.load(x + at + k, mask=at + k < K, other=0.0)
        acc += w.to(tl.float32) * a.to(tl.float32)[None, :]
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < N)


@kernel_op()
def one_row_linear(x: Tensor, weight: Tensor, float32: bool) -> Tensor:
    """x @ weight.T, summed in float32.

    Args:
        x: (1, in).
        weight: (out, in), contiguous.
        float32: The result's dtype is float32 instead of x's.
    """
    (rows, size), columns = x.shape, weight.shape[0]
    assert rows == 1 and x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty(1, columns, dtype=torch.float32 if float32 else x.dtype, device=x.device)
    # The fastest of 30 shapes tried on an H200 for each of the model's sizes, within 3%.
    block_k = min(2048 if size > 2048 else 1024, triton.next_power_of_2(size))
    block_n = max(1, min(4, 2048 // block_k))
    _one_row_kernel[(-(-columns // block_n),)](
        x, weight, out, columns, K=size, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
        **launch_options(x),
    )  # fmt: skip
    return out


@one_row_linear.register_fake
def _(x: Tensor, weight: Tensor, float32: bool) -> Tensor:
    return x.new_empty(1, weight.shape[0], dtype=torch.float32 if float32 else x.dtype)


def linear(x: Tensor, weight: Tensor, *, float32: bool = False) -> Tensor:
    """x @ weight.T by whichever product is faster at this number of rows.

    Args:
        x: (num_rows, in).
        weight: (out, in), contiguous.
        float32: Keeps the sum unrounded: the result is float32 instead of x's dtype.
    """
    if x.shape[0] == 1:
        return one_row_linear(x, weight, float32)
    if not float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
