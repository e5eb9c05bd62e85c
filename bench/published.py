"""The published model's sizes, in config.json's and preprocessor_config.json's spelling. Knows no benchmark."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144, "rope_theta": 50000.0, "eos_token_id": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "group_size": 32, "type": "int", "symmetric": True, "strategy": "group",
        }}},
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4,
    "vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "vt_num_attention_heads": 16, "vt_intermediate_size": 4304,
    "merge_kernel_size": [2, 2], "mm_hidden_size": 1152, "projector_ln_eps": 1e-5,
}  # fmt: skip
MEDIA: dict[str, Any] = {
    "patch_size": 14, "merge_kernel_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "in_patch_limit": 16384, "patch_limit_on_one_side": 512, "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None, "sample_fps": 2.0, "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff", "fixed_output_tokens": None,
}  # fmt: skip

INT4_BYTES = 0.5 + 2 / 32  # Of a weight of an int4 expert, with its part of a group's bfloat16 scale.


def config(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    """config.json with some fields changed; the vocabulary's special ids are low ones, for shares of it."""
    return {
        "model_type": "kimi_k25", "text_config": TEXT | (text or {}), "vision_config": VISION | (vision or {}),
        "dtype": "bfloat16", "media_placeholder_token_id": 1, "pad_token_id": 0, "eos_token_id": 0,
        "video_placeholder": "<video>", **outer,
    }  # fmt: skip
