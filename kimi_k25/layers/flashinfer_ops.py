"""What this package calls of FlashInfer, in one place: norms, and ragged prefill attention planned once a step.

Importing this file imports no FlashInfer; `import_flashinfer` says why when it cannot be had.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .kv_cache import AttentionBatch
from .operators import kernel_op

__all__ = ["INSTALL", "MissingLibraryError", "RaggedPrefill", "fused_add_rmsnorm", "import_flashinfer", "rmsnorm"]

INSTALL = "pip install 'aliasmix[kimi,gpu]'"
WORKSPACE_BYTES = 128 * 2**20  # What FlashInfer recommends for the parts of split attention.


class MissingLibraryError(ImportError):
    """A library of the `gpu` extra that is not there, or does not import.

    Attributes:
        name: Of the library, as ImportError has it.
    """


def import_gpu_library(package: str, module: str) -> Any:
    """Imports `module`, which `package` on PyPI provides.

    Raises:
        MissingLibraryError: With the reason and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except Exception as e:  # A broken installation raises AssertionError and RuntimeError too.
        reason = f"{package} is not usable ({type(e).__name__}: {e}); install it with: {INSTALL}"
        raise MissingLibraryError(reason, name=package) from e


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
        self._planned: torch.cuda.Event | None = None
        self._device = device
        self._num_queries, self._has_prefix = 0, False
        self._layer: tuple[Tensor, ...] | None = None
        self._again: Callable[[], object] | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Reads a step's lengths, without waiting for the device.

        A sequence's new tokens are its last ones, so with a longer key side the mask is aligned to the end.
        """
        prefix = batch.cache if batch.cache is not None and batch.cache.has_prefix else None
        queries = keys = self._bounds(batch.lengths)
        if prefix:
            keys = self._bounds(prefix.kv_lens)
        if self._planned is not None:
            self._planned.synchronize()  # The plan before may still be on its way out of pinned memory.
        self._wrapper.plan(queries, keys, **self._shape)
        if self._device.type == "cuda":
            self._planned = self._planned or torch.cuda.Event()
            self._planned.record()
        self._layer = self._again = None
        self._num_queries, self._has_prefix = batch.num_query_tokens, prefix is not None

    def _bounds(self, lengths: Sequence[int]) -> Tensor:
        # Pinned: from other memory the copy to the device may wait for all work before it.
        bounds = [0, *itertools.accumulate(lengths)]
        return torch.tensor(bounds, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer's attention of the planned step.

        Layers without a prefix share their tensors, so all but the first launch the kernel with the arguments of the
        one before: on a short step slicing and FlashInfer's checks would take as long as launching.

        Args:
            q: (num_query_tokens, heads, qk_head_dim), padding behind, as in `out`.
            k, v: Of all tokens that the sequences attend to; with padding behind where there is no prefix.
            out: (num_query_tokens, heads, v_head_dim), written.
        """
        layer = self._layer
        if layer is not None and q is layer[0] and k is layer[1] and v is layer[2] and out is layer[3]:
            assert self._again is not None
            self._again()
            return
        n = self._num_queries
        if self._has_prefix:
            self._wrapper.run(q[:n], k, v, out=out[:n])
            return
        module = self._wrapper._cached_module

        def launch(*args: object) -> None:
            self._again = functools.partial(module.ragged_run, *args)
            self._again()

        self._wrapper._cached_module = SimpleNamespace(ragged_run=launch)
        try:
            self._wrapper.run(q[:n], k[:n], v[:n], out=out[:n])
        finally:
            self._wrapper._cached_module = module
        self._layer = (q, k, v, out)
