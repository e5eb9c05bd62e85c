"""Tensors whose dtype is part of their meaning, kept through `Module.to`. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def keeping_dtype(fn: Callable[[Tensor], Tensor], *kept: Tensor) -> Callable[[Tensor], Tensor]:
    """Wraps the function that `nn.Module._apply` maps over its tensors: `kept` are moved, never converted.

    Without it `model.to(torch.bfloat16)` would round the router's correction bias and the rope's frequencies.
    """
    kept_ids = {id(tensor) for tensor in kept}

    def apply(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if id(tensor) not in kept_ids or result.dtype == tensor.dtype:
            return result
        return tensor.to(result.device)

    return apply
