"""Writing to an alias, through every way that nn.Module has; and classes that cannot work, refused when they are made."""

# ruff: noqa: E501 - the messages are pinned as they are printed

import abc
import copy
import pickle
import warnings
from typing import Generic, TypeVar

import pytest
import torch
from aliased import (
    NUM_KEYS,
    Backbone,
    Duplicate,
    Guarded,
    HandWritten,
    LanguageModel,
    Plain,
    PropertyOnly,
    assert_text,
    keys,
    walk,
)
from torch import nn
from torch.nn.utils import parametrize

from aliasmix import (
    AliasDefinitionError,
    AliasError,
    AliasWriteError,
    GuardedSetattrMixin,
    ReadOnlyAlias,
    Unaliased,
    is_guarded,
)

T = TypeVar("T")


class Forwarding(GuardedSetattrMixin, Plain):
    model = ReadOnlyAlias("language_model", on_write="forward")
    head = ReadOnlyAlias("language_model.lm_head", on_write="forward")
    second = ReadOnlyAlias("language_model.model.layers.1", on_write="forward")
    backbone = ReadOnlyAlias("model.model", on_write="forward")  # through another alias


def ignoring():
    """A new class each time, since a class warns once."""

    class Ignoring(GuardedSetattrMixin, Plain):
        model = ReadOnlyAlias("language_model", on_write="ignore")

    return Ignoring()


def refused(write):
    with pytest.raises(AliasWriteError) as caught:
        write()
    assert isinstance(caught.value, (AliasError, AttributeError))
    return str(caught.value)


OTHER_VALUES = {
    "module": lambda: nn.Linear(4, 4),
    "same class": LanguageModel,
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "tensor": lambda: torch.ones(2),
    "none": lambda: None,
    "int": lambda: 3,
    "list": list,
}

WRITES = {
    "setattr": lambda w, v: setattr(w, "model", v),
    "add_module": lambda w, v: w.add_module("model", v),
    "register_module": lambda w, v: w.register_module("model", v),
    "set_submodule": lambda w, v: w.set_submodule("model", v),
    "object.__setattr__": lambda w, v: object.__setattr__(w, "model", v),
}


# -- the value that is there already ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [Guarded, Forwarding, ignoring])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_assigning_the_current_target_changes_nothing(wrapper, write):
    module = wrapper()
    before = walk(module)

    write(module, module.model)

    assert walk(module) == before == walk(Plain())
    assert "model" not in module.__dict__


