"""What is registered in a module, under which names and in which memory. Judges nothing.

nn.Module's own walks recurse for ever on a module that contains itself, and name a module once only; this walk is
a loop, ends on cycles, and keeps every name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
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


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that two tensors share exactly if they share their memory.

    The address of the data will not do: it is 0 for every tensor on the meta device and every empty one. The
    storage object's own address tells them apart; a tensor without a storage (sparse, lazy) stands for itself.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, AttributeError, ValueError):
        return id(tensor)


def extent(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
    """Returns (offset, shape, strides, element size), offset and strides in elements; None without strides."""
    try:
        shape = tuple(int(n) for n in tensor.shape)
        return int(tensor.storage_offset()), shape, tuple(int(n) for n in tensor.stride()), tensor.element_size()
    except (NotImplementedError, RuntimeError):
        return None


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common.

    Exact for slices of one contiguous tensor, along any dimension; for other layouts whether the spans overlap.
    """
    first, second = extent(a), extent(b)
    if first is None or second is None:
        return a is b
    if not prod(first[1]) or not prod(second[1]):
        return False
    spans = []
    for offset, shape, strides, size in (first, second):
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        spans.append((offset * size, (last + 1) * size))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    if first[2] != second[2] or first[3] != second[3]:
        return True
    # The same strides: write each offset as coordinates of the common base, and compare the ranges of each one.
    left, right = first[0], second[0]
    outer_step, is_apart = 0, False
    for dim in sorted(range(len(first[2])), key=lambda dim: -first[2][dim]):
        step = first[2][dim]
        if step <= 0:
            return True
        (i, left), (j, right) = divmod(left, step), divmod(right, step)
        if outer_step and (max(i + first[1][dim], j + second[1][dim])) * step > outer_step:
            return True  # wraps round into the next row: no slice of a contiguous tensor
        is_apart |= i + first[1][dim] <= j or j + second[1][dim] <= i
        outer_step = step
    # What is left of the offsets is the place in a dimension that was indexed away, as in `x[:, 3]`.
    is_apart |= left != right and all(step % outer_step == 0 for step in first[2])
    return not is_apart
