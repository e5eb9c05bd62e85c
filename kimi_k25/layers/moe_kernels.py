"""Triton kernels around the routed experts: scores to a block layout, SwiGLU, and the weighted sum of expert rows.

layers/moe.py defines the results. A "pair" is one token's choice of one expert, numbered token * K + choice.
Each is a torch operator, so that a graph tape sees it. All but align_blocks may stand where the shared expert's stream
parts from the main one or comes back to it. Ids count from this rank's first expert. A pair that no expert here
computes, of a padding row (from num_tokens on) or of another rank's expert, is absent: it has the id L and no row.

Suffixes: T tokens, E experts, L of them here, K experts a token, P = T * K pairs, H hidden_size,
I moe_intermediate_size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin, launch_options
from .operators import kernel_op

__all__ = [
    "add_norm_rows",
    "align_blocks",
    "combine_rows",
    "max_blocks",
    "route",
    "route_to_pair_blocks",
    "swiglu_rows",
]


@triton.jit
def _route_kernel(
    logits, bias, num_tokens, weights, ids, ranks, counts, sorted_ids, expert_ids, num_rows, row_stride, scaling,
    first_expert, P,
    E: tl.constexpr, L: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr, HAS_PADDING: tl.constexpr, PAIR_BLOCKS: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    scores = tl.sigmoid(tl.load(logits + row * row_stride + e, mask=e < E, other=0.0).to(tl.float32))
    biased = tl.where(e < E, scores + tl.load(bias + e, mask=e < E, other=0.0), float("-inf"))
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    picked = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(K):
        best = tl.argmax(biased, 0)
        chosen = tl.where(k == i, best, chosen)
        picked = tl.where(k == i, tl.sum(tl.where(e == best, scores, 0.0), 0), picked)
        biased = tl.where(e == best, float("-inf"), biased)
    if RENORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    chosen -= first_expert
    here = (chosen >= 0) & (chosen < L)
    if HAS_PADDING:
        here &= row < tl.load(num_tokens)
    chosen = tl.where(here, chosen, L)
    here &= k < K
    tl.store(weights + row * K + k, picked * scaling, mask=k < K)
    tl.store(ids + row * K + k, chosen, mask=k < K)
    if PAIR_BLOCKS:
        pair = (row * K + k).to(tl.int32)
        block, has_block = pair, k < K
        if L < E:
            # Most pairs are absent, and a product takes as long over an empty block as over one in use.
            has_block = here
            number = here.to(tl.int32)
            block = tl.atomic_add(num_rows, tl.sum(number, 0) * M) // M + tl.cumsum(number, 0) - number
        elif row == 0:
            tl.store(num_rows, P * M)
        m = tl.arange(0, BLOCK_M)[None, :]
        rows = tl.where((m == 0) & here[:, None], pair[:, None], P)
        tl.store(sorted_ids + block[:, None] * M + m, rows, mask=has_block[:, None] & (m < M))
        tl.store(expert_ids + block, tl.minimum(chosen, L - 1), mask=has_block)
    else:
        # The order of equal ids is the order of arrival, not of tokens: it says where a row lies, not what is in it.
        rank = tl.atomic_add(counts + chosen, tl.full((BLOCK_K,), 1, tl.int32), mask=here)
        tl.store(ranks + row * K + k, rank, mask=k < K)


def _launch_route(
    logits: Tensor, bias: Tensor, num_tokens: Tensor | None, topk: int, renormalise: bool, scaling: float,
    first_expert: int, num_local: int, *, ranked: tuple[Tensor, Tensor] | None = None,
    blocks: tuple[Tensor, Tensor, Tensor] | None = None, block_size: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = logits.new_empty(logits.shape[0], topk, dtype=torch.float32)
    ids = torch.empty_like(weights, dtype=torch.int32)
    ranks, counts = ranked or (ids, ids)
    sorted_ids, expert_ids, num_rows = blocks or (ids, ids, ids)
    _route_kernel[(ids.shape[0],)](
        logits, bias, ids if num_tokens is None else num_tokens, weights, ids, ranks, counts, sorted_ids, expert_ids,
        num_rows, logits.stride(0), scaling, first_expert, ids.numel(),
        E=bias.shape[0], L=num_local, K=topk, BLOCK_E=triton.next_power_of_2(bias.shape[0]),
        BLOCK_K=triton.next_power_of_2(topk), RENORMALISE=renormalise, HAS_PADDING=num_tokens is not None,
        PAIR_BLOCKS=blocks is not None, M=block_size, BLOCK_M=triton.next_power_of_2(block_size),
        num_warps=1,  # Its eight searches for the best expert then need no barrier.
        **launch_options(logits, joins=True),
    )  # fmt: skip
    return weights, ids


@kernel_op()
def route(
    logits: Tensor,
    bias: Tensor,
    num_tokens: Tensor | None,
    topk: int,
    renormalise: bool,
    scaling: float,
    first_expert: int = 0,
    num_local: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Router.forward behind its product, for a single group, and a count of the rows of every expert here.

    Args:
        logits: (T, at least E) float32; E is bias's length.
        bias: e_score_correction_bias, (E,) float32.
        num_tokens: One element; rows from there on are padding. None: no row is.
        first_expert, num_local: The experts here; others' pairs count in the weights' sum alone. None: all.

    Returns:
        weights (T, K) float32; ids (T, K) int32; ranks (T, K) int32, place of each pair among those of its expert;
        counts (L,) int32.
    """
    num_local = num_local or bias.shape[0]
    ranks = logits.new_empty(logits.shape[0], topk, dtype=torch.int32)
    counts = logits.new_zeros(num_local, dtype=torch.int32)
    args = (logits, bias, num_tokens, topk, renormalise, scaling, first_expert, num_local)
    return *_launch_route(*args, ranked=(ranks, counts)), ranks, counts


