"""Piecewise CUDA graphs around eager attention, for any decoder. Knows no model; importing it imports no torch.

    resolve_decoder   finds the decoder stack in a wrapper
    break_point       marks the call that stays eager
    BucketPolicy      the padded sizes
    GraphPlan         what to capture
    GraphRunner       captures and runs
    will_it_capture   what in a function would stop a capture, found on the CPU
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .breaks import break_point
    from .buckets import BucketPolicy, Selection
    from .buffers import InputSpec
    from .errors import (
        BreakPointError,
        CaptureError,
        DecoderNotFoundError,
        GraphError,
        GraphFallbackError,
        GraphFallbackWarning,
        PointerMovedError,
        VerificationError,
    )
    from .graph_set import MemoryReport
    from .plan import GraphPlan
    from .report import CaptureReport, will_it_capture
    from .resolve import resolve_decoder
    from .runner import Choice, GraphRunner
    from .tape import Tape
    from .watch import CaptureIssue

_HOME = {
    "break_point": "breaks",
    "BucketPolicy": "buckets",
    "Selection": "buckets",
    "InputSpec": "buffers",
    "BreakPointError": "errors",
    "CaptureError": "errors",
    "DecoderNotFoundError": "errors",
    "GraphError": "errors",
    "GraphFallbackError": "errors",
    "GraphFallbackWarning": "errors",
    "PointerMovedError": "errors",
    "VerificationError": "errors",
    "GraphPlan": "plan",
    "CaptureReport": "report",
    "will_it_capture": "report",
    "resolve_decoder": "resolve",
    "Choice": "runner",
    "GraphRunner": "runner",
    "MemoryReport": "graph_set",
    "Tape": "tape",
    "CaptureIssue": "watch",
}

__all__ = [
    "BreakPointError",
    "BucketPolicy",
    "CaptureError",
    "CaptureIssue",
    "CaptureReport",
    "Choice",
    "DecoderNotFoundError",
    "GraphError",
    "GraphFallbackError",
    "GraphFallbackWarning",
    "GraphPlan",
    "GraphRunner",
    "InputSpec",
    "MemoryReport",
    "PointerMovedError",
    "Selection",
    "Tape",
    "VerificationError",
    "break_point",
    "resolve_decoder",
    "will_it_capture",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
