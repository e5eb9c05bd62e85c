"""will_it_capture: everything in a function that would stop a CUDA graph capture, found without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .breaks import crossing_scope
from .watch import CaptureIssue, CaptureWatch

__all__ = ["CaptureReport", "will_it_capture"]


@dataclass(slots=True)
class CaptureReport:
    """What one run met. True if nothing would stop a capture; `str()` is a list for people.

    `num_breaks` counts the break points met: those calls stay eager, so they are not looked into.
    """

    issues: list[CaptureIssue] = field(default_factory=list)
    num_ops: int = 0
    num_breaks: int = 0

    def __bool__(self) -> bool:
        return not self.issues

    def __str__(self) -> str:
        verdict = "does not capture" if self.issues else "captures"
        seen = f"{self.num_ops} operators and {self.num_breaks} break points seen"
        head = f"{verdict}; waits for the device: {len(self.issues)} ({seen})"
        return "\n".join([head, *(f"  {issue}" for issue in self.issues)])


@torch.no_grad()
def will_it_capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CaptureReport:
    """Report every call in `fn` that would stop a CUDA graph capture, with its module path and line.

    Runs on the CPU. `fn` is called twice: once to warm up, as before a real capture (what is computed once and
    cached may wait), and once watched. Operators registered with torch.library count as one opaque operator
    each. What doesn't wait but goes wrong at replay (a frozen branch, a number baked in) shows only when a
    replay is compared with eager: see GraphRunner.verify on the tape backend.

    Example:
        >>> print(will_it_capture(lambda x: x / x.max().item(), torch.ones(3)))  # doctest: +ELLIPSIS
        does not capture; waits for the device: 1 (3 operators and 0 break points seen)
          Tensor.item (aten._local_scalar_dense.default) at ...: reads a value on the host
    """
    report = CaptureReport()

    def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        report.num_ops += 1
        return func(*args, **kwargs)

    def note(issue: CaptureIssue) -> None:
        if issue not in report.issues:
            report.issues.append(issue)

    watch = CaptureWatch(note, count)

    class LeaveWatch:
        def cross(self, fn: Callable[..., None], bound: inspect.BoundArguments) -> None:
            report.num_breaks += 1
            with watch.paused(), crossing_scope(None):
                fn(*bound.args, **bound.kwargs)

    fn(*args, **kwargs)
    with watch.installed(), crossing_scope(LeaveWatch()):
        watch.active = True
        fn(*args, **kwargs)
    return report
