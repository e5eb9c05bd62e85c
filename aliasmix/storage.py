"""Which memory tensors are in, and whether they share it. Reads no data, and knows no module and no name."""

from __future__ import annotations

from math import prod

import torch


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


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte and the one past the last that a tensor touches in its storage; (0, 0) if none."""
    place = extent(tensor)
    if place is None or 0 in place[1]:
        return 0, 0
    offset, shape, strides, size = place
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return offset * size, (last + 1) * size


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common.

    Exact for slices of one contiguous tensor, along any dimension; for other layouts whether the spans overlap.
    """
    first, second = extent(a), extent(b)
    if first is None or second is None:
        return a is b
    if not prod(first[1]) or not prod(second[1]):
        return False
    (begin, end), (other_begin, other_end) = span(a), span(b)
    if end <= other_begin or other_end <= begin:
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
