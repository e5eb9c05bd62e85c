"""What is registered in a module, under which names. Judges nothing.

nn.Module's own walks recurse for ever on a module that contains itself, and name a module once only; this walk is
a loop, ends on cycles, and keeps every name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aliasmix.tensorinfo import TensorInfo


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of a module's `_parameters` or `_buffers`.

    Attributes:
        name: Its dotted name along the first path to its module.
        kind: "param" or "buffer".
        persistent: Whether state_dict() has it.
        tensor: What is in it.
    """

    name: str
    kind: str
    persistent: bool
    tensor: torch.Tensor


@dataclass(slots=True)
class Walk:
    """Everything registered below a root.

    Attributes:
        modules: First path to each module -> the module; the root's path is "".
        paths: id of a module -> all paths to it, the first of them a key of `modules`. Paths below a second
            path of a parent are left out: the parent's own entry tells.
        cycles: (path, path of the ancestor that it leads back to).
        slots: Parameters and buffers, None entries left out.
    """

    modules: dict[str, nn.Module]
    paths: dict[int, list[str]]
    cycles: list[tuple[str, str]]
    slots: list[Slot]


def walk(root: nn.Module) -> Walk:
    """Walks the registered modules in the order of state_dict().

    Raises:
        TypeError: The root is no module, such as a class that nobody has called.
    """
    if not isinstance(root, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, found {root!r}; is it a class that is still to be called?")
    result = Walk({}, {}, [], [])
    ancestors: dict[int, str] = {}
    # A module is entered when it is popped first, and left when it comes up a second time.
    stack: list[tuple[str, nn.Module, bool]] = [("", root, False)]
    while stack:
        path, module, is_leaving = stack.pop()
        if is_leaving:
            del ancestors[id(module)]
        elif id(module) in ancestors:
            result.cycles.append((path, ancestors[id(module)]))
        elif id(module) in result.paths:
            result.paths[id(module)].append(path)
        else:
            result.paths[id(module)] = [path]
            result.modules[path] = module
            result.slots += _slots(path, module)
            ancestors[id(module)] = path
            stack.append((path, module, True))
            children = [(join(path, name), child, False) for name, child in _children(module)]
            stack += reversed(children)
    return result


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _slots(path: str, module: nn.Module) -> Iterable[Slot]:
    for name, value in module._parameters.items():
        if value is not None:
            yield Slot(join(path, name), "param", True, value)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Slot(join(path, name), "buffer", name not in module._non_persistent_buffers_set, buffer)


def join(path: str, name: str) -> str:
    """Returns the dotted name of an attribute of the module at a path."""
    return f"{path}.{name}" if path else name


def state_values(found: Walk) -> dict[str, Any]:
    """Returns what state_dict() would return, as the live values; with cycles, the slots along their first paths.

    state_dict() itself is asked where that ends, since modules may add to it or rename what they save.
    """
    if found.cycles:
        return {slot.name: slot.tensor for slot in found.slots if slot.persistent}
    return dict(found.modules[""].state_dict(keep_vars=True))


def describe(value: object) -> TensorInfo:
    """Returns the `TensorInfo` of a state_dict value; a value that is no tensor has kind `extra`.

    Raises:
        ValueError: For a lazy parameter that has no shape yet.
    """
    if not isinstance(value, torch.Tensor):
        return TensorInfo((), type(value).__name__, "extra")
    if nn.parameter.is_lazy(value):
        raise ValueError("a lazy module has no shapes before its first forward; run one, then check")
    kind = "param" if isinstance(value, nn.Parameter) else "buffer"
    return TensorInfo(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."), kind)
