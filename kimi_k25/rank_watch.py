"""Ends a rank that can't go on: its neighbour is gone, or nothing moves for longer than its phase may take.

A collective that another rank never joins does not come back to Python: on GPUs the host waits for a kernel that spins,
and graphs replay their collectives unseen by torch's own watchdog. So threads watch; all that they need of the main one
is the GIL, and torch lets go of that while it waits. Knows no model, no files and no arguments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TIMEOUTS", "RankWatch"]

# Seconds a phase may go on without a collective or the next phase. What takes long is stated; a step gets the least.
TIMEOUTS = {
    "meeting": 300.0,
    "loading": 1800.0,  # 600 GB over a network's file system.
    "compiling kernels": 900.0,
    "capturing graphs": 600.0,
    "reading the prompt": 120.0,  # Decoding and resizing pictures and videos, then the vision tower.
    "a step": 20.0,
    "waiting for input": float("inf"),  # Rank 0 may be reading what somebody types.
    "leaving": 20.0,
}
POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0  # For every rank to say where it is, once one has run out of time.
GRACE_SECONDS = 3.0  # For a rank that fails to say why, before those who lose it speak.
FOREVER = timedelta(days=365)
INTERRUPTED = 130
PACKAGE = Path(__file__).parent


class RankWatch:
    """Watches this rank among several, from threads that live as long as the process.

    Args:
        store: A connection of the watch's own: the main thread may hold its for as long as it waits there.
        say: Takes the one line that a run ends with.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, say: Callable[[str], None]) -> None:
        self.rank, self.size = rank, size
        self._store, self._say = store, say
        self._phase, self._since = "meeting", time.monotonic()
        self._has_left = threading.Event()
        self._neighbour: threading.Thread | None = None
        self._pair: dist.ProcessGroup | None = None
        threading.Thread(target=self._watch_time, daemon=True).start()
        self._end_at_ctrl_c()

    def enter(self, phase: str) -> None:
        """Begins a phase of TIMEOUTS, or says that it goes on."""
        self._phase, self._since = phase, time.monotonic()

    def watch_neighbour(self) -> None:
        """Ends this rank when the one before it dies: the connection between the two closes. All ranks must call it."""
        self._pair = dist.new_group(backend="gloo", timeout=FOREVER)
        self._neighbour = threading.Thread(target=self._watch_neighbour, daemon=True)
        self._neighbour.start()

    def farewell(self) -> None:
        """Nobody is missed from here on. All ranks must have come to their end."""
        self._has_left.set()
        if self._neighbour is not None:
            dist.send(torch.zeros(1), (self.rank + 1) % self.size, group=self._pair)
            self._neighbour.join()

    def claim_failure(self, error: BaseException | None = None) -> bool:
        """Makes this rank the one that says why the run ends; False if another has claimed that before.

        Waits GRACE_SECONDS with an error that is only the loss of another rank, which may still say why.
        """
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            time.sleep(GRACE_SECONDS)
        claim = f"{self.rank} {threading.get_ident()}"
        try:
            return bool(self._store.compare_set("failed", "", claim) == claim.encode())
        except RuntimeError:  # The store is gone, with the process that held it.
            return True

    def _end(self, rank: int, reason: str) -> None:
        if self.claim_failure():
            self._say(f"rank {rank}: {reason}")
        os._exit(1)

    def _watch_neighbour(self) -> None:
        before = (self.rank - 1) % self.size
        try:
            dist.recv(torch.empty(1), before, group=self._pair)
        except RuntimeError:
            time.sleep(GRACE_SECONDS)
            self._end(before, "is gone; its process ended without a word")

    def _watch_time(self) -> None:
        collectives = 0
        while not self._has_left.wait(POLL_SECONDS):
            if (now := self._num_collectives()) != collectives:
                collectives, self._since = now, time.monotonic()
            is_over = time.monotonic() - self._since > TIMEOUTS[self._phase]
            try:
                if is_over or self._store.check(["stuck"]):
                    self._say_who_is_stuck(TIMEOUTS[self._phase])
            except RuntimeError:
                if not self._has_left.wait(GRACE_SECONDS):
                    self._end(self.rank, "the store that ranks meet at is gone, and torchrun with it")

    def _say_who_is_stuck(self, seconds: float) -> None:
        """Ends the run for the rank that is furthest behind: the others wait in a collective that it has not begun."""
        reporter, limit = self._store.compare_set("stuck", "", f"{self.rank} {seconds:g}").decode().split()
        here = (self._num_collectives(), f"{self._phase}, at {_position()}")
        self._store.set(f"stuck/{self.rank}", json.dumps(here))
        keys = [f"stuck/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=ANSWER_SECONDS))
        answers = {rank: json.loads(self._store.get(key)) for rank, key in enumerate(keys) if self._store.check([key])}
        silent = (0, "its place is not known, it does not answer")
        behind = min(
            range(self.size), key=lambda r: (r in answers, answers.get(r, silent)[0], r != int(reporter), r)
        )
        others: dict[str, list[str]] = {}
        for rank, (_, place) in answers.items():
            if rank != behind:
                others.setdefault(place, []).append(str(rank))
        listed = "".join(f"; rank {', '.join(ranks)}: {place}" for place, ranks in others.items())
        self._end(behind, f"nothing moved for {limit} s: {answers.get(behind, silent)[1]}{listed}")

    def _num_collectives(self) -> int:
        """That this rank has begun, by torch's own count; those that graphs replay are not in it."""
        group: Any = dist.group.WORLD
        return 0 if group is None else int(group._get_sequence_number_for_group())

    def _end_at_ctrl_c(self) -> None:
        """Ends the process at once, wherever it waits: Python's own handler comes after the collective's end."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)

        def wait() -> None:
            os.read(reader, 1)
            os._exit(INTERRUPTED)

        threading.Thread(target=wait, daemon=True).start()


def _position() -> str:
    """Where the main thread is: the innermost line of this package."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    own = [frame for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)] or stack
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].name})"
