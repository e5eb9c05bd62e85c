"""Checkpoints that were saved while the alias was a second registration."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from aliased import Duplicate, Guarded, LanguageModel, Plain, assert_text, keys
from torch import nn

from aliasmix import AliasError, GuardedSetattrMixin, ReadOnlyAlias, enable_alias_keys, fold_alias_keys


class Outer(GuardedSetattrMixin, nn.Module):
    """An alias that leads through an alias of the module inside."""

    decoder = ReadOnlyAlias("inner.model")
    weight = ReadOnlyAlias("inner.model.lm_head.weight")
    width = ReadOnlyAlias("inner.vision_tower.in_features")
    missing = ReadOnlyAlias("nowhere")

    def __init__(self):
        super().__init__()
        self.inner = Guarded()


def renamed(state_dict, old, new):
    return {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in state_dict.items()}


def test_fold_gives_the_keys_of_the_module_and_leaves_the_input():
    old = Duplicate().state_dict()
    keys_before = list(old)

    folded = fold_alias_keys(old, Guarded())

    assert list(folded) == keys(Plain())
    assert list(old) == keys_before
    assert type(folded) is OrderedDict
    assert folded._metadata is old._metadata
    assert folded["language_model.lm_head.weight"] is old["language_model.lm_head.weight"]


def test_fold_renames_keys_that_only_have_the_alias():
    old = renamed(Plain().state_dict(), "language_model.", "model.")

    assert Guarded().load_state_dict(fold_alias_keys(old, Guarded())).missing_keys == []


def test_fold_follows_aliases_of_modules_inside_and_of_parameters():
    module = Outer()
    old = renamed(module.state_dict(), "inner.language_model.lm_head.weight", "weight")
    old = renamed(renamed(old, "inner.language_model.model.", "inner.layers."), "inner.language_model.", "decoder.")
    old = renamed(old, "inner.layers.layers.", "inner.layers.")
    old["inner.language_model.model.embed_tokens.weight"] = old.pop("inner.layers.embed_tokens.weight")

    assert sorted(fold_alias_keys(old, module)) == sorted(keys(module))


def test_fold_compares_values_where_both_names_are_there():
    old = {name: tensor.clone() for name, tensor in Duplicate().state_dict().items()}
    assert list(fold_alias_keys(old, Guarded())) == keys(Plain())

    old["model.scale"] = old["model.scale"] + 1

    with pytest.raises(AliasError) as caught:
        fold_alias_keys(old, Guarded())
    assert_text(
        str(caught.value),
        """\
'model.scale' and 'language_model.scale' are one tensor of Guarded, but their values differ in this checkpoint; \
choose with on_conflict='canonical' or on_conflict='alias'""",
    )
    for choice, expected in (("canonical", "language_model.scale"), ("alias", "model.scale")):
        assert fold_alias_keys(old, Guarded(), on_conflict=choice)["language_model.scale"] is old[expected]


def test_fold_works_on_meta_tensors_and_reports_a_shape():
    with torch.device("meta"):
        old = Duplicate().state_dict()
        assert list(fold_alias_keys({k: v.clone() for k, v in old.items()}, Guarded())) == keys(Plain())

        old["model.scale"] = torch.ones(2)
        with pytest.raises(AliasError, match="values differ"):
            fold_alias_keys(old, Guarded())


@pytest.mark.parametrize("travel", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_enabled_module_loads_old_keys_also_inside_another_module(travel):
    inner, source = Guarded(), Duplicate()
    enable_alias_keys(inner)
    outer = travel(nn.ModuleDict({"left": Plain(), "right": inner}))
    old = {f"left.{k}": v for k, v in Plain().state_dict().items()} | {
        f"right.{k}": v for k, v in source.state_dict().items() if not k.startswith("language_model.")
    }

    result = outer.load_state_dict(old)

    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(outer["right"].language_model.lm_head.weight, source.model.lm_head.weight)
    assert "right.model.scale" in old


def test_without_it_old_keys_are_unexpected():
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Guarded().load_state_dict(Duplicate().state_dict())


def test_enabled_module_still_reports_a_key_that_nothing_has():
    module = Guarded()
    enable_alias_keys(module)
    old = {**Plain().state_dict(), "model.nonsense": torch.ones(1)}

    with pytest.raises(RuntimeError, match=r"language_model\.nonsense"):
        module.load_state_dict(old)


def test_fold_of_a_module_without_aliases_changes_nothing():
    state_dict = LanguageModel().state_dict()

    assert fold_alias_keys(state_dict, LanguageModel()) == state_dict


@pytest.mark.parametrize(
    "value",
    [
        torch.full((2, 2), float("nan")),
        torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.zeros(()).to(torch.float8_e4m3fn),
    ],
    ids=["nan", "float4", "float8"],
)
def test_equal_bytes_never_conflict(value):
    old = {"model.lm_head.weight": value.clone(), "language_model.lm_head.weight": value.clone()}

    assert list(fold_alias_keys(old, Guarded())) == ["language_model.lm_head.weight"]


def test_values_that_torch_cannot_compare_conflict_and_can_be_chosen():
    sparse = torch.eye(2).to_sparse()
    old = {"model.lm_head.weight": sparse, "language_model.lm_head.weight": sparse.clone()}

    with pytest.raises(AliasError, match="choose with on_conflict"):
        fold_alias_keys(old, Guarded())
    assert list(fold_alias_keys(old, Guarded(), on_conflict="alias").values()) == [sparse]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="on_conflict='newest': expected 'error', 'canonical' or 'alias'"):
        fold_alias_keys({}, Guarded(), on_conflict="newest")
