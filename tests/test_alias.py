"""Reading an alias: what it resolves to, and what an error says when it does not."""

# ruff: noqa: E501 - the messages are pinned as they are printed

from types import MethodType
from unittest import mock

import pytest
import torch
from aliased import Guarded, LanguageModel, assert_text, keys
from torch import nn

from aliasmix import (
    AliasDefinitionError,
    AliasTargetError,
    GuardedSetattrMixin,
    ReadOnlyAlias,
    aliases,
    explain,
)


class Alias(GuardedSetattrMixin, nn.Module):
    """One alias of everything that is not a module."""

    weight = ReadOnlyAlias("linear.weight")
    mean = ReadOnlyAlias("norm.running_mean")
    in_features = ReadOnlyAlias("linear.in_features")
    run = ReadOnlyAlias("linear.forward")
    first = ReadOnlyAlias("stack.0")
    second_hand = ReadOnlyAlias("first.weight")

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.stack = nn.Sequential(nn.Linear(2, 2))


class OptionalAlias(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model", none_is_missing=True)
    plain = ReadOnlyAlias("language_model")
    norm = ReadOnlyAlias("language_model.norm")


class Typed(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model", expect=LanguageModel, doc="The decoder.")

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model


def read_error(module, name):
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert type(caught.value) is AttributeError
    return str(caught.value)


def test_alias_reads_its_target():
    wrapper = Guarded()

    assert wrapper.model is wrapper.language_model
    assert wrapper.layers is wrapper.language_model.model.layers


def test_alias_follows_a_replaced_target():
    wrapper = Guarded()

    wrapper.language_model = LanguageModel()

    assert wrapper.model is wrapper.language_model


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("weight", lambda m: m.linear.weight),
        ("mean", lambda m: m.norm.running_mean),
        ("in_features", lambda m: m.linear.in_features),
        ("first", lambda m: m.stack[0]),
        ("second_hand", lambda m: m.stack[0].weight),
    ],
)
def test_alias_of_parameter_buffer_value_digit_and_alias(name, target):
    module = Alias()

    assert getattr(module, name) is target(module)


def test_alias_of_a_bound_method_can_be_called_and_assigned_to_itself():
    module, x = Alias(), torch.ones(1, 2)

    module.run = module.run

    assert torch.equal(module.run(x), module.linear(x))
    assert type(module.run) is MethodType
    assert "run" not in module.__dict__


def test_in_place_arithmetic_through_an_alias_changes_the_target():
    module = Alias()
    before = module.linear.weight.detach().clone()

    with torch.no_grad():
        module.weight *= 2

    assert torch.equal(module.linear.weight, before * 2)
    assert "weight" not in module._parameters


def test_submodule_paths_go_through_an_alias():
    wrapper = Guarded()

    assert wrapper.get_submodule("model.model.layers.0") is wrapper.language_model.model.layers[0]
    assert wrapper.get_parameter("model.lm_head.weight") is wrapper.language_model.lm_head.weight
    assert wrapper.get_buffer("model.scale") is wrapper.language_model.scale


def test_class_access_gives_the_alias():
    alias = Guarded.model

    assert isinstance(alias, ReadOnlyAlias)
    assert (alias.name, alias.owner, alias.target, alias.parts) == (
        "model",
        Guarded,
        "language_model",
        ("language_model",),
    )
    assert (alias.on_write, alias.none_is_missing, alias.expect) == ("error", False, None)
    assert alias.__doc__ == "Read-only alias of 'language_model'."
    assert Typed.model.__doc__ == "The decoder."


def test_aliases_lists_a_class_an_object_and_an_unaliased_subclass():
    class Hidden(Guarded):
        model = None

    assert list(aliases(Guarded)) == ["model", "layers"]
    assert aliases(Guarded()) == aliases(Guarded)
    assert list(aliases(Hidden)) == ["layers"]
    assert aliases(nn.Linear) == {}


def test_dir_lists_the_alias_even_without_a_target_and_repr_does_not():
    wrapper = Guarded()
    del wrapper.language_model

    assert "model" in dir(wrapper)
    assert "(model)" not in repr(wrapper)


def test_missing_target_is_a_missing_attribute():
    wrapper = Guarded()
    del wrapper.language_model

    assert not hasattr(wrapper, "model")
    assert getattr(wrapper, "model", "default") == "default"


def test_target_of_none_is_missing_only_where_the_alias_says_so():
    wrapper = OptionalAlias()
    wrapper.language_model = None

    assert hasattr(wrapper, "plain")
    assert wrapper.plain is None
    assert not hasattr(wrapper, "model")


