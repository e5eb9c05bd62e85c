"""The addresses that captured graphs have baked in, and whether they still hold. Knows no graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .errors import PointerMovedError

__all__ = ["PointerFingerprint", "registered_names"]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def registered_names(module: nn.Module) -> list[str]:
    """What a module has registered. Not its state_dict: a module may refuse that, or gather it from other ranks."""
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [name for names in tensors for name, _ in names]


class PointerFingerprint:
    """Addresses of all parameters and buffers of a module, and of watched workspaces.

    Tensors are read anew from their modules at each check, so `p.data = new`, a replaced parameter or buffer
    and a replaced submodule are all seen. In-place writes, `load_state_dict` among them, keep the addresses
    and are welcome.

    Args:
        module: its parameters and buffers are watched under their state-dict names.
        watch: further tensors by name, each given by a function that reads it where it lives (a workspace that
            may grow, a cache).
    """

    def __init__(self, module: nn.Module, watch: Mapping[str, Callable[[], Tensor]]) -> None:
        self._names: list[str] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._child_names: list[str] = []
        self._child_slots: list[tuple[dict[str, Any], str]] = []
        for prefix, parent in module.named_modules():
            dot = f"{prefix}." if prefix else ""
            for slots in (parent._parameters, parent._buffers):
                for key, tensor in slots.items():
                    if tensor is not None:
                        self._names.append(dot + key)
                        self._slots.append((slots, key))
            for key in parent._modules:
                self._child_names.append(dot + key)
                self._child_slots.append((parent._modules, key))
        self._names += watch
        self._watch = list(watch.values())
        self._pointers = self._read_pointers()
        self._children = self._read_children()

    def _read_pointers(self) -> list[int]:
        # Flat comprehensions: this runs after every launch, for a thousand tensors and more.
        watched = [read().data_ptr() for read in self._watch]
        try:
            return [slots[key].data_ptr() for slots, key in self._slots] + watched
        except (AttributeError, KeyError):  # one was removed
            return [_pointer(slots.get(key)) for slots, key in self._slots] + watched

    def _read_children(self) -> list[nn.Module | None]:
        return [slots.get(key) for slots, key in self._child_slots]

    def check(self) -> None:
        """Raise PointerMovedError, with the tensors' names, if any address differs from the one taken."""
        pointers, children = self._read_pointers(), self._read_children()
        if pointers == self._pointers and children == self._children:
            return
        moved = tuple(
            name
            for names, before, after in (
                (self._names, self._pointers, pointers),
                (self._child_names, self._children, children),
            )
            for name, was, now in zip(names, before, after, strict=True)
            if was != now
        )
        raise PointerMovedError(
            f"{', '.join(moved[:3])}{f' and {len(moved) - 3} more' if len(moved) > 3 else ''} moved after freeze(); "
            "the graphs still read the old memory. Write new values in place (tensor.copy_, load_state_dict), or "
            "close() this runner and capture again",
            moved,
        )
