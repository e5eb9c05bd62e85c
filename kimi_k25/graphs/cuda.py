"""CUDA graphs: segments of a forward in torch.cuda.CUDAGraphs of one pool on one stream.

The library breakable-cuda-graphs 0.1.0 is not used: it keeps break arguments by address without owning them,
and refuses nothing of what this runner must refuse; what would remain of it is `begin` and `end` below.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .errors import CaptureError

__all__ = ["CudaGraphs"]


class CudaGraphs:
    """Captures forwards as segments; one of the runner's backends.

    All graphs share one private memory pool, so captures must be replayed by one thread at a time; and all are
    dropped together in `close`, after a synchronisation: memory of a half-dropped pool is handed out again.

    Args:
        device: the CUDA device.
        cuda: torch.cuda, or what stands for it in a test without a GPU.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._side_stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()
        self._graphs: list[Any] = []
        self._open: Any = None
        self._pool_ranges: list[tuple[int, int]] = []
        self._pool_is_settled = False
        self._foreign: set[int] = set()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Runs on the capture stream: cuBLAS keeps a workspace for each stream it has met."""
        self._cuda.synchronize(self._device)
        with self._cuda.stream(self._stream):
            yield
        self._cuda.synchronize(self._device)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """One forward. Segments begin and end inside."""
        self._foreign.clear()
        self._cuda.empty_cache()  # what warm-up left cached is of no use to the graphs' own pool
        with self.warming():
            yield

    def begin(self) -> None:
        """Open a segment."""
        self._pool_is_settled = False
        self._open = self._cuda.CUDAGraph()
        # relaxed: other threads of a server, NCCL's watchdog among them, may go on calling CUDA, and `outside` may
        # take memory from the driver. What would break the capture itself is an error in every mode.
        self._open.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> Callable[[], None]:
        """Close it; the result replays it.

        Raises:
            CaptureError: a side stream is still at work.
        """
        graph, self._open = self._open, None
        with warnings.catch_warnings():
            # Two breaks in a row leave an empty graph between them, which replays as nothing.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            try:
                graph.capture_end()
            except RuntimeError as e:
                if "unjoined" not in str(e) and "not joined" not in str(e):
                    raise
                raise CaptureError(
                    "a side stream was still at work when a segment ended. Make the current stream wait for it "
                    "before the break point; a collective started with async_op=True needs its wait()"
                ) from e
        self._graphs.append(graph)
        self._stream.wait_stream(self._side_stream)
        return graph.replay

    def abort(self) -> None:
        """Drop an open capture after an error; the error itself is the caller's to raise."""
        graph, self._open = self._open, None
        if graph is not None:
            try:
                graph.capture_end()
            except RuntimeError:
                return  # an invalidated capture ends with an error of its own
            graph.reset()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside the block memory comes from the ordinary pool, though a segment is open."""
        with self._cuda.stream(self._side_stream):
            yield

    def owns(self, tensor: Tensor) -> bool:
        """Whether this tensor lies in the graphs' pool: some capture made it."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._foreign:
            return False
        if not self._in_pool(address) and not self._pool_is_settled:
            # Only an address not met before costs a look at the allocator: caches, once each.
            self._pool_ranges = [
                (segment["address"], segment["address"] + segment["total_size"])
                for segment in self._cuda.memory_snapshot(self._pool)
            ]
            self._pool_is_settled = self._open is None  # it grows again with the next capture
        if self._in_pool(address):
            return True
        self._foreign.add(address)
        return False

    def _in_pool(self, address: int) -> bool:
        return any(start <= address < stop for start, stop in self._pool_ranges)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs' pool holds."""
        return sum(segment["total_size"] for segment in self._cuda.memory_snapshot(self._pool))

    def close(self) -> None:
        """Drop all graphs together, once the device has finished; the pool that follows is a new one."""
        self._cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool_ranges = []
        self._pool = self._cuda.graph_pool_handle()
