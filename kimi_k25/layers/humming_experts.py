"""The int4 experts' two products through humming-kernels and, for the width of a rank of eight, int4_down.

Each has an order of the packed words of its own. The words are rearranged in place, so that a model's experts are in
memory once, at one address. Until the weights are loaded again state_dict() refuses them by name. Knows no router.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import int4_down
from .fused_moe import Blocks
from .gpu_libraries import import_gpu_library
from .moe import Int4RoutedExperts
from .moe_kernels import swiglu_rows

__all__ = ["HummingExperts", "RepackedWeightsError"]


class RepackedWeightsError(RuntimeError):
    """The checkpoint's packed words are asked for, but they were rearranged for the GPU's kernels.

    Attributes:
        names: Of the tensors.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"{', '.join(names)}: rearranged in place for humming-kernels, so these are not the checkpoint's words any "
            "more. Load the model with backend='torch' to save it or to read its state_dict()"
        )
        self.names = names


class _Product:
    """One weight shape's kernels, shared by all layers: which there are, and which serves how many rows."""

    def __init__(
        self, num_experts: int, out_size: int, in_size: int, group_size: int, deterministic: bool, ep: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._layer_args = {"shape_n": out_size, "shape_k": in_size, "num_experts": num_experts}
        self._group_size = group_size
        self._compute = {"gemm_type": "indexed", "use_batch_invariant": deterministic}
        self._ep, self._device = ep, device
        self._layer_config: Any = None
        self._tunings: dict[int, dict[str, Any]] = {}
        self._kernels: dict[str, Tensor] = {}
        # Split sums meet here; zero between calls. Layers run one after another, so that they can share it.
        self._locks = torch.zeros(2048, dtype=torch.int32, device=device)

    def repack(self, packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """New tensors with the same words in the kernels' order."""
        layer_module = import_gpu_library("humming-kernels", "humming.layer")
        weight_config = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "type": "int", "num_bits": 4,
            "strategy": "group", "group_size": self._group_size, "symmetric": True,
        }  # fmt: skip
        with torch.device("meta"):
            layer = layer_module.HummingLayer(
                **self._layer_args, weight_config=weight_config, torch_dtype=torch.bfloat16
            )
        if hasattr(layer, "weight_shape"):
            del layer.weight_shape  # The checkpoint's own note of the sizes.
        layer.weight_packed = torch.nn.Parameter(packed, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.transform()
        self._layer_config = layer.humming_config
        return layer.weight.data, layer.weight_scale.data

    def tuning(self, num_rows: int) -> dict[str, Any]:
        """The library's choice for so many (token, expert) pairs, of which an even share is of the experts here."""
        if num_rows not in self._tunings:
            tune = import_gpu_library("humming-kernels", "humming.tune")
            self._tunings[num_rows] = tune.get_heuristics_config(
                self._layer_config, shape_m=-(-num_rows // self._ep), device=self._device, **self._compute
            )
        return self._tunings[num_rows]

    def prepare(self, row_counts: Sequence[int]) -> None:
        """Compiles what these numbers of pairs need, all at once; otherwise a size's first call does, for seconds."""
        missing = {str(self.tuning(n)): self.tuning(n) for n in row_counts}
        missing = {key: tuning for key, tuning in missing.items() if key not in self._kernels}
        if not missing:
            return
        kernel = import_gpu_library("humming-kernels", "humming.kernel.humming").HummingKernel
        everything = 1 << 30
        intervals = [[0, everything, tuning] for tuning in missing.values()]
        made = kernel.prepare_kernels(self._layer_config.to_str(), self._compute, intervals, self._device)
        for key, row in zip(missing, made.view(-1, 4), strict=True):
            self._kernels[key] = row.clone()

    def block_size(self, num_rows: int) -> int:
        """Rows a block, for so many (token, expert) pairs."""
        return int(self.tuning(num_rows)["block_shape"][0])

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, blocks: Blocks, topk: int) -> Tensor:
        """Row p // topk of x times its expert's weight, for each pair p of the blocks: (num_rows * topk, out_size)."""
        num_rows = x.shape[0] * topk
        key = str(self.tuning(num_rows))
        if key not in self._kernels:
            self.prepare([num_rows])
        launch = import_gpu_library("humming-kernels", "humming.ops").launch_kernel
        out: Tensor = launch(
            configs=self._kernels[key], inputs=x, weight=weight, weight_scale=scale, sorted_ids=blocks[0],
            expert_ids=blocks[1], num_tokens_padded=blocks[2], locks=self._locks, top_k=topk, valid_shape_m=num_rows,
        )  # fmt: skip
        return out


_product = cache(_Product)


@torch.no_grad()
def _rearrange_for_down_rows(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int4_down.rearrange, some experts at a time: its integers of 64 bits hold 36 times their words' memory."""
    parts = [int4_down.rearrange(*part) for part in zip(packed.split(16), scale.split(16), strict=True)]
    words, scales = zip(*parts, strict=True)
    return torch.cat(words), torch.cat(scales)


class HummingExperts:
    """The products of one layer's routed experts, over rows that stay in the order of their pairs.

    Args:
        experts: Their packed words are rearranged by `repack`, in place.
        deterministic: Kernels that give the same bits every run, at 12% to 40% more time.
        ep: Groups that a layer's experts are divided over; numbers of pairs below are those of all groups.

    Attributes:
        weights: Rearranged words and scales of each product, in the experts' own memory; empty before `repack`.
    """

    def __init__(self, experts: Int4RoutedExperts, *, deterministic: bool = False, ep: int = 1) -> None:
        self.experts = experts
        self.is_repacked = False
        self._products: dict[str, _Product] = {}
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        for name in ("gate_up_proj", "down_proj"):
            packed, scale = getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale")
            num_experts, out_size, words = packed.shape
            group_size = words * 8 // scale.shape[-1]
            if name == "down_proj" and (words * 8, group_size) == (int4_down.INPUTS, int4_down.GROUP_SIZE):
                continue  # int4_down's kernel, which is faster.
            self._products[name] = _product(
                num_experts, out_size, words * 8, group_size, deterministic, ep, packed.device
            )
        experts.register_state_dict_pre_hook(self._refuse)
        experts.register_load_state_dict_pre_hook(self._expect_original)

    def _refuse(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.is_repacked:
            raise RepackedWeightsError([prefix + name for name, _ in module.named_buffers(recurse=False)])

    def _expect_original(self, *_: object) -> None:
        self.is_repacked = False

    @torch.no_grad()
    def repack(self) -> None:
        """Rearranges freshly loaded words, in place."""
        if self.is_repacked:
            return
        for name in ("gate_up_proj", "down_proj"):
            self._keep(name, *self.rearrange(name))
        self.is_repacked = True

    def rearrange(self, name: str) -> tuple[Tensor, Tensor]:
        """Words and scales of gate_up_proj or down_proj in its kernels' order, from those of the checkpoint."""
        packed, scale = getattr(self.experts, f"{name}_packed"), getattr(self.experts, f"{name}_scale")
        product = self._products.get(name)
        return (product.repack if product else _rearrange_for_down_rows)(packed, scale)

    def _keep(self, name: str, weight: Tensor, scale: Tensor) -> None:
        own_packed, own_scale = getattr(self.experts, f"{name}_packed"), getattr(self.experts, f"{name}_scale")
        self.weights[name] = own_packed.view(weight.shape), own_scale.view(scale.dtype).view(scale.shape)
        for target, source in zip(self.weights[name], (weight, scale), strict=True):
            # Rearranging may have been no more than a view of the same memory.
            shared = target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            target.copy_(source.clone() if shared else source)

    def prepare(self, pair_counts: Sequence[int]) -> None:
        """Compiles for these numbers of (token, expert) pairs; otherwise a size's first call does, for seconds."""
        for product in self._products.values():
            product.prepare(pair_counts)

    def block_sizes(self, num_pairs: int) -> tuple[int, int]:
        """Rows a block of the two products, for align_blocks."""
        size = self._products["gate_up_proj"].block_size(num_pairs)
        if down := self._products.get("down_proj"):
            return size, down.block_size(num_pairs)
        # int4_down takes any size, but 16 rows cost it no more than 8. Few pairs have blocks of their own.
        return size, max(size, 16) if num_pairs >= 1024 else size

    def gate_up(self, x: Tensor, blocks: Blocks, topk: int) -> Tensor:
        """(T, H) to (T * topk, 2 I), a row a pair; rows of no block are undefined."""
        return self._products["gate_up_proj"](x, *self.weights["gate_up_proj"], blocks, topk)

    def down(self, gate_up: Tensor, blocks: Blocks) -> Tensor:
        """SwiGLU and the second product, (P, 2 I) to (P, H); rows of no block are undefined."""
        weights = self.weights["down_proj"]
        if product := self._products.get("down_proj"):
            return product(swiglu_rows(gate_up, gate_up.dtype), *weights, blocks, 1)
        return int4_down.down_rows(gate_up, *weights, *blocks)
