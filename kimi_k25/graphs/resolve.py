"""Finding the decoder stack inside a wrapper. Knows no model class, and never assigns."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch import nn

from .errors import DecoderNotFoundError

__all__ = ["resolve_decoder"]


def resolve_decoder(module: nn.Module) -> Any:
    """The module that owns the decoder layers, reached by following `.model` and `.language_model`.

    Attributes are only read, so an alias (a property or descriptor that registers no submodule) is as good
    as a registered child, and `state_dict()` is the same afterwards.

    Args:
        module: a decoder, or any nesting of wrappers around one.

    Returns:
        The first module found that has a non-empty `.layers`.

    Raises:
        DecoderNotFoundError: there is none; the message lists every path that was tried.
    """
    tried: list[str] = []
    visited: set[int] = set()

    def search(candidate: Any, path: str) -> Any:
        visited.add(id(candidate))
        layers = getattr(candidate, "layers", None)
        if isinstance(layers, Sized) and len(layers) > 0:
            return candidate
        tried.append(f"{path}.layers ({'missing' if layers is None else f'empty {type(layers).__name__}'})")
        for name in ("model", "language_model"):
            try:
                child = getattr(candidate, name)
            except AttributeError as e:
                # An alias whose target is missing raises here too: its message says more than "missing".
                reason = "missing" if name in str(e) and "no attribute" in str(e) else str(e)
                tried.append(f"{path}.{name} ({reason})")
                continue
            if not isinstance(child, nn.Module):
                tried.append(f"{path}.{name} ({type(child).__name__}, not a module)")
            elif id(child) in visited:
                tried.append(f"{path}.{name} (leads back)")
            elif (found := search(child, f"{path}.{name}")) is not None:
                return found
        return None

    decoder = search(module, type(module).__name__)
    if decoder is None:
        raise DecoderNotFoundError(
            f"{type(module).__name__} has no decoder stack; tried {', '.join(tried)}. "
            "Pass the module that owns `.layers`, or reach it through `.model` or `.language_model`; "
            "a GraphRunner only counts the layers, and takes num_layers= instead.",
            tuple(tried),
        )
    return decoder
