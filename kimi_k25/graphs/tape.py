"""The tape: CUDA-graph semantics on the CPU, so that capture faults fail in CI.

While a segment is recorded, each operator is run and noted with the storages it used. A replay executes the
same operators into the same storages and reruns no host code, as a CUDA graph would. So a host sync raises
CaptureError where it happens, and a frozen branch, a baked number, a rebound tensor or a stale buffer shows as
a replay that differs from eager. `poison=True` fills everything the graph itself allocated with NaN first: what
a replay doesn't recompute, it then can't get right by luck.

It models neither streams nor the allocator: no race between streams, no reuse of freed memory is seen. A raw
kernel launch (Triton's `kernel[grid](...)`) is no operator and stays invisible; wrapped as a torch.library
operator it is one opaque operator, whose inside is not looked into. While recording, torch's dispatch mode is
on, in which a few composite operators choose another decomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import CaptureError
from .watch import CaptureIssue, CaptureWatch

__all__ = ["Tape"]

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _only_allocates(func: Any) -> bool:
    return func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _ALLOCATIONS


def _only_views(func: Any) -> bool:
    """By declaration. c10d's collectives declare no aliasing at all, though they write their arguments."""
    returns = func._schema.returns
    return bool(returns) and not func._schema.is_mutable and all(value.alias_info for value in returns)


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _freeze(tree: Any) -> Any:
    """The same storages under new tensor objects, so that `p.data = new` doesn't reach into the tape."""
    return tree_map_only(Tensor, Tensor.detach, tree)


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _await_collectives(func: Any, result: Any) -> None:
    """Wait for what a replayed collective started; without it gloo's sums arrive late, and wrong."""
    if func.namespace == "c10d":
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                torch.distributed.Work.unbox(leaf).wait()
    elif func.namespace == "_c10d_functional":
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                torch.ops._c10d_functional.wait_tensor(leaf)


@dataclass(slots=True)
class _Op:
    """An operator as it was called; `fresh` are its outputs in storages of their own, by position."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]]

    def replay(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        _await_collectives(self.func, result)
        leaves = tree_leaves(result) if self.fresh else ()
        for position, captured in self.fresh:
            captured.copy_(leaves[position])


class _Segment:
    """One recorded segment. Calling it replays it."""

    def __init__(self, poisoned: list[Tensor]) -> None:
        self.ops: list[_Op] = []
        self.poisoned = poisoned

    def __call__(self) -> None:
        with torch.no_grad():
            for tensor in self.poisoned:
                _poison(tensor)
            for op in self.ops:
                op.replay()


class Tape:
    """Records forwards as segments of operators; one of the runner's backends.

    Args:
        poison: fill what a forward's segments allocated with NaN (integers: the lowest value) after its
            recording and before each replay of its first segment.
    """

    name = "tape"

    def __init__(self, *, poison: bool = False) -> None:
        self._watch = CaptureWatch(self._refuse, self._record)
        self._poison = poison
        # Storage -> number of the recording that made it, and a tensor in it: once freed, its key would be another's.
        self._owners: dict[int, tuple[int, Tensor]] = {}
        self._recording = 0
        self._fresh: list[Tensor] = []
        self._segment: _Segment | None = None
        self._num_segments = 0
        self._pending: dict[Any, str] = {}
        self.nbytes = 0

    def _refuse(self, issue: CaptureIssue) -> None:
        raise CaptureError(
            f"{issue}, and a captured graph runs without the host. Keep it on the device, do it before the "
            "forward, or move it into a break point"
        )

    @contextmanager
    def warming(self) -> Iterator[None]:
        """One eager forward. There is nothing to warm on a CPU."""
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """One forward. Segments begin and end inside."""
        self._recording += 1
        self._fresh, self._num_segments = [], 0
        with self._watch.installed():
            yield
        if self._poison:
            for tensor in self._fresh:
                _poison(tensor)

    def begin(self) -> None:
        """Open a segment."""
        # The list is filled while later segments record: the first replayed segment poisons for all of them.
        self._segment = _Segment(self._fresh if self._poison and not self._num_segments else [])
        self._num_segments += 1
        self._watch.active = True

    def end(self) -> Callable[[], None]:
        """Close it; the result replays it.

        Raises:
            CaptureError: a collective was started that nobody waited for.
        """
        self._watch.active = False
        if self._pending:
            raise CaptureError(
                f"{', '.join(self._pending.values())} was started and nobody waited for it before the segment "
                "ended; its result may arrive after it is read. Call wait() on what async_op=True returned"
            )
        assert self._segment is not None
        segment, self._segment = self._segment, None
        return segment

    def abort(self) -> None:
        """Drop an open segment after an error."""
        self._watch.active = False
        self._segment = None
        self._pending.clear()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside the block nothing is recorded, though a segment is open."""
        with self._watch.paused():
            yield

    def owns(self, tensor: Tensor) -> bool:
        """Whether some recording made the storage of this tensor."""
        return _storage_key(tensor) in self._owners

    def close(self) -> None:
        """Forget what recordings made; segments that somebody holds still replay."""
        self._owners.clear()
        self._fresh = []
        self.nbytes = 0

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._segment is not None
        used = {_storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if any(key in self._owners and self._owners[key][0] != self._recording for key in used):
            self._watch.report(
                str(func), "reads a tensor that an earlier capture made (kept on a module or in a cache?)"
            )
        frozen_args, frozen_kwargs = _freeze(args), _freeze(kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            result = self._watch_work(func, result)
        leaves = tree_leaves(result)
        fresh = [
            (position, leaf.detach())
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and _storage_key(leaf) not in used
        ]
        for _, tensor in fresh:
            key = _storage_key(tensor)
            if key not in self._owners:
                self._owners[key] = (self._recording, tensor)
                self.nbytes += tensor.untyped_storage().nbytes()
            self._fresh.append(tensor)
        if not _only_allocates(func) and (fresh or not _only_views(func)):
            self._segment.ops.append(_Op(func, frozen_args, frozen_kwargs, fresh))
        return result

    def _watch_work(self, func: Any, result: Any) -> Any:
        """Put our own Work in place of a collective's, to see whether the model waits for it."""
        from torch._C._distributed_c10d import Work  # missing in builds without distributed

        pending = self._pending

        class WatchedWork(Work):
            def __init__(self, work: Any) -> None:
                super().__init__()
                self.work = work

            def wait(self, *args: Any) -> Any:
                pending.pop(self, None)
                return self.work.wait(*args)

        def watched(leaf: Any) -> Any:
            work = WatchedWork(Work.unbox(leaf))
            pending[work] = str(func)
            return work.boxed()

        return tree_map_only(torch.ScriptObject, watched, result)
