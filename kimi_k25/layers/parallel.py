"""The parallel plan: what each rank keeps of the decoder, and how ranks put their parts together. Knows no file.

Tensor parallel: attention heads, dense and shared feed-forward widths, and the vocabulary are divided over all ranks;
so are media items, whole. Routed experts are divided by number over `ep` groups of ranks and by width inside a group.
Tokens are on every rank, so partial sums are all-reduced over all ranks and a group needs no collective of its own.
Source: Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import TextConfig

__all__ = ["WHOLE", "ParallelPlan", "VocabularyEmbedding", "gather_rows", "world_sizes"]

# The dimension of each divided weight: rows give a rank its own outputs, columns a part of a sum.
_CUT_DIM = {
    "embed_tokens": 0, "lm_head": 0, "q_b_proj": 0, "kv_b_proj": 0, "gate_proj": 0, "up_proj": 0,
    "o_proj": 1, "down_proj": 1,
}  # fmt: skip
_GROUPED_MM_MULTIPLE = 8  # torch's grouped product wants rows of whole 16 bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """One rank's share.

    Attributes:
        tp: Ranks in all.
        ep: Groups that experts are divided over by number; a divisor of tp.
        rank: This one.
        group: All ranks; None if there is only one.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's width."""
        return self.tp // self.ep

    @property
    def expert_group(self) -> int:
        """Which experts are here: those of number n // (n_routed_experts / ep) equal to this."""
        return self.rank // self.expert_tp

    def check(self, text: TextConfig, group_size: int | None) -> None:
        """
        Args:
            group_size: Of int4 routed experts; None if there are none.

        Raises:
            ValueError: The model can't be divided so; the message lists the numbers of ranks that can.
        """
        if trouble := _why_not(text, self.tp, self.ep, group_size):
            found = world_sizes(text, group_size=group_size)
            if eps := [str(ep) for ep in _divisors(self.tp) if not _why_not(text, self.tp, ep, group_size)]:
                found += f"; with {self.tp} rank{'s' if self.tp > 1 else ''} --ep may be {', '.join(eps)}"
            raise ValueError(f"{trouble}; numbers of ranks that divide this model: {found}")

    def cut(self, name: str, shape: Sequence[int], *, is_expert: bool = False) -> tuple[slice, ...]:
        """What this rank keeps of a tensor of the checkpoint, as an index; () if all of it.

        Args:
            shape: Of the whole; of int4 weights in words or scales, since shares begin on the borders of groups.
            is_expert: A routed expert's: divided inside its group only.
        """
        dim = _CUT_DIM.get(name.split(".")[-2])
        parts = self.expert_tp if is_expert else self.tp
        if dim is None or parts == 1:
            return ()
        size, start = shape[dim] // parts, self.rank % parts
        assert size * parts == shape[dim], (name, shape, parts)
        return (slice(None),) * dim + (slice(start * size, (start + 1) * size),)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.tp > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, which have one shape: (tp, *shape)."""
        parts = x.new_empty(self.tp, *x.shape)
        dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        if self.tp > 1:
            dist.broadcast(x, group_src=0, group=self.group)
        return x

    def owners(self, costs: Sequence[int]) -> list[int]:
        """The rank of each item: the largest first, each to the rank with the least so far."""
        loads, owners = [0] * self.tp, [0] * len(costs)
        for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[item] = loads.index(min(loads))
            loads[owners[item]] += costs[item]
        return owners


WHOLE = ParallelPlan()


def _why_not(text: TextConfig, tp: int, ep: int, group_size: int | None) -> str:
    """What cannot be divided so; "" if all can."""
    if ep < 1 or tp % ep:
        return f"--ep {ep} does not divide {tp} rank{'s' if tp > 1 else ''}"
    shared_size = text.moe_intermediate_size * text.n_shared_experts if text.moe_layers else 0
    width_unit = group_size or _GROUPED_MM_MULTIPLE
    wanted = [
        ("num_attention_heads", text.num_attention_heads, tp, "ranks", 1),
        ("intermediate_size", text.intermediate_size, tp, "ranks", 1),
        ("vocab_size", text.vocab_size, tp, "ranks", 1),
        ("moe_intermediate_size times n_shared_experts", shared_size, tp, "ranks", 1),
    ]
    if text.moe_layers and tp > 1:
        wanted.append(("n_routed_experts", text.n_routed_experts, ep, "groups", 1))
        wanted.append(("moe_intermediate_size", text.moe_intermediate_size, tp // ep, "ranks of a group", width_unit))
    for field, size, parts, of, unit in wanted:
        if size % (parts * unit):
            units = f" in multiples of {unit}" if unit > 1 else ""
            return f"{field} is {size}; expected to divide over {parts} {of}{units}"
    return ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def world_sizes(text: TextConfig, *, group_size: int | None) -> str:
    """Numbers of ranks that divide a model, with the least --ep where they need one: "1, 2, 4 with --ep 2"."""
    found = []
    for tp in range(1, text.num_attention_heads + 1):
        eps = [ep for ep in _divisors(tp) if not _why_not(text, tp, ep, group_size)]
        if eps:
            found.append(str(tp) if eps[0] == 1 else f"{tp} with --ep {eps[0]}")
    return ", ".join(found)


class VocabularyEmbedding(nn.Embedding):
    """Token embeddings of this rank's part of the vocabulary; ranks add up their rows."""

    def __init__(self, vocab_size: int, hidden_size: int, plan: ParallelPlan) -> None:
        super().__init__(vocab_size // plan.tp, hidden_size)
        self.plan = plan

    def forward(self, input_ids: Tensor) -> Tensor:
        """(num_tokens,) ids of the whole vocabulary to (num_tokens, hidden_size)."""
        if self.plan.tp == 1:
            return super().forward(input_ids)
        local_ids = input_ids - self.plan.rank * self.num_embeddings
        is_elsewhere = (local_ids < 0) | (local_ids >= self.num_embeddings)
        rows = super().forward(local_ids.masked_fill(is_elsewhere, 0))
        return self.plan.all_reduce(rows.masked_fill(is_elsewhere[..., None], 0.0))


def gather_rows(plan: ParallelPlan, rows: Tensor, owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Items that ranks computed apart, end to end in their order on every rank. One collective.

    Args:
        rows: Of this rank's items, in their order, (num_rows, dim).
        owners, lengths: Rank and number of rows of each item.
    """
    totals = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in range(plan.tp)]
    padded = rows.new_zeros(max(totals), rows.shape[1])
    padded[: rows.shape[0]] = rows
    parts, starts, items = plan.all_gather(padded), [0] * plan.tp, []
    for owner, length in zip(owners, lengths, strict=True):
        items.append(parts[owner, starts[owner] : starts[owner] + length])
        starts[owner] += length
    return torch.cat(items)
