"""Where each tensor of a checkpoint, or a rank's part of it, lies in the model. Knows no file.

The model keeps the checkpoint's names, but for the routed experts: a layer's are stacked, gate above up, so that one
grouped product serves them all. Of several ranks each keeps the parts that the plan gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from aliasmix.tensorinfo import TensorInfo

from .layers.parallel import WHOLE, ParallelPlan
from .model import KimiK25ForConditionalGeneration
from .tensor_names import EXPERT

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of a checkpoint and its place.

    Attributes:
        name: In the checkpoint, in the original spelling.
        parameter: A parameter or buffer, as state_dict() names it.
        part: What of the tensor is kept, as an index; () if all of it.
        index: `parameter[index]` is that part.
    """

    name: str
    parameter: str
    part: tuple[slice, ...]
    index: Index

    def view(self, state: Mapping[str, Tensor]) -> Tensor:
        """What of the model the tensor fills."""
        parameter = state[self.parameter]
        return parameter[self.index] if self.index else parameter


def place(name: str, info: TensorInfo, num_experts: int, plan: ParallelPlan = WHOLE) -> Placement | None:
    """
    Args:
        num_experts: That are on one rank.

    Returns:
        The tensor's place; None for a weight_shape, which the model does not keep, and for another rank's expert.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return Placement(name, name, plan.cut(name, info.shape), ())
    group, expert = divmod(int(match["expert"]), num_experts)
    if match["part"] == "_shape" or group != plan.expert_group:
        return None
    part = plan.cut(name, info.shape, is_expert=True)
    if match["proj"] == "down":
        return Placement(name, f"{match['experts']}.down_proj{match['part']}", part, (expert,))
    rows = info.shape[0] // plan.expert_tp
    half = slice(0, rows) if match["proj"] == "gate" else slice(rows, 2 * rows)
    return Placement(name, f"{match['experts']}.gate_up_proj{match['part']}", part, (expert, half))


def place_all(
    expected: Mapping[str, TensorInfo], model: KimiK25ForConditionalGeneration
) -> dict[str, Placement]:
    """The places by name of all tensors that the model has a part of, on this rank; together they fill each parameter
    and persistent buffer exactly once."""
    plan, num_experts = model.plan, model.config.text_config.n_routed_experts // model.plan.ep
    placements = {
        name: placement for name, info in expected.items() if (placement := place(name, info, num_experts, plan))
    }
    state = model.state_dict(keep_vars=True)
    filled = dict.fromkeys(state, 0)
    for name, placement in placements.items():
        view = placement.view(state)
        if not placement.part:
            assert view.shape == expected[name].shape, (name, view.shape, expected[name].shape)
        filled[placement.parameter] += view.numel()
    assert len({(p.parameter, str(p.index)) for p in placements.values()}) == len(placements)
    assert filled == {name: tensor.numel() for name, tensor in state.items()}
    return placements


def packed_layers_of(model: nn.Module) -> frozenset[int]:
    """The decoder layers whose routed experts are int4."""
    packed = re.compile(r"language_model\.model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj_packed")
    return frozenset(int(match[1]) for name in model.state_dict() if (match := packed.fullmatch(name)))
