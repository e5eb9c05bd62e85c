"""Manifests: a committed list of keys that reviews well, and what is told when a module leaves it."""

import gc
import json

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, UnreadableFileError
from aliasmix.integrity import Manifest, check_manifest, write_manifest


class LM(nn.Module):
    def __init__(self, num_layers=3, width=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])
        self.lm_head = nn.Linear(width, 8, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("inv_freq", torch.zeros(2), persistent=False)


class Wrapper(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model")

    def __init__(self, **options):
        super().__init__()
        self.language_model = LM(**options)


def told(report):
    return [(f.code, *f.paths) for f in report.findings]


@pytest.fixture
def changed(tmp_path):
    """Checks a changed wrapper against the manifest of an unchanged one."""

    def check(change=lambda w: None, **options):
        write_manifest(Wrapper(), tmp_path / "keys.json")
        wrapper = Wrapper()
        change(wrapper)
        return check_manifest(wrapper, tmp_path / "keys.json", **options)

    return check


def test_a_manifest_has_one_key_a_line_in_natural_order():
    text = Manifest.of_module(Wrapper(num_layers=1)).to_json()

    assert_expected_inline(text.replace(__name__, "pkg"), """\
{
 "aliasmix_manifest": 1,
 "class": "pkg.Wrapper",
 "keys": {
  "language_model.embed_tokens.weight": {"kind": "param", "shape": [8, 4], "dtype": "float32"},
  "language_model.layers.0.bias": {"kind": "param", "shape": [4], "dtype": "float32"},
  "language_model.layers.0.weight": {"kind": "param", "shape": [4, 4], "dtype": "float32"},
  "language_model.lm_head.weight": {"kind": "param", "shape": [8, 4], "dtype": "float32"},
  "language_model.steps": {"kind": "buffer", "shape": [], "dtype": "int64"}
 },
 "buffers_non_persistent": [
  "language_model.inv_freq"
 ],
 "ties": [
  ["language_model.embed_tokens.weight", "language_model.lm_head.weight"]
 ],
 "aliases": {
  "model": "language_model"
 },
 "meta": {"created_with": "aliasmix manifest"}
}
""")


def test_layers_are_in_the_order_of_their_numbers():
    keys = [key for key in Manifest.of_module(LM(num_layers=12)).tensors if key.endswith(".bias")]

    assert keys == [f"layers.{n}.bias" for n in range(12)]


def test_a_manifest_is_the_same_wherever_it_is_made(tmp_path):
    write_manifest(Wrapper(), tmp_path / "cpu.json")
    with torch.device("meta"):
        write_manifest(Wrapper(), tmp_path / "meta.json")

    assert (tmp_path / "cpu.json").read_bytes() == (tmp_path / "meta.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.json", "meta.json"]


def test_a_manifest_survives_a_round_trip(tmp_path):
    manifest = Manifest.of_module(Wrapper())
    manifest.write(tmp_path / "keys.json")

    assert Manifest.read(tmp_path / "keys.json").to_json() == manifest.to_json()


def test_an_unchanged_module_has_no_findings(changed):
    report = changed()

    assert report.ok and told(report) == [] and report.stats == {"keys": 9}


def test_an_added_key_is_found_and_can_be_allowed(changed):
    def adapt(w):
        w.language_model.lora_A = nn.Linear(4, 2, bias=False)

    assert told(changed(adapt)) == [("KEY_ADDED", "language_model.lora_A.weight")]
    assert changed(adapt, allow_added=["*.lora_A.*"]).ok


def test_a_removed_key_is_found(changed):
    assert told(changed(lambda w: delattr(w.language_model, "steps"))) == [("KEY_REMOVED", "language_model.steps")]


def test_a_moved_prefix_is_one_finding(changed):
    def move(w):
        w.text = w.language_model
        del w.language_model

    report = changed(move)

    assert told(report) == [("KEY_MOVED", "language_model.*", "text.*")]
    assert report.findings[0].count == 9


def test_a_compiled_child_is_one_finding(changed):
    def wrap(w):
        w.language_model = torch.compile(w.language_model, backend="eager")

    report = changed(wrap)

    assert told(report) == [("KEY_MOVED", "language_model.*", "language_model._orig_mod.*")]


def test_a_shape_a_dtype_and_a_kind_are_found(changed):
    def change(w):
        lm = w.language_model
        lm.layers[0] = nn.Linear(4, 5)
        lm.layers[1].bias.data = lm.layers[1].bias.data.double()
        weight = lm.layers[2].weight.data
        del lm.layers[2].weight
        lm.layers[2].register_buffer("weight", weight)

    assert told(changed(change)) == [
        ("SHAPE", "language_model.layers.0.bias"),
        ("SHAPE", "language_model.layers.0.weight"),
        ("DTYPE", "language_model.layers.1.bias"),
        ("KIND", "language_model.layers.2.weight"),
    ]


def test_an_untied_head_is_found(changed):
    def untie(w):
        w.language_model.lm_head.weight = nn.Parameter(torch.zeros(8, 4))

    report = changed(untie)

    assert told(report) == [("TIE_CHANGED", "language_model.embed_tokens.weight", "language_model.lm_head.weight")]
    assert "were one tensor and are not any more" in report.findings[0].detail


def test_a_second_registration_shows_as_added_keys_that_are_tied(changed):
    report = changed(lambda w: nn.Module.__setattr__(w, "model", w.language_model))

    assert ("KEY_ADDED", "model.*") in told(report)


def test_a_buffer_that_stops_being_saved_is_one_finding(changed):
    def drop(w):
        w.language_model.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    report = changed(drop)

    assert told(report) == [("KIND", "language_model.steps")]
    assert "was saved, is now not saved" in report.findings[0].detail


def test_a_buffer_that_was_never_saved_is_no_key(changed):
    assert told(changed(lambda w: w.register_buffer("cache", torch.zeros(1), persistent=False))) == []


def test_a_retargeted_alias_is_found(tmp_path):
    class Retargeted(Wrapper):
        model = ReadOnlyAlias("language_model.layers")
        text = ReadOnlyAlias("language_model")

    write_manifest(Wrapper(), tmp_path / "keys.json")

    report = check_manifest(Retargeted(), tmp_path / "keys.json")

    assert told(report) == [("ALIAS_CHANGED", "model"), ("ALIAS_CHANGED", "text")]
    assert report.findings[0].detail == "stood for 'language_model', now for 'language_model.layers'"


def test_a_cyclic_module_has_a_manifest():
    wrapper = Wrapper()
    wrapper.language_model.parent = wrapper

    assert len(Manifest.of_module(wrapper).tensors) == 9


def test_extra_state_is_a_key():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

    manifest = Manifest.of_module(Extra(2, 2))

    assert manifest.tensors["_extra_state"].kind == "extra"


def test_a_lazy_module_is_told_what_it_needs():
    with pytest.raises(ValueError, match="has no shapes before its first forward"):
        Manifest.of_module(nn.LazyLinear(2))


# Bad input


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "is not JSON: "),
        ("[1]", "holds a list; expected an object"),
        ("{}", "no 'aliasmix_manifest' entry, expected version 1"),
        ('{"aliasmix_manifest": 2, "keys": {}}', "version 2, expected version 1"),
        ('{"aliasmix_manifest": 1}', "'keys' is a NoneType, expected a dict"),
        ('{"aliasmix_manifest": 1, "keys": {"a": {}}}', "entry 'a' is not of the form"),
        (
            '{"aliasmix_manifest": 1, "keys": {"a": {"kind": "param", "shape": [-1], "dtype": "int8"}}}',
            "entry 'a' is not of the form",
        ),
        ('{"aliasmix_manifest": 1, "keys": {"a": 1, "a": 2}}', "key 'a' is there twice"),
        ('{"aliasmix_manifest": 1, "keys": {}, "ties": [1]}', "'ties' is not a list of lists of names"),
        ("<<<<<<< HEAD\n{}", "is not JSON: "),
        ('{"aliasmix_manifest": true, "keys": {}}', "version True, expected version 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_manifest_is_named_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "keys.json"
    path.write_text(content)

    with pytest.raises(UnreadableFileError) as caught:
        Manifest.read(path)

    assert caught.value.path == path
    assert reason in caught.value.reason


def test_garbage_collection_goes_on_after_a_bad_manifest(tmp_path):
    with pytest.raises(UnreadableFileError):
        Manifest.read(tmp_path / "keys.json")
    assert gc.isenabled()


def test_a_manifest_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"keys\.json: there is no such file"):
        check_manifest(Wrapper(), tmp_path / "keys.json")


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
LISTS = st.lists(SCALARS, max_size=3)
ENTRIES = st.dictionaries(st.sampled_from(["kind", "shape", "dtype", "a"]), SCALARS | LISTS)
JSON = SCALARS | LISTS | ENTRIES | st.dictionaries(st.text(max_size=2), ENTRIES) | st.lists(LISTS, max_size=2)


@settings(deadline=None)  # a busy machine reads a file late
@given(JSON, st.sampled_from(["keys", "ties", "aliases", "buffers_non_persistent", "class"]))
def test_any_json_is_read_or_refused(tmp_path_factory, value, entry):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"aliasmix_manifest": 1, "keys": {}} | {entry: value}))

    try:
        manifest = Manifest.read(path)
    except UnreadableFileError as error:
        assert error.reason
    else:
        manifest.to_json()
