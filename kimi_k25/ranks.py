"""The ranks of one run: how they meet, agree and end. Knows no model, no files and no arguments.

torchrun starts the processes and ends all of them when one fails. Ranks meet at its store, where they compare what
they are about to do before the first collective, and where rank 0's input waits for the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from .layers.parallel import ParallelPlan

__all__ = ["Ranks"]

MEETING_TIMEOUT = timedelta(minutes=5)
LOADING_TIMEOUT = timedelta(minutes=30)  # Until ready(): reading weights, compiling kernels, capturing graphs.
STEP_TIMEOUT = timedelta(seconds=20)  # From then on, for any one collective.
INPUT_TIMEOUT = timedelta(days=365)  # Rank 0 may be reading what somebody types.


class Ranks:
    """This process among those that torchrun's environment tells of; alone without one.

    Attributes:
        rank, size: Of all machines.
        local_rank: On this machine: which of its devices is this rank's.
    """

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._num_shared = 0
        if self.size > 1:
            self._store, *_ = next(dist.rendezvous("env://", timeout=MEETING_TIMEOUT))

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compares what must be the same everywhere; no collective is needed.

        Raises:
            ValueError: Ranks disagree; the message names on what, and each rank's value.
        """
        if self.size == 1:
            return
        self._say_and_wait("facts", json.dumps({name: str(value) for name, value in facts.items()}), MEETING_TIMEOUT)
        by_rank = [json.loads(self._store.get(f"facts/{rank}")) for rank in range(self.size)]
        for name in facts:
            values: dict[str, list[str]] = {}
            for rank, found in enumerate(by_rank):
                values.setdefault(found.get(name, "nothing"), []).append(str(rank))
            if len(values) > 1:
                listed = "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in values.items())
                raise ValueError(f"ranks disagree on {name}: {listed}. Start all of them alike")

    def plan(self, device: str, *, ep: int = 1) -> ParallelPlan:
        """This rank's share of a model, over NCCL on GPUs and gloo on CPUs."""
        if self.size == 1:
            return ParallelPlan(ep=ep)
        device_type = torch.device(device).type
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=LOADING_TIMEOUT,
        )
        mesh = dist.init_device_mesh(device_type, (self.size,), mesh_dim_names=("tp",))
        return ParallelPlan(tp=self.size, ep=ep, rank=mesh.get_local_rank("tp"), group=mesh.get_group("tp"))

    def ready(self) -> None:
        """Waits until every rank has come this far; from here on a rank that hangs ends the run within STEP_TIMEOUT."""
        if self.size > 1:
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(STEP_TIMEOUT)

    def share(self, text: str | None) -> str | None:
        """Rank 0's text, on every rank; the others wait for it as long as it takes."""
        if self.size == 1:
            return text
        key = f"text/{self._num_shared}"
        self._num_shared += 1
        if self.rank == 0:
            self._store.set(key, json.dumps(text))
            return text
        self._store.wait([key], INPUT_TIMEOUT)
        shared: str | None = json.loads(self._store.get(key))
        return shared

    def is_first_to_fail(self) -> bool:
        """Whether no rank has failed before: those behind it lose their connection, and that is no news."""
        if self.size == 1:
            return True
        try:
            return self._store.compare_set("failed", "", str(self.rank)) == str(self.rank).encode()
        except RuntimeError:  # The store is gone, with the process that held it.
            return True

    def leave(self) -> None:
        """Ends this rank's part once all have come to their end: a connection that closes early fails its reader."""
        if self.size > 1:
            self._say_and_wait("left", "", STEP_TIMEOUT)
            dist.destroy_process_group()

    def _say_and_wait(self, what: str, text: str, timeout: timedelta) -> None:
        self._store.set(f"{what}/{self.rank}", text)
        self._store.wait([f"{what}/{rank}" for rank in range(self.size)], timeout)