def test_assigning_the_current_target_changes_nothing_on_a_copy():
    original = Guarded()
    for module in (copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        module.model = module.model

        assert keys(module) == keys(Plain())
        assert module.model is module.language_model


def test_assigning_the_current_target_changes_nothing_through_a_compiled_module():
    compiled = torch.compile(Guarded(), backend="eager")

    compiled.model = compiled.model

    assert keys(compiled._orig_mod) == keys(Plain())
    refused(lambda: setattr(compiled, "model", nn.Linear(1, 1)))


def test_assigning_the_current_target_changes_nothing_after_the_class_was_swapped():
    module = Guarded()
    parametrize.register_parametrization(module.vision_tower, "weight", nn.Identity())
    module.register_parameter("gain", nn.Parameter(torch.ones(1)))
    parametrize.register_parametrization(module, "gain", nn.Identity())
    before = keys(module)
    assert type(module).__name__ == "ParametrizedGuarded"

    module.model = module.model

    assert keys(module) == before
    refused(lambda: setattr(module, "model", nn.Linear(1, 1)))


def test_parametrized_target_is_a_new_tensor_at_every_read_and_so_another_value():
    class Weight(GuardedSetattrMixin, nn.Module):
        weight = ReadOnlyAlias("linear.weight")

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    module = Weight()
    module.weight = module.weight
    parametrize.register_parametrization(module.linear, "weight", Doubled())

    refused(lambda: setattr(module, "weight", module.weight))


# -- any other value ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_set", [True, False], ids=["target", "no target"])
@pytest.mark.parametrize("value", OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_write_of_another_value_is_refused_and_registers_nothing(value, is_set):
    module = Guarded()
    if not is_set:
        del module.language_model
    before = walk(module)

    refused(lambda: setattr(module, "model", value()))

    assert walk(module) == before
    assert "model" not in {**module.__dict__, **module._parameters, **module._buffers}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_to_write_is_refused(write):
    module = Guarded()
    before = walk(module)

    refused(lambda: write(module, nn.Linear(1, 1)))

    assert walk(module) == before


def test_set_submodule_below_an_alias_acts_on_the_target():
    module, layer = Guarded(), nn.Linear(4, 4)

    module.set_submodule("model.model.layers.0", layer)

    assert module.language_model.model.layers[0] is layer


def test_parameters_and_buffers_registered_by_name_are_refused_by_torch_while_the_target_is_there():
    module = Guarded()

    with pytest.raises(KeyError, match="already exists"):
        module.register_parameter("model", nn.Parameter(torch.ones(1)))
    with pytest.raises(KeyError, match="already exists"):
        module.register_buffer("model", torch.ones(1))

    assert keys(module) == keys(Plain())


def test_module_dict_entry_that_is_an_alias_is_refused():
    class Dict(GuardedSetattrMixin, nn.ModuleDict):
        model = ReadOnlyAlias("language_model")

    refused(lambda: Dict({"language_model": nn.Linear(1, 1), "model": nn.Linear(1, 1)}))
    module = Dict({"language_model": nn.Linear(1, 1)})
    refused(lambda: module.__setitem__("model", nn.Linear(1, 1)))
    module["model"] = module["language_model"]

    assert list(module) == ["language_model"]


def test_alias_of_a_value_refuses_arithmetic():
    class Count(GuardedSetattrMixin, nn.Module):
        width = ReadOnlyAlias("linear.in_features")

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    module = Count()

    with pytest.raises(AliasWriteError):
        module.width += 1

    assert module.linear.in_features == 2


def test_every_hand_written_way_fails_where_the_guard_does_not():
    """What the guard is for: each of the older patterns breaks under the line that a served engine runs."""
    self_assigned = {cls: cls() for cls in (Plain, PropertyOnly, HandWritten, Guarded)}
    for cls, module in self_assigned.items():
        if cls is not Plain:
            module.model = module.model
    dropped = HandWritten()
    dropped.model = nn.Linear(1, 1)

    num_keys = {cls.__name__: len(keys(module)) for cls, module in self_assigned.items()}
    assert num_keys == {"Plain": NUM_KEYS, "PropertyOnly": 18, "HandWritten": NUM_KEYS, "Guarded": NUM_KEYS}
    assert len(keys(Duplicate())) == 18
    assert type(dropped.model) is LanguageModel  # a wrong module, dropped without a word
    refused(lambda: setattr(Guarded(), "model", nn.Linear(1, 1)))


def test_future_torch_that_refuses_hidden_children_does_not_refuse_a_guarded_one(monkeypatch):
    """A proposed nn.Module raises KeyError for a child that a class attribute hides; the guard acts before it."""
    original = nn.Module.__setattr__

    def strict(self, name, value):
        if isinstance(value, nn.Module) and hasattr(type(self), name):
            raise KeyError(f"attribute '{name}' already exists")
        original(self, name, value)

    hand_written, module = PropertyOnly(), Guarded()
    monkeypatch.setattr(nn.Module, "__setattr__", strict)

    module.model = module.model

    assert len(keys(module)) == NUM_KEYS
    with pytest.raises(KeyError):
        hand_written.model = hand_written.model


# -- messages -----------------------------------------------------------------------------------------------------


def test_message_for_another_module():
    module = Guarded()

    assert_text(
        refused(lambda: setattr(module, "model", Backbone())),
        """\
Guarded.model is a read-only alias of 'language_model'
  current target: LanguageModel   assigned: Backbone
  nn.Module would register it as 'model', where no read finds it: 5 more state_dict keys
  fix: assign to .language_model instead
       or declare ReadOnlyAlias('language_model', on_write="forward"), which replaces the target
       or declare model = Unaliased() in a subclass, for an attribute of its own""",
    )


def test_message_for_another_module_of_the_same_class():
    module = Guarded()

    message = refused(lambda: setattr(module, "model", LanguageModel()))

    assert_text(
        message.splitlines()[1], """  current target: LanguageModel   assigned: another LanguageModel"""
    )


def test_message_for_a_compiled_target_names_the_way_to_compile_in_place():
    module = Guarded()

    assert_text(
        refused(lambda: setattr(module, "model", torch.compile(module.model, backend="eager"))),
        """\
Guarded.model is a read-only alias of 'language_model'
  current target: LanguageModel   assigned: OptimizedModule (wrapping LanguageModel)
  nn.Module would register it as 'model', where no read finds it: 8 more state_dict keys
  fix: assign to .language_model instead; to compile in place, call .language_model.compile()
       or declare ReadOnlyAlias('language_model', on_write="forward"), which replaces the target
       or declare model = Unaliased() in a subclass, for an attribute of its own""",
    )
    module.language_model.compile(backend="eager")
    assert keys(module) == keys(Plain())


def test_message_for_a_plain_value_claims_no_registration():
    module = Guarded()

    assert_text(
        refused(lambda: setattr(module, "layers", None)),
        """\
Guarded.layers is a read-only alias of 'language_model.model.layers'
  current target: ModuleList   assigned: None
  fix: assign to .language_model.model.layers instead
       or declare ReadOnlyAlias('language_model.model.layers', on_write="forward"), which replaces the target
       or declare layers = Unaliased() in a subclass, for an attribute of its own""",
    )


def test_message_for_a_parameter_without_a_target():
    module = Guarded()
    del module.language_model

    assert_text(
        refused(lambda: setattr(module, "model", nn.Parameter(torch.ones(1)))).splitlines()[2],
        """  nn.Module would register it as 'model', where no read finds it: 1 more state_dict key""",
    )


def test_message_for_a_base_class_whose_init_assigns_the_alias():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(1, 1)

    class Derived(GuardedSetattrMixin, Base):
        model = ReadOnlyAlias("language_model")

    assert_text(
        refused(Derived),
        """\
Derived.model is a read-only alias of 'language_model'
  current target: none (hop 1 'language_model' missing on Derived)   assigned: Linear
  nn.Module would register it as 'model', where no read finds it: 2 more state_dict keys
  fix: assign to .language_model instead, before anything assigns 'model' (does the __init__ of a base class?)
       or declare ReadOnlyAlias('language_model', on_write="forward"), which replaces the target
       or declare model = Unaliased() in a subclass, for an attribute of its own""",
    )


def test_message_counts_the_keys_of_a_cyclic_module_once():
    child, parent = nn.Linear(1, 1), nn.Module()
    parent.child = child
    child.parent = parent

    assert "2 more state_dict keys" in refused(lambda: setattr(Guarded(), "model", parent))


# -- policies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model", lambda m: m.language_model),
        ("head", lambda m: m.language_model.lm_head),
        ("second", lambda m: m.language_model.model.layers[1]),
        ("backbone", lambda m: m.language_model.model),
    ],
)
def test_forward_replaces_the_target(name, read):
    module, value = Forwarding(), LanguageModel()
    children = [child for child, _ in module.named_children()]

    setattr(module, name, value)

    assert read(module) is getattr(module, name) is value
    assert [child for child, _ in module.named_children()] == children


