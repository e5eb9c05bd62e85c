"""config.json: what is read, what is derived, and what is refused by name."""

import copy
import json
from pathlib import Path

import pytest

from aliasmix.errors import UnreadableFileError
from kimi_k25.config import ConfigError, KimiK25Config, TextConfig, load_config

TINY = Path(__file__).parent / "data/oracle/tiny_int4"
RAW = json.loads((TINY / "config.json").read_text())


def changed(dotted: str, value: object) -> dict:
    """The tiny configuration with one field set, or removed if value is ..."""
    raw = copy.deepcopy(RAW)
    *parents, last = dotted.split(".")
    target = raw
    for name in parents:
        target = target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return raw


def test_stop_ids_are_the_union_of_both_files():
    config = load_config(TINY)

    assert config.stop_token_ids == {385, 386}


def test_softmax_scale_of_the_published_model():
    text = changed("text_config.qk_nope_head_dim", 128)["text_config"] | {"qk_rope_head_dim": 64}

    config = TextConfig.from_dict(text)

    assert config.softmax_scale == pytest.approx(0.14468, abs=5e-6)
    assert config.rope_scaling.cos_sin_factor == 1.0


def test_transformers_spelling_of_the_vision_fields_is_the_same_configuration():
    raw = copy.deepcopy(RAW)
    vision = raw["vision_config"]
    for ours, theirs in {
        "vt_hidden_size": "hidden_size",
        "vt_num_hidden_layers": "num_hidden_layers",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_intermediate_size": "intermediate_size",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    }.items():
        vision[theirs] = vision.pop(ours)
    raw["projection_hidden_size"] = vision.pop("mm_hidden_size")
    raw["projection_layer_norm_eps"] = vision.pop("projector_ln_eps")
    raw["image_token_id"] = raw.pop("media_placeholder_token_id")
    text = raw["text_config"]
    scaling = text.pop("rope_scaling")
    text["rope_parameters"] = scaling | {"rope_type": scaling.pop("type"), "rope_theta": text.pop("rope_theta")}

    assert KimiK25Config.from_dict(raw) == KimiK25Config.from_dict(RAW)


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(ConfigError, match=r"vt_hidden_size is stated twice and differs: .* is 48 but .* is 52"):
        KimiK25Config.from_dict(changed("vision_config.hidden_size", 52))


def test_quantization_config_is_read_at_the_top_or_in_text_config_or_both():
    quantization = RAW["text_config"]["quantization_config"]
    at_top = changed("text_config.quantization_config", ...) | {"quantization_config": quantization}
    both = RAW | {"quantization_config": quantization}

    configs = {KimiK25Config.from_dict(raw) for raw in (RAW, at_top, both)}

    assert len(configs) == 1
    assert configs.pop().quantization_config.group_size == 32


def test_two_quantization_configs_that_differ_are_refused():
    other = copy.deepcopy(RAW["text_config"]["quantization_config"])
    other["ignore"] = []

    with pytest.raises(ConfigError, match="at the top and in text_config, and the two differ"):
        KimiK25Config.from_dict(RAW | {"quantization_config": other})


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k3", "kimi_k2", "llama", None])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(ConfigError, match=f"model_type is {family!r}.*supported: 'kimi_k25'" if family else "missing"):
        KimiK25Config.from_dict(changed("model_type", family))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("text_config.hidden_act", "gelu", "is 'gelu', which is not supported; supported: 'silu'"),
        ("text_config.hidden_size", ..., "is missing"),
        ("text_config.hidden_size", -64, "is -64; expected an integer from 1 to"),
        ("text_config.hidden_size", 10**12, "expected an integer from 1 to"),
        ("text_config.hidden_size", "64", "is '64'; expected an integer"),
        ("text_config.hidden_size", True, "is True; expected an integer"),
        ("text_config.num_hidden_layers", 10**6, "expected an integer from 1 to 1024"),
        ("vision_config.vt_num_hidden_layers", 10**6, "expected an integer from 1 to 1024"),
        ("text_config.n_routed_experts", 10**6, "expected at most 200000 in all"),
        ("text_config.n_group", 3, "expected a divisor of 8 experts"),
        ("text_config.topk_group", 2, "expected at most n_group"),
        ("text_config.num_experts_per_tok", 9, "expected at most the 8 experts"),
        ("text_config.qk_rope_head_dim", 7, "expected an even number"),
        ("text_config.num_key_value_heads", 2, "as many as num_attention_heads"),
        ("text_config.rms_norm_eps", 0, "expected a number above 0"),
        ("text_config.rope_theta", float("nan"), "expected a number above 1"),
        ("text_config.rope_theta", 1.0, "expected a number above 1"),
        ("text_config.rope_theta", float("inf"), "is inf; expected a number above 1, at most 1e\\+12"),
        ("text_config.rope_theta", 10**400, r"is 10+\.\.\.; expected a number above 1"),
        ("text_config.norm_topk_prob", "yes", "expected true or false"),
        ("text_config.rope_scaling.type", ..., "is missing"),
        ("text_config.rope_scaling.type", "linear", "is 'linear', which is not supported; supported: 'yarn'"),
        ("text_config.rope_scaling.beta_fast", 0.5, "expected more than beta_slow"),
        ("text_config.scoring_func", "softmax", "supported: 'sigmoid'"),
        ("text_config.num_nextn_predict_layers", 1, "supported: 0"),
        ("text_config.tie_word_embeddings", True, "supported: False"),
        ("text_config", [], "is list; expected an object"),
        ("text_config.quantization_config.quant_method", "modelopt", "supported: 'compressed-tensors'"),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 128, "supported: 32"),
        ("text_config.quantization_config.config_groups.group_0.weights.symmetric", False, "supported: True"),
        ("text_config.quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "only weights"),
        ("vision_config.merge_kernel_size", [2, 2, 2], "expected two sizes"),
        ("vision_config.merge_kernel_size", True, "expected two sizes"),
        ("vision_config.vt_hidden_size", 50, "is 50 over 4 heads"),
        ("vision_config.text_hidden_size", 65, "is 65; expected 64"),
        ("vision_config.pos_emb_type", "bilinear", "supported: 'divided_fixed'"),
        ("media_placeholder_token_id", 640, "expected less than vocab_size"),
        ("eos_token_id", [-1], "expected a token id"),
        ("dtype", "float16", "supported: 'bfloat16', 'float32'"),
        ("model_type", [], r"is \[\]; supported: 'kimi_k25'"),
        ("model_type", "x" * 10**5, r"is 'x+\.\.\.; supported: 'kimi_k25'"),
        ("video_placeholder", 5, "is 5; expected a text"),
        ("video_placeholder", "", "is ''; expected a text"),
    ],
)
def test_values_that_are_not_computed_are_refused_and_named(field, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        KimiK25Config.from_dict(changed(field, value))

    assert caught.value.field == field.removeprefix("text_config." if "quantization" in field else "")


def test_load_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed("text_config.hidden_act", "gelu")))

    with pytest.raises(ConfigError, match=r"config\.json: text_config\.hidden_act is 'gelu'"):
        load_config(tmp_path)


def test_load_config_without_a_file_says_what_a_checkpoint_is(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"Kimi-K2\.5: is no folder here; .* nothing is downloaded"):
        load_config("moonshotai/Kimi-K2.5")
    with pytest.raises(UnreadableFileError, match=r"config\.json: there is no such file$"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_files_that_are_no_json_object_are_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(UnreadableFileError, match=r"config\.json"):
        load_config(tmp_path)
