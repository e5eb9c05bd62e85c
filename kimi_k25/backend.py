"""Which kernels the model runs on: plain PyTorch, or FlashInfer, humming and Triton on a Hopper GPU.

The plain modules stay and define what is computed; `flashinfer` puts a FastDecoder and a FastVisionEncoder before
them. Choosing is explicit, and what was chosen and why is one line. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from .layers.flashinfer_ops import RaggedPrefill, import_flashinfer
from .layers.gpu_libraries import MissingLibraryError, import_gpu_library
from .layers.moe import Int4RoutedExperts
from .model import KimiK25ForConditionalGeneration

if TYPE_CHECKING:
    from .fast_decoder import FastDecoder
    from .layers.fused_moe import ExpertProducts

__all__ = ["Backend", "BackendError", "set_fast_decoder", "use_backend", "why_not_flashinfer"]

Backend = Literal["auto", "torch", "flashinfer"]


class BackendError(RuntimeError):
    """The backend that was asked for can't run here; the message says what is missing and what to do."""


def why_not_flashinfer(model: KimiK25ForConditionalGeneration) -> str:
    """What keeps this model from the fast kernels, with the way out; "" if nothing does."""
    weight = model.language_model.lm_head.weight
    text = model.config.text_config
    if not weight.is_cuda:
        return f"the model is on {weight.device.type}; the fast kernels need a CUDA device. Load it with device='cuda'"
    name, capability = torch.cuda.get_device_name(weight.device), torch.cuda.get_device_capability(weight.device)
    if capability != (9, 0):
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the fast kernels are Hopper's (9.0)"
    if weight.dtype != torch.bfloat16:
        return f"the model is in {weight.dtype}; the fast kernels are for bfloat16. Load it with dtype=torch.bfloat16"
    shape = (text.kv_lora_rank, text.qk_head_dim, text.v_head_dim)
    if shape != (512, 192, 128):
        return f"latent and head sizes are {shape}; FlashInfer's kernels are for the published model's (512, 192, 128)"
    try:
        import_flashinfer()
        import_gpu_library("triton", "triton")
        if any(isinstance(module, Int4RoutedExperts) for module in model.modules()):
            import_gpu_library("humming-kernels", "humming.layer")
    except MissingLibraryError as e:
        return str(e)
    return ""


def use_backend(
    model: KimiK25ForConditionalGeneration, backend: Backend = "auto", *, deterministic: bool = False
) -> str:
    """Chooses the kernels of decoder and vision tower. Call it once the weights are loaded, before graphs are captured.

    With `flashinfer` the int4 experts are rearranged in place: from then on state_dict() and saving refuse their
    names, and this function can't go back. Loading again gives the checkpoint's words.

    Args:
        backend: `auto` takes flashinfer where it can run. On a CPU that is no news; on a GPU the line says what is
            missing, so that nobody runs slowly without knowing it.
        deterministic: Kernels whose results are the same bits every run, at 12% (2,048 tokens) to 40% (64) more time
            in the experts.

    Returns:
        One line: the backend, and what it was chosen for.

    Raises:
        BackendError: flashinfer was asked for by name and can't run here, or torch after flashinfer.
        ValueError: No such backend.
    """
    if backend not in ("auto", "torch", "flashinfer"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'torch' or 'flashinfer'")
    if backend == "torch":
        if model.language_model.model.fast is not None:
            raise BackendError(
                "the int4 experts are already rearranged for flashinfer; load the model again for backend='torch'"
            )
        return "backend: torch"
    if trouble := why_not_flashinfer(model):
        if backend == "flashinfer":
            raise BackendError(trouble)
        return f"backend: torch ({trouble})"
    from .fast_vision import FastVisionEncoder
    from .layers.humming_experts import HummingExperts

    ep = model.plan.ep
    set_fast_decoder(model, lambda experts: HummingExperts(experts, deterministic=deterministic, ep=ep))
    model.vision_tower.encoder.fast = FastVisionEncoder(model.vision_tower.encoder)
    return f"backend: flashinfer{', deterministic' if deterministic else ''}"


def set_fast_decoder(
    model: KimiK25ForConditionalGeneration, products: Callable[[Int4RoutedExperts], ExpertProducts]
) -> FastDecoder:
    """Puts the fused kernels before the decoder's own layers; nothing is checked.

    Args:
        model: Of which why_not_flashinfer says nothing.
        products: Makes the products of a layer's int4 experts.
    """
    from .fast_decoder import FastDecoder  # Its kernels need triton.

    decoder, text, weight = model.language_model.model, model.config.text_config, model.language_model.lm_head.weight
    prefill = RaggedPrefill(
        num_heads=text.num_attention_heads // model.plan.tp, qk_head_dim=text.qk_head_dim, v_head_dim=text.v_head_dim,
        scale=text.softmax_scale, dtype=weight.dtype, device=weight.device,
    )  # fmt: skip
    decoder.fast = fast = FastDecoder(decoder, prefill=prefill, products=products)
    return fast