def test_forward_sets_a_target_that_is_not_there_yet():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(1, 1)

    class Derived(GuardedSetattrMixin, Base):
        model = ReadOnlyAlias("language_model", on_write="forward")

    assert keys(Derived()) == ["language_model.weight", "language_model.bias"]


def test_forward_goes_through_the_guard_of_the_parent():
    class Outer(GuardedSetattrMixin, nn.Module):
        inner_model = ReadOnlyAlias("inner.model", on_write="forward")

        def __init__(self):
            super().__init__()
            self.inner = Guarded()

    refused(lambda: setattr(Outer(), "inner_model", nn.Linear(1, 1)))


def test_forward_is_refused_where_a_hop_is_missing_or_none():
    module = Forwarding()
    module.language_model = None

    assert_text(
        refused(lambda: setattr(module, "head", nn.Linear(1, 1))),
        """Forwarding.head = ... cannot be forwarded to 'language_model.lm_head': hop 1 'language_model' is None""",
    )
    del module.language_model
    assert_text(
        refused(lambda: setattr(module, "head", nn.Linear(1, 1))),
        """Forwarding.head = ... cannot be forwarded to 'language_model.lm_head': hop 1 'language_model' missing on Forwarding""",
    )


def test_forward_of_a_compiled_target_changes_its_keys():
    module = Forwarding()

    module.model = torch.compile(module.model, backend="eager")

    assert all("._orig_mod." in key for key in keys(module) if key.startswith("language_model"))


