"""config.json and generation_config.json as frozen dataclasses, in the checkpoint's own spelling. Knows no torch.

Values that this package does not compute are refused here, by name, before anything is built from them.
Source: Moonshot's configuration_kimi_k25 and the values of the published checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aliasmix.errors import UnreadableFileError
from aliasmix.jsonfile import quote, read_object

NO_FOLDER = "is no folder here; a checkpoint is a local folder, and nothing is downloaded"
MAX_SIZE = 2**24  # Of any one dimension; the published model's largest is 2**18.
MAX_LAYERS = 1024
MAX_EXPERT_MATRICES = 200_000  # Layers x experts; the published model has 60 x 384.
MAX_NUMBER = 1e12  # Of any factor, base or epsilon; rope bases come nearest.


class ConfigError(ValueError):
    """A configuration value that is missing, malformed or not supported.

    Attributes:
        field: Dotted name in config.json, such as "text_config.hidden_act".
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class _Fields:
    """Typed reads from one JSON object, each error naming the field."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(where or "config.json", f"is {type(raw).__name__}; expected an object")
        self.raw = raw
        self.where = where

    def name(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field

    def get(self, field: str, default: Any = ..., *, also: str | None = None) -> Any:
        """The value of `field`, or of the other spelling `also`; both may be present if they agree."""
        found = [key for key in (field, also) if key is not None and self.raw.get(key) is not None]
        if len(found) == 2 and self.raw[found[0]] != self.raw[found[1]]:
            values = " but ".join(f"{self.name(key)} is {quote(self.raw[key])}" for key in found)
            raise ConfigError(self.name(field), f"is stated twice and differs: {values}")
        if found:
            return self.raw[found[0]]
        if default is ...:
            raise ConfigError(self.name(field), "is missing" + (f" (nor is {also} there)" if also else ""))
        return default

    def size(
        self, field: str, default: Any = ..., *, also: str | None = None, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        value = self.get(field, default, also=also)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(self.name(field), f"is {quote(value)}; expected an integer from {least} to {most}")
        return value

    def number(self, field: str, default: Any = ..., *, also: str | None = None, least: float = 0.0) -> float:
        value = self.get(field, default, also=also)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= MAX_NUMBER:
            expected = f"expected a number above {least:g}, at most {MAX_NUMBER:g}"
            raise ConfigError(self.name(field), f"is {quote(value)}; {expected}")
        return float(value)

    def flag(self, field: str, default: Any = ...) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise ConfigError(self.name(field), f"is {quote(value)}; expected true or false")
        return value

    def only(self, field: str, *supported: Any, default: Any = ...) -> Any:
        """A value of which this package implements just some."""
        value = self.get(field, default)
        if value not in supported:
            names = ", ".join(repr(choice) for choice in supported)
            raise ConfigError(self.name(field), f"is {quote(value)}, which is not supported; supported: {names}")
        return value

    def text(self, field: str, default: str) -> str:
        value = self.get(field, default)
        if not isinstance(value, str) or not value:
            raise ConfigError(self.name(field), f"is {quote(value)}; expected a text")
        return value

    def token_ids(self, field: str, default: Any = ...) -> tuple[int, ...]:
        value = self.get(field, default)
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_SIZE for i in ids):
            raise ConfigError(self.name(field), f"is {quote(value)}; expected a token id or a list of them")
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Rope scaling by YaRN (arXiv 2309.00071), as DeepSeek-V3 applies it."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int

    @staticmethod
    def attention_factor(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.attention_factor(self.factor, self.mscale) / self.softmax_factor

    @property
    def softmax_factor(self) -> float:
        """What queries and keys are each scaled by; its square goes into the softmax scale."""
        return self.attention_factor(self.factor, self.mscale_all_dim) if self.mscale_all_dim else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The decoder: multi-head latent attention, a few dense layers, then mixture-of-experts layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: YarnScaling | None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_cache_dim(self) -> int:
        """Values cached per token and layer: the latent, then the shared roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        factor = self.rope_scaling.softmax_factor if self.rope_scaling else 1.0
        return float(self.qk_head_dim**-0.5 * factor * factor)

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TextConfig:
        f = _Fields(raw, "text_config")
        f.only("model_type", "kimi_k2", "deepseek_v3", default="kimi_k2")
        f.only("hidden_act", "silu", default="silu")
        f.only("attention_bias", False, default=False)
        f.only("scoring_func", "sigmoid", default="sigmoid")
        f.only("topk_method", "noaux_tc", default="noaux_tc")
        f.only("tie_word_embeddings", False, default=False)
        f.only("num_nextn_predict_layers", 0, default=0)

        rope = _Fields(f.get("rope_parameters", {}), "text_config.rope_parameters")
        config = cls(
            vocab_size=f.size("vocab_size"),
            hidden_size=f.size("hidden_size"),
            intermediate_size=f.size("intermediate_size"),
            moe_intermediate_size=f.size("moe_intermediate_size"),
            num_hidden_layers=f.size("num_hidden_layers", most=MAX_LAYERS),
            num_attention_heads=f.size("num_attention_heads"),
            n_routed_experts=f.size("n_routed_experts"),
            n_shared_experts=f.size("n_shared_experts", least=0),
            num_experts_per_tok=f.size("num_experts_per_tok"),
            first_k_dense_replace=f.size("first_k_dense_replace", least=0),
            moe_layer_freq=f.size("moe_layer_freq", 1),
            n_group=f.size("n_group", 1),
            topk_group=f.size("topk_group", 1),
            norm_topk_prob=f.flag("norm_topk_prob", True),
            routed_scaling_factor=f.number("routed_scaling_factor"),
            q_lora_rank=f.size("q_lora_rank"),
            kv_lora_rank=f.size("kv_lora_rank"),
            qk_nope_head_dim=f.size("qk_nope_head_dim"),
            qk_rope_head_dim=f.size("qk_rope_head_dim"),
            v_head_dim=f.size("v_head_dim"),
            rms_norm_eps=f.number("rms_norm_eps"),
            max_position_embeddings=f.size("max_position_embeddings"),
            rope_theta=f.number("rope_theta", rope.raw.get("rope_theta", ...), least=1.0),
            rope_scaling=_yarn(f, rope),
        )
        heads = f.size("num_key_value_heads", config.num_attention_heads)
        if heads != config.num_attention_heads:
            raise ConfigError(
                "text_config.num_key_value_heads",
                f"is {heads}; latent attention has as many as num_attention_heads ({config.num_attention_heads})",
            )
        config._check()
        return config

    def _check(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if self.qk_rope_head_dim % 2:
            raise ConfigError("text_config.qk_rope_head_dim", f"is {self.qk_rope_head_dim}; expected an even number")
        if self.num_hidden_layers * experts > MAX_EXPERT_MATRICES:
            raise ConfigError(
                "text_config.n_routed_experts",
                f"is {experts} in {self.num_hidden_layers} layers; expected at most {MAX_EXPERT_MATRICES} in all",
            )
        for field in ("hidden_size", "moe_intermediate_size"):
            if self.moe_layers and getattr(self, field) % 8:  # torch's grouped product wants rows of whole 16 bytes.
                raise ConfigError(f"text_config.{field}", f"is {getattr(self, field)}; expected a multiple of 8")
        if experts % groups or (groups > 1 and experts // groups < 2):
            raise ConfigError(
                "text_config.n_group", f"is {groups}; expected a divisor of {experts} experts, two or more a group"
            )
        if self.topk_group > groups:
            raise ConfigError("text_config.topk_group", f"is {self.topk_group}; expected at most n_group ({groups})")
        selectable = self.topk_group * (experts // groups)
        if self.num_experts_per_tok > selectable:
            raise ConfigError(
                "text_config.num_experts_per_tok",
                f"is {self.num_experts_per_tok}; expected at most the {selectable} experts of topk_group groups",
            )


def _yarn(text: _Fields, rope: _Fields) -> YarnScaling | None:
    """`rope_scaling`, or transformers 5's `rope_parameters` with the same keys."""
    raw = text.get("rope_scaling", None)
    f = rope if raw is None else _Fields(raw, "text_config.rope_scaling")
    # A factor without a type would be dropped in silence.
    kind = f.get("type", ... if "factor" in f.raw else "default", also="rope_type")
    if kind not in ("yarn", "default"):
        raise ConfigError(f.name("type"), f"is {quote(kind)}, which is not supported; supported: 'yarn', or no scaling")
    if kind == "default":
        return None
    scaling = YarnScaling(
        factor=f.number("factor"),
        beta_fast=f.number("beta_fast", 32.0),
        beta_slow=f.number("beta_slow", 1.0),
        mscale=f.number("mscale", 1.0),
        mscale_all_dim=f.number("mscale_all_dim", 0.0, least=-1.0),
        original_max_position_embeddings=f.size("original_max_position_embeddings"),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        raise ConfigError(
            f.name("beta_fast"), f"is {scaling.beta_fast:g}; expected more than beta_slow ({scaling.beta_slow:g})"
        )
    return scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """MoonViT3d and the projector to the decoder's width."""

    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    vt_hidden_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    vt_intermediate_size: int
    merge_kernel_size: tuple[int, int]
    mm_hidden_size: int
    text_hidden_size: int
    projector_ln_eps: float

    @property
    def head_dim(self) -> int:
        return self.vt_hidden_size // self.vt_num_attention_heads

    @property
    def patches_per_token(self) -> int:
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, top: Mapping[str, Any], hidden_size: int) -> VisionConfig:
        """Both spellings: Moonshot's, and transformers' with the projector's fields in `top`, the outer object."""
        outer_spelling = {
            "mm_hidden_size": top.get("projection_hidden_size"),
            "projector_ln_eps": top.get("projection_layer_norm_eps"),
        }
        f = _Fields({**outer_spelling, **raw}, "vision_config")
        f.only("pos_emb_type", "divided_fixed", default="divided_fixed")
        f.only("merge_type", "sd2_tpool", default="sd2_tpool")
        f.only("video_attn_type", "spatial_temporal", default="spatial_temporal")
        f.only("mm_projector_type", "patchmerger", default="patchmerger")
        f.only("projector_hidden_act", "gelu", default="gelu")
        merge = f.get("merge_kernel_size")
        merge = [merge, merge] if isinstance(merge, int) else merge
        sizes = merge if isinstance(merge, list | tuple) else ()
        if len(sizes) != 2 or not all(type(m) is int and 0 < m < 64 for m in sizes):
            raise ConfigError("vision_config.merge_kernel_size", f"is {quote(merge)}; expected two sizes, as [2, 2]")

        vt_hidden_size = f.size("vt_hidden_size", also="hidden_size")
        config = cls(
            patch_size=f.size("patch_size"),
            init_pos_emb_height=f.size("init_pos_emb_height", also="pos_emb_height"),
            init_pos_emb_width=f.size("init_pos_emb_width", also="pos_emb_width"),
            init_pos_emb_time=f.size("init_pos_emb_time", also="pos_emb_time"),
            vt_hidden_size=vt_hidden_size,
            vt_num_hidden_layers=f.size("vt_num_hidden_layers", also="num_hidden_layers", most=MAX_LAYERS),
            vt_num_attention_heads=f.size("vt_num_attention_heads", also="num_attention_heads"),
            vt_intermediate_size=f.size("vt_intermediate_size", also="intermediate_size"),
            merge_kernel_size=(merge[0], merge[1]),
            mm_hidden_size=f.size("mm_hidden_size", vt_hidden_size),
            text_hidden_size=f.size("text_hidden_size", hidden_size),
            projector_ln_eps=f.number("projector_ln_eps"),
        )
        if config.vt_hidden_size % config.vt_num_attention_heads or config.head_dim % 4:
            raise ConfigError(
                "vision_config.vt_hidden_size",
                f"is {config.vt_hidden_size} over {config.vt_num_attention_heads} heads; "
                "expected a head size that is a multiple of 4 (two axes of rotated pairs)",
            )
        for field, expected in (("mm_hidden_size", config.vt_hidden_size), ("text_hidden_size", hidden_size)):
            if getattr(config, field) != expected:
                raise ConfigError(f"vision_config.{field}", f"is {getattr(config, field)}; expected {expected}")
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Weights of the routed experts: symmetric int4 in groups along the input dimension."""

    num_bits: int
    group_size: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QuantizationConfig:
        f = _Fields(raw, "quantization_config")
        f.only("quant_method", "compressed-tensors")
        f.only("format", "pack-quantized")
        groups = f.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise ConfigError("quantization_config.config_groups", "does not hold exactly one group")
        (name, group), *_ = groups.items()
        where = f"quantization_config.config_groups.{name}"
        if _Fields(group, where).get("input_activations", None) is not None:
            raise ConfigError(f"{where}.input_activations", "is set; only weights may be quantised")
        w = _Fields(_Fields(group, where).get("weights"), f"{where}.weights")
        w.only("type", "int")
        w.only("symmetric", True)
        w.only("strategy", "group")
        w.only("actorder", None, default=None)
        return cls(num_bits=w.only("num_bits", 4), group_size=w.only("group_size", 32))


_OTHER_FAMILIES = {
    "kimi_vl": "Kimi-VL, an older family",
    "kimi_k3": "Kimi-K3, a newer family",
    "kimi_k2": "a text-only Kimi-K2",
    "deepseek_v3": "a text-only DeepSeek-V3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK25Config:
    """The whole model's configuration.

    Attributes:
        dtype: Of the checkpoint's unquantised tensors, as torch spells it.
        stop_token_ids: Union of config.json's and generation_config.json's end-of-sequence ids.
    """

    text_config: TextConfig
    vision_config: VisionConfig
    quantization_config: QuantizationConfig | None
    media_placeholder_token_id: int
    pad_token_id: int
    stop_token_ids: frozenset[int]
    video_placeholder: str
    dtype: str

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, generation_config: Mapping[str, Any] | None = None) -> KimiK25Config:
        """Reads config.json's object, with generation_config.json's beside it.

        Raises:
            ConfigError: A value is missing, malformed, or of a kind that this package does not compute.
        """
        f = _Fields(raw, "")
        model_type = f.get("model_type")
        if model_type != "kimi_k25":
            name = quote(model_type)
            family = next((f", {other}" for known, other in _OTHER_FAMILIES.items() if known == model_type), "")
            raise ConfigError("model_type", f"is {name}{family}; supported: 'kimi_k25' (Kimi-K2.5, K2.6, K2.7)")
        f.only("tie_word_embeddings", False, default=False)
        f.only("use_unified_vision_chunk", True, default=True)
        text = _Fields(f.get("text_config"), "text_config")
        text_config = TextConfig.from_dict(text.raw)
        stop = set(f.token_ids("eos_token_id", text.get("eos_token_id", [])))
        if generation_config is not None:
            stop |= set(_Fields(generation_config, "generation_config").token_ids("eos_token_id", []))
        config = cls(
            text_config=text_config,
            vision_config=VisionConfig.from_dict(
                _Fields(f.get("vision_config"), "vision_config").raw, top=raw, hidden_size=text_config.hidden_size
            ),
            quantization_config=_quantization(f, text),
            media_placeholder_token_id=f.size("media_placeholder_token_id", also="image_token_id", least=0),
            pad_token_id=f.size("pad_token_id", text.get("pad_token_id", 0), least=0),
            stop_token_ids=frozenset(stop),
            video_placeholder=f.text("video_placeholder", "<|kimi_k25_video_placeholder|>"),
            dtype=f.only("dtype", "bfloat16", "float32", default=text.get("dtype", f.get("torch_dtype", "bfloat16"))),
        )
        named_ids = [(field, getattr(config, field)) for field in ("media_placeholder_token_id", "pad_token_id")]
        for field, token_id in [*named_ids, *(("eos_token_id", i) for i in sorted(stop))]:
            if token_id >= text_config.vocab_size:
                raise ConfigError(field, f"is {token_id}; expected less than vocab_size ({text_config.vocab_size})")
        return config


def _quantization(outer: _Fields, text: _Fields) -> QuantizationConfig | None:
    """`quantization_config` stands in text_config; configurations saved after loading show it at the top as well."""
    found = [raw for raw in (outer.get("quantization_config", None), text.get("quantization_config", None)) if raw]
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError("quantization_config", "stands at the top and in text_config, and the two differ")
    return QuantizationConfig.from_dict(found[0]) if found else None


def load_config(checkpoint: str | os.PathLike[str]) -> KimiK25Config:
    """Reads a checkpoint folder's config.json, and generation_config.json if it is there.

    Raises:
        UnreadableFileError: A file is not there, or is not a JSON object.
        ConfigError: A value is missing, malformed or not supported.
    """
    path = Path(checkpoint) / "config.json"
    if not path.parent.is_dir():
        raise UnreadableFileError(checkpoint, NO_FOLDER)
    generation = path.with_name("generation_config.json")
    raw = read_object(path, fractions=True)
    raw_generation = read_object(generation, fractions=True) if generation.exists() else None
    try:
        return KimiK25Config.from_dict(raw, generation_config=raw_generation)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.field}", str(e).removeprefix(e.field + " ")) from None
