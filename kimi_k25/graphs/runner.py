"""GraphRunner: captures a forward for a ladder of sizes and runs each step by the fastest way that is right.

The forward takes embeddings and gives hidden states. Token lookup, vision tower and LM head stay outside, so
text and images share the same graphs. Knows no model: only a function, its inputs and its break points.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .breaks import crossing_scope
from .buckets import BucketPolicy
from .buffers import InputSpec, StaticInputs, count_tokens
from .capture import Backend, BridgeBuffers, Captured, Forward, PaddedEager, Step, capture_forward, quiet_gc
from .errors import CaptureError, GraphError, GraphFallbackError, GraphFallbackWarning
from .fingerprint import PointerFingerprint, registered_names
from .ladder import Ladder, Phase
from .plan import GraphPlan
from .resolve import resolve_decoder

__all__ = ["Choice", "GraphRunner", "MemoryReport"]

logger = logging.getLogger(__name__)

Dummy = Callable[[Phase, int], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step would run: `full`, `piecewise` or `eager`, in which bucket, and why no better."""

    mode: Literal["full", "piecewise", "eager"]
    bucket: int | None = None
    reason: str = ""
    is_fallback: bool = False


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


def _choose_backend(plan: GraphPlan, device: torch.device) -> tuple[Backend | None, str]:
    """The backend, or None for eager with the reason."""
    if plan.backend == "tape":
        from .tape import Tape

        return Tape(poison=plan.poison), ""
    if plan.backend == "eager":
        return None, "the plan says eager"
    if device.type == "cuda":
        from .cuda import CudaGraphs

        return CudaGraphs(device), ""
    if plan.backend == "cuda" or plan.strict:
        raise GraphError(f"CUDA graphs need a CUDA device, the module is on {device}; use backend='tape' or 'eager'")
    return None, f"no CUDA graphs on {device.type}"


