"""MixtureOfExperts with fused kernels: the same function of the same parameters, faster on a Hopper GPU.

Expert rows are never gathered or put back: the products find each token's row themselves and write a row a pair.
Holds the plain module without registering it again, and one derived weight: the router's matrix with the shared
expert's gate and up below it, one product whose sum stays in float32. Suffixes as in moe.py, P pairs.
"""

from __future__ import annotations

from functools import cache
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
        """Rows a block of the two products."""

    def gate_up(self, x: Tensor, blocks: Blocks, topk: int) -> Tensor:
        """(T, H) to (P, 2 I); rows of no block are undefined."""

    def down(self, hidden: Tensor, blocks: Blocks) -> Tensor:
        """(P, I) to (P, H); rows of no block are undefined."""


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
        self.num_experts = router.shape[0]
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
        rows, weights, ids, shared_out = self._rows(x, num_tokens)
        return combine_rows(rows, weights, ids, shared_out, self.num_experts)

    def add_norm(
        self, x: Tensor, num_tokens: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The same, then residual addition and the norm behind it: (normed, residual), the latter in place."""
        rows, weights, ids, shared_out = self._rows(x, num_tokens)
        return add_norm_rows(
            rows, weights, ids, shared_out, residual, norm_weight, eps, self.num_experts
        ), residual

    def _shared_beside(self, x: Tensor, scores: Tensor) -> Tensor:
        """The shared expert on a second stream, which `_rows` waits for."""
        assert self.plain.shared_experts is not None
        stream = _side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            _, hidden = swiglu_rows(x.new_empty(0, 2), scores, self.num_experts)
            return linear(hidden, self.plain.shared_experts.down_proj.weight)

    def _rows(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Every pair's row, weights and ids, and the shared expert's rows."""
        config, gate, shared = self.plain.gate.config, self.plain.gate, self.plain.shared_experts
        topk = config.num_experts_per_tok
        num_pairs = x.shape[0] * topk
        scores = linear(x, self.router_and_shared, float32=True)  # (T, E + 2 S)
        beside = shared is not None and x.is_cuda and x.shape[0] <= MAX_TOKENS_BESIDE
        shared_out = self._shared_beside(x, scores) if beside else None
        args = (scores, gate.e_score_correction_bias, num_tokens, topk, config.norm_topk_prob)
        size, down_size = self.products.block_sizes(num_pairs)
        if num_pairs <= MAX_PAIR_BLOCKS and size == down_size:
            weights, ids, *rest = route_to_pair_blocks(*args, config.routed_scaling_factor, size)
            blocks = down_blocks = (rest[0], rest[1], rest[2])
        else:
            weights, ids, ranks, counts = route(*args, config.routed_scaling_factor)
            blocks = down_blocks = align_blocks(ids, ranks, counts, size)
            if down_size != size:
                down_blocks = align_blocks(ids, ranks, counts, down_size)
        gate_up = self.products.gate_up(x, blocks, topk)
        hidden, shared_hidden = swiglu_rows(gate_up, None if shared is None or beside else scores, self.num_experts)
        rows = self.products.down(hidden, down_blocks)
        if beside:
            torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device))
        elif shared is not None:
            shared_out = linear(shared_hidden, shared.down_proj.weight)
        return rows, weights, ids, shared_out


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
        hidden, _ = swiglu_rows(linear(x, self.gate_up), None, 0)
        return linear(hidden, self.plain.down_proj.weight)
