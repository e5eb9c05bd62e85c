"""The line that gave a module its second name."""

import sys
from pathlib import Path

import pytest
from aliased import Guarded, Plain
from torch import nn

from aliasmix import trace_registrations

HERE = __file__


def here():
    return sys._getframe(1).f_lineno


def test_second_registration_is_reported_once_with_its_line():
    module = Plain()

    with trace_registrations() as found:
        module.model = module.language_model
        line = here() - 1

    assert [str(r).removeprefix(str(Path(HERE).parent)) for r in found] == [
        f"/test_alias_trace.py:{line}: Plain.model registers a LanguageModel that already is Plain.language_model"
    ]
    (found,) = found
    assert (found.owner, found.name, found.value, found.also) == (
        "Plain",
        "model",
        "LanguageModel",
        ("Plain.language_model",),
    )
    assert (found.file, found.line) == (HERE, line)


def test_every_way_to_register_is_reported_at_the_callers_line():
    module = Plain()

    with trace_registrations() as found:
        module.add_module("a", module.vision_tower)
        module.set_submodule("b", module.vision_tower)
        module.c = module.language_model.model.layers[0]
        module.d = nn.ModuleList([module.language_model.lm_head])
        nn.Module.__setattr__(module, "e", module.language_model.model)
        last = here() - 1

    assert [(r.name, r.line, r.file) for r in found] == [
        (name, line, HERE) for name, line in zip("abc0e", range(last - 4, last + 1), strict=True)
    ]


def test_registration_inside_the_block_and_deep_below_is_found():
    with trace_registrations() as found:
        module = Plain()
        module.language_model.model.shortcut = module.vision_tower

    assert [(r.owner, r.name, r.also) for r in found] == [("Backbone", "shortcut", ("Plain.vision_tower",))]


def test_building_wrapping_replacing_and_aliases_are_no_second_registration():
    with trace_registrations() as found:
        module = Guarded()
        module.model = module.model
        for name, child in module.named_children():
            setattr(module, name, nn.Sequential(child))
        module.shortcut = module.vision_tower
        del module.shortcut
        other = nn.ModuleList([module.language_model])  # another tree may have it too

    assert found == []
    assert other[0] is module.language_model


def test_a_block_that_raises_still_reports_and_stops_the_watch():
    module = Plain()

    with pytest.raises(ZeroDivisionError), trace_registrations() as found:
        module.model = module.language_model
        _ = 1 / 0
    module.again = module.language_model

    assert [r.name for r in found] == ["model"]


def test_cyclic_modules_end():
    child, parent = nn.Linear(1, 1), nn.Module()

    with trace_registrations() as found:
        parent.child = child
        child.parent = parent

    assert found == []
