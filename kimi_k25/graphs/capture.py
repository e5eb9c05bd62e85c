"""One captured forward: a list of calls, graph segments and eager breaks in turn. Knows no bucket and no model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .backend import Backend
from .breaks import crossing_scope
from .bridges import BridgeBuffers
from .errors import BreakPointError, CaptureError

__all__ = ["Captured", "Forward", "PaddedEager", "Step", "capture_forward"]

Forward = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(slots=True)
class Step:
    """The one fact of a run that break calls read: how many rows are real."""

    num_tokens: int = 0
    _padding: tuple[Tensor, int, Tensor] | None = None

    def zero_padding(self, out: Tensor) -> None:
        """Zero the rows of `out` behind the real ones; layers that share it share the view of them too."""
        if self._padding is None or self._padding[0] is not out or self._padding[1] != self.num_tokens:
            self._padding = (out, self.num_tokens, out[self.num_tokens :])
        self._padding[2].zero_()


def _without_broadcast(tensor: Tensor) -> Tensor:
    """The elements that exist: one of each dimension that a zero stride repeats."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _BreakCall:
    """A recorded break: runs the function eagerly, then zeroes the rows of its output that are padding."""

    __slots__ = ("args", "fn", "kwargs", "num_rows", "out", "step")

    def __init__(self, fn: Callable[..., None], bound: inspect.BoundArguments, step: Step) -> None:
        self.fn, self.args, self.kwargs, self.step = fn, bound.args, bound.kwargs, step
        self.out: Tensor = bound.arguments["out"]
        self.num_rows = self.out.shape[0]

    def __call__(self) -> None:
        result = self.fn(*self.args, **self.kwargs)
        if result is not None:
            raise BreakPointError(
                f"break point {self.fn.__qualname__} returned a {type(result).__name__}; it must write into 'out' "
                "and return None, since a returned tensor would move from replay to replay"
            )
        if self.step.num_tokens < self.num_rows:
            self.step.zero_padding(self.out)


def _check_out(fn: Callable[..., None], bound: inspect.BoundArguments, num_rows: int) -> None:
    out = bound.arguments.get("out")
    if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != num_rows:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BreakPointError(
            f"break point {fn.__qualname__} was given out={found}, expected a tensor of ({num_rows}, ...): "
            "one row a token, padding included"
        )


class PaddedEager:
    """Break points of an eager forward on padded inputs, to which a replay must be bitwise equal."""

    def __init__(self, step: Step, num_rows: int) -> None:
        self.step, self.num_rows = step, num_rows

    def cross(self, fn: Callable[..., None], bound: inspect.BoundArguments) -> None:
        _check_out(fn, bound, self.num_rows)
        with crossing_scope(None):
            _BreakCall(fn, bound, self.step)()


class _Pieces:
    """Break points of a forward that is being captured: each ends a segment and begins the next."""

    def __init__(self, backend: Backend, bridges: BridgeBuffers | None, step: Step, num_rows: int) -> None:
        self.backend, self.bridges, self.step, self.num_rows = backend, bridges, step, num_rows
        self.calls: list[Callable[[], object]] = []
        self.num_breaks = 0

    def cross(self, fn: Callable[..., None], bound: inspect.BoundArguments) -> None:
        _check_out(fn, bound, self.num_rows)
        out = bound.arguments["out"]
        for name, value in bound.arguments.items():
            bound.arguments[name] = self._hand_over(f"{fn.__qualname__}.{name}", value, copy=name != "out")
        self.calls.append(self.backend.end())
        call = _BreakCall(fn, bound, self.step)
        with crossing_scope(None):
            call()
        self.calls.append(call)
        self.num_breaks += 1
        self.backend.begin()
        if call.out is not out:
            out.copy_(call.out)

    def _hand_over(self, key: str, value: object, *, copy: bool) -> object:
        """`value` with the tensors that the graph made replaced by bridge buffers, which the graph fills.

        Without bridges a tensor crosses as itself: the recorded call keeps it alive, and its memory with it.
        """
        if self.bridges is None:
            return value
        bridges = self.bridges
        sources: list[Tensor] = []
        targets: list[Tensor] = []

        def bridge(tensor: Tensor) -> Tensor:
            if not self.backend.owns(tensor):
                return tensor
            target = bridges.like(f"{key}[{len(targets)}]", tensor)
            sources.append(_without_broadcast(tensor))
            targets.append(_without_broadcast(target))
            return target

        handed = tree_map_only(Tensor, bridge, value)
        if copy and sources:
            torch._foreach_copy_(targets, sources)
        return handed


@dataclass(slots=True)
class Captured:
    """A forward as calls. `output` is `(num_rows, hidden)`, overwritten by each replay."""

    calls: list[Callable[[], object]]
    output: Tensor
    num_breaks: int
    nbytes: int = 0

    def replay(self) -> None:
        """Run the calls in order."""
        for call in self.calls:
            call()


def capture_forward(
    backend: Backend,
    forward: Forward,
    inputs: Mapping[str, Tensor],
    output: Tensor,
    step: Step,
    *,
    pieces: bool,
    bridges: BridgeBuffers | None,
) -> Captured:
    """Capture one forward at one padded size.

    Args:
        backend: records the segments.
        forward: reads `inputs`, returns hidden states `(num_rows, hidden)`.
        inputs: static buffers of `num_rows` rows.
        output: static `(num_rows, hidden)`, written by the last segment.
        step: read by break calls at each replay.
        pieces: leave the graph at break points; else they are called through, into one full graph.
        bridges: where activations cross a break; None keeps each alive where it is.

    Raises:
        CaptureError: something in the forward can't be captured; no segment stays open.
    """
    crossing = _Pieces(backend, bridges, step, output.shape[0])
    with backend.recording(), crossing_scope(crossing if pieces else None):
        try:
            backend.begin()
            hidden_states = forward(inputs)
            if hidden_states.shape != output.shape:
                raise CaptureError(
                    f"forward returned {tuple(hidden_states.shape)} for {output.shape[0]} rows, "
                    f"expected {tuple(output.shape)} as at warm-up"
                )
            output.copy_(hidden_states)
            crossing.calls.append(backend.end())
        except BaseException:
            backend.abort()
            raise
    return Captured(crossing.calls, output, crossing.num_breaks)
