"""Mixture of experts: the noaux_tc router, tokens sorted by expert, grouped products. Knows no checkpoint.

Every shape depends on the number of tokens alone, never on where the router sends them.
Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

Suffixes: T tokens, E experts, K experts a token, H hidden_size, I moe_intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TextConfig
from .dtype import keeping_dtype
from .int4 import PER_WORD, int4_grouped_mm
from .mlp import SwiGLU, swiglu
from .parallel import WHOLE, ParallelPlan


class Router(nn.Module):
    """Scores every expert and picks num_experts_per_tok for each token, balanced by a bias and no auxiliary loss."""

    e_score_correction_bias: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        # float32 always: it is added to sigmoids that differ in digits which bfloat16 does not hold.
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        return super()._apply(keeping_dtype(fn, self.e_score_correction_bias), recurse)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (T, K) float32 and ids (T, K) int64 of each token's experts.

        The bias and the groups decide who is picked; the weights are the unbiased scores.
        """
        c = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()  # (T, E)
        biased = scores + self.e_score_correction_bias
        if c.n_group > 1:
            grouped = biased.unflatten(-1, (c.n_group, -1))
            best_groups = grouped.topk(2, -1).values.sum(-1).topk(c.topk_group, -1, sorted=False).indices
            chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best_groups, True)
            biased = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)
        topk_ids = biased.topk(c.num_experts_per_tok, -1, sorted=False).indices
        topk_weights = scores.gather(-1, topk_ids)
        if c.norm_topk_prob:
            topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
        return topk_weights * c.routed_scaling_factor, topk_ids


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Groups (token, choice) pairs by expert.

    Args:
        topk_ids: (T, K). An id of num_experts sorts behind all experts, to no group.

    Returns:
        order: Flat pairs sorted by expert, (T * K,) int64; stable, so equal from run to run.
        offsets: End of each expert's pairs in that order, (E,) int32.
    """
    sorted_ids, order = topk_ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=topk_ids.device)
    return order, torch.searchsorted(sorted_ids, experts, right=True).int()


class RoutedExperts(nn.Module):
    """The experts' weights, stacked: gate and up as one matrix, gate first."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        nn.init.normal_(self.gate_up_proj, std=hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=intermediate_size**-0.5)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Rows sorted by expert, (T * K, H) to (T * K, H); rows past the last offset are undefined."""
        hidden = swiglu(F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=offsets))
        return F.grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=offsets)


class Int4RoutedExperts(nn.Module):
    """The same, packed: eight values a word along the input dimension, a bfloat16 scale for every group.

    Raises:
        ValueError: A row of a weight is no whole number of groups.
    """

    gate_up_proj_packed: Tensor
    gate_up_proj_scale: Tensor
    down_proj_packed: Tensor
    down_proj_scale: Tensor

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, group_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        for name, out_size, in_size in (
            ("gate_up_proj", 2 * intermediate_size, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            if in_size % group_size:
                raise ValueError(f"{name} has rows of {in_size} values; expected whole groups of {group_size}")
            words = torch.zeros(num_experts, out_size, in_size // PER_WORD, dtype=torch.int32)
            scale = torch.ones(num_experts, out_size, in_size // group_size, dtype=torch.bfloat16)
            self.register_buffer(f"{name}_packed", words)
            self.register_buffer(f"{name}_scale", scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4RoutedExperts:
        return super()._apply(keeping_dtype(fn, self.gate_up_proj_scale, self.down_proj_scale), recurse)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Rows sorted by expert, (T * K, H) to (T * K, H); rows past the last offset are zeros."""
        hidden = swiglu(int4_grouped_mm(x, self.gate_up_proj_packed, self.gate_up_proj_scale, offsets))
        return int4_grouped_mm(hidden, self.down_proj_packed, self.down_proj_scale, offsets)


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared experts of one layer."""

    def __init__(self, config: TextConfig, *, group_size: int | None, plan: ParallelPlan = WHOLE) -> None:
        """
        Args:
            group_size: Of int4 routed experts; None keeps them in the model's dtype.
            plan: Gives this rank its experts and widths; what forward returns is then a part of the sum over ranks.
        """
        super().__init__()
        c = config
        self.gate = Router(c)
        sizes = (c.n_routed_experts // plan.ep, c.hidden_size, c.moe_intermediate_size // plan.expert_tp)
        # The first expert here, if there are others elsewhere.
        self.first_expert = plan.expert_group * sizes[0] if plan.ep > 1 else None
        self.experts = RoutedExperts(*sizes) if group_size is None else Int4RoutedExperts(*sizes, group_size)
        shared_size = c.moe_intermediate_size * c.n_shared_experts // plan.tp
        self.shared_experts = SwiGLU(c.hidden_size, shared_size) if shared_size else None

    def forward(self, x: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """Each token through its chosen experts, weighted, plus the shared ones.

        Args:
            x: (T, H).
            num_tokens: 0-d; rows from there on are padding and reach no routed expert. None: no row is.

        Returns:
            (T, H).
        """
        topk_weights, topk_ids = self.gate(x)
        routed, is_absent = x, None  # (T, K) or (T, 1): pairs that no expert here computes.
        if self.first_expert is not None:
            topk_ids = topk_ids - self.first_expert
            is_absent = (topk_ids < 0) | (topk_ids >= self.experts.num_experts)
        if num_tokens is not None:
            is_padding = (torch.arange(x.shape[0], device=x.device) >= num_tokens)[:, None]
            is_absent = is_padding if is_absent is None else is_absent | is_padding
            routed = x.masked_fill(is_padding, 0.0)  # For the gradient: no group computes theirs either.
        if is_absent is not None:
            topk_ids = topk_ids.masked_fill(is_absent, self.experts.num_experts)
        order, offsets = sort_by_expert(topk_ids, self.experts.num_experts)
        # index_select, not x[...]: the gradient adds rows in place instead of sorting them first.
        rows = self.experts(routed.index_select(0, order // topk_ids.shape[1]), offsets)
        place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
        outputs = rows.index_select(0, place).unflatten(0, topk_ids.shape).float()  # (T, K, H)
        if is_absent is not None:
            outputs = outputs.masked_fill(is_absent[..., None], 0.0)  # No group computed them.
        out = (outputs * topk_weights[..., None]).sum(1).to(x.dtype)
        return out if self.shared_experts is None else out + self.shared_experts(x)
