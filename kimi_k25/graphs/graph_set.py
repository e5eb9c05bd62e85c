"""GraphSet: all graphs of a plan, captured together and dropped together. Knows no step that is to be run."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .backend import Backend
from .bridges import BridgeBuffers
from .buffers import InputSpec, StaticInputs, count_tokens
from .capture import Captured, Forward, Step, capture_forward
from .errors import CaptureError, GraphFallbackWarning
from .fingerprint import registered_names
from .ladder import Ladder, Phase
from .plan import GraphPlan

__all__ = ["Dummy", "GraphSet", "MemoryReport"]

Dummy = Callable[[Phase, int], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. `by_bucket` is what each capture added to the graphs' memory, in the order of capture.

    `reserved_bytes` and `driver_bytes` are what torch's allocator and the driver gave during the whole capture,
    warm-up included (0 off CUDA).
    """

    graph_bytes: int
    bridge_bytes: int
    static_bytes: int
    reserved_bytes: int
    driver_bytes: int
    by_bucket: dict[tuple[str, int], int]


class GraphSet:
    """The graphs of a GraphPlan over one forward: a ladder for each phase, on one backend.

    Arguments are GraphRunner's; `specs` are its inputs by phase.

    Attributes:
        ladders: by phase, empty until `capture` and after `close`.
        names: what the module had registered before the capture.
    """

    def __init__(
        self,
        backend: Backend,
        forward: Forward,
        module: nn.Module,
        *,
        specs: Mapping[Phase, Mapping[str, InputSpec]],
        dummy: Dummy,
        plan: GraphPlan,
        num_layers: int,
        device: torch.device,
    ) -> None:
        self.backend, self.forward, self.module, self.dummy = backend, forward, module, dummy
        self.specs, self.plan, self.num_layers, self.device = specs, plan, num_layers, device
        self.names = registered_names(module)
        self.ladders: dict[Phase, Ladder] = {}
        self.bridges: BridgeBuffers | None = None
        self._step = Step()
        self._reserved_bytes = self._driver_bytes = 0

    def capture(self) -> None:
        """Warm every bucket eagerly, then capture all, largest first, prefill before decode.

        Raises:
            CaptureError: the forward can't be captured, or meets another number of break points than layers;
                nothing is left captured then.
        """
        policies = {"prefill": self.plan.prefill, "decode": self.plan.decode}
        before = self._given_bytes()
        self.ladders = {
            phase: Ladder(phase, policy, StaticInputs(specs, policy.maximum, self.device), self._step, self.forward)
            for phase, specs in self.specs.items()
            if (policy := policies[phase]) is not None
        }
        try:
            with _quiet_gc():
                for ladder in self.ladders.values():
                    self._warm(ladder)
                while not self._capture_ladders():
                    self.backend.close()  # over budget: its memory comes back only when all of its graphs go
        except BaseException:
            self.close()
            raise
        self._reserved_bytes, self._driver_bytes = (a - b for a, b in zip(self._given_bytes(), before, strict=True))

    def _warm(self, ladder: Ladder) -> None:
        """Autotuning, library workspaces and lazy caches must happen before the first capture, at every size."""
        for bucket in reversed(ladder.sizes):
            try:
                self._load_dummy(ladder, bucket)
                with self.backend.warming():
                    hidden_states = ladder.run_padded(bucket)
            except torch.OutOfMemoryError as e:
                self._drop_out_of_memory(ladder, bucket, e)
                continue
            if hidden_states.dim() != 2 or hidden_states.shape[0] != bucket:
                raise CaptureError(
                    f"forward returned {tuple(hidden_states.shape)} for {bucket} tokens, expected ({bucket}, hidden)"
                )
            if ladder.output is None:
                ladder.output = torch.zeros_like(hidden_states)

    def _capture_ladders(self) -> bool:
        """Capture all; False if the budget was exceeded, with the largest bucket dropped for the next try."""
        self.bridges = BridgeBuffers(self.backend) if self.plan.bridges == "shared" else None
        for ladder in self.ladders.values():
            ladder.captured.clear()
            if ladder.output is None:
                continue
            for bucket in reversed(ladder.sizes):
                before = self.nbytes
                try:
                    captured = self._capture_bucket(ladder, bucket, ladder.output[:bucket])
                except torch.OutOfMemoryError as e:
                    self._drop_out_of_memory(ladder, bucket, e)
                    continue
                captured.nbytes = self.nbytes - before
                ladder.captured[bucket] = captured
                if self.plan.max_graph_bytes is not None and self.nbytes > self.plan.max_graph_bytes:
                    self._drop_over_budget(self.nbytes, self.plan.max_graph_bytes)
                    return False
        self._refuse_kept_tensors()
        return True

    def _capture_bucket(self, ladder: Ladder, bucket: int, output: Tensor) -> Captured:
        self._load_dummy(ladder, bucket)
        if self.plan.one_break:
            return Captured([lambda: output.copy_(ladder.run_padded(bucket))], output, 1)
        pieces = ladder.mode == "piecewise"
        captured = capture_forward(
            self.backend, self.forward, ladder.statics.views(bucket), output, self._step,
            pieces=pieces, bridges=self.bridges,
        )  # fmt: skip
        if pieces and captured.num_breaks != self.num_layers:
            raise CaptureError(
                f"the forward met {captured.num_breaks} break points, expected {self.num_layers}, one a layer; "
                "an attention without @break_point would be frozen into the graph with its first arguments"
            )
        return captured

    def _load_dummy(self, ladder: Ladder, num_tokens: int) -> None:
        inputs = self.dummy(ladder.phase, num_tokens)
        found = count_tokens(inputs, ladder.statics.specs)
        if found != num_tokens:
            raise ValueError(f"dummy({ladder.phase!r}, {num_tokens}) gave {found} tokens, expected {num_tokens}")
        ladder.load(inputs, num_tokens, num_tokens)

    def _drop_out_of_memory(self, ladder: Ladder, bucket: int, error: torch.OutOfMemoryError) -> None:
        message = (
            f"out of memory at {ladder.phase} bucket {bucket}, with {self.nbytes} bytes of graphs before it; lower the "
            f"maximum of GraphPlan.{ladder.phase}, or max_graph_bytes"
        )
        if self.plan.strict:
            raise CaptureError(message) from error
        ladder.drop(bucket, "out of memory")
        warnings.warn(f"{message}. The other buckets stay in use", GraphFallbackWarning, stacklevel=2)

    def _drop_over_budget(self, used: int, budget: int) -> None:
        ladder = max(self.ladders.values(), key=lambda ladder: max(ladder.sizes, default=0))
        bucket = max(ladder.sizes)
        message = (
            f"graphs take {used} bytes, over max_graph_bytes={budget}, with {ladder.phase} bucket {bucket} the "
            "largest; raise the budget, or plan fewer"
        )
        if self.plan.strict:
            raise CaptureError(message)
        ladder.drop(bucket, "over max_graph_bytes")
        warnings.warn(f"{message}. It is dropped", GraphFallbackWarning, stacklevel=2)

    def _refuse_kept_tensors(self) -> None:
        """A tensor that a module kept from a capture lies in memory that every replay overwrites."""
        for name, module in self.module.named_modules():
            for key, value in (*vars(module).items(), *module._buffers.items(), *module._parameters.items()):
                if isinstance(value, Tensor) and self.backend.owns(value):
                    raise CaptureError(
                        f"{name + '.' if name else ''}{key} was made inside the capture and kept on its module; "
                        "replays overwrite it. Compute it before the forward, or don't keep it"
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs and of their bridge buffers."""
        return self.backend.nbytes + (self.bridges.nbytes if self.bridges else 0)

    @property
    def num_segments(self) -> int:
        """Segments of all buckets together."""
        captured = [c for ladder in self.ladders.values() for c in ladder.captured.values()]
        return sum(len(c.calls) - c.num_breaks for c in captured)

    def memory_report(self) -> MemoryReport:
        """What the graphs and their buffers take."""
        return MemoryReport(
            graph_bytes=self.backend.nbytes,
            bridge_bytes=self.bridges.nbytes if self.bridges else 0,
            static_bytes=sum(ladder.static_bytes for ladder in self.ladders.values()),
            reserved_bytes=self._reserved_bytes,
            driver_bytes=self._driver_bytes,
            by_bucket={
                (phase, bucket): captured.nbytes
                for phase, ladder in self.ladders.items()
                for bucket, captured in ladder.captured.items()
            },
        )

    def _given_bytes(self) -> tuple[int, int]:
        """Bytes reserved by torch's allocator, and in use as the driver sees it."""
        if self.device.type != "cuda":
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device), total - free

    def close(self) -> None:
        """Drop all graphs together; `capture` may make others."""
        self.ladders.clear()
        self.bridges, self._step = None, Step()
        self.backend.close()


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """A collection during a capture could free device memory, which breaks it; so collect first, then hold."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.disable()
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
