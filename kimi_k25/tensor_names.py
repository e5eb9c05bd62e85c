"""Names, shapes and dtypes of the checkpoint's tensors, by the configuration alone. Knows no file and no module.

Source: Moonshot's published checkpoint. Other tools write some names differently; `canonical_name` undoes what is a
rename and nothing more, and `refuse_other_formats` names what is not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from aliasmix.tensorinfo import TensorInfo, listing

from .config import KimiK25Config, TextConfig, VisionConfig

TEXT = "language_model.model"
INT4_PER_WORD = 8
SCALE_DTYPE = "bfloat16"  # Of int4 scales, whatever the model's dtype: see layers/int4.py.

_RENAMES = [
    # The decoder without its own `.model.`, as in NVIDIA's conversions.
    (re.compile(r"language_model\.(?=(layers|embed_tokens|norm)\.)"), f"{TEXT}."),
    # What transformers 5's save_pretrained makes of the names that it maps on loading.
    (re.compile(r"language_model\.model\.blocks\.(?=\d+\.)"), f"{TEXT}.layers."),
    (re.compile(r"model\.(?=mm_projector\.pre_norm\.)"), ""),
    (re.compile(r"vision_tower\.encoder\.(?=patch_embed\.proj\.)"), "vision_tower."),
]

# Part of a name -> what has such names. The first match names the format.
_OTHER_FORMATS = [
    (re.compile(r"\.(weight_scale_2|input_scale|k_scale|v_scale)$"), "NVFP4 (ModelOpt)"),
    (re.compile(r"\.weight_scale_inv$"), "FP8 in blocks"),
    (re.compile(r"^multi_modal_projector\."), "Kimi-VL, an older family"),
    (re.compile(r"^model\.(language_model|vision_tower)\."), "transformers' own layout"),
]
SUPPORTED = "supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4"

EXPERT = re.compile(
    r"(?P<experts>language_model\.model\.layers\.(?P<layer>\d+)\.mlp\.experts)\.(?P<expert>\d+)"
    r"\.(?P<proj>gate|up|down)_proj\.weight(?P<part>_packed|_scale|_shape|)"
)


def canonical_name(name: str) -> str:
    """The original checkpoint's spelling of a tensor's name; unknown names come back as they are."""
    for pattern, replacement in _RENAMES:
        if match := pattern.match(name):
            return replacement + name[match.end() :]
    return name


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Original spelling -> name as the file has it.

    Raises:
        ValueError: Two names are one tensor in different spellings.
    """
    spelled: dict[str, str] = {}
    for name in names:
        canonical = canonical_name(name)
        if canonical in spelled:
            raise ValueError(f"holds {canonical} twice, as {spelled[canonical]} and as {name}; expected one of them")
        spelled[canonical] = name
    return spelled


def refuse_other_formats(names: Iterable[str]) -> None:
    """Raises:
    ValueError: A name belongs to a format that this package does not compute.
    """
    for name in names:
        for pattern, other in _OTHER_FORMATS:
            if pattern.search(name):
                raise ValueError(f"holds {name}, which is {other}; {SUPPORTED}")


def find_packed_layers(names: Iterable[str], config: TextConfig) -> frozenset[int]:
    """The MoE layers whose routed experts are int4: those with `weight_packed`, whatever an ignore list says.

    Args:
        names: In the original spelling.

    Raises:
        ValueError: Some of a layer's experts are packed and some are not.
    """
    packed: Counter[int] = Counter()
    plain: dict[int, str] = {}
    for name in names:
        if (match := EXPERT.fullmatch(name)) and match["part"] in ("", "_packed"):
            layer = int(match["layer"])
            if match["part"]:
                packed[layer] += 1
            else:
                plain.setdefault(layer, name)
    if half := sorted(packed.keys() & plain.keys()):
        lines = [f"of layer {layer}, {packed[layer]:,} matrices are packed but not {plain[layer]}" for layer in half]
        raise ValueError(f"holds layers with only some routed experts packed: {listing(lines)}; expected all or none")
    return frozenset(packed.keys() & {*config.moe_layers})


