"""Bytes of files into CUDA tensors, by several threads through pinned memory. Knows no checkpoint.

A mapped file's pages reach a GPU at the speed of one thread's page faults. Here each thread reads a piece into pinned
memory of its own and sends it on, while the others read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from aliasmix.errors import UnreadableFileError

__all__ = ["FileReader"]

NUM_THREADS = 8
PIECE_BYTES = 16 * 2**20  # A thread's pinned memory: 128 MiB in all.


class FileReader:
    """Reads into tensors of one device; close it to end its threads.

    Args:
        device: A CUDA device. On the CPU the same runs without pinned memory, for tests.
    """

    def __init__(
        self, device: torch.device, *, num_threads: int = NUM_THREADS, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._threads = ThreadPoolExecutor(num_threads, "file-reader")
        self._own = threading.local()

    def close(self) -> None:
        """Waits for what is under way; drops what is not."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, path: Path, places: Iterable[tuple[int, Tensor]], done: Callable[[int], object]) -> None:
        """Fills tensors from one file; returns when all are there.

        Args:
            places: First byte in the file, and the contiguous tensor that is filled from there.
            done: Called with every number of bytes that has arrived.

        Raises:
            UnreadableFileError: The file ends before a tensor's last byte.
            OSError: It cannot be read.
        """
        descriptor = os.open(path, os.O_RDONLY)
        pieces: list[Future[int]] = []
        try:
            for begin, tensor in places:
                data = tensor.detach().flatten().view(torch.uint8)
                assert data.data_ptr() == tensor.data_ptr(), "a copy would be filled"
                for start in range(0, data.shape[0], self._piece_bytes):
                    piece = data[start : start + self._piece_bytes]
                    pieces.append(self._threads.submit(self._read, path, descriptor, begin + start, piece))
            for future in pieces:
                done(future.result())
        finally:  # No thread may read a descriptor that is closed, or was given to another file.
            for future in reversed(pieces):  # In their order each wait would let another piece begin.
                if not future.cancel():
                    future.exception()
            os.close(descriptor)

    def _read(self, path: Path, descriptor: int, begin: int, target: Tensor) -> int:
        if not hasattr(self._own, "staging"):
            self._own.staging = torch.empty(
                self._piece_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        num_bytes = target.shape[0]
        staging: Tensor = self._own.staging[:num_bytes]
        view, num_read = staging.numpy().data, 0
        while num_read < num_bytes:
            if not (count := os.preadv(descriptor, [view[num_read:]], begin + num_read)):
                raise UnreadableFileError(path, f"ends at byte {begin + num_read}, inside a tensor")
            num_read += count
        target.copy_(staging)  # Waits: the staging memory is free again after it.
        return num_bytes
