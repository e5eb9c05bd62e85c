"""What this package calls of FlashInfer, in one place: norms, and ragged prefill attention planned once a step.

Importing this file imports no FlashInfer; `import_flashinfer` says why when it cannot be had.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .attention_batch import AttentionBatch
from .gpu_libraries import import_gpu_library
from .operators import kernel_op

__all__ = ["WORKSPACE_BYTES", "RaggedPrefill", "fused_add_rmsnorm", "import_flashinfer", "rmsnorm"]

WORKSPACE_BYTES = 128 * 2**20  # What FlashInfer recommends for the parts of split attention.


def import_flashinfer(module: str = "flashinfer") -> Any:
    """FlashInfer, or one of its modules; see import_gpu_library."""
    if "FLASHINFER_WORKSPACE_BASE" not in os.environ and not os.access(Path.home(), os.W_OK):
        # Its import makes a folder in the home directory, and fails where it can't.
        os.environ["FLASHINFER_WORKSPACE_BASE"] = tempfile.gettempdir()
    return import_gpu_library("flashinfer-python", module)


@kernel_op(mutates_args=("x", "residual"))
def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x, then x = norm(residual), both in place. FlashInfer checks no dtypes, so this does.

    Args:
        x, residual: (num_tokens, hidden_size) bfloat16 or float16 on CUDA.
        weight: (hidden_size,) of the same dtype.
    """
    _check_dtypes(x, residual, weight)
    import_flashinfer().fused_add_rmsnorm(x, residual, weight, eps=eps)


@fused_add_rmsnorm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    return None


@kernel_op()
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of (num_tokens, hidden_size), of the same dtypes as fused_add_rmsnorm."""
    _check_dtypes(x, weight)
    return import_flashinfer().rmsnorm(x, weight, eps=eps)


@rmsnorm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _check_dtypes(*tensors: Tensor) -> None:
    if tensors[0].dtype not in (torch.bfloat16, torch.float16) or len({t.dtype for t in tensors}) > 1:
        found = ", ".join(str(t.dtype) for t in tensors)
        raise TypeError(f"FlashInfer's norms take one 16-bit dtype throughout, not {found}")


class RaggedPrefill:
    """Causal attention of packed sequences, planned once a step for all layers.

    FlashInfer's wrapper makes the first step's calls of its compiled functions. Later steps make the same calls with
    their own lengths and tensors: the GPU waits for a plan, and the wrapper's Python would be most of the wait.

    Args:
        library: The flashinfer module, or what stands for it in a test.
    """

    def __init__(
        self, *, num_heads: int, qk_head_dim: int, v_head_dim: int, scale: float, dtype: torch.dtype,
        device: torch.device, library: Any = None,
    ) -> None:  # fmt: skip
        library = library or import_flashinfer()
        self._shape = {
            "num_qo_heads": num_heads, "num_kv_heads": num_heads, "head_dim_qk": qk_head_dim,
            "head_dim_vo": v_head_dim, "causal": True, "sm_scale": scale, "q_data_type": dtype, "kv_data_type": dtype,
        }  # fmt: skip
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        # What the kernel gets beside a step's plan and tensors, known once the wrapper has run: two workspaces; lengths
        # on the device, which the kernel for Hopper finds in the plan and does not read here; constants.
        self._constant: tuple[list[Any], list[Any], list[Any]] | None = None
        self._planned = torch.cuda.Event() if device.type == "cuda" else None
        self._plan_info: Any = None
        self._num_queries, self._has_prefix = 0, False
        self._layer: tuple[Tensor, ...] | None = None
        self._again: Callable[[], object] | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Reads a step's lengths, without waiting for the device.

        A sequence's new tokens are its last ones, so with a longer key side the mask is aligned to the end.
        """
        prefix = batch.cache if batch.cache is not None and batch.cache.has_prefix else None
        lengths = prefix.kv_lens if prefix else batch.lengths
        queries, num_queries = _bounds(batch.lengths), batch.num_query_tokens
        keys = _bounds(lengths) if prefix else queries
        if self._planned is not None:
            self._planned.synchronize()  # The plan before may still be on its way out of pinned memory.
        if self._constant is None:
            self._wrapper.plan(queries, keys, **self._shape)
            self._plan_info = self._wrapper._plan_info
        else:
            shape, wrapper = self._shape, self._wrapper
            self._plan_info = wrapper._cached_module.plan(
                *self._constant[0], wrapper._pin_memory_int_workspace_buffer,
                queries, keys, torch.tensor(lengths, dtype=torch.int32), num_queries, len(lengths),
                shape["num_qo_heads"], shape["num_kv_heads"], 1, False,  # A page size, and no CUDA graph.
                shape["head_dim_qk"], shape["head_dim_vo"], True, -1,  # Causal, over the whole sequence.
            )  # fmt: skip
        if self._planned is not None:
            self._planned.record()
        self._layer = self._again = None
        self._num_queries, self._has_prefix = num_queries, prefix is not None

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer's attention of the planned step.

        Layers without a prefix share their tensors, so all but the first launch the kernel with the arguments of the
        one before.

        Args:
            q: (num_query_tokens, heads, qk_head_dim), padding behind, as in `out`.
            k, v: Of all tokens that the sequences attend to; with padding behind where there is no prefix.
            out: (num_query_tokens, heads, v_head_dim), written.

        Raises:
            ValueError: Fewer rows than planned, or another dtype: the kernel itself would read on regardless.
        """
        layer = self._layer
        if layer is not None and q is layer[0] and k is layer[1] and v is layer[2] and out is layer[3]:
            assert self._again is not None
            self._again()
            return
        n, dtype = self._num_queries, self._shape["q_data_type"]
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            if x.dtype != dtype or x.shape[0] < n:
                raise ValueError(f"{name} is {x.dtype} of {x.shape[0]} rows, the plan is for {n} of {dtype}")
        rows = q[:n], *((k, v) if self._has_prefix else (k[:n], v[:n])), out[:n]
        if self._constant is None:
            asked = self._ask_wrapper(*rows)
            self._constant = asked[:2], asked[6:8], asked[9:]
        workspaces, lengths, constants = self._constant
        arguments = *workspaces, self._plan_info, *rows[:3], *lengths, rows[3], *constants
        launch = functools.partial(self._wrapper._cached_module.ragged_run, *arguments)
        launch()
        if not self._has_prefix:
            self._layer, self._again = (q, k, v, out), launch

    def _ask_wrapper(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Any]:
        """What FlashInfer would launch its kernel with, after its own checks."""
        asked: list[Any] = []
        module = self._wrapper._cached_module
        self._wrapper._cached_module = SimpleNamespace(ragged_run=lambda *args: asked.extend(args))
        try:
            self._wrapper.run(q, k, v, out=out)
        finally:
            self._wrapper._cached_module = module
        return asked


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
