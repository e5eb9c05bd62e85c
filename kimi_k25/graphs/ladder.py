"""A ladder: the graphs of one phase, one for each bucket, over one set of static buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .breaks import crossing_scope
from .buckets import BucketPolicy, Selection
from .buffers import StaticInputs
from .capture import Captured, Forward, PaddedEager, Step

__all__ = ["Ladder", "Phase"]

Phase = Literal["prefill", "decode"]


@dataclass(slots=True)
class Ladder:
    """Captures by bucket. `policy` is None once every bucket was dropped, `dropped` says why one was.

    `output` is `(max_rows, hidden)`, written by every replay; it exists once a forward has shown its width.
    """

    phase: Phase
    policy: BucketPolicy | None
    statics: StaticInputs
    step: Step
    forward: Forward
    captured: dict[int, Captured] = field(default_factory=dict)
    output: Tensor | None = None
    dropped: str = ""

    @property
    def mode(self) -> Literal["full", "piecewise"]:
        return "full" if self.phase == "decode" else "piecewise"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.policy.sizes if self.policy else ()

    def select(self, num_rows: int) -> Selection:
        """The bucket for that many rows; a miss says what was dropped too."""
        selection = self.policy.select(num_rows) if self.policy else Selection(None, "no buckets are left")
        if selection.bucket is None and self.dropped:
            return Selection(None, f"{selection.reason}; {self.dropped}")
        return selection

    def drop(self, bucket: int, why: str) -> None:
        """Go on without `bucket`."""
        self.captured.pop(bucket, None)
        self.dropped = f"bucket {bucket} was dropped: {why}"
        sizes = tuple(size for size in self.sizes if size != bucket)
        self.policy = BucketPolicy(sizes) if sizes else None

    def load(self, inputs: Mapping[str, Tensor], num_tokens: int, bucket: int) -> None:
        """Make a step the current one: its tensors into the static buffers, padded to `bucket`."""
        self.step.num_tokens = num_tokens
        self.statics.load(inputs, num_tokens, bucket)

    def run_padded(self, bucket: int) -> Tensor:
        """The loaded step eagerly, on the static buffers as they are: (bucket, hidden)."""
        with crossing_scope(PaddedEager(self.step, bucket) if self.mode == "piecewise" else None):
            return self.forward(self.statics.views(bucket))

    @property
    def static_bytes(self) -> int:
        """Bytes of inputs and output."""
        return self.statics.nbytes + (0 if self.output is None else self.output.nbytes)
