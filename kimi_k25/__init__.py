"""Kimi-K2.5 in plain PyTorch: pictures and text in, text out.

Names are looked up on first use: `import kimi_k25` and `import kimi_k25.graphs` load no model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import BackendError, use_backend
    from .checkpoint import load_model, save_checkpoint
    from .config import ConfigError, KimiK25Config, load_config
    from .engine import Engine, Prompt, SamplingParams
    from .model import KimiK25ForConditionalGeneration
    from .processor import Processor, load_processor
    from .streaming import GenerationStep, generate_text, stream_generate
    from .tensor_names import expected_tensors

_HOMES = {
    "backend": ("BackendError", "use_backend"),
    "checkpoint": ("load_model", "save_checkpoint"),
    "config": ("ConfigError", "KimiK25Config", "load_config"),
    "engine": ("Engine", "Prompt", "SamplingParams"),
    "model": ("KimiK25ForConditionalGeneration",),
    "processor": ("Processor", "load_processor"),
    "streaming": ("GenerationStep", "generate_text", "stream_generate"),
    "tensor_names": ("expected_tensors",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "BackendError",
    "ConfigError",
    "Engine",
    "GenerationStep",
    "KimiK25Config",
    "KimiK25ForConditionalGeneration",
    "Processor",
    "Prompt",
    "SamplingParams",
    "expected_tensors",
    "generate_text",
    "load_config",
    "load_model",
    "load_processor",
    "save_checkpoint",
    "stream_generate",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
