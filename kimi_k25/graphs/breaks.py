"""Break points: the calls at which a captured forward leaves its graph. Knows nothing of what happens there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, Protocol

from .errors import BreakPointError

__all__ = ["Crossing", "break_point", "crossing_scope"]

P = ParamSpec("P")


class Crossing(Protocol):
    """What a break point meets instead of its own body while a forward is captured."""

    def cross(self, fn: Callable[..., None], bound: inspect.BoundArguments) -> None:
        """Run `fn` with these arguments now, and remember the call for each replay."""
        ...


# A context variable, not a global: a second thread that runs the same model eagerly must not join the capture.
_crossing: ContextVar[Crossing | None] = ContextVar("crossing", default=None)


@contextmanager
def crossing_scope(crossing: Crossing | None) -> Iterator[None]:
    """Break points inside the block meet `crossing`; with None they are plain calls."""
    token = _crossing.set(crossing)
    try:
        yield
    finally:
        _crossing.reset(token)


def break_point(fn: Callable[P, None]) -> Callable[P, None]:
    """Mark a call that stays eager between two graphs: attention over a cache, as a rule.

    Outside a capture, and in a full graph, the call costs one context-variable read and runs as written.

    The contract: `fn` has a parameter named `out`, a tensor of `(num_tokens, ...)` that it writes, and it
    returns None. Tensors in its arguments (in nested lists, tuples and dicts too) that the graph made are handed
    over in buffers of the runner, from which only `out` goes back; every other tensor and object is recorded by
    reference. So facts that change from step to step belong in one mutable object, rewritten before each run.

    Raises:
        BreakPointError: at decoration, `fn` has no parameter `out`.
    """
    signature = inspect.signature(fn)
    if "out" not in signature.parameters:
        raise BreakPointError(
            f"break point {fn.__qualname__}{signature} has no parameter 'out'; a break point writes its result "
            "into a tensor it is given, since a returned one would move from replay to replay"
        )

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        crossing = _crossing.get()
        if crossing is None:
            return fn(*args, **kwargs)
        return crossing.cross(fn, signature.bind(*args, **kwargs))

    return call