@route.register_fake
def _(
    logits: Tensor, bias: Tensor, num_tokens: Tensor | None, topk: int, renormalise: bool, scaling: float,
    first_expert: int = 0, num_local: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ids = logits.new_empty((logits.shape[0], topk), dtype=torch.int32)
    counts = ids.new_empty(num_local or bias.shape[0])
    return torch.empty_like(ids, dtype=torch.float32), ids, torch.empty_like(ids), counts


@kernel_op()
def route_to_pair_blocks(
    logits: Tensor,
    bias: Tensor,
    num_tokens: Tensor | None,
    topk: int,
    renormalise: bool,
    scaling: float,
    block_size: int,
    first_expert: int = 0,
    num_local: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """route and align_blocks in one launch, for few tokens: every pair has a block of its own.

    Two tokens of one expert then read its weights twice; up to eight tokens that is rare. Where experts are divided
    an absent pair has no block, and num_rows is set to zero by a second launch.

    Returns:
        weights and ids as route's; sorted_ids, expert_ids and num_rows as align_blocks'.
    """
    is_whole = num_local is None or num_local == bias.shape[0]
    pairs = logits.shape[0] * topk
    sorted_ids = logits.new_empty(pairs * block_size, dtype=torch.int32)
    expert_ids = logits.new_empty(pairs, dtype=torch.int32)
    num_rows = (torch.empty if is_whole else torch.zeros)(1, dtype=torch.int32, device=logits.device)
    blocks = (sorted_ids, expert_ids, num_rows)
    args = (logits, bias, num_tokens, topk, renormalise, scaling, first_expert, num_local or bias.shape[0])
    return *_launch_route(*args, blocks=blocks, block_size=block_size), *blocks


@route_to_pair_blocks.register_fake
def _(
    logits: Tensor, bias: Tensor, num_tokens: Tensor | None, topk: int, renormalise: bool, scaling: float,
    block_size: int, first_expert: int = 0, num_local: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ids = logits.new_empty((logits.shape[0], topk), dtype=torch.int32)
    weights = torch.empty_like(ids, dtype=torch.float32)
    return weights, ids, ids.new_empty(ids.numel() * block_size), ids.new_empty(ids.numel()), ids.new_empty(1)


@triton.jit
def _align_kernel(
    ids, ranks, counts, sorted_ids, expert_ids, num_rows, P, num_blocks, pair_programs,
    L: tl.constexpr, M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    pid = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < L, other=0)
    blocks = (count + M - 1) // M
    ends = tl.cumsum(blocks, 0)
    starts = ends - blocks
    if pid < pair_programs:
        p = pid * GROUP + tl.arange(0, GROUP)
        expert = tl.load(ids + p, mask=p < P, other=L)
        rank = tl.load(ranks + p, mask=p < P, other=0)
        start = tl.sum(tl.where(e[None, :] == expert[:, None], starts[None, :], 0), 1)
        tl.store(sorted_ids + start * M + rank, p, mask=(p < P) & (expert < L))
    else:
        block = (pid - pair_programs) * GROUP + tl.arange(0, GROUP)
        total = tl.sum(blocks, 0)
        owner = tl.sum(((ends[None, :] <= block[:, None]) & (e[None, :] < L)).to(tl.int32), 1)
        tl.store(expert_ids + block, tl.minimum(owner, L - 1), mask=block < num_blocks)
        mine = e[None, :] == owner[:, None]
        filled = tl.sum(tl.where(mine, count[None, :] + starts[None, :] * M, 0), 1)  # End of the expert's real rows.
        m = tl.arange(0, BLOCK_M)
        place = block[:, None] * M + m[None, :]
        empty = (place >= filled[:, None]) & (block[:, None] < total) & (m[None, :] < M)
        tl.store(sorted_ids + place, tl.full((GROUP, BLOCK_M), 0, tl.int32) + P, mask=empty)
        if pid == pair_programs:
            tl.store(num_rows, total * M)


@kernel_op()
def align_blocks(ids: Tensor, ranks: Tensor, counts: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lays the pairs out in blocks of one expert each, as an indexed grouped product reads them.

    Args:
        ids, ranks, counts: From route.
        block_size: Rows a block.

    Returns:
        sorted_ids: The pair of every row of every block, P where a row is empty; int32, as long as it can get.
        expert_ids: Of every block, int32.
        num_rows: Rows of all blocks in use, (1,) int32; what lies behind is undefined.
    """
    pairs, num_experts = ids.numel(), counts.shape[0]
    num_blocks = max_blocks(pairs, num_experts, block_size)
    sorted_ids = torch.empty(num_blocks * block_size, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    num_rows = torch.empty(1, dtype=torch.int32, device=ids.device)
    group = 16
    pair_programs = -(-pairs // group)
    _align_kernel[(pair_programs + -(-num_blocks // group),)](
        ids, ranks, counts, sorted_ids, expert_ids, num_rows, pairs, num_blocks, pair_programs,
        L=num_experts, M=block_size, BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=triton.next_power_of_2(block_size), GROUP=group, **launch_options(ids),
    )  # fmt: skip
    return sorted_ids, expert_ids, num_rows


def max_blocks(pairs: int, num_experts: int, block_size: int) -> int:
    """Most blocks that any routing of so many pairs can need: every expert that is hit may leave one block unfilled."""
    hit = min(pairs, num_experts)
    return hit + (pairs - hit) // block_size


@align_blocks.register_fake
def _(ids: Tensor, ranks: Tensor, counts: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    num_blocks = max_blocks(ids.numel(), counts.shape[0], block_size)
    return ids.new_empty(num_blocks * block_size), ids.new_empty(num_blocks), ids.new_empty(1)


@triton.jit
def _swiglu_kernel(
    gate_up, out, num_rows, stride, S: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK_S)[None, :]
    mask = (row < num_rows) & (i < S)
    gate = tl.load(gate_up + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + S + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * S + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@kernel_op()
def swiglu_rows(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: (num_rows, 2 S), rows contiguous, any float dtype.

    Returns:
        (num_rows, S) in `dtype`.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_rows, size, dtype=dtype)
    per_program = 4
    _swiglu_kernel[(-(-num_rows // per_program),)](
        gate_up, out, num_rows, gate_up.stride(0), S=size, ROWS=per_program, BLOCK_S=triton.next_power_of_2(size),
        **launch_options(gate_up, joins=True),
    )  # fmt: skip
    return out


@swiglu_rows.register_fake
def _(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=dtype)


@triton.jit
def _weighted_sum(rows, weights, ids, token, h, H, L: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr):
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        width = tl.where(tl.load(ids + pair) < L, H, 0)  # No product wrote an absent pair: it may hold NaN.
        value = tl.load(rows + pair * H + h, mask=h < width, other=0.0).to(tl.float32)
        acc += value * tl.load(weights + pair)
    return acc


@triton.jit
def _combine_kernel(
    rows, weights, ids, shared, out, H,
    L: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = _weighted_sum(rows, weights, ids, token, h, H, L, K, BLOCK_H)
    dtype = out.dtype.element_ty
    acc = acc.to(dtype)
    if HAS_SHARED:
        acc = (acc.to(tl.float32) + tl.load(shared + token * H + h, mask=h < H, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + token * H + h, acc, mask=h < H)


@kernel_op()
def combine_rows(
    rows: Tensor, weights: Tensor, ids: Tensor, shared: Tensor | None, num_experts: int
) -> Tensor:
    """The weighted sum of each token's expert rows, in float32, plus the shared expert's.

    Args:
        rows: (P, H), contiguous, row p being pair p's.
        weights, ids: From route.
        shared: (T, H), contiguous, or None.
        num_experts: Experts here; ids from there on are absent.

    Returns:
        (T, H) in rows' dtype.
    """
    (num_tokens, topk), hidden_size = ids.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, hidden_size)
    block = min(1024, triton.next_power_of_2(hidden_size))
    _combine_kernel[(num_tokens, -(-hidden_size // block))](
        rows, weights, ids, rows if shared is None else shared, out, hidden_size,
        L=num_experts, K=topk, BLOCK_H=block, HAS_SHARED=shared is not None, **launch_options(rows, joins=True),
    )  # fmt: skip
    return out


@combine_rows.register_fake
def _(
    rows: Tensor, weights: Tensor, ids: Tensor, shared: Tensor | None, num_experts: int
) -> Tensor:  # fmt: skip
    return rows.new_empty(ids.shape[0], rows.shape[1])


@triton.jit
def _add_norm_kernel(
    rows, weights, ids, shared, residual, norm_weight, normed, H, eps,
    L: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    acc = _weighted_sum(rows, weights, ids, token, h, H, L, K, BLOCK_H)
    dtype = normed.dtype.element_ty
    acc = acc.to(dtype).to(tl.float32)
    if HAS_SHARED:
        acc += tl.load(shared + token * H + h, mask=h < H, other=0.0).to(tl.float32)
        acc = acc.to(dtype).to(tl.float32)
    acc += tl.load(residual + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    acc = acc.to(dtype)
    tl.store(residual + token * H + h, acc, mask=h < H)
    x = acc.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    w = tl.load(norm_weight + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(normed + token * H + h, (w * x.to(dtype).to(tl.float32)).to(dtype), mask=h < H)


@kernel_op(mutates_args=("residual",))
def add_norm_rows(
    rows: Tensor, weights: Tensor, ids: Tensor, shared: Tensor | None, residual: Tensor, norm_weight: Tensor,
    eps: float, num_experts: int,
) -> Tensor:  # fmt: skip
    """combine_rows, then the residual's addition and the next layer's norm: the sum never goes through memory alone.

    Args:
        rows, weights, ids, shared, num_experts: As in combine_rows.
        residual: (T, H); the sum is added to it in place.
        norm_weight: (H,).

    Returns:
        The normalised sum, (T, H).
    """
    num_tokens, topk = ids.shape
    normed = torch.empty_like(residual)
    block = triton.next_power_of_2(rows.shape[1])
    _add_norm_kernel[(num_tokens,)](
        rows, weights, ids, rows if shared is None else shared, residual, norm_weight, normed, rows.shape[1], eps,
        L=num_experts, K=topk, BLOCK_H=block, HAS_SHARED=shared is not None, num_warps=16 if block > 4096 else 4,
        **launch_options(rows, joins=True),
    )  # fmt: skip
    return normed


@add_norm_rows.register_fake
def _(
    rows: Tensor, weights: Tensor, ids: Tensor, shared: Tensor | None, residual: Tensor, norm_weight: Tensor,
    eps: float, num_experts: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(residual)
