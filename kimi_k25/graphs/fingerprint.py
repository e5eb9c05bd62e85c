"""The addresses that captured graphs have baked in, and whether they still hold. Knows no graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from itertools import compress
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
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        self._child_slots: list[tuple[str, dict[str, Any], str]] = []
        for prefix, parent in module.named_modules():
            dot = f"{prefix}." if prefix else ""
            for registry in (parent._parameters, parent._buffers):
                self._slots += [(dot + key, registry, key) for key, tensor in registry.items() if tensor is not None]
            self._child_slots += [(dot + key, parent._modules, key) for key in parent._modules]
        self._registries = list({id(registry): registry for _, registry, _ in self._slots}.values())
        self._child_registries = list({id(registry): registry for _, registry, _ in self._child_slots}.values())
        self._watch = dict(watch)
        self._before = self._look_up()
        self._arrange()

    def _look_up(self) -> list[tuple[str, object]]:
        """The address of each tensor, and each submodule itself, by name."""
        found: list[tuple[str, object]] = [(name, _pointer(slots.get(key))) for name, slots, key in self._slots]
        found += [(name, read().data_ptr()) for name, read in self._watch.items()]
        return found + [(name, slots.get(key)) for name, slots, key in self._child_slots]

    def _arrange(self) -> None:
        self._is_tensor = [isinstance(value, Tensor) for value in gc.get_referents(*self._registries)]
        self._children = gc.get_referents(*self._child_registries)
        self._pointers = self._read_pointers()

    def _read_pointers(self) -> list[int]:
        # The launches before this have driven it all out of the CPU's caches, so what costs is how much is touched, and
        # loops of C wait for several at once: the values of all dicts in order, None among them, are their referents.
        tensors = compress(gc.get_referents(*self._registries), self._is_tensor)
        return [*map(Tensor.data_ptr, tensors), *(read().data_ptr() for read in self._watch.values())]

    def check(self) -> None:
        """Raise PointerMovedError, with the tensors' names, if any address differs from the one taken."""
        try:
            if gc.get_referents(*self._child_registries) == self._children and self._read_pointers() == self._pointers:
                return
        except TypeError:  # one was removed
            pass
        moved = tuple(was[0] for was, now in zip(self._before, self._look_up(), strict=True) if was != now)
        if not moved:  # something was registered beside them
            return self._arrange()
        raise PointerMovedError(
            f"{', '.join(moved[:3])}{f' and {len(moved) - 3} more' if len(moved) > 3 else ''} moved after freeze(); "
            "the graphs still read the old memory. Write new values in place (tensor.copy_, load_state_dict), or "
            "close() this runner and capture again",
            moved,
        )
