"""The end of a tensor-parallel block behind one call: all-reduce, residual addition and RMSNorm.

FlashInfer fuses the three for two, four or eight ranks of one host, through a workspace that all ranks make together.
Captured graphs hold its address, so it is made once, large enough, before any capture. Knows no layer and no model.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .flashinfer_ops import fused_add_rmsnorm, import_flashinfer
from .norm import rms_norm

__all__ = ["MIN_WORKSPACE_TOKENS", "AllReduceAddRMSNorm", "why_not_fused"]

MIN_WORKSPACE_TOKENS = 2048
WORLD_SIZES = (2, 4, 8)
RESIDUAL_RMS_NORM = 1  # AllReduceFusionPattern.kARResidualRMSNorm

logger = logging.getLogger(__name__)


def why_not_fused(num_tokens: int, *, capacity: int, hidden_size: int, dtype: torch.dtype, world_size: int) -> str:
    """Why a call of this size must not be fused; "" if it may. All ranks must come to the same answer, so nothing
    about this rank alone counts.

    Args:
        capacity: Tokens that the workspace was made for.
    """
    if world_size not in WORLD_SIZES:
        return f"{world_size} ranks; the fused kernel serves {', '.join(map(str, WORLD_SIZES))}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}; the fused kernel serves bfloat16 and float16"
    if hidden_size % 8:
        return f"hidden size {hidden_size}; expected a multiple of 8"
    if num_tokens > capacity:
        return f"{num_tokens} tokens; the workspace holds {capacity}"
    return ""


class AllReduceAddRMSNorm:
    """norm(all_reduce(x) + residual) and the sum, for all layers of one group.

    Every path has one contract: it returns (normed, residual); x and the residual given are consumed and may be
    overwritten. Sums are rounded to the tensors' dtype, but FlashInfer's single-rank kernel normalises the sum before
    it is rounded and its multi-rank kernel after: paths agree to the dtype's precision, not bitwise.

    Args:
        group: None, or a group of one rank: nothing is reduced.
        fuse: False keeps to plain PyTorch, which defines the result.
        comm: flashinfer.comm, or what stands for it in a test.

    Attributes:
        capacity: Most tokens that are fused; larger calls take the unfused path.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, fuse: bool = True, comm: Any = None) -> None:
        self.group, self.fuse = group, fuse
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.capacity = MIN_WORKSPACE_TOKENS
        self.why_unfused = ""
        self._comm = comm
        self._workspace: Any = None
        self._is_prepared = False

    def reserve(self, num_tokens: int) -> None:
        """Announces steps of so many tokens. Once made, the workspace never grows: captured graphs hold its address."""
        if not self._is_prepared:
            self.capacity = max(self.capacity, num_tokens)

    def prepare(self, weight: Tensor) -> None:
        """Makes the workspace, once; a collective call. A failure of any rank turns fusion off on all, for good.

        Args:
            weight: A norm's: of the device, dtype and width that shall be fused.
        """
        if self._is_prepared or self.world_size == 1 or not self.fuse:
            return
        self._is_prepared = True
        self.why_unfused = why_not_fused(
            1, capacity=self.capacity, hidden_size=weight.shape[0], dtype=weight.dtype, world_size=self.world_size
        )
        self.why_unfused = self.why_unfused or self._why_not_one_host()
        # Creation exchanges handles between ranks: one that can't even begin would leave the others waiting in it.
        self.why_unfused = self.why_unfused or self._vote(self._check_library, weight)
        self.why_unfused = self.why_unfused or self._vote(self._make_workspace, weight)
        if self.why_unfused:
            self._workspace = None
            logger.warning("all-reduce and norm are not fused: %s", self.why_unfused)

    def _why_not_one_host(self) -> str:
        hosts: list[str] = [""] * self.world_size
        dist.all_gather_object(hosts, _host(), group=self.group)
        number = len(set(hosts))
        return "" if number == 1 else f"ranks on {number} hosts; the fused kernel serves those of one"

    def _vote(self, attempt: Callable[[Tensor], None], weight: Tensor) -> str:
        """Runs `attempt` here and on all other ranks; the first rank's trouble, or ""."""
        trouble = ""
        try:
            attempt(weight)
        except Exception as e:
            trouble = f"{type(e).__name__}: {e}"
        answers: list[str] = [""] * self.world_size
        dist.all_gather_object(answers, trouble, group=self.group)
        return next((f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer), "")

    def _check_library(self, weight: Tensor) -> None:
        if self._comm is not None:
            return
        if not weight.is_cuda:
            raise RuntimeError(f"the fused kernel needs CUDA, the tensors are on {weight.device.type}")
        self._comm = import_flashinfer("flashinfer.comm")

    def _make_workspace(self, weight: Tensor) -> None:
        # Never backend="auto": on an H200 it picks the one that takes NVLink multicast.
        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=self.world_size, rank=dist.get_rank(self.group),
            max_token_num=self.capacity, hidden_dim=weight.shape[0], dtype=weight.dtype, group=self.group,
        )  # fmt: skip

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Ends a block; see the class. Outside a capture the first call prepares the workspace: all ranks must come.

        Args:
            x: This rank's part of the block's output, (num_tokens, hidden_size).
            residual: The sum of all earlier blocks, the same on every rank.
            weight: (hidden_size,).

        Returns:
            The normalised sum, and the sum.
        """
        if self.world_size > 1:
            if not self._is_prepared and not _is_capturing(x):
                self.prepare(weight)
            if self._workspace is not None and not why_not_fused(
                x.shape[0], capacity=self.capacity, hidden_size=x.shape[1], dtype=x.dtype, world_size=self.world_size
            ):
                return self._fused(x, residual, weight, eps)
            dist.all_reduce(x, group=self.group)
        if self.fuse and x.is_cuda and x.dtype != torch.float32:
            fused_add_rmsnorm(x, residual, weight, eps)
            return x, residual
        residual = x + residual
        return rms_norm(residual, weight, eps), residual

    def _fused(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, added = torch.empty_like(x), torch.empty_like(residual)
        self._comm.allreduce_fusion(
            input=x.contiguous(), workspace=self._workspace, pattern=RESIDUAL_RMS_NORM,
            residual_in=residual.contiguous(), residual_out=added, norm_out=normed, rms_gamma=weight, rms_eps=eps,
            fp32_acc=True, launch_with_pdl=False, trigger_completion_at_end=True,
        )  # fmt: skip
        return normed, added


def _host() -> str:
    """The same for processes that can share a GPU's memory; containers of two machines may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text() if boot.exists() else "")


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
