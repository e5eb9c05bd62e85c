"""Balances the experts' load without a loss: after every step, a bias per expert moves against its share of tokens.

Source: Wang et al., auxiliary-loss-free load balancing, arXiv 2408.15664, as DeepSeek-V3 uses it. The bias only picks
experts; it never weighs their outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.moe import Router


class RouterBalance:
    """Counts where each router sends its tokens, and moves the routers' correction biases.

    Args:
        model: Whose routers are watched from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        shape = (len(self.routers), self.routers[0].e_score_correction_bias.shape[0])
        device = self.routers[0].e_score_correction_bias.device
        self._step_counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._counts = torch.zeros_like(self._step_counts)
        for row, router in enumerate(self.routers):
            router.register_forward_hook(self._counting(row))

    def _counting(self, row: int) -> Any:
        def count(router: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            if router.training:
                ids = output[1].flatten()
                self._step_counts[row].scatter_add_(0, ids, torch.ones_like(ids))

        return count

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Moves each bias by `rate` towards an even load, from the counts since the last update."""
        counts = self._step_counts.float()
        moves = (counts.mean(1, keepdim=True) - counts).sign() * rate
        for router, move in zip(self.routers, moves, strict=True):
            bias = router.e_score_correction_bias
            bias += move
            bias -= bias.mean()  # Only differences matter.
        self._counts += self._step_counts
        self._step_counts.zero_()

    def reset(self) -> None:
        """Forgets all counts."""
        self._step_counts.zero_()
        self._counts.zero_()

    def take_load(self) -> list[list[float]]:
        """Each expert's load since the last call, 1 being an even share, by layer. Syncs with the device."""
        counts = self._counts.double()
        load = counts / counts.mean(1, keepdim=True).clamp(min=1)
        self._counts.zero_()
        return [[round(value, 4) for value in row] for row in load.tolist()]
