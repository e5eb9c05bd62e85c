"""Seeing what would stop a stream capture while a forward runs on the CPU. Knows no graph and no replay.

A capture dies where the host waits for the device. The waits that pass through torch's dispatcher (`.item()`,
`nonzero`, a boolean mask) are recognised by their operator's tags; those that never reach it (`tolist`, `numpy`,
`cpu`, `to("cpu")`, `repr`) by the Python function. On the CPU `to(x.device)` can't be told from a move to the
host, so only the literal `to("cpu")` counts.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CaptureIssue", "CaptureWatch"]

_HOST_READS = {
    Tensor.tolist: "copies the tensor to the host",
    Tensor.cpu: "copies the tensor to the host",
    Tensor.numpy: "copies the tensor to the host",
    Tensor.__array__: "copies the tensor to the host",
    Tensor.__repr__: "prints values, so it reads them on the host",
    Tensor.__format__: "prints values, so it reads them on the host",
    Tensor.__deepcopy__: "allocates outside the graph at each capture",
    Tensor.pin_memory: "allocates host memory",
    Tensor.new_tensor: "copies from host memory, which waits for the device",
}
# They wait for the device inside their CUDA kernels, where no operator shows it.
_HIDDEN_WAITS = {torch.ops.aten.multinomial.default, torch.ops.aten._linalg_check_errors.default}
# one_hot looks for values out of range on the CPU only, once the number of classes is given.
_ONE_HOT = torch.nn.functional.one_hot
_MASKABLE = {torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}

_SKIPPED_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


@dataclass(frozen=True, slots=True)
class CaptureIssue:
    """One thing that would stop a capture.

    `op` is the operator or function, `module_path` the chain of modules it was called in (`Model.layers.1.attn`,
    empty outside any module), `location` the line of the model's own code, as `file:line`.
    """

    op: str
    reason: str
    module_path: str
    location: str

    def __str__(self) -> str:
        where = f"{self.module_path} ({self.location})" if self.module_path else self.location
        return f"{self.op} at {where}: {self.reason}"


def _locate() -> tuple[str, str]:
    """Module path and file:line of the code that is running, found from the Python stack."""
    modules: list[nn.Module] = []
    location = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not location and not frame.f_code.co_filename.startswith(_SKIPPED_FOLDERS):
            location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back
    modules.reverse()
    if not modules:
        return "", location
    path = type(modules[0]).__name__
    for parent, child in itertools.pairwise(modules):
        name = next((name for name, module in parent.named_modules() if module is child), type(child).__name__)
        path += f".{name}"
    return path, location


def _host_read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this Python-level call would stop a capture, for calls whose wait no operator shows."""
    if func is Tensor.__format__ and args[0].dim() == 0:
        return None  # reaches the dispatcher as item()
    if func in _HOST_READS:
        return _HOST_READS[func]
    if func is Tensor.to and "cpu" in (*args[1:2], kwargs.get("device")):
        return "copies the tensor to the host"
    if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
        return "copies from host memory, which waits for the device"
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, list) for part in index):
            return "copies an index list from host memory, which waits for the device"
    return None


def _data_dependence(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this operator would stop a capture: its result on the host, or a shape that values decide."""
    if func in _HIDDEN_WAITS:
        return "checks values on the host"
    if func in _MASKABLE or func is torch.ops.aten.index.Tensor:
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # x[mask] = number becomes masked_fill; every other boolean mask counts its true values on the host.
        is_fill = func in _MASKABLE and args[2].dim() == 0
        return "a boolean mask makes a shape that values decide" if masked and not is_fill else None
    if torch.Tag.data_dependent_output in func.tags:
        return "reads a value on the host"
    if torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        return "makes a shape that values decide"
    if func is torch.ops.aten.histc.default and args[2:4] in ((), (0, 0)):
        return "reads the range of values on the host; give min and max"
    return None


class CaptureWatch:
    """Watches all torch calls while installed and active.

    Args:
        on_issue: called for each thing that would stop a capture; may raise.
        on_op: runs an operator, `(func, args, kwargs) -> result`; the place to record it.
    """

    def __init__(
        self,
        on_issue: Callable[[CaptureIssue], None],
        on_op: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self.active = False
        self.on_issue = on_issue
        self.on_op = on_op
        self._surface = ""
        self._excused = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block torch calls pass through here; whether they are looked at, `active` says.

        A break point leaves the watch from deep inside the forward, where other modes may lie on top of these
        on torch's stack; so leaving is a flag and not a pop.
        """
        try:
            with _FunctionWatch(self), _OperatorWatch(self):
                yield
        finally:
            self.active = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nothing is looked at."""
        was, self.active = self.active, False
        try:
            yield
        finally:
            self.active = was

    def report(self, op: str, reason: str) -> None:
        """Hand on an issue, located at the code that is running."""
        if not self._excused:
            self.on_issue(CaptureIssue(op, reason, *_locate()))

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of torch's Python functions; what waits below torch's dispatcher is reported here."""
        if not self.active:
            return func(*args, **kwargs)
        name = (resolve_name(func) or getattr(func, "__name__", str(func))).removeprefix("torch.")
        if reason := _host_read(func, args, kwargs):
            self.report(name, reason)
            with self.paused():  # one report a call, though more waits may hide below
                return func(*args, **kwargs)
        outer, self._surface, self._excused = self._surface, name, func is _ONE_HOT and len(args) + len(kwargs) > 1
        try:
            return func(*args, **kwargs)
        finally:
            self._surface, self._excused = outer, False

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator through `on_op`; what waits by its own declaration is reported here."""
        if not self.active:
            return func(*args, **kwargs)
        if reason := _data_dependence(func, args, kwargs):
            self.report(f"{self._surface} ({func})" if self._surface else str(func), reason)
        return self.on_op(func, args, kwargs)


class _FunctionWatch(TorchFunctionMode):
    def __init__(self, watch: CaptureWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.function(func, args, kwargs or {})


class _OperatorWatch(TorchDispatchMode):
    def __init__(self, watch: CaptureWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watch.active and torch.is_inference_mode_enabled():
            # Inference mode hands composite operators over whole; a wait may hide inside.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.watch.operator(func, args, kwargs)
