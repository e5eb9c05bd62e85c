"""Where each tensor of a checkpoint lies in the model. Knows no file.

The model keeps the checkpoint's names, but for the routed experts: a layer's are stacked, gate above up, so that one
grouped product serves them all. What cuts tensors over ranks cuts here: nothing else knows both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from aliasmix.tensorinfo import TensorInfo

from .tensor_names import EXPERT

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of a checkpoint and its place.

    Attributes:
        name: In the checkpoint, in the original spelling.
        parameter: A parameter or buffer, as state_dict() names it.
        index: `parameter[index]` is the whole tensor.
    """

    name: str
    parameter: str
    index: Index

    def view(self, state: Mapping[str, Tensor]) -> Tensor:
        """The part of the model that the tensor fills."""
        parameter = state[self.parameter]
        return parameter[self.index] if self.index else parameter


def place(name: str, info: TensorInfo) -> Placement | None:
    """Returns the tensor's place; None for a weight_shape, which the model does not keep."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return Placement(name, name, ())
    if match["part"] == "_shape":
        return None
    expert, rows = int(match["expert"]), info.shape[0]
    if match["proj"] == "down":
        return Placement(name, f"{match['experts']}.down_proj{match['part']}", (expert,))
    half = slice(0, rows) if match["proj"] == "gate" else slice(rows, 2 * rows)
    return Placement(name, f"{match['experts']}.gate_up_proj{match['part']}", (expert, half))


def place_all(expected: Mapping[str, TensorInfo], model: nn.Module) -> dict[str, Placement]:
    """Every tensor's place by its name; together they fill each parameter and persistent buffer exactly once."""
    placements = {name: placement for name, info in expected.items() if (placement := place(name, info))}
    state = model.state_dict(keep_vars=True)
    filled = dict.fromkeys(state, 0)
    for name, placement in placements.items():
        view = placement.view(state)
        assert view.shape == expected[name].shape, (name, view.shape, expected[name].shape)
        filled[placement.parameter] += view.numel()
    assert len({(p.parameter, str(p.index)) for p in placements.values()}) == len(placements)
    assert filled == {name: tensor.numel() for name, tensor in state.items()}
    return placements


def packed_layers_of(model: nn.Module) -> frozenset[int]:
    """The decoder layers whose routed experts are int4."""
    packed = re.compile(r"language_model\.model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj_packed")
    return frozenset(int(match[1]) for name in model.state_dict() if (match := packed.fullmatch(name)))
