"""int4 weights as compressed-tensors packs them, and the grouped product over them. Knows no expert and no router.

A weight w[o, i] is q * scale[o, i // 32] with q in [-8, 7]; u = q + 8 is stored, eight values to an int32 along the
input dimension, the first in the lowest four bits. The product q * scale is rounded to bfloat16, as the checkpoint's
maker computes it: float32 here would change the model's answers.
Source: compressed-tensors' pack-quantized format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operators import kernel_op

PER_WORD = 8


def unpack_int4(packed: Tensor) -> Tensor:
    """(..., in / 8) int32 to (..., in) int8 in [-8, 7]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts & 15) - 8).to(torch.int8).flatten(-2)


def pack_int4(q: Tensor) -> Tensor:
    """(..., in) integers in [-8, 7] to (..., in / 8) int32; the inverse of unpack_int4."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=q.device)
    words = ((q.long() + 8).unflatten(-1, (-1, PER_WORD)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def dequantize_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """The weight in bfloat16.

    Args:
        packed: (..., out, in / 8) int32.
        scale: (..., out, in / group_size) bfloat16.
    """
    groups = unpack_int4(packed).to(torch.bfloat16).unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.to(torch.bfloat16).unsqueeze(-1)).flatten(-2)


def _bounds(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of every group that has rows."""
    ends = offsets.tolist()
    return [(g, a, b) for g, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b]


@kernel_op()
def int4_grouped_mm(x: Tensor, packed: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x, sorted by group, each times its group's weight. The plain version: it loops over groups.

    Args:
        x: (num_rows, in).
        packed: (num_groups, out, in / 8) int32.
        scale: (num_groups, out, in / group_size) bfloat16.
        offsets: End of each group's rows, (num_groups,) int32. Rows past the last end come out as zeros.

    Returns:
        (num_rows, out) in x's dtype.
    """
    out = x.new_zeros(x.shape[0], packed.shape[1])
    for group, a, b in _bounds(offsets):
        out[a:b] = x[a:b] @ dequantize_int4(packed[group], scale[group]).to(x.dtype).T
    return out


@int4_grouped_mm.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[1])


@kernel_op()
def int4_grouped_mm_backward(grad: Tensor, packed: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """The gradient with respect to x, (num_rows, in); the packed weights are constants."""
    out = grad.new_zeros(grad.shape[0], packed.shape[2] * PER_WORD)
    for group, a, b in _bounds(offsets):
        out[a:b] = grad[a:b] @ dequantize_int4(packed[group], scale[group]).to(grad.dtype)
    return out


@int4_grouped_mm_backward.register_fake
def _(grad: Tensor, packed: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], packed.shape[2] * PER_WORD)


def _save_weights(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return int4_grouped_mm_backward(grad, *ctx.saved_tensors), None, None, None


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return int4_grouped_mm(grad, *ctx.saved_tensors), None, None, None


int4_grouped_mm.register_autograd(_backward, setup_context=_save_weights)
int4_grouped_mm_backward.register_autograd(_backward_of_backward, setup_context=_save_weights)
