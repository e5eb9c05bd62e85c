"""The checkpoint's tensors by the configuration alone, and other tools' names for them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aliasmix.tensorinfo import TensorInfo, read_checkpoint
from kimi_k25.config import KimiK25Config, load_config
from kimi_k25.config_json import config_json
from kimi_k25.tensor_names import canonical_name, canonical_names, expected_tensors, find_packed_layers

ORACLE = Path(__file__).parent / "data" / "oracle"
LAYER = "language_model.model.layers.60"


def published_config() -> KimiK25Config:
    """The published model's sizes, in the oracle's configuration."""
    raw = json.loads((ORACLE / "tiny_int4" / "config.json").read_text())
    raw["text_config"] |= {
        "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    raw["vision_config"] |= {
        "init_pos_emb_height": 64, "init_pos_emb_width": 64, "vt_hidden_size": 1152, "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 16, "vt_intermediate_size": 4304, "mm_hidden_size": 1152, "text_hidden_size": 7168,
    }  # fmt: skip
    return KimiK25Config.from_dict(raw)


def test_published_model_has_208550_tensors() -> None:
    tensors = expected_tensors(published_config())

    assert len(tensors) == 208_550
    for name, shape, dtype in (
        ("language_model.model.embed_tokens.weight", (163840, 7168), "bfloat16"),
        ("language_model.lm_head.weight", (163840, 7168), "bfloat16"),
        ("language_model.model.layers.0.mlp.down_proj.weight", (7168, 18432), "bfloat16"),
        (f"{LAYER}.self_attn.q_b_proj.weight", (12288, 1536), "bfloat16"),
        (f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "bfloat16"),
        (f"{LAYER}.self_attn.kv_b_proj.weight", (16384, 512), "bfloat16"),
        (f"{LAYER}.self_attn.o_proj.weight", (7168, 8192), "bfloat16"),
        (f"{LAYER}.mlp.gate.e_score_correction_bias", (384,), "float32"),
        (f"{LAYER}.mlp.experts.383.up_proj.weight_packed", (2048, 896), "int32"),
        (f"{LAYER}.mlp.experts.383.up_proj.weight_scale", (2048, 224), "bfloat16"),
        (f"{LAYER}.mlp.experts.383.down_proj.weight_packed", (7168, 256), "int32"),
        (f"{LAYER}.mlp.experts.383.down_proj.weight_scale", (7168, 64), "bfloat16"),
        (f"{LAYER}.mlp.experts.383.down_proj.weight_shape", (2,), "int32"),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1152), "bfloat16"),
        ("vision_tower.encoder.blocks.26.wqkv.weight", (3456, 1152), "bfloat16"),
        ("vision_tower.encoder.blocks.26.mlp.fc1.weight", (1152, 4304), "bfloat16"),
        ("mm_projector.proj.0.weight", (4608, 4608), "bfloat16"),
        ("mm_projector.proj.2.weight", (7168, 4608), "bfloat16"),
    ):
        assert tensors[name] == TensorInfo(shape, dtype), name


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_int4"])
def test_oracle_has_exactly_the_expected_tensors(name: str) -> None:
    expected, found = expected_tensors(load_config(ORACLE / name)), read_checkpoint(ORACLE / name).tensors

    assert expected == {name: TensorInfo(found[name].shape, found[name].dtype) for name in expected}
    assert found.keys() == expected.keys()


def test_packing_is_chosen_a_layer() -> None:
    tensors = expected_tensors(load_config(ORACLE / "tiny_int4"), packed_layers={2})

    assert tensors["language_model.model.layers.1.mlp.experts.7.down_proj.weight"] == TensorInfo((64, 96), "bfloat16")
    packed = "language_model.model.layers.2.mlp.experts.7.down_proj.weight_packed"
    assert tensors[packed] == TensorInfo((64, 12), "int32")
    assert find_packed_layers(tensors, load_config(ORACLE / "tiny_int4").text_config) == {2}


def test_a_model_without_shared_experts_expects_none() -> None:
    config = load_config(ORACLE / "tiny_bf16")
    config = replace(config, text_config=replace(config.text_config, n_shared_experts=0))

    assert not [name for name in expected_tensors(config) if "shared_experts" in name]


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    config = load_config(ORACLE / "tiny_int4")
    config = replace(config, text_config=replace(config.text_config, moe_intermediate_size=100))

    with pytest.raises(ValueError, match=r"rows of 100 values in .*down_proj.* are not whole groups of 32"):
        expected_tensors(config)


def test_packed_layers_without_quantization_config_are_refused() -> None:
    with pytest.raises(ValueError, match="no quantization_config"):
        expected_tensors(load_config(ORACLE / "tiny_bf16"), packed_layers={1})


ALIASES = {
    "language_model.layers.3.mlp.gate.weight": "language_model.model.layers.3.mlp.gate.weight",
    "language_model.embed_tokens.weight": "language_model.model.embed_tokens.weight",
    "language_model.norm.weight": "language_model.model.norm.weight",
    "language_model.model.blocks.3.mlp.gate.weight": "language_model.model.layers.3.mlp.gate.weight",
    "model.mm_projector.pre_norm.bias": "mm_projector.pre_norm.bias",
    "vision_tower.encoder.patch_embed.proj.weight": "vision_tower.patch_embed.proj.weight",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_other_spellings_lead_to_the_original(alias: str) -> None:
    assert canonical_name(alias) == ALIASES[alias]


def test_original_names_and_unknown_ones_stay() -> None:
    for name in [*expected_tensors(load_config(ORACLE / "tiny_int4")), "language_model.layers_norm", "model.x", ""]:
        assert canonical_name(name) == name


def test_one_tensor_in_two_spellings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds mm_projector.pre_norm.bias twice, as .* and as model.mm_projector"):
        canonical_names(["mm_projector.pre_norm.bias", "model.mm_projector.pre_norm.bias"])


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_int4"])
def test_written_configuration_reads_back_equal(name: str) -> None:
    config = load_config(ORACLE / name)

    assert KimiK25Config.from_dict(json.loads(config_json(config))) == config
    assert KimiK25Config.from_dict(json.loads(config_json(published_config()))) == published_config()


def test_written_configuration_without_yarn_reads_back_equal() -> None:
    config = load_config(ORACLE / "tiny_bf16")
    config = replace(config, text_config=replace(config.text_config, rope_scaling=None))

    assert KimiK25Config.from_dict(json.loads(config_json(config))) == config
