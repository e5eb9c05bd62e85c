"""MixtureOfExperts with fused kernels: the same function of the same parameters, faster on a Hopper GPU.

Expert rows are never gathered or put back: the products find each token's row themselves and write a row a pair.
Holds the plain module without registering it again, and one derived weight: the router's matrix with the shared
expert's gate and up below it, one product whose sum stays in float32. Where experts are divided by number it routes
over all of them and computes those here. Suffixes as in moe.py, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from .mlp import SwiGLU
from .moe import MixtureOfExperts
from .moe_kernels import add_norm_rows, align_blocks, combine_rows, route, route_to_pair_blocks, swiglu_rows
from .skinny_linear import linear

__all__ = ["ExpertProducts", "FusedExperts", "FusedSwiGLU"]

MAX_TOKENS_BESIDE = 256  # Up to here the shared expert runs beside the routing; larger steps fill the GPU anyway.
MAX_PAIR_BLOCKS = 64  # Pairs up to which each gets a block of its own: eight tokens of eight experts.

Blocks = tuple[Tensor, Tensor, Tensor]  # sorted_ids, expert_ids, num_rows: see moe_kernels.align_blocks


class ExpertProducts(Protocol):
    """The experts' two products over blocks: see humming_experts.HummingExperts."""

    def repack(self) -> None:
        """Rearranges freshly loaded words, in place."""

    def block_sizes(self, num_pairs: int) -> tuple[int, int]:
        """Rows a block of the two products, for so many pairs of all experts."""

    def gate_up(self, x: Tensor, blocks: Blocks, topk: int) -> Tensor:
        """(T, H) to (P, 2 I); rows of no block are undefined."""

    def down(self, gate_up: Tensor, blocks: Blocks) -> Tensor:
        """SwiGLU and the second product, (P, 2 I) to (P, H); rows of no block are undefined."""


class FusedExperts:
    """One layer's mixture of experts.

    Args:
        plain: The module whose parameters these are. It must have a single group of experts.
        products: Of plain's experts; they are repacked here.
    """

    def __init__(self, plain: MixtureOfExperts, products: ExpertProducts) -> None:
        assert plain.gate.config.n_group == 1
        self.plain, self.products = plain, products
        router = plain.gate.weight
        self.num_experts, self.num_local = router.shape[0], plain.experts.num_experts
        shared_size = 0 if plain.shared_experts is None else plain.shared_experts.gate_proj.weight.shape[0]
        self._sizes = [self.num_experts, shared_size, shared_size]
        self.router_and_shared = torch.empty(
            sum(self._sizes), router.shape[1], dtype=router.dtype, device=router.device
        )
        self.refresh_derived()

    @torch.no_grad()
    def refresh_derived(self) -> None:
        """Copies router and shared expert into their joined weight, and has the experts rearranged, in place."""
        router, gate, up = self.router_and_shared.split(self._sizes)
        router.copy_(self.plain.gate.weight)
        if self.plain.shared_experts is not None:
            gate.copy_(self.plain.shared_experts.gate_proj.weight)
            up.copy_(self.plain.shared_experts.up_proj.weight)
        self.products.repack()

    def __call__(self, x: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """Arguments and result are those of MixtureOfExperts.forward."""
        gate_up, blocks, weights, ids, shared = self._gate_up(x, num_tokens)
        return combine_rows(self.products.down(gate_up, blocks), weights, ids, shared(), self.num_local)

    def add_norm(
        self, x: Tensor, num_tokens: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The same, then residual addition and the norm behind it: (normed, residual), the latter in place."""
        gate_up, blocks, weights, ids, shared = self._gate_up(x, num_tokens)
        rows = self.products.down(gate_up, blocks)
        return add_norm_rows(rows, weights, ids, shared(), residual, norm_weight, eps, self.num_local), residual

    def _shared(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.plain.shared_experts is not None
        hidden = swiglu_rows(scores[:, self.num_experts :], dtype)
        return linear(hidden, self.plain.shared_experts.down_proj.weight)

    def _shared_beside(self, scores: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        """The shared expert on a second stream; the call waits for it."""
        stream = _side_stream(scores.device)
        stream.wait_stream(torch.cuda.current_stream(scores.device))
        with torch.cuda.stream(stream):
            out = self._shared(scores, dtype)

        def joined() -> Tensor:
            torch.cuda.current_stream(scores.device).wait_stream(stream)
            return out

        return joined

    def _gate_up(
        self, x: Tensor, num_tokens: Tensor | None
    ) -> tuple[Tensor, Blocks, Tensor, Tensor, Callable[[], Tensor | None]]:
        """Every pair's gate and up, blocks for the down product, weights, ids, and what gives the shared rows."""
        config, gate = self.plain.gate.config, self.plain.gate
        topk = config.num_experts_per_tok
        num_pairs = x.shape[0] * topk
        scores = linear(x, self.router_and_shared, float32=True)  # (T, E + 2 S)
        shared: Callable[[], Tensor | None]
        if self.plain.shared_experts is None:
            shared = lambda: None  # noqa: E731
        elif x.is_cuda and x.shape[0] <= MAX_TOKENS_BESIDE:
            shared = self._shared_beside(scores, x.dtype)
        else:
            shared = partial(self._shared, scores, x.dtype)
        args = (
            scores, gate.e_score_correction_bias, num_tokens, topk, config.norm_topk_prob, config.routed_scaling_factor,
        )  # fmt: skip
        local = (self.plain.first_expert or 0, self.num_local)
        size, down_size = self.products.block_sizes(num_pairs)
        if num_pairs <= MAX_PAIR_BLOCKS and size == down_size:
            weights, ids, *rest = route_to_pair_blocks(*args, size, *local)
            blocks = down_blocks = (rest[0], rest[1], rest[2])
        else:
            weights, ids, ranks, counts = route(*args, *local)
            blocks = down_blocks = align_blocks(ids, ranks, counts, size)
            if down_size != size:
                down_blocks = align_blocks(ids, ranks, counts, down_size)
        return self.products.gate_up(x, blocks, topk), down_blocks, weights, ids, shared


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class FusedSwiGLU:
    """A dense layer's feed-forward block with gate and up as one product."""

    def __init__(self, plain: SwiGLU) -> None:
        self.plain = plain
        gate = plain.gate_proj.weight
        self.gate_up = torch.empty(2 * gate.shape[0], gate.shape[1], dtype=gate.dtype, device=gate.device)
        self.refresh_derived()

    @torch.no_grad()
    def refresh_derived(self) -> None:
        """Copies the two projections into their joined weight, in place."""
        gate, up = self.gate_up.chunk(2)
        gate.copy_(self.plain.gate_proj.weight)
        up.copy_(self.plain.up_proj.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Argument and result are those of SwiGLU.forward."""
        hidden = swiglu_rows(linear(x, self.gate_up), x.dtype)
        return linear(hidden, self.plain.down_proj.weight)
