"""GraphRunner: runs each step by the fastest captured way that is right. Knows no model and captures nothing itself.

The forward takes embeddings and gives hidden states. Token lookup, vision tower and LM head stay outside, so
text and images share the same graphs.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .backend import Backend
from .buffers import InputSpec, count_tokens
from .capture import Forward
from .errors import CaptureError, GraphError, GraphFallbackError, GraphFallbackWarning
from .fingerprint import PointerFingerprint
from .graph_set import Dummy, GraphSet, MemoryReport
from .ladder import Ladder, Phase
from .plan import GraphPlan
from .resolve import resolve_decoder
from .verify import Batch, verify

__all__ = ["Choice", "GraphRunner"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step would run: `full`, `piecewise` or `eager`, in which bucket, and why no better."""

    mode: Literal["full", "piecewise", "eager"]
    bucket: int | None = None
    reason: str = ""
    is_fallback: bool = False


class _Alone:
    """A block for one thread at a time, which a second one is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise GraphError(
                "another thread is inside this runner; its static buffers serve one step at a time. "
                "Give each thread a runner, or put a lock around run()"
            )

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


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

    Attributes:
        graphs: what was captured; None if all runs are eager.

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
        self.module = module
        self.plan = plan or GraphPlan()
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._forward = forward
        self._specs: dict[Phase, dict[str, InputSpec]] = {
            "prefill": dict(inputs),
            "decode": {**inputs, **(decode_inputs or {})},
        }
        self._watch = dict(watch or {})
        self._eager_num_tokens = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._fingerprint: PointerFingerprint | None = None
        self._state: Literal["new", "captured", "frozen", "closed"] = "new"
        self._alone = _Alone()
        self._runs: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._capture_seconds = 0.0
        layers = len(resolve_decoder(module).layers) if num_layers is None else num_layers
        backend, self._why_eager = _choose_backend(self.plan, self.device)
        self.graphs: GraphSet | None = None
        if backend is not None:
            self.graphs = GraphSet(
                backend, forward, module,
                specs=self._specs, dummy=dummy, plan=self.plan, num_layers=layers, device=self.device,
            )  # fmt: skip

    @torch.no_grad()
    def capture(self) -> None:
        """Capture all that the plan asks for, once.

        Raises:
            CaptureError: the forward can't be captured, or meets another number of break points than layers; or
                this runner has captured before. After a failed capture it may try again.
        """
        if self._state != "new":
            raise CaptureError(f"capture() on a {self._state} runner; make a new one")
        with self._alone:
            start = time.perf_counter()
            if self.graphs is not None:
                self.graphs.capture()
            self._capture_seconds = time.perf_counter() - start
            self._state = "captured"
        logger.info("%s", self.describe())

    def freeze(self) -> None:
        """No capture from here on; each run checks that all that the graphs read still lies where it lay."""
        if self._state != "captured":
            raise GraphError(f"freeze() follows capture(), once; this runner is {self._state}")
        self._fingerprint = PointerFingerprint(self.module, self._watch)
        self._state = "frozen"

    def can_run(self, num_tokens: int, *, decode: bool = False) -> Choice:
        """How a step of this size would run. Full (decode) before piecewise before eager.

        A decode step that misses its own ladder tries the prefill graphs: break points take any step.
        """
        if self.graphs is None:
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
            raise GraphError("this runner is closed; make a new one")
        with self._alone:
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
            captured.replay()
            if self._fingerprint is not None:
                # After the launches: the host checks while the device works, before any result is handed out.
                self._fingerprint.check()
            hidden_states = captured.output[:num_tokens]
            return hidden_states.clone() if clone else hidden_states

    @torch.no_grad()
    def run_eager(self, inputs: Mapping[str, Tensor], *, decode: bool = False) -> Tensor:
        """Run one step eagerly, padded as `run` would pad it: what `run` must equal bitwise.

        Only at equal size: eager without padding may pick another kernel and differ in the last bits. Arguments
        and result are those of `run`; nothing is counted.
        """
        with self._alone:
            num_tokens = count_tokens(inputs, self._specs["decode" if decode else "prefill"])
            choice = self.can_run(num_tokens, decode=decode)
            if choice.bucket is None:
                return self._run_unpadded(inputs, num_tokens)
            ladder = self._ladders["decode" if choice.mode == "full" else "prefill"]
            ladder.load(inputs, num_tokens, choice.bucket)
            return ladder.run_padded(choice.bucket)[:num_tokens]

    def _run_unpadded(self, inputs: Mapping[str, Tensor], num_tokens: int) -> Tensor:
        self._eager_num_tokens.fill_(num_tokens)
        return self._forward({**inputs, "num_tokens": self._eager_num_tokens})

    @property
    def _ladders(self) -> Mapping[Phase, Ladder]:
        return self.graphs.ladders if self.graphs is not None else {}

    def _note_fallback(self, choice: Choice) -> None:
        if self.plan.strict:
            raise GraphFallbackError(f"the step would run {choice.mode}: {choice.reason}")
        self._fallbacks[choice.reason] += 1
        if self._fallbacks[choice.reason] == 1:
            # Past run and torch.no_grad's wrapper: the line that asked for the step.
            warnings.warn(f"running {choice.mode}: {choice.reason}", GraphFallbackWarning, stacklevel=4)

    def verify(
        self,
        level: int = 2,
        *,
        batches: Mapping[Phase, Sequence[Batch]] | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-3,
    ) -> dict[str, int]:
        """Compare replays with eager, after `capture`: kimi_k25.graphs.verify has the levels and the arguments.

        Returns:
            Number of comparisons made, by level.

        Raises:
            VerificationError: a replay differs from eager.
            GraphError: there is no graph to verify.
        """
        if self.graphs is None or not self._ladders:
            why = self._why_eager or self.can_run(1).reason
            raise GraphError(f"nothing to verify: {why}. Call capture() first; on a CPU with backend='tape'")
        with self._alone:
            if self._fingerprint is not None:
                self._fingerprint.check()
            return verify(self.graphs, level, batches=batches, head=head, rtol=rtol, atol=atol)

    def stats(self) -> dict[str, Any]:
        """Backend, state, runs by mode and fallbacks by reason."""
        return {
            "backend": self.graphs.backend.name if self.graphs is not None else "eager",
            "why_eager": self._why_eager,
            "state": self._state,
            "runs": dict(self._runs),
            "fallbacks": dict(self._fallbacks),
            "buckets": {phase: list(ladder.captured)[::-1] for phase, ladder in self._ladders.items()},
            "capture_seconds": self._capture_seconds,
        }

    def describe(self) -> str:
        """One line: backend, buckets, segments, seconds, MiB; or why there are none."""
        if self.graphs is None:
            return f"graphs: eager ({self._why_eager})"
        ladders = [
            f"{phase} {len(ladder.captured)} buckets {min(ladder.captured)}..{max(ladder.captured)}"
            for phase, ladder in self._ladders.items()
            if ladder.captured
        ]
        return (
            f"graphs: {self.graphs.backend.name}, {', '.join(ladders) or 'nothing captured'}, "
            f"{self.graphs.num_segments} segments, {self._capture_seconds:.2f} s, {self.graphs.nbytes / 2**20:.1f} MiB"
        )

    def memory_report(self) -> MemoryReport:
        """What the graphs and their buffers take."""
        return self.graphs.memory_report() if self.graphs is not None else MemoryReport(0, 0, 0, 0, 0, {})

    def close(self) -> None:
        """Drop all graphs together. The runner can't `run` again; another one can be made."""
        with self._alone:
            self._state = "closed"
            self._fingerprint = None
            if self.graphs is not None:
                self.graphs.close()

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
