"""Muon for many small matrices at once: momentum, made orthogonal, as the real model was trained. Knows no model.

Source: Jordan et al., "Muon" (2024); the scale that lets it share AdamW's learning rate is Moonlight's, arXiv
2502.16982. Matrices are padded with zeros, which orthogonalisation leaves alone, to a few common shapes, so that a step
is some eighty kernels however many matrices there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM, WEIGHT_DECAY, RMS = 0.95, 0.05, 0.2
_UNIT = 128
_ITERATIONS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon:
    """Updates matrices that lie end to end in one flat float32 tensor.

    Args:
        values, grads: (num_values,) float32.
        shapes: (number of matrices, rows, columns) of each run of matrices in them, in order.

    Attributes:
        momentum: (num_values,) float32; all there is to save.
    """

    def __init__(self, values: Tensor, grads: Tensor, shapes: Sequence[tuple[int, int, int]]) -> None:
        self._values, self._grads, self.momentum = values, grads, torch.zeros_like(values)
        # Where each value stands in the padded form, group by group, the longer side first.
        sizes = sorted({_padded(rows, columns) for _, rows, columns in shapes})
        counts = {size: sum(n for n, *side in shapes if _padded(*side) == size) for size in sizes}
        starts, total = {}, 0
        for size in sizes:
            starts[size], total = total, total + counts[size] * size[0] * size[1]
        self._groups = [(starts[size], counts[size], *size) for size in sizes]
        place, scale = [], []
        for number, rows, columns in shapes:
            size = _padded(rows, columns)
            matrix, row, column = torch.meshgrid(*map(torch.arange, (number, rows, columns)), indexing="ij")
            long, short = (row, column) if rows >= columns else (column, row)
            place.append((starts[size] + (matrix * size[0] + long) * size[1] + short).flatten())
            starts[size] += number * size[0] * size[1]
            scale.append(torch.full((number * rows * columns,), RMS * max(rows, columns) ** 0.5))
        self._place = torch.cat(place).to(values.device)
        self._scale = torch.cat(scale).to(values.device)
        self._dtype = torch.bfloat16 if values.device.type == "cuda" else torch.float32
        self._padded = torch.zeros(total, device=values.device, dtype=self._dtype)  # Stays zero where nothing stands.

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the gradients as they are."""
        self.momentum.lerp_(self._grads, 1 - MOMENTUM)
        self._padded[self._place] = torch.lerp(self._grads, self.momentum, MOMENTUM).to(self._dtype)  # Nesterov's.
        updates = []
        for start, number, rows, columns in self._groups:
            x = self._padded[start : start + number * rows * columns].view(number, rows, columns)
            updates.append(orthogonal(x).flatten())
        update = torch.cat(updates)[self._place].float().mul_(self._scale)
        self._values.mul_(1 - learning_rate * WEIGHT_DECAY).sub_(update, alpha=learning_rate)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrices with singular values about one (0.7 to 1.2), (n, rows, columns), rows >= columns."""
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-20).to(x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x.mT @ x
        x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return x


def _padded(rows: int, columns: int) -> tuple[int, int]:
    long, short = (-(-side // _UNIT) * _UNIT for side in (max(rows, columns), min(rows, columns)))
    return long, short