def test_message_names_a_missing_first_hop():
    wrapper = Guarded()
    del wrapper.language_model

    assert_text(
        read_error(wrapper, "model"),
        """Guarded.model -> 'language_model': hop 1 'language_model' missing on Guarded""",
    )


def test_message_names_a_missing_later_hop():
    wrapper = Guarded()
    wrapper.language_model = nn.Linear(1, 1)

    assert_text(
        read_error(wrapper, "layers"),
        """Guarded.layers -> 'language_model.model.layers': hop 2 'model' missing on Linear""",
    )


def test_message_names_a_hop_that_is_none():
    wrapper = OptionalAlias()
    wrapper.language_model = None

    assert_text(
        read_error(wrapper, "norm"),
        """OptionalAlias.norm -> 'language_model.norm': hop 1 'language_model' is None""",
    )
    assert_text(
        read_error(wrapper, "model"),
        """OptionalAlias.model -> 'language_model': the target is None""",
    )


def test_message_follows_a_chain_of_aliases():
    module = Alias()
    del module.stack

    assert_text(
        read_error(module, "second_hand"),
        """Alias.second_hand -> 'first.weight': hop 1 'first' missing on Alias (Alias.first -> 'stack.0': hop 1 'stack' missing on Alias)""",
    )


def test_message_before_init_has_run():
    assert_text(
        read_error(Guarded.__new__(Guarded), "model"),
        """Guarded.model -> 'language_model': nn.Module.__init__ has not run yet""",
    )


def test_a_name_that_is_no_alias_keeps_torchs_message():
    assert read_error(Guarded(), "thinker") == "'Guarded' object has no attribute 'thinker'"
    assert read_error(Guarded.__new__(Guarded), "_modules") == "'Guarded' object has no attribute '_modules'"


def test_resolve_returns_the_target_or_raises_what_explain_says():
    wrapper = Guarded()

    assert Guarded.model.resolve(wrapper) is wrapper.language_model

    del wrapper.language_model
    with pytest.raises(AliasTargetError, match="hop 1 'language_model' missing") as caught:
        Guarded.model.resolve(wrapper)
    assert isinstance(caught.value, AttributeError)


def test_expected_type_is_checked_by_resolve_and_not_by_a_read():
    wrong = Typed(nn.Linear(1, 1))

    assert wrong.model is wrong.language_model
    with pytest.raises(AliasTargetError):
        Typed.model.resolve(wrong)
    assert_text(
        explain(wrong, "model"), """Typed.model -> 'language_model': Linear, expected LanguageModel"""
    )
    assert_text(
        explain(Typed(LanguageModel()), "model"), """Typed.model -> 'language_model': LanguageModel"""
    )


def test_explain_of_a_name_that_is_no_alias_lists_those_that_are():
    with pytest.raises(AliasTargetError) as caught:
        explain(Guarded(), "thinker")

    assert_text(str(caught.value), """Guarded has no alias 'thinker'; its aliases: layers, model""")


def test_mock_patches_the_target_and_the_alias_follows():
    wrapper, fake = Guarded(), nn.Linear(1, 1)
    keys_before = keys(wrapper)

    with mock.patch.object(wrapper, "language_model", fake):
        assert wrapper.model is fake

    assert wrapper.model is wrapper.language_model is not fake
    assert sorted(keys(wrapper)) == sorted(keys_before)


def test_subscript_works_at_run_time_with_a_type_and_a_forward_reference():
    class Subscripted(GuardedSetattrMixin, nn.Module):
        model = ReadOnlyAlias[LanguageModel]("language_model")
        later = ReadOnlyAlias["NotDefinedYet"]("language_model")

    module = Subscripted()
    module.language_model = LanguageModel()

    assert module.model is module.later is module.language_model


@pytest.mark.parametrize("target", ["", ".model", "model.", "model..layers"])
def test_target_with_an_empty_part_is_refused(target):
    with pytest.raises(AliasDefinitionError) as caught:
        ReadOnlyAlias(target)

    assert str(caught.value) == (
        f"ReadOnlyAlias({target!r}): a target is attribute names with dots between them, "
        "such as 'language_model' or 'language_model.model'"
    )


def test_unknown_policy_is_refused():
    with pytest.raises(AliasDefinitionError) as caught:
        ReadOnlyAlias("language_model", on_write="warn")

    assert_text(
        str(caught.value),
        """ReadOnlyAlias('language_model', on_write='warn'): expected 'error', 'ignore' or 'forward'""",
    )