def test_ignore_drops_the_value_and_warns_once_at_the_line_that_assigned():
    module = ignoring()
    target = module.model

    with pytest.warns(UserWarning) as caught:
        module.model = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.model = None

    assert module.model is target
    assert keys(module) == keys(Plain())
    assert caught[0].filename == __file__
    assert_text(
        str(caught[0].message),
        """Ignoring.model is a read-only alias of 'language_model': the assigned Linear is dropped, and later ones without a warning""",
    )


# -- deleting -----------------------------------------------------------------------------------------------------


def test_delete_is_refused():
    module = Guarded()

    with pytest.raises(AliasWriteError) as caught:
        del module.model

    assert module.model is module.language_model
    assert_text(
        str(caught.value),
        """Guarded.model is a read-only alias of 'language_model' and cannot be deleted; delete .language_model, or declare `model = Unaliased()` in a subclass""",
    )


def test_delete_repairs_what_was_written_around_the_guard():
    module = Guarded()
    nn.Module.__setattr__(module, "model", module.language_model)
    module.__dict__["layers"] = 1
    assert len(keys(module)) == 18

    del module.model
    del module.layers

    assert keys(module) == keys(Plain())
    assert "layers" not in module.__dict__


# -- classes ------------------------------------------------------------------------------------------------------


def definition_error(body):
    with pytest.raises((AliasDefinitionError, RuntimeError)) as caught:
        body()
    error = caught.value
    # Python 3.11 wraps what __set_name__ raises.
    return str(error if isinstance(error, AliasDefinitionError) else error.__cause__)


def test_wrong_order_of_bases_is_refused_with_the_corrected_line():
    def body():
        class Wrapper(nn.Module, GuardedSetattrMixin):
            model = ReadOnlyAlias("language_model")

    assert_text(
        definition_error(body),
        """`class Wrapper(Module, GuardedSetattrMixin)`: nn.Module.__setattr__ runs first and the guard never does; write `class Wrapper(GuardedSetattrMixin, Module)`""",
    )


def test_alias_without_the_guard_is_refused_with_the_corrected_line():
    def body():
        class Wrapper(Plain):
            model = ReadOnlyAlias("language_model")

    assert_text(
        definition_error(body),
        """Wrapper.model is an alias without a guard: `self.model = self.language_model` would register the module twice; write `class Wrapper(GuardedSetattrMixin, Plain)`""",
    )


def test_alias_in_a_class_that_is_no_module_needs_the_guard_too():
    def body():
        class HasModel:
            model = ReadOnlyAlias("language_model")

    assert_text(
        definition_error(body),
        """HasModel.model is an alias without a guard: `self.model = self.language_model` would register the module twice; write `class HasModel(GuardedSetattrMixin)`""",
    )


def test_alias_of_itself_is_refused():
    def body():
        class Wrapper(GuardedSetattrMixin, nn.Module):
            model = ReadOnlyAlias("model.layers")

    assert_text(
        definition_error(body),
        """Wrapper.model = ReadOnlyAlias('model.layers'): an alias cannot lead back to itself (model -> model); point it at a registered attribute, for example `model = ReadOnlyAlias('language_model')`""",
    )


def test_cycle_of_aliases_is_refused_also_across_classes():
    class Base(GuardedSetattrMixin, nn.Module):
        a = ReadOnlyAlias("b.layers")

    def body():
        class Derived(Base):
            b = ReadOnlyAlias("c")
            c = ReadOnlyAlias("a")

    assert_text(
        definition_error(body),
        """Derived.a = ReadOnlyAlias('b.layers'): an alias cannot lead back to itself (a -> b -> c -> a); point it at a registered attribute, for example `a = ReadOnlyAlias('language_model')`""",
    )


@pytest.mark.parametrize("name", ["training", "forward", "_modules", "state_dict", "__class__"])
def test_name_of_nn_module_is_refused(name):
    message = definition_error(
        lambda: type("Wrapper", (GuardedSetattrMixin, nn.Module), {name: ReadOnlyAlias("language_model")})
    )

    assert message == (
        f"Wrapper.{name} = ReadOnlyAlias('language_model'): nn.Module has an attribute {name!r} itself; "
        "choose another name"
    )


def test_one_alias_under_two_names_is_refused():
    def body():
        class Wrapper(GuardedSetattrMixin, nn.Module):
            model = decoder = ReadOnlyAlias("language_model")

    assert_text(
        definition_error(body),
        """Wrapper.model = ReadOnlyAlias('language_model'): this alias already is 'decoder'; write a ReadOnlyAlias('language_model') for each name""",
    )


