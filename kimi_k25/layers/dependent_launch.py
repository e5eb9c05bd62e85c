"""Programmatic dependent launch: a kernel is set up while the one in front of it still runs, about 1 us saved each.

A kernel so launched may start before the one in front has ended, or written anything. It is safe by one rule: `begin`
is the first statement of every kernel that takes launch_options. Its wait ends when all of the kernel in front has
ended and can be read; that one waited too before it could end, and so on, hence everything earlier is complete.
What is not ours keeps the rule or stream order: FlashInfer's norms wait first; PyTorch's and humming's kernels are
launched in the ordinary way, which waits by itself. humming's must stay so: its use_pdl reads sorted_ids, expert_ids
and num_rows before it waits. Knows no kernel.

Source: CUDA programming guide, programmatic dependent launch; PTX ISA, griddepcontrol.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["begin", "launch_options"]

ENABLED = True  # False: every kernel waits until the one in front has ended, as stream order has it.


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel in front, then lets the one behind be set up: it waits itself, so early is not too early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(like: Tensor, *, joins: bool = False) -> dict[str, bool]:
    """Keywords of a kernel's launch, its constant PDL among them.

    Args:
        like: A tensor of the launch's device.
        joins: The kernel may stand where streams part or meet. It is then launched in stream order, and only the one
            behind it early: a kernel that takes up the GPU while it waits for another stream could keep that from it.
    """
    if not (ENABLED and like.is_cuda and _is_supported(like.device)):
        return {"PDL": False}
    return {"PDL": True} if joins else {"PDL": True, "launch_pdl": True}


@cache
def _is_supported(device: torch.device) -> bool:
    is_compiled = isinstance(begin, triton.JITFunction)  # Triton's interpreter has no such thing.
    return is_compiled and torch.cuda.get_device_capability(device) >= (9, 0)
