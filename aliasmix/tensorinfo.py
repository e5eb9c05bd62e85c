"""What is known of a tensor without its data, read from a safetensors header or a sharded index. Knows no module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One named tensor.

    Attributes:
        shape: Its shape.
        dtype: torch's name without the prefix: "bfloat16", "int32".
        kind: "param", "buffer", or "tensor" where it is not known (a checkpoint does not say).
        file: Name of the file that holds it, relative to the checkpoint; "" for a live module.
        begin, end: Byte range in that file, counted from the file's start.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "tensor"
    file: str = ""
    begin: int = 0
    end: int = 0
