"""Bridge buffers: where activations cross from a graph to the eager call behind it. Knows no forward."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import Backend

__all__ = ["BridgeBuffers"]


class BridgeBuffers:
    """Buffers in which activations cross a break, one for each argument, shared by all layers and buckets.

    Layers run in order, so a buffer is free again when the next layer needs it. It has the size of the largest
    user, met first because capture descends, and is owned here and by the recorded calls: never by address only.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def like(self, key: str, tensor: Tensor) -> Tensor:
        """A view of the buffer of `key` with the shape and strides of `tensor`: kernels may depend on both."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = last + 1 if tensor.numel() else 0
        buffer = self._buffers.get((key, tensor.dtype))
        if buffer is None or buffer.numel() < extent:
            with self._backend.outside():
                buffer = torch.zeros(extent, dtype=tensor.dtype, device=tensor.device)
            self._buffers[key, tensor.dtype] = buffer
        return buffer.as_strided(tensor.shape, tensor.stride())

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
