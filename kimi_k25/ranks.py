"""The ranks of one run: how they meet, agree and end. Knows no model, no files and no arguments.

torchrun starts the processes, and on each machine ends all of them when one fails. Ranks meet at its store, where they
compare what they are about to do before the first collective, and where rank 0's input waits for the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .layers.parallel import ParallelPlan
from .rank_watch import FOREVER, TIMEOUTS, RankWatch

__all__ = ["Ranks"]

P = ParamSpec("P")
R = TypeVar("R")


class Ranks:
    """This process among those that torchrun's environment tells of; alone without one.

    Args:
        say: Takes the one line that a run ends with when it fails outside the main thread.

    Attributes:
        rank, size: Of all machines.
        local_rank: On this machine: which of its devices is this rank's.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._num_agreed = self._num_shared = 0
        self._phase = "meeting"
        if self.size > 1:
            self._store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUTS["meeting"])))
            self._watch = RankWatch(self._store.clone(), self.rank, self.size, say)

    def enter(self, phase: str) -> None:
        """Begins a phase of rank_watch.TIMEOUTS: if it takes longer, all ranks end."""
        self._phase = phase
        if self.size > 1:
            self._watch.enter(phase)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compares what must be the same everywhere, and waits for all; no collective is needed.

        Raises:
            ValueError: Ranks disagree; the message names on what, and each rank's value.
        """
        if self.size == 1:
            return
        key = f"facts/{self._num_agreed}"
        self._num_agreed += 1
        self._say_and_wait(key, json.dumps({name: str(value) for name, value in facts.items()}))
        by_rank = [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]
        for name in facts:
            values: dict[str, list[str]] = {}
            for rank, found in enumerate(by_rank):
                values.setdefault(found.get(name, "nothing"), []).append(str(rank))
            if len(values) > 1:
                listed = "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in values.items())
                raise ValueError(f"ranks disagree on {name}: {listed}. Start all of them alike")

    def plan(self, device: str, *, ep: int = 1) -> ParallelPlan:
        """This rank's share of a model, over NCCL on GPUs and gloo on CPUs. From here on a rank's death is noticed."""
        if self.size == 1:
            return ParallelPlan(ep=ep)
        own = torch.device(device)
        dist.init_process_group(
            "nccl" if own.type == "cuda" else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=TIMEOUTS["loading"]),
            device_id=own if own.type == "cuda" else None,  # NCCL connects at once: not after half an hour of loading.
        )
        self._watch.watch_neighbour()
        mesh = dist.init_device_mesh(own.type, (self.size,), mesh_dim_names=("tp",))
        return ParallelPlan(tp=self.size, ep=ep, rank=mesh.get_local_rank("tp"), group=mesh.get_group("tp"))

    def ready(self) -> None:
        """Waits until every rank has come this far."""
        if self.size > 1:
            dist.barrier()
            # The watch ends what hangs before that. Should it be kept from the GIL, this is torch's own watchdog.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUTS["a step"] + 10))

    def watched(self, step: Callable[P, R]) -> Callable[P, R]:
        """The same function; each call begins a step."""
        if self.size == 1:
            return step

        def watched_step(*args: P.args, **kwargs: P.kwargs) -> R:
            self.enter("a step")
            return step(*args, **kwargs)

        return watched_step

    def share(self, read: Callable[[], str | None]) -> str | None:
        """What rank 0 reads, on every rank; the others wait for it as long as it takes."""
        if self.size == 1:
            return read()
        key, phase = f"text/{self._num_shared}", self._phase
        self._num_shared += 1
        self.enter("waiting for input")
        if self.rank == 0:
            text = read()
            self._store.set(key, json.dumps(text))
        else:
            self._store.wait([key], FOREVER)
            text = json.loads(self._store.get(key))
        self.enter(phase)
        return text

    def claim_failure(self, error: BaseException) -> bool:
        """Whether this rank is to say why the run ends: those that fail after it lose their connection, no news."""
        return self.size == 1 or self._watch.claim_failure(error)

    def leave(self) -> None:
        """Ends this rank's part once all have come to their end: a connection that closes early fails its reader."""
        if self.size > 1:
            self.enter("leaving")
            self._say_and_wait("left", "")
            self._watch.farewell()
            dist.destroy_process_group()

    def _say_and_wait(self, what: str, text: str) -> None:
        self._store.set(f"{what}/{self.rank}", text)
        self._store.wait([f"{what}/{rank}" for rank in range(self.size)], FOREVER)  # The watch ends it earlier.
