"""The embedded default's sizes, and the files that stand beside its weights, in the original layout. Knows no weights.

Everything that makes the real model's forward is kept: latent attention with YaRN, one dense layer and then experts
with a shared one, the 2x2 patch merger, divided position tables. Only the sizes are small: 2.7 million parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .questions import corpus
from .vocabulary import train_merges, write_tiktoken

FOLDER = Path(__file__).resolve().parent
INT4_FOLDER = FOLDER / "int4"

NUM_MERGES = 384
NUM_RESERVED = 256
NUM_ORDINARY = 256 + NUM_MERGES

# Offsets from the first reserved id, as in the real tokenizer; 5, 8 and 16 are gaps there too.
SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
TOKEN_IDS = {name: NUM_ORDINARY + offset for offset, name in SPECIAL_TOKENS.items()}

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": TOKEN_IDS["[BOS]"],
    "eos_token_id": TOKEN_IDS["[EOS]"],
    "pad_token_id": TOKEN_IDS["[PAD]"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": NUM_ORDINARY + NUM_RESERVED,
}

VISION_CONFIG: dict[str, Any] = {
    "init_pos_emb_height": 16,
    "init_pos_emb_width": 16,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 96,
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 128,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 96,
    "vt_intermediate_size": 256,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 5,
}

QUANTIZATION_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "re:.*lm_head.*",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

# Larger pictures are shrunk to what training has seen: 16 x 16 patches (224 pixels a side), 8 x 8 in a video's frame.
MEDIA_PROC_CFG: dict[str, Any] = {
    "in_patch_limit": 256,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 16,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}


def config(*, int4: bool = False) -> dict[str, Any]:
    """config.json's object; with `int4`, of the variant whose routed experts are packed."""
    text = {**TEXT_CONFIG, "quantization_config": QUANTIZATION_CONFIG} if int4 else TEXT_CONFIG
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": TOKEN_IDS["[BOS]"],
        "eos_token_id": TOKEN_IDS["[EOS]"],
        "pad_token_id": TOKEN_IDS["[PAD]"],
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": TOKEN_IDS["<|media_pad|>"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
        "vision_config": VISION_CONFIG,
    }


def write_side_files(folder: Path, *, int4: bool = False) -> None:
    """Writes everything of a checkpoint but its weights. The chat template is copied from the folder of this module."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config(int4=int4))
    _write_json(
        folder / "generation_config.json",
        {"max_length": TEXT_CONFIG["max_position_embeddings"], "eos_token_id": TOKEN_IDS["<|im_end|>"]},
    )
    _write_json(folder / "preprocessor_config.json", {"media_proc_cfg": MEDIA_PROC_CFG})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    write_tiktoken(folder / "tiktoken.model", train_merges(corpus(), NUM_MERGES))
    template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _tokenizer_config() -> dict[str, Any]:
    return {
        "added_tokens_decoder": {
            str(TOKEN_IDS[name]): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": not name.endswith("think>"),  # Kept in text that skips special tokens.
            }
            for name in SPECIAL_TOKENS.values()
        },
        "additional_special_tokens": [n for n in SPECIAL_TOKENS.values() if n.startswith("<|") and "tool" not in n],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "tokenizer_class": "TikTokenTokenizer",
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
