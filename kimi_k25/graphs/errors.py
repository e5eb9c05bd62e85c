"""The errors of the graph runner. Knows nothing of how a graph is captured."""

from __future__ import annotations

__all__ = [
    "BreakPointError",
    "CaptureError",
    "DecoderNotFoundError",
    "GraphError",
    "GraphFallbackError",
    "GraphFallbackWarning",
    "PointerMovedError",
    "VerificationError",
]


class GraphError(RuntimeError):
    """Base of everything the graph runner raises."""


class CaptureError(GraphError):
    """The forward can't be captured as it is written."""


class BreakPointError(CaptureError, TypeError):
    """A function marked as a break point breaks the contract of one."""


class DecoderNotFoundError(GraphError, AttributeError):
    """No decoder (a module with `.layers`) is reachable. `paths` are those that were tried."""

    def __init__(self, message: str, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.paths = paths


class PointerMovedError(GraphError):
    """A tensor that captured graphs read no longer lies where it lay. `names` are the tensors."""

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


class GraphFallbackError(GraphError):
    """With `strict=True`: a run that would have fallen back to a slower mode."""


class VerificationError(GraphError, AssertionError):
    """A replay doesn't equal eager."""


class GraphFallbackWarning(UserWarning):
    """A run fell back to a slower mode; given once for each reason."""
