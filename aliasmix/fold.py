"""Loads checkpoints saved while an alias was a second registration: keys under an alias fold into the target's.

Knows nothing of files; it works on the dictionary that load_state_dict is given.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from aliasmix.alias import aliases
from aliasmix.errors import AliasError, AliasTargetError


def fold_alias_keys(
    state_dict: dict[str, Any], module: nn.Module, *, on_conflict: Literal["error", "canonical", "alias"] = "error"
) -> dict[str, Any]:
    """Renames keys that go through an alias of `module` or of a module inside it to the keys that `module` has.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, fold_alias_keys
        >>> class Wrapper(GuardedSetattrMixin, nn.Module):
        ...     model = ReadOnlyAlias("language_model")
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.language_model = nn.Linear(2, 2, bias=False)
        >>> fold_alias_keys({"model.weight": torch.zeros(2, 2)}, Wrapper())
        {'language_model.weight': tensor([[0., 0.],
                [0., 0.]])}

    Args:
        state_dict: A checkpoint; it is not changed, and its tensors are not copied.
        module: What the checkpoint is for.
        on_conflict: Which tensor to keep where both names are present with different values. Equal ones never conflict.

    Returns:
        A new dictionary of the same type of keys, in the same order, with the `_metadata` of the old one.

    Raises:
        AliasError: Two names of one tensor have different values and `on_conflict` is "error".
        ValueError: There is no such `on_conflict`.
    """
    if on_conflict not in ("error", "canonical", "alias"):
        raise ValueError(f"on_conflict={on_conflict!r}: expected 'error', 'canonical' or 'alias'")
    renames = _renames(module)
    folded: dict[str, Any] = type(state_dict)()
    if hasattr(state_dict, "_metadata"):
        folded._metadata = state_dict._metadata  # type: ignore[attr-defined]
    spellings: dict[str, dict[str, Any]] = {}
    for key, value in state_dict.items():
        spellings.setdefault(_canonical(key, renames), {})[key] = value
    for canonical, values in spellings.items():
        through_alias = [key for key in values if key != canonical]
        wants_alias = on_conflict == "alias" and through_alias
        keep = canonical if canonical in values and not wants_alias else through_alias[0]
        for key in values:
            if on_conflict == "error" and not _is_equal(values[key], values[keep]):
                raise AliasError(
                    f"{key!r} and {keep!r} are one tensor of {type(module).__name__}, but their values differ "
                    "in this checkpoint; choose with on_conflict='canonical' or on_conflict='alias'"
                )
        folded[canonical] = values[keep]
    return folded


def enable_alias_keys(module: nn.Module) -> None:
    """Makes load_state_dict of `module`, or of anything around it, accept keys that go through its aliases.

    Two names with different values are an error; `fold_alias_keys` can choose.
    """
    module.register_load_state_dict_pre_hook(_fold_under_prefix)  # type: ignore[no-untyped-call]


def _fold_under_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    inside = {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}
    folded = {prefix + key: value for key, value in fold_alias_keys(inside, module).items()}
    for key in inside:
        del state_dict[prefix + key]
    state_dict.update(folded)


def _renames(module: nn.Module) -> dict[str, str]:
    """Alias path -> registered path, for every alias inside `module` that leads to something registered in it."""
    paths: dict[int, str] = {}
    for named in (module.named_modules(), module.named_parameters(), module.named_buffers()):
        paths.update((id(registered), path) for path, registered in named)
    renames = {}
    for path, inner in module.named_modules():
        for name, alias in aliases(inner).items():
            try:
                canonical = paths.get(id(alias.resolve(inner)))
            except AliasTargetError:
                continue
            if canonical:
                renames[f"{path}.{name}" if path else name] = canonical
    return renames


def _canonical(key: str, renames: dict[str, str]) -> str:
    # Registered paths go through no alias, so every replacement leaves one alias fewer in the key.
    for end in range(len(key), 0, -1):
        if (end == len(key) or key[end] == ".") and key[:end] in renames:
            return _canonical(renames[key[:end]] + key[end:], renames)
    return key


def _is_equal(value: Any, other: Any) -> bool:
    if value is other or not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return value is other
    try:
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        if value.is_meta or other.is_meta or torch.equal(value, other):
            return True
    except RuntimeError:  # torch compares neither float4 nor sparse nor nested tensors, nor two devices
        pass
    try:  # NaN is not equal to itself, its bytes are
        return torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    except RuntimeError:
        return False
