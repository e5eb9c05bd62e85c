"""GraphPlan: what to capture, and how. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .buckets import BucketPolicy

__all__ = ["GraphPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """What a GraphRunner captures.

    Args:
        backend: `auto` is cuda on a CUDA device and eager elsewhere; `tape` (CUDA-graph semantics on the CPU,
            for tests) is only had by name.
        prefill: buckets in tokens of the piecewise graphs; None captures none.
        decode: buckets in sequences of the full graphs; None captures none.
        max_graph_bytes: budget of the graphs' memory; above it buckets are dropped from the top, with a warning.
        strict: every fallback to a slower mode raises GraphFallbackError.
        bridges: `shared` copies activations that cross a break into buffers that all layers and buckets share;
            `per_layer` keeps each alive where the graph made it: no copies, more memory.
        poison: tape only; fills the graph's own intermediates with NaN before each replay.
        one_break: a debug mode that runs the whole padded forward as one eager break. A fault that stays is
            the model's, a fault that goes is the capture's.

    Raises:
        ValueError: an unknown backend or kind of bridges, or poison without the tape.
        TypeError: buckets that are no BucketPolicy.
    """

    backend: Literal["auto", "cuda", "tape", "eager"] = "auto"
    prefill: BucketPolicy | None = BucketPolicy.prefill(2048)
    decode: BucketPolicy | None = None
    max_graph_bytes: int | None = None
    strict: bool = False
    bridges: Literal["shared", "per_layer"] = "shared"
    poison: bool = False
    one_break: bool = False

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "cuda", "tape", "eager"):
            raise ValueError(f"backend {self.backend!r} is not one of 'auto', 'cuda', 'tape', 'eager'")
        if self.bridges not in ("shared", "per_layer"):
            raise ValueError(f"bridges {self.bridges!r} is not one of 'shared', 'per_layer'")
        for phase, policy in (("prefill", self.prefill), ("decode", self.decode)):
            if policy is not None and not isinstance(policy, BucketPolicy):
                raise TypeError(
                    f"{phase} is {policy!r}, expected a BucketPolicy or None: BucketPolicy.{phase}(maximum) makes the "
                    "usual sizes, BucketPolicy.of(sizes) takes yours"
                )
        if self.poison and self.backend != "tape":
            raise ValueError("poison=True needs backend='tape': a CUDA graph's intermediates can't be reached")
