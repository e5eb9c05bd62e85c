"""Aliases on classes that somebody else wrote."""

import copy
import pickle

import pytest
from aliased import NUM_KEYS, LanguageModel, Plain, assert_text, keys
from torch import nn

from aliasmix import (
    AliasDefinitionError,
    AliasWriteError,
    GuardedSetattrMixin,
    ReadOnlyAlias,
    aliases,
    install_alias,
    is_guarded,
)


class ForPickle(Plain):
    pass


def wrapper_class():
    """A class of its own for each test, since installing changes the class."""
    return type("Wrapper", (Plain,), {})


def with_property():
    class Wrapper(Plain):
        @property
        def model(self):
            return self.language_model

    return Wrapper


def hand_written():
    class Wrapper(with_property()):
        def __setattr__(self, name, value):
            if name != "model":
                super().__setattr__(name, value)

    return Wrapper


def test_install_gives_read_guard_and_introspection():
    cls = wrapper_class()

    alias = install_alias(cls, "model", "language_model", expect=LanguageModel, doc="The decoder.")

    module = cls()
    module.model = module.model
    assert module.model is module.language_model
    assert keys(module) == keys(Plain())
    assert (alias.owner, alias.name, alias.expect, alias.__doc__) == (cls, "model", LanguageModel, "The decoder.")
    assert aliases(cls) == {"model": alias}
    assert is_guarded(cls, "model")
    with pytest.raises(AliasWriteError, match=r"Wrapper\.model is a read-only alias"):
        module.model = nn.Linear(1, 1)
    with pytest.raises(AliasWriteError):
        module.add_module("model", nn.Linear(1, 1))
    del module.language_model
    with pytest.raises(AttributeError, match="hop 1 'language_model' missing"):
        _ = module.model


def test_install_reaches_instances_and_subclasses_that_are_there_already_and_later_ones():
    cls = wrapper_class()
    earlier, module = type("Earlier", (cls,), {}), cls()

    install_alias(cls, "model", "language_model")
    later = type("Later", (cls,), {"layers": ReadOnlyAlias("language_model.model.layers")})

    for instance in (module, earlier(), later()):
        instance.model = instance.model
        assert keys(instance) == keys(Plain())
    assert list(aliases(later)) == ["model", "layers"]
    assert later._alias_table == aliases(later)


def test_install_leaves_other_classes_alone():
    before = nn.Module.__setattr__

    install_alias(wrapper_class(), "model", "language_model")

    assert nn.Module.__setattr__ is before
    assert aliases(Plain) == {}
    assert not is_guarded(Plain, "model")


def test_install_twice_adds_and_retargets():
    cls = wrapper_class()

    install_alias(cls, "model", "language_model")
    install_alias(cls, "model", "language_model.model")
    install_alias(cls, "layers", "model.layers")

    module = cls()
    assert module.model is module.language_model.model
    assert module.layers is module.language_model.model.layers


@pytest.mark.parametrize("make", [with_property, hand_written])
def test_install_replaces_a_property_and_comes_before_the_classs_own_setattr(make):
    cls = make()

    install_alias(cls, "model", "language_model")

    module = cls()
    module.model = module.model
    module.other = nn.Linear(1, 1)
    assert len(keys(module)) == NUM_KEYS + 2
    with pytest.raises(AliasWriteError):
        module.model = nn.Linear(1, 1)


def test_installed_class_can_be_copied_and_pickled():
    install_alias(ForPickle, "model", "language_model")

    for module in (copy.deepcopy(ForPickle()), pickle.loads(pickle.dumps(ForPickle()))):
        module.model = module.model
        assert module.model is module.language_model
        assert keys(module) == keys(Plain())


@pytest.mark.parametrize(
    ("cls", "name", "target", "message"),
    [
        (
            nn.Module,
            "model",
            "language_model",
            "an alias on nn.Module would be one on every module; give install_alias the wrapper's class",
        ),
        (
            Plain,
            "forward",
            "language_model.forward",
            "Plain.forward = ReadOnlyAlias('language_model.forward'): nn.Module has an attribute 'forward' itself; "
            "choose another name",
        ),
        (
            Plain,
            "model",
            "model.layers",
            "Plain.model = ReadOnlyAlias('model.layers'): an alias cannot lead back to itself (model -> model); "
            "point it at a registered attribute, for example `model = ReadOnlyAlias('language_model')`",
        ),
    ],
)
def test_install_refuses_what_cannot_work_and_changes_nothing(cls, name, target, message):
    before = dict(cls.__dict__), cls.__bases__

    with pytest.raises(AliasDefinitionError) as caught:
        install_alias(cls, name, target)

    assert str(caught.value) == message
    assert (dict(cls.__dict__), cls.__bases__) == before


def test_install_refuses_to_hide_a_method():
    class Wrapper(Plain):
        def encode(self): ...

    with pytest.raises(AliasDefinitionError) as caught:
        install_alias(Wrapper, "encode", "vision_tower.forward")

    assert_text(
        str(caught.value),
        """install_alias(Wrapper, 'encode', ...) would hide Wrapper.encode, a function; choose another name""",
    )


def test_install_below_a_guarded_subclass_is_refused_with_the_way_out():
    base = wrapper_class()
    type("Guarded", (GuardedSetattrMixin, base), {})

    with pytest.raises(AliasDefinitionError, match=r"declare the alias there: `model = ReadOnlyAlias\('language_mod"):
        install_alias(base, "model", "language_model")
    assert base.__bases__ == (Plain,)


@pytest.mark.parametrize("cls", [dict, Plain(), "Plain"], ids=["dict", "instance", "text"])
def test_install_wants_a_class_of_modules(cls):
    with pytest.raises(AliasDefinitionError, match=r"expects a class derived from nn\.Module, not"):
        install_alias(cls, "model", "language_model")