def expected_tensors(config: KimiK25Config, packed_layers: Collection[int] | None = None) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint in the original layout.

    Args:
        config: Of the checkpoint; its dtype is that of all tensors but the routers' correction bias (float32) and what
            int4 experts consist of.
        packed_layers: MoE layers whose routed experts are int4; None: all of them if the configuration has a
            quantization_config, else none.

    Returns:
        Names in the order of the forward pass. The published model has 208,550.

    Raises:
        ValueError: Packed layers that the configuration's quantization_config does not describe, or rows that are not
            whole groups.

    Example:
        >>> expected_tensors(load_config("Kimi-K2.5"))["language_model.lm_head.weight"].shape
        (163840, 7168)
    """
    text = config.text_config
    if packed_layers is None:
        packed_layers = text.moe_layers if config.quantization_config else ()
    group_size = config.quantization_config.group_size if config.quantization_config else None
    if packed_layers and group_size is None:
        raise ValueError("there are packed layers but the configuration has no quantization_config")
    tensors: dict[str, TensorInfo] = {}
    for name, shape in _vision(config.vision_config):
        tensors[name] = TensorInfo(shape, config.dtype)
    tensors[f"{TEXT}.embed_tokens.weight"] = TensorInfo((text.vocab_size, text.hidden_size), config.dtype)
    for layer in range(text.num_hidden_layers):
        prefix = f"{TEXT}.layers.{layer}"
        for name, shape in _decoder_layer(text, prefix, is_moe=text.is_moe_layer(layer)):
            tensors[name] = TensorInfo(shape, config.dtype)
        if text.is_moe_layer(layer):
            bias = TensorInfo((text.n_routed_experts,), "float32")
            tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = bias
            tensors |= _experts(text, prefix, config.dtype, group_size if layer in packed_layers else None)
    tensors[f"{TEXT}.norm.weight"] = TensorInfo((text.hidden_size,), config.dtype)
    tensors["language_model.lm_head.weight"] = TensorInfo((text.vocab_size, text.hidden_size), config.dtype)
    return tensors


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _vision(c: VisionConfig) -> Shapes:
    hidden = c.vt_hidden_size
    yield "vision_tower.patch_embed.proj.weight", (hidden, 3, c.patch_size, c.patch_size)
    yield "vision_tower.patch_embed.proj.bias", (hidden,)
    yield "vision_tower.patch_embed.pos_emb.weight", (c.init_pos_emb_height, c.init_pos_emb_width, hidden)
    for block in range(c.vt_num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block}"
        yield from _norm(f"{prefix}.norm0", hidden)
        yield from _linear(f"{prefix}.wqkv", 3 * hidden, hidden)
        yield from _linear(f"{prefix}.wo", hidden, hidden)
        yield from _norm(f"{prefix}.norm1", hidden)
        yield from _linear(f"{prefix}.mlp.fc0", c.vt_intermediate_size, hidden)
        yield from _linear(f"{prefix}.mlp.fc1", hidden, c.vt_intermediate_size)
    yield from _norm("vision_tower.encoder.final_layernorm", hidden)
    joined = c.mm_hidden_size * c.patches_per_token
    yield from _norm("mm_projector.pre_norm", c.mm_hidden_size)
    yield from _linear("mm_projector.proj.0", joined, joined)
    yield from _linear("mm_projector.proj.2", c.text_hidden_size, joined)


def _norm(prefix: str, size: int) -> Shapes:
    yield f"{prefix}.weight", (size,)
    yield f"{prefix}.bias", (size,)


def _linear(prefix: str, out_size: int, in_size: int) -> Shapes:
    yield f"{prefix}.weight", (out_size, in_size)
    yield f"{prefix}.bias", (out_size,)


def _decoder_layer(c: TextConfig, prefix: str, *, is_moe: bool) -> Shapes:
    """All but the router's bias and the routed experts."""
    heads = c.num_attention_heads
    yield f"{prefix}.input_layernorm.weight", (c.hidden_size,)
    yield f"{prefix}.self_attn.q_a_proj.weight", (c.q_lora_rank, c.hidden_size)
    yield f"{prefix}.self_attn.q_a_layernorm.weight", (c.q_lora_rank,)
    yield f"{prefix}.self_attn.q_b_proj.weight", (heads * c.qk_head_dim, c.q_lora_rank)
    yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (c.kv_cache_dim, c.hidden_size)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield f"{prefix}.self_attn.kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield f"{prefix}.self_attn.o_proj.weight", (c.hidden_size, heads * c.v_head_dim)
    yield f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)
    if not is_moe:
        yield from _swiglu(f"{prefix}.mlp", c.hidden_size, c.intermediate_size)
        return
    yield f"{prefix}.mlp.gate.weight", (c.n_routed_experts, c.hidden_size)
    if c.n_shared_experts:
        yield from _swiglu(f"{prefix}.mlp.shared_experts", c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)


def _swiglu(prefix: str, hidden_size: int, intermediate_size: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.up_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.down_proj.weight", (hidden_size, intermediate_size)


def _experts(c: TextConfig, prefix: str, dtype: str, group_size: int | None) -> dict[str, TensorInfo]:
    """Each expert's matrices, as they are or as packed words, scales and true shape."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    for suffix, (out_size, in_size) in _swiglu("", c.hidden_size, c.moe_intermediate_size):
        if group_size is None:
            parts[suffix] = {suffix: TensorInfo((out_size, in_size), dtype)}
        else:
            if in_size % group_size:
                raise ValueError(f"rows of {in_size} values in {prefix}{suffix} are not whole groups of {group_size}")
            parts[suffix] = {
                f"{suffix}_packed": TensorInfo((out_size, in_size // INT4_PER_WORD), "int32"),
                f"{suffix}_scale": TensorInfo((out_size, in_size // group_size), SCALE_DTYPE),
                f"{suffix}_shape": TensorInfo((2,), "int32"),
            }
    return {
        f"{prefix}.mlp.experts.{expert}{name}": info
        for expert in range(c.n_routed_experts)
        for infos in parts.values()
        for name, info in infos.items()
    }