class GraphRunner:
    """Runs a forward through graphs: decode in full graphs, prefill in pieces around eager break points.

    Args:
        forward: `(inputs) -> hidden_states (num_tokens, hidden)`. `inputs` has the tensors named by the specs
            and `num_tokens`, an int32 tensor of one element: rows past it are padding. Inside, shapes may
            depend on shapes only.
        module: its parameters and buffers are what the graphs read; its decoder stack counts the layers.
        inputs: name to InputSpec, for prefill and decode.
        dummy: `(phase, num_tokens) -> inputs`: a harmless step of that size, and all that the break points need
            to run it. Called for warm-up, capture and verification.
        decode_inputs: further inputs that only decode steps have (block tables, sequence lengths).
        plan: what to capture.
        num_layers: how many break points a forward must meet; by default the decoder's number of layers.
        watch: further tensors that the graphs read, by name (caches, workspaces): see PointerFingerprint.

    Example:
        runner = GraphRunner(forward, module, inputs={"inputs_embeds": InputSpec((7168,), torch.bfloat16)},
                             dummy=dummy, plan=GraphPlan(prefill=BucketPolicy.prefill(2048)))
        runner.capture()
        runner.freeze()
        hidden_states = runner.run({"inputs_embeds": inputs_embeds})
    """

    def __init__(
        self,
        forward: Forward,
        module: nn.Module,
        *,
        inputs: Mapping[str, InputSpec],
        dummy: Dummy,
        decode_inputs: Mapping[str, InputSpec] | None = None,
        plan: GraphPlan | None = None,
        num_layers: int | None = None,
        watch: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        self.forward, self.module, self.dummy = forward, module, dummy
        self.plan = plan or GraphPlan()
        self.num_layers = len(resolve_decoder(module).layers) if num_layers is None else num_layers
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._specs: dict[Phase, dict[str, InputSpec]] = {
            "prefill": dict(inputs),
            "decode": {**inputs, **(decode_inputs or {})},
        }
        self._watch = dict(watch or {})
        self._names = registered_names(module)
        self._backend, self._why_eager = _choose_backend(self.plan, self.device)
        self._ladders: dict[Phase, Ladder] = {}
        self._bridges: BridgeBuffers | None = None
        self._step = Step()
        self._eager_num_tokens = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._fingerprint: PointerFingerprint | None = None
        self._state: Literal["new", "captured", "frozen", "closed"] = "new"
        self._lock = threading.Lock()
        self._runs: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._capture_seconds = 0.0
        self._reserved_bytes = self._driver_bytes = 0

    # -- capture ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self) -> None:
        """Warm every bucket eagerly, then capture all, largest first, prefill before decode.

        Raises:
            CaptureError: the forward can't be captured, or meets another number of break points than layers; or
                this runner has captured before. After a failed capture it may try again.
        """
        if self._state != "new":
            raise CaptureError(f"capture() on a {self._state} runner; make a new one")
        with self._alone():
            start, memory = time.perf_counter(), self._memory()
            if self._backend is not None:
                try:
                    with quiet_gc():
                        self._capture_all(self._backend)
                except BaseException:
                    self._ladders.clear()
                    self._backend.close()
                    raise
            self._capture_seconds = time.perf_counter() - start
            self._reserved_bytes, self._driver_bytes = (a - b for a, b in zip(self._memory(), memory, strict=True))
            self._state = "captured"
        logger.info("%s", self.describe())

    def _capture_all(self, backend: Backend) -> None:
        policies: dict[Phase, BucketPolicy | None] = {"prefill": self.plan.prefill, "decode": self.plan.decode}
        self._ladders = {
            phase: Ladder(phase, policy, StaticInputs(self._specs[phase], policy.maximum, self.device), self._step)
            for phase, policy in policies.items()
            if policy is not None
        }
        for ladder in self._ladders.values():
            self._warm(backend, ladder)
        while not self._capture_ladders(backend):
            backend.close()  # over budget: its memory comes back only when all of its graphs go

    def _warm(self, backend: Backend, ladder: Ladder) -> None:
        """Autotuning, library workspaces and lazy caches must happen before the first capture, at every size."""
        for bucket in reversed(ladder.sizes):
            try:
                self._load_dummy(ladder, bucket)
                with backend.warming():
                    hidden_states = self._run_padded(ladder, bucket)
            except torch.OutOfMemoryError as e:
                self._drop_out_of_memory(ladder, bucket, e)
                continue
            if hidden_states.dim() != 2 or hidden_states.shape[0] != bucket:
                raise CaptureError(
                    f"forward returned {tuple(hidden_states.shape)} for {bucket} tokens, expected ({bucket}, hidden)"
                )
            if ladder.output is None:
                ladder.output = torch.zeros_like(hidden_states)

    def _capture_ladders(self, backend: Backend) -> bool:
        """Capture all; False if the budget was exceeded, with the largest bucket dropped for the next try."""
        self._bridges = BridgeBuffers(backend) if self.plan.bridges == "shared" else None
        for ladder in self._ladders.values():
            ladder.captured.clear()
            if ladder.output is None:
                continue
            for bucket in reversed(ladder.sizes):
                before = self._graph_bytes(backend)
                try:
                    captured = self._capture_bucket(backend, ladder, bucket)
                except torch.OutOfMemoryError as e:
                    self._drop_out_of_memory(ladder, bucket, e)
                    continue
                captured.nbytes = self._graph_bytes(backend) - before
                ladder.captured[bucket] = captured
                budget, used = self.plan.max_graph_bytes, self._graph_bytes(backend)
                if budget is not None and used > budget:
                    self._drop_over_budget(used, budget)
                    return False
        self._refuse_kept_tensors(backend)
        return True

    def _capture_bucket(self, backend: Backend, ladder: Ladder, bucket: int) -> Captured:
        assert ladder.output is not None
        output = ladder.output[:bucket]
        self._load_dummy(ladder, bucket)
        if self.plan.one_break:
            return Captured([lambda: output.copy_(self._run_padded(ladder, bucket))], output, 1)
        captured = capture_forward(
            backend,
            self.forward,
            ladder.statics.views(bucket),
            output,
            self._step,
            pieces=ladder.mode == "piecewise",
            bridges=self._bridges,
        )
        if ladder.mode == "piecewise" and captured.num_breaks != self.num_layers:
            raise CaptureError(
                f"the forward met {captured.num_breaks} break points, expected {self.num_layers}, one a layer; "
                "an attention without @break_point would be frozen into the graph with its first arguments"
            )
        return captured

    def _drop_out_of_memory(self, ladder: Ladder, bucket: int, error: torch.OutOfMemoryError) -> None:
        used = self._graph_bytes(self._backend) if self._backend else 0
        message = (
            f"out of memory at {ladder.phase} bucket {bucket}, with {used} bytes of graphs before it; lower the "
            f"maximum of GraphPlan.{ladder.phase}, or max_graph_bytes"
        )
        if self.plan.strict:
            raise CaptureError(message) from error
        ladder.drop(bucket, "out of memory")
        warnings.warn(f"{message}. The other buckets stay in use", GraphFallbackWarning, stacklevel=2)

    def _drop_over_budget(self, used: int, budget: int) -> None:
        ladder = max(self._ladders.values(), key=lambda ladder: max(ladder.sizes, default=0))
        bucket = max(ladder.sizes)
        message = (
            f"graphs take {used} bytes, over max_graph_bytes={budget}, with {ladder.phase} bucket {bucket} the "
            "largest; raise the budget, or plan fewer"
        )
        if self.plan.strict:
            raise CaptureError(message)
        ladder.drop(bucket, "over max_graph_bytes")
        warnings.warn(f"{message}. It is dropped", GraphFallbackWarning, stacklevel=2)

    def _refuse_kept_tensors(self, backend: Backend) -> None:
        """A tensor that a module kept from a capture lies in memory that every replay overwrites."""
        for name, module in self.module.named_modules():
            for key, value in (*vars(module).items(), *module._buffers.items(), *module._parameters.items()):
                if isinstance(value, Tensor) and backend.owns(value):
                    raise CaptureError(
                        f"{name + '.' if name else ''}{key} was made inside the capture and kept on its module; "
                        "replays overwrite it. Compute it before the forward, or don't keep it"
                    )

    def freeze(self) -> None:
        """No capture from here on; each run checks that all that the graphs read still lies where it lay."""
        if self._state != "captured":
            raise GraphError(f"freeze() needs a captured runner, this one is {self._state}")
        self._fingerprint = PointerFingerprint(self.module, self._watch)
        self._state = "frozen"

    # -- running ------------------------------------------------------------------------------------------

    def can_run(self, num_tokens: int, *, decode: bool = False) -> Choice:
        """How a step of this size would run. Full (decode) before piecewise before eager.

        A decode step that misses its own ladder tries the prefill graphs: break points take any step.
        """
        if self._backend is None:
            return Choice("eager", reason=self._why_eager)
        if not self._ladders:
            reason = {"new": "nothing is captured yet", "closed": "the runner is closed"}.get(self._state)
            return Choice("eager", reason=reason or "the plan has no graphs", is_fallback=True)
        reasons: list[str] = []
        phase: Phase
        phases: tuple[Phase, ...] = ("decode", "prefill") if decode else ("prefill",)
        for phase in phases:
            ladder = self._ladders.get(phase)
            if ladder is None:
                continue
            selection = ladder.select(num_tokens)
            if selection.bucket is not None:
                return Choice(ladder.mode, selection.bucket, "; ".join(reasons), is_fallback=bool(reasons))
            reasons.append(f"{phase}: {selection.reason}")
        phase = "decode" if decode else "prefill"
        return Choice("eager", reason="; ".join(reasons) or f"no {phase} graphs are planned", is_fallback=bool(reasons))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], *, decode: bool = False, clone: bool = True) -> Tensor:
        """Run one step.

        Args:
            inputs: tensors of `(num_tokens, ...)`, exactly those of the specs.
            decode: one token a sequence, so that a full graph may serve it; `num_tokens` is then `num_seqs`.
            clone: False returns the graph's own output: no copy, valid until the next run.

        Returns:
            Hidden states `(num_tokens, hidden)`.

        Raises:
            PointerMovedError: after `freeze`, something that the graphs read was moved; the result is withheld.
            GraphFallbackError: with `strict`, the step can't run as planned.
            GraphError: closed, or another thread is inside.
        """
        if self._state == "closed":
            raise GraphError("this runner is closed")
        with self._alone():
            num_tokens = count_tokens(inputs, self._specs["decode" if decode else "prefill"])
            choice = self.can_run(num_tokens, decode=decode)
            if choice.is_fallback:
                self._note_fallback(choice)
            self._runs[choice.mode] += 1
            if choice.bucket is None:
                return self._run_unpadded(inputs, num_tokens)
            ladder = self._ladders["decode" if choice.mode == "full" else "prefill"]
            captured = ladder.captured[choice.bucket]
            ladder.load(inputs, num_tokens, choice.bucket)
            self._replay(captured)
            hidden_states = captured.output[:num_tokens]
            return hidden_states.clone() if clone else hidden_states

    @torch.no_grad()
    def run_eager(self, inputs: Mapping[str, Tensor], *, decode: bool = False) -> Tensor:
        """Run one step eagerly, padded as `run` would pad it: what `run` must equal bitwise.

        Only at equal size: eager without padding may pick another kernel and differ in the last bits. Arguments
        and result are those of `run`; nothing is counted.
        """
        with self._alone():
            num_tokens = count_tokens(inputs, self._specs["decode" if decode else "prefill"])
            choice = self.can_run(num_tokens, decode=decode)
            if choice.bucket is None:
                return self._run_unpadded(inputs, num_tokens)
            ladder = self._ladders["decode" if choice.mode == "full" else "prefill"]
            ladder.load(inputs, num_tokens, choice.bucket)
            return self._run_padded(ladder, choice.bucket)[:num_tokens]

    def _run_unpadded(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Tensor:
        self._eager_num_tokens.fill_(num_tokens)
        return self.forward({**inputs, "num_tokens": self._eager_num_tokens})

    def _run_padded(self, ladder: Ladder, bucket: int) -> Tensor:
        """Eager on the static buffers as they are."""
        crossing = PaddedEager(self._step, bucket) if ladder.mode == "piecewise" else None
        with crossing_scope(crossing):
            return self.forward(ladder.statics.views(bucket))

    def _replay(self, captured: Captured) -> None:
        for call in captured.calls:
            call()
        # After the launches: the host checks while the device works, before any result is handed out.
        if self._fingerprint is not None:
            self._fingerprint.check()

    def _note_fallback(self, choice: Choice) -> None:
        if self.plan.strict:
            raise GraphFallbackError(f"the step would run {choice.mode}: {choice.reason}")
        self._fallbacks[choice.reason] += 1
        if self._fallbacks[choice.reason] == 1:
            # Past run and torch.no_grad's wrapper: the line that asked for the step.
            warnings.warn(f"running {choice.mode}: {choice.reason}", GraphFallbackWarning, stacklevel=4)

    def _load_dummy(self, ladder: Ladder, num_tokens: int) -> None:
        inputs = self.dummy(ladder.phase, num_tokens)
        found = count_tokens(inputs, self._specs[ladder.phase])
        if found != num_tokens:
            raise ValueError(f"dummy({ladder.phase!r}, {num_tokens}) gave {found} tokens")
        ladder.load(inputs, num_tokens, num_tokens)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise GraphError(
                "another thread is inside this runner; its static buffers serve one step at a time. "
                "Give each thread a runner, or put a lock around run()"
            )
        try:
            yield
        finally:
            self._lock.release()

    # -- looking in ---------------------------------------------------------------------------------------

    def verify(self, level: int = 2, **options: Any) -> dict[str, int]:
        """Compare replays with eager, after `capture`: kimi_k25.graphs.verify has the levels and the options.

        Returns:
            Number of comparisons made, by level.

        Raises:
            VerificationError: a replay differs from eager.
            GraphError: there is no graph to verify.
        """
        from .verify import verify

        if not self._ladders:
            why = self._why_eager or self.can_run(1).reason
            raise GraphError(f"nothing to verify: {why}. Call capture() first; on a CPU with backend='tape'")
        with self._alone():
            return verify(self, level, **options)

    def stats(self) -> dict[str, Any]:
        """Backend, state, runs by mode and fallbacks by reason."""
        return {
            "backend": self._backend.name if self._backend else "eager",
            "why_eager": self._why_eager,
            "state": self._state,
            "runs": dict(self._runs),
            "fallbacks": dict(self._fallbacks),
            "buckets": {phase: list(ladder.captured)[::-1] for phase, ladder in self._ladders.items()},
            "capture_seconds": self._capture_seconds,
        }

    def describe(self) -> str:
        """One line: backend, buckets, segments, seconds, MiB; or why there are none."""
        if self._backend is None:
            return f"graphs: eager ({self._why_eager})"
        ladders = [
            f"{phase} {len(ladder.captured)} buckets {min(ladder.captured)}..{max(ladder.captured)}"
            for phase, ladder in self._ladders.items()
            if ladder.captured
        ]
        calls = sum(len(c.calls) - c.num_breaks for ladder in self._ladders.values() for c in ladder.captured.values())
        mib = self._graph_bytes(self._backend) / 2**20
        return (
            f"graphs: {self._backend.name}, {', '.join(ladders) or 'nothing captured'}, {calls} segments, "
            f"{self._capture_seconds:.2f} s, {mib:.1f} MiB"
        )

    def memory_report(self) -> MemoryReport:
        """What the graphs and their buffers take."""
        return MemoryReport(
            graph_bytes=self._backend.nbytes if self._backend else 0,
            bridge_bytes=self._bridges.nbytes if self._bridges else 0,
            static_bytes=sum(
                ladder.statics.nbytes + (0 if ladder.output is None else ladder.output.nbytes)
                for ladder in self._ladders.values()
            ),
            reserved_bytes=self._reserved_bytes,
            driver_bytes=self._driver_bytes,
            by_bucket={
                (phase, bucket): captured.nbytes
                for phase, ladder in self._ladders.items()
                for bucket, captured in ladder.captured.items()
            },
        )

    def _graph_bytes(self, backend: Backend) -> int:
        return backend.nbytes + (self._bridges.nbytes if self._bridges else 0)

    def _memory(self) -> tuple[int, int]:
        """Bytes reserved by torch's allocator, and in use as the driver sees it."""
        if self.device.type != "cuda":
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device), total - free

    def close(self) -> None:
        """Drop all graphs together. The runner can't `run` again; another one can be made."""
        with self._alone():
            self._state = "closed"
            self._ladders.clear()
            self._bridges = self._fingerprint = None
            if self._backend is not None:
                self._backend.close()

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