def test_alias_that_was_set_on_a_class_later_is_refused_in_its_subclass():
    class Wrapper(GuardedSetattrMixin, Plain): ...

    Wrapper.model = ReadOnlyAlias("language_model")

    assert_text(
        definition_error(lambda: type("Derived", (Wrapper,), {})),
        """Derived.model = ReadOnlyAlias('language_model') was set after its class was made, where no guard knows of it; write `install_alias(Derived, 'model', 'language_model')`""",
    )


def test_subclass_inherits_retargets_and_merges_aliases():
    class Other(GuardedSetattrMixin, nn.Module):
        head = ReadOnlyAlias("language_model.lm_head")

    class Both(Guarded, Other):
        model = ReadOnlyAlias("language_model.model")

    module = Both()

    assert module.model is module.language_model.model
    assert module.head is module.language_model.lm_head
    for name in ("model", "head", "layers"):
        setattr(module, name, getattr(module, name))
        refused(lambda name=name: setattr(module, name, nn.Linear(1, 1)))
    assert keys(module) == keys(Plain())


def test_abstract_and_generic_wrappers_can_have_aliases():
    class Abstract(GuardedSetattrMixin, nn.Module, Generic[T], abc.ABC):
        model = ReadOnlyAlias("language_model")

        @abc.abstractmethod
        def encode(self): ...

    class Concrete(Abstract[int], Plain):
        def encode(self): ...

    module = Concrete()
    module.model = module.model

    assert keys(module) == keys(Plain())
    refused(lambda: setattr(module, "model", None))


def test_alias_in_a_class_that_is_no_module_works_in_a_wrapper():
    class HasModel(GuardedSetattrMixin):
        model = ReadOnlyAlias("language_model")

    class Wrapper(HasModel, Plain):
        pass

    module = Wrapper()
    module.model = module.model

    assert keys(module) == keys(Plain())


def test_unaliased_subclass_has_an_ordinary_attribute_again():
    class Own(Guarded):
        model = Unaliased()

    module, value = Own(), nn.Linear(1, 1)
    assert not hasattr(module, "model")

    module.model = value
    assert module.model is value
    assert "model.weight" in keys(module)
    module.model = None
    assert module.model is None
    del module.model
    module.model = 3

    assert module.model == 3
    assert keys(module) == keys(Plain())
    assert Own.model is Own.__dict__["model"]
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'model'"):
        _ = Own().model


def test_is_guarded_is_found_out_by_trying():
    class Bypass(Guarded):
        def __setattr__(self, name, value):
            nn.Module.__setattr__(self, name, value)

    class Unguarded(Plain):
        pass

    Unguarded.model = ReadOnlyAlias("language_model")  # too late for __set_name__: install_alias is the way
    guarded = ignoring()
    for cls in (Guarded, Forwarding, HandWritten, type(guarded)):
        assert is_guarded(cls, "model")
    for cls in (Plain, PropertyOnly, Bypass, Unguarded):
        assert not is_guarded(cls, "model")
    with pytest.warns(UserWarning):  # trying has not used up the one warning
        guarded.model = None


@pytest.mark.parametrize("bypass", ["nn.Module.__setattr__", "_modules"])
def test_a_write_around_the_guard_is_not_seen_by_it(bypass):
    module = Guarded()

    if bypass == "_modules":
        module._modules["model"] = module.language_model
    else:
        nn.Module.__setattr__(module, "model", module.language_model)

    assert len(keys(module)) == 18


def deep_module():
    module = nn.Linear(1, 1)
    for _ in range(2000):
        module = nn.Sequential(module)
    return module


@pytest.mark.parametrize("make", [deep_module, lambda: nn.Module.__new__(nn.Linear)], ids=["deep", "before __init__"])
def test_an_odd_module_is_refused_as_any_other(make):
    value, wrapper = make(), Guarded()

    with pytest.raises(AliasWriteError, match="read-only alias"):
        wrapper.model = value
    assert list(wrapper.state_dict()) == keys(Plain())


@pytest.mark.parametrize("options", [{"target": 3}, {"target": "lm", "expect": (nn.Linear, nn.Conv2d)}])
def test_an_alias_of_no_name_or_several_types_is_refused(options):
    with pytest.raises(AliasDefinitionError):
        ReadOnlyAlias(**options)
