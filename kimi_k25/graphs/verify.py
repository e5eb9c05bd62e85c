"""Verification: is a replay what eager computes? Knows captured graphs, no model.

L0 structure: a break for each layer in every piecewise graph, parameters and buffers as before.
L1 replay == eager, bitwise, on the same padded buffers (another size may pick another kernel, so only there).
L2 replayed twice, in every order of up to three buckets, with memory churned through in between.
L3 the real rows of a padded replay against eager without padding, within a tolerance.
L4 greedy tokens of both are equal; needs `head`.

Prefill is checked before decode, so decode graphs are seen to survive the prefill graphs' replays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .buffers import count_tokens
from .errors import VerificationError
from .fingerprint import registered_names
from .graph_set import GraphSet
from .ladder import Ladder, Phase

__all__ = ["Batch", "verify"]

Batch = Callable[[], Mapping[str, Tensor]]


@torch.no_grad()
def verify(
    graphs: GraphSet,
    level: int,
    *,
    batches: Mapping[Phase, Sequence[Batch]] | None = None,
    head: Callable[[Tensor], Tensor] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-3,
) -> dict[str, int]:
    """Run all levels up to `level`.

    Args:
        batches: real steps by phase; each call sets up one (the caller's own step object too) and returns its
            inputs. By default the graphs' dummy steps: each bucket full, and one row short.
        head: `(num_tokens, hidden) -> (num_tokens, vocab)`, for L4.
        rtol, atol: L3's tolerance. It is the tolerance between two sizes of the same product, not of graphs.

    Returns:
        Number of comparisons made, by level.

    Raises:
        VerificationError: names level, phase, bucket, the first differing row and the largest difference.
        ValueError: no such level, or L4 without a head.
    """
    if not 0 <= level <= 4:
        raise ValueError(f"level is {level}; expected 0 to 4")
    if level >= 4 and head is None:
        raise ValueError("level 4 compares tokens, so it needs head=")
    counts: dict[str, int] = {}
    _check_structure(graphs, counts)
    for ladder in graphs.ladders.values():
        steps = _steps(ladder, graphs, (batches or {}).get(ladder.phase))
        for step in steps if level >= 1 else ():
            num_tokens, bucket, inputs = _load(ladder, step)
            where = f"{ladder.phase} {num_tokens} tokens in bucket {bucket}"
            replayed = _replay(ladder, bucket)
            _compare(counts, "L1", where, replayed, ladder.run_padded(bucket))
            if level >= 3:
                real = {**inputs, "num_tokens": ladder.statics.num_tokens}
                unpadded = graphs.forward(real)
                _compare(counts, "L3", where, replayed[:num_tokens], unpadded, rtol, atol)
                if level >= 4 and head is not None:
                    tokens = [head(rows).argmax(-1, keepdim=True) for rows in (replayed[:num_tokens], unpadded)]
                    _compare(counts, "L4", where, tokens[0], tokens[1])
        if level >= 2:
            for order in _orders(steps):
                for step in (*order, *order):
                    num_tokens, bucket, _ = _load(ladder, step)
                    _churn(graphs.device)
                    replayed = _replay(ladder, bucket)
                    where = f"{ladder.phase} bucket {bucket}"
                    _compare(counts, "L2", where, replayed, ladder.run_padded(bucket))
    return counts


_FROZEN = "a Python value, a number from the host or a rebound tensor is frozen in the graph"
_PADDED = "padding reaches real rows, or another size's kernels differ by more than the tolerance"
_USUAL_CAUSE = {"L1": _FROZEN, "L2": _FROZEN, "L3": _PADDED, "L4": _PADDED}


def _compare(
    counts: dict[str, int],
    level: str,
    where: str,
    replayed: Tensor,
    eager: Tensor,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    counts[level] = counts.get(level, 0) + 1
    close = torch.isclose(replayed, eager, equal_nan=True, rtol=rtol, atol=atol)
    if bool(close.all()):
        return
    row = int((~close).flatten(1).any(1).nonzero()[0])
    worst = (replayed.double() - eager.double()).abs().max().item()
    raise VerificationError(
        f"{level} {where}: replay != eager, first in row {row}, by up to {worst:.3g}. "
        f"As a rule {_USUAL_CAUSE[level]}: see docs/will-it-capture.md"
    )


def _check_structure(graphs: GraphSet, counts: dict[str, int]) -> None:
    for ladder in graphs.ladders.values():
        for bucket, captured in ladder.captured.items():
            counts["L0"] = counts.get("L0", 0) + 1
            if ladder.mode == "piecewise" and not graphs.plan.one_break and captured.num_breaks != graphs.num_layers:
                raise VerificationError(f"L0 bucket {bucket}: {captured.num_breaks} breaks, {graphs.num_layers} layers")
    if (names := registered_names(graphs.module)) != graphs.names:
        changed = ", ".join(sorted({*names} ^ {*graphs.names})[:3]) or "their order"
        raise VerificationError(
            f"L0: the module has other parameters or buffers than before the capture ({changed}); make a new runner"
        )


def _steps(ladder: Ladder, graphs: GraphSet, batches: Sequence[Batch] | None) -> list[Batch]:
    if batches is not None:
        return list(batches)
    sizes = sorted(ladder.captured)
    counts = sorted({count for size in sizes for count in (size, size - 1) if count > 0})
    return [lambda count=count: graphs.dummy(ladder.phase, count) for count in counts]  # type: ignore[misc]


def _orders(steps: list[Batch]) -> list[tuple[Batch, ...]]:
    picked = steps if len(steps) <= 3 else [steps[0], steps[len(steps) // 2], steps[-1]]
    return list(itertools.permutations(picked))


def _load(ladder: Ladder, batch: Batch) -> tuple[int, int, Mapping[str, Tensor]]:
    inputs = batch()
    num_tokens = count_tokens(inputs, ladder.statics.specs)
    selection = ladder.select(num_tokens)
    if selection.bucket is None:
        raise VerificationError(f"{ladder.phase} of {num_tokens} tokens can't be replayed: {selection.reason}")
    ladder.load(inputs, num_tokens, selection.bucket)
    return num_tokens, selection.bucket, inputs


def _replay(ladder: Ladder, bucket: int) -> Tensor:
    captured = ladder.captured[bucket]
    captured.output.fill_(float("nan"))
    captured.replay()
    return captured.output.clone()


def _churn(device: torch.device) -> None:
    """Take and dirty memory of many sizes, so that what a graph no longer owns is somebody else's now."""
    taken = [torch.full((1 << power,), float("nan"), device=device) for power in range(6, 22, 3)]
    del taken[::2]
