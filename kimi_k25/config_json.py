"""config.json out of a configuration, for checkpoints of models that came from none. The inverse of `load_config`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .config import KimiK25Config, QuantizationConfig


def config_json(config: KimiK25Config) -> bytes:
    """The file's content, which reads back as an equal configuration, stop ids included."""
    text = asdict(config.text_config)
    if config.text_config.rope_scaling is not None:
        text["rope_scaling"] = {"type": "yarn", **text["rope_scaling"]}
    if config.quantization_config is not None:
        text["quantization_config"] = _quantization(config.quantization_config)
    value = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": config.dtype,
        "eos_token_id": sorted(config.stop_token_ids),
        "media_placeholder_token_id": config.media_placeholder_token_id,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": config.video_placeholder,
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_act": "silu",
            "num_key_value_heads": config.text_config.num_attention_heads,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            **text,
        },
        "vision_config": {
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "video_attn_type": "spatial_temporal",
            **asdict(config.vision_config),
        },
    }
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _quantization(config: QuantizationConfig) -> dict[str, Any]:
    weights = {
        "dynamic": False,
        "group_size": config.group_size,
        "num_bits": config.num_bits,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    not_experts = [
        "re:.*lm_head.*",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ]
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": not_experts,
    }
