"""Differences told in few lines: subtrees, numbers, moved prefixes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliasmix.integrity import compare_keys, compare_tensors
from aliasmix.names import find_moves, fold, natural_key, parse_rule, replace_prefix
from aliasmix.tensorinfo import TensorInfo


def info(*shape, dtype="float32", kind="tensor"):
    return TensorInfo(shape, dtype, kind)


def layers(prefix, number=12, names=("attn.q.weight", "attn.q.bias", "mlp.up.weight")):
    return {f"{prefix}.{n}.{name}": info(4, len(name)) for n in range(number) for name in names}


def told(findings):
    return [(f.code, *f.paths, f.count) for f in findings]


def test_equal_sides_have_no_findings():
    both = layers("model.layers")

    assert compare_tensors(both, dict(both)) == []
    assert compare_keys(both, dict(both)) == []


def test_checkpoint_differences_have_their_codes():
    expected = {"a.weight": info(2, 3), "b.weight": info(4), "c.weight": info(5), "d.weight": info(6)}
    found = {"a.weight": info(3, 2), "b.weight": info(4, dtype="bfloat16"), "c.weight": info(5), "e": info(1)}

    findings = compare_tensors(expected, found)

    assert told(findings) == [
        ("CKPT_MISSING", "d.weight", 1),
        ("CKPT_UNEXPECTED", "e", 1),
        ("CKPT_SHAPE", "a.weight", 1),
        ("CKPT_DTYPE", "b.weight", 1),
    ]
    assert findings[0].detail == "not in the checkpoint; expected float32 [6]"
    assert findings[2].detail == "expected [2, 3], checkpoint has [3, 2]"
    assert findings[3].severity == "warning"


def test_a_missing_layer_is_one_finding():
    expected = layers("layers", names=[f"{n}.weight" for n in "abcd"])
    found = {name: value for name, value in expected.items() if not name.startswith("layers.7.")}

    findings = compare_tensors(expected, found)

    assert told(findings) == [("CKPT_MISSING", "layers.7.*", 4)]


def test_the_same_tensor_missing_in_every_layer_is_one_finding():
    expected = layers("layers")
    found = {name: value for name, value in expected.items() if not name.endswith(".bias")}

    findings = compare_tensors(expected, found)

    assert told(findings) == [("CKPT_MISSING", "layers.*.attn.q.bias", 12)]
    assert "e.g. layers.0.attn.q.bias" in findings[0].detail


def test_a_moved_prefix_of_a_checkpoint_names_the_rename_that_mends_it():
    findings = compare_tensors(layers("lm.model.layers") | {"head": info(1)}, layers("lm.layers") | {"head": info(1)})

    assert told(findings) == [
        ("CKPT_MISSING", "lm.model.layers.*", 36),
        ("CKPT_UNEXPECTED", "lm.layers.*", 36),
    ]
    assert "'lm.layers = lm.model.layers'" in findings[0].fix


def test_a_moved_prefix_is_one_finding():
    reference = layers("lm.layers") | {"lm.head.weight": info(3)}
    current = layers("lm.model.layers") | {"lm.head.weight": info(3)}

    findings = compare_keys(reference, current)

    assert told(findings) == [("KEY_MOVED", "lm.layers.*", "lm.model.layers.*", 36)]


def test_a_rename_inside_every_layer_is_one_finding():
    reference = layers("layers")
    current = {name.replace(".attn.", ".self_attn."): value for name, value in reference.items()}

    findings = compare_keys(reference, current)

    assert told(findings) == [("KEY_MOVED", "layers.*.attn.q.*", "layers.*.self_attn.q.*", 24)]


def test_renamed_numbers_are_paired_where_one_partner_fits_best():
    def linears(a, b):
        weights = {f"{a}.weight": info(4, 4), f"{b}.weight": info(7, 4)}
        return weights | {f"{a}.bias": info(4), f"{b}.bias": info(7)}

    reference, current = linears("proj.0", "proj.2"), linears("linear_1", "linear_2")

    findings = compare_keys(reference, current)

    assert told(findings) == [("KEY_MOVED", "proj.0.*", "linear_1.*", 2), ("KEY_MOVED", "proj.2.*", "linear_2.*", 2)]


def test_an_ambiguous_rename_is_told_as_removed_and_added():
    reference = {"a.1.weight": info(4)}
    current = {"b.weight": info(4), "c.weight": info(4)}

    findings = compare_keys(reference, current)

    assert told(findings) == [
        ("KEY_REMOVED", "a.1.weight", 1),
        ("KEY_ADDED", "b.weight", 1),
        ("KEY_ADDED", "c.weight", 1),
    ]


def test_a_moved_tensor_with_another_shape_is_removed_and_added():
    findings = compare_keys({"a.weight": info(4)}, {"b.weight": info(5)})

    assert told(findings) == [("KEY_REMOVED", "a.weight", 1), ("KEY_ADDED", "b.weight", 1)]


def test_a_compile_wrapper_shows_as_one_move():
    reference = layers("language_model.layers") | {"language_model.norm.weight": info(4)}
    current = {name.replace("language_model.", "language_model._orig_mod."): value for name, value in reference.items()}

    findings = compare_keys(reference, current)

    assert told(findings) == [("KEY_MOVED", "language_model.*", "language_model._orig_mod.*", 37)]


def test_shape_dtype_and_kind_changes_have_their_codes():
    reference = {"a": info(1, kind="param"), "b": info(2, kind="param"), "c": info(3, kind="buffer"), "d": info(4)}
    current = {"a": info(2, kind="param"), "b": info(2, dtype="int8", kind="param"), "c": info(3, kind="param")}
    current["d"] = info(4, kind="param")  # "tensor" on the other side matches any kind

    findings = compare_keys(reference, current)

    assert told(findings) == [("SHAPE", "a", 1), ("DTYPE", "b", 1), ("KIND", "c", 1)]
    assert findings[2].detail == "expected buffer, is now param"


def test_allowed_additions_are_info():
    findings = compare_keys({"a": info(1)}, {"a": info(1), "a.lora_A.weight": info(2), "b": info(3)}, ["*.lora_A.*"])

    assert [(f.code, f.paths[0], f.severity) for f in findings] == [
        ("KEY_ADDED", "a.lora_A.weight", "info"),
        ("KEY_ADDED", "b", "error"),
    ]


def test_natural_order_and_rules():
    assert sorted(["l.10.w", "l.9.w", "l.1.w"], key=natural_key) == ["l.1.w", "l.9.w", "l.10.w"]
    assert parse_rule(" a.b = c ") == ("a.b", "c")
    assert replace_prefix("a.bc.d", "a.b", "x") == "a.bc.d"
    assert replace_prefix("a.b.d", "a.b", "x") == "x.d"
    with pytest.raises(ValueError, match=r"rule 'a\.b' is not of the form 'name = name'"):
        parse_rule("a.b")


NAMES = st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, st.sampled_from([None, "x", "y"]), max_size=30))
def test_folding_keeps_every_name_once_and_only_under_its_path(labelled):
    labels = {name: label for name, label in labelled.items() if label}

    groups = fold(labels, list(labelled))

    assert sorted(name for group in groups for name in group.names) == sorted(labels)
    for group in groups:
        assert all(labels[name] == group.label for name in group.names)
        if group.path.endswith(".*") and group.path.count("*") == 1 and len(group.names) > 1:
            prefix = group.path[:-2]
            below = {name for name in labelled if name.startswith(prefix + ".")}
            assert below == set(group.names) or all(n.rpartition(".")[0] == prefix for n in group.names)


@settings(max_examples=150, deadline=None)
@given(st.sets(NAMES, max_size=20), st.sets(NAMES, max_size=20))
def test_moves_pair_each_name_at_most_once(left, right):
    removed, added = left - right, right - left

    moves = find_moves(sorted(removed), sorted(added), lambda a, b: True)

    olds = [old for move in moves for old, _ in move.pairs]
    news = [new for move in moves for _, new in move.pairs]
    assert len(set(olds)) == len(olds) and set(olds) <= removed
    assert len(set(news)) == len(news) and set(news) <= added


def test_seventy_thousand_moved_experts_are_one_line_in_seconds():
    experts = [f"layers.{n}.mlp.experts.{e}" for n in range(61) for e in range(384)]
    names = [f"{expert}.{proj}.weight" for expert in experts for proj in ("gate_proj", "up_proj", "down_proj")]
    reference = {f"lm.{name}": info(2, 3) for name in names}
    current = {f"lm.model.{name}": info(2, 3) for name in names}

    began = time.process_time()
    findings = compare_keys(reference, current)
    cpu_s = time.process_time() - began

    assert told(findings) == [("KEY_MOVED", "lm.layers.*.mlp.experts.*", "lm.model.layers.*.mlp.experts.*", 70272)]
    assert cpu_s < 5  # measured 0.7; quadratic would be hours


def test_listings_without_a_common_name_are_told_in_seconds():
    names = [f"layers.{n}.mlp.experts.{e}.{p}" for n in range(61) for e in range(384) for p in ("gate", "up", "down")]
    reference = {name: info(2, 3) for name in names}
    current = {f"x.{name}.w": info(2, 3) for name in names} | {f"x.{n}.other.0.up": info(4) for n in range(500)}

    began = time.process_time()
    findings = compare_keys(reference, current)
    cpu_s = time.process_time() - began

    assert told(findings) == [("KEY_REMOVED", "layers.*", 70272), ("KEY_ADDED", "x.*", 70772)]
    assert cpu_s < 10  # measured 2; linear
