"""Static inputs: the buffers at fixed addresses that graphs read. Knows names, shapes and padding, no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["InputSpec", "StaticInputs", "count_tokens"]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the forward: a tensor of `(num_tokens, *tail)`.

    Args:
        tail: shape behind the token dimension.
        dtype: of the buffer; what is run must have it too.
        pad: value of the rows past the real token count (slot_mapping: the dummy slot).
    """

    tail: tuple[int, ...]
    dtype: torch.dtype
    pad: float = 0


class StaticInputs:
    """Buffers of `max_rows` rows, one for each spec, plus `num_tokens`, an int32 tensor of one element.

    The buffers live as long as the graphs that read them, and are written only by `load`.
    """

    def __init__(self, specs: Mapping[str, InputSpec], max_rows: int, device: torch.device) -> None:
        if "num_tokens" in specs:
            raise ValueError("'num_tokens' is the runner's own input; choose another name")
        self.specs = dict(specs)
        self.buffers = {
            name: torch.full((max_rows, *spec.tail), spec.pad, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        self.num_tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._loaded_tokens = 0
        self._views: dict[int, dict[str, Tensor]] = {}

    def views(self, num_rows: int) -> dict[str, Tensor]:
        """The first `num_rows` rows of every buffer, and `num_tokens`: what a forward of that bucket reads.

        The same views each time, so ask for buckets only.
        """
        if num_rows not in self._views:
            views = {name: buffer[:num_rows] for name, buffer in self.buffers.items()}
            self._views[num_rows] = views | {"num_tokens": self.num_tokens}
        return self._views[num_rows]

    def load(self, inputs: Mapping[str, Tensor], num_tokens: int, num_rows: int) -> None:
        """Copy a step in and refill the rows behind it with their pad values. No allocation, no sync."""
        whole = self.views(num_rows)
        for name, spec in self.specs.items():
            rows = whole[name]
            if num_tokens < num_rows:
                rows[num_tokens:].fill_(spec.pad)
                rows = rows[:num_tokens]
            rows.copy_(inputs[name])
        if num_tokens != self._loaded_tokens:  # one launch less of every step of a decode
            self.num_tokens.fill_(num_tokens)
            self._loaded_tokens = num_tokens

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values()) + self.num_tokens.nbytes


def count_tokens(inputs: Mapping[str, Tensor], specs: Mapping[str, InputSpec]) -> int:
    """The number of tokens of a step, after checking its names, shapes and dtypes against the specs.

    Raises:
        ValueError: an input is missing or unknown, or its shape or dtype isn't the spec's.
    """
    if inputs.keys() != specs.keys():
        raise ValueError(f"inputs are {sorted(inputs)}, expected {sorted(specs)}")
    num_tokens = next(iter(inputs.values())).shape[0]
    for name, spec in specs.items():
        tensor = inputs[name]
        if tuple(tensor.shape) != (num_tokens, *spec.tail) or tensor.dtype != spec.dtype:
            raise ValueError(
                f"input {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"expected {spec.dtype} {(num_tokens, *spec.tail)}"
            )
    return num_tokens
