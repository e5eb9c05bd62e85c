"""Kimi-K2.5 as its papers write it: float64, one token, one head and one expert at a time, slow and obvious.

Reads the weights of our modules and nothing else of them: no shape trick, no fused product, no library attention.
"""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from kimi_k25.config import TextConfig, VisionConfig

LORA_NORM_EPS = 1e-6
VISION_EPS = 1e-5
Grid = tuple[int, int, int]


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + eps) for row in x.double()]
    return torch.stack(rows) * weight.double()


@torch.no_grad()
def layer_norm(x: Tensor, norm: torch.nn.LayerNorm, eps: float) -> Tensor:
    rows = []
    for row in x.double():
        centred = row - row.mean()
        rows.append(centred / math.sqrt((centred * centred).mean().item() + eps))
    return torch.stack(rows) * norm.weight.double() + norm.bias.double()


@torch.no_grad()
def linear(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    out = x.double() @ layer.weight.double().T
    return out if layer.bias is None else out + layer.bias.double()


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query over the keys it may see: (d,), (n, d), (n, dv) to (dv,)."""
    scores = [float(q @ key) * scale for key in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    out = torch.zeros(values.shape[1], dtype=torch.float64)
    for weight, value in zip(weights, values, strict=True):
        out += weight / sum(weights) * value
    return out


def turn(x: Tensor, angles: list[float]) -> Tensor:
    """Rotates pairs (2i, 2i + 1) as complex numbers."""
    out = []
    for i, angle in enumerate(angles):
        z = complex(x[2 * i], x[2 * i + 1]) * cmath.exp(1j * angle)
        out += [z.real, z.imag]
    return torch.tensor(out, dtype=torch.float64)


# -- decoder ------------------------------------------------------------------------------------------------------


def inverse_frequencies(c: TextConfig) -> list[float]:
    dim, yarn = c.qk_rope_head_dim, c.rope_scaling
    plain = [c.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return plain

    def pair_with(turns: float) -> float:  # The pair that turns so often within the original context.
        return dim / 2 * math.log(yarn.original_max_position_embeddings / turns / 2 / math.pi) / math.log(c.rope_theta)

    first, last = max(math.floor(pair_with(yarn.beta_fast)), 0), min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    out = []
    for i, frequency in enumerate(plain):
        stretched = min(max((i - first) / max(last - first, 0.001), 0.0), 1.0)
        out.append(frequency * (1 - stretched) + frequency / yarn.factor * stretched)
    return out


def softmax_scale(c: TextConfig) -> float:
    scale = 1 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.rope_scaling is not None and c.rope_scaling.mscale_all_dim:
        scale *= (1 + 0.1 * c.rope_scaling.mscale_all_dim * math.log(c.rope_scaling.factor)) ** 2
    return scale


def rope_length(c: TextConfig) -> float:
    """What rotated pairs are multiplied by."""
    yarn = c.rope_scaling
    if yarn is None:
        return 1.0
    lengths = [1 + 0.1 * mscale * math.log(yarn.factor) for mscale in (yarn.mscale, yarn.mscale_all_dim)]
    return lengths[0] / lengths[1]


@torch.no_grad()
def latent_attention(module, c: TextConfig, x: Tensor, positions: list[int], lengths: list[int]) -> Tensor:
    """(num_tokens, hidden_size), every token over those before it in its own sequence."""
    heads, nope, rope, dv = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    frequencies, factor = inverse_frequencies(c), rope_length(c)

    def roped(vector: Tensor, position: int) -> Tensor:
        return turn(vector, [position * f for f in frequencies]) * factor

    queries = linear(rms_norm(linear(x, module.q_a_proj), module.q_a_layernorm.weight, LORA_NORM_EPS), module.q_b_proj)
    compressed = linear(x, module.kv_a_proj_with_mqa)
    latent = rms_norm(compressed[:, : c.kv_lora_rank], module.kv_a_layernorm.weight, LORA_NORM_EPS)
    decompressed = linear(latent, module.kv_b_proj)
    shared = [roped(row[c.kv_lora_rank :], p) for row, p in zip(compressed, positions, strict=True)]
    out, start = torch.zeros(x.shape[0], heads * dv, dtype=torch.float64), 0
    for length in lengths:
        for head in range(heads):
            q0, kv0 = head * (nope + rope), head * (nope + dv)
            rows = range(start, start + length)
            keys = torch.stack([torch.cat((decompressed[t, kv0 : kv0 + nope], shared[t])) for t in rows])
            values = decompressed[start : start + length, kv0 + nope : kv0 + nope + dv]
            for seen, t in enumerate(rows, start=1):
                q_nope, q_pe = queries[t, q0 : q0 + nope + rope].split((nope, rope))
                q = torch.cat((q_nope, roped(q_pe, positions[t])))
                out[t, head * dv : (head + 1) * dv] = attend(q, keys[:seen], values[:seen], softmax_scale(c))
        start += length
    return linear(out, module.o_proj)


@torch.no_grad()
def route(gate, c: TextConfig, x: Tensor) -> list[dict[int, float]]:
    """Weight of each chosen expert, for every token."""
    choices = []
    size = c.n_routed_experts // c.n_group
    for row in (x.double() @ gate.weight.double().T).tolist():
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
        biased = [s + b for s, b in zip(scores, gate.e_score_correction_bias.tolist(), strict=True)]
        groups = range(c.n_group)
        if c.n_group > 1:
            best_two = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in groups]
            groups = sorted(groups, key=lambda g: best_two[g])[-c.topk_group :]
        allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: biased[e])[-c.num_experts_per_tok :]
        total = sum(scores[e] for e in chosen) if c.norm_topk_prob else 1.0
        choices.append({e: scores[e] / total * c.routed_scaling_factor for e in chosen})
    return choices


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def unpack_row(words: list[int], num_values: int) -> list[int]:
    """The values of packed int32 words, read byte by byte: the low nibble of the first byte is the first value."""
    data = b"".join(word.to_bytes(4, "little", signed=True) for word in words)
    nibbles = [nibble for byte in data for nibble in (byte % 16, byte // 16)]
    return [nibble - 8 for nibble in nibbles[:num_values]]


def int4_matrix(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, in) float64, each product rounded to bfloat16."""
    rows = []
    for words, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        values = unpack_row(words, len(words) * 8)
        size = len(values) // len(scales)
        rows.append([value * scales[i // size] for i, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16).double()


def expert_matrices(experts, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and down of one expert, packed or not."""
    if hasattr(experts, "gate_up_proj_packed"):
        gate_up = int4_matrix(experts.gate_up_proj_packed[e], experts.gate_up_proj_scale[e])
        down = int4_matrix(experts.down_proj_packed[e], experts.down_proj_scale[e])
    else:
        gate_up, down = experts.gate_up_proj[e].double(), experts.down_proj[e].double()
    half = gate_up.shape[0] // 2
    return gate_up[:half], gate_up[half:], down


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, up, down = gate.double(), up.double(), down.double()
    return down @ (silu(gate @ x.double()) * (up @ x.double()))


def swiglu_module(mlp, x: Tensor) -> Tensor:
    return torch.stack([swiglu(r, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight) for r in x])


@torch.no_grad()
def mixture_of_experts(module, c: TextConfig, x: Tensor) -> Tensor:
    matrices = [expert_matrices(module.experts, e) for e in range(c.n_routed_experts)]
    out = torch.zeros(x.shape[0], c.hidden_size, dtype=torch.float64)
    for t, weights in enumerate(route(module.gate, c, x)):
        for e, weight in weights.items():
            out[t] += weight * swiglu(x[t], *matrices[e])
    return out if module.shared_experts is None else out + swiglu_module(module.shared_experts, x)


@torch.no_grad()
def decoder(model, c: TextConfig, embeds: Tensor, positions: list[int], lengths: list[int]) -> list[Tensor]:
    """Hidden states: the embeddings, then after each layer, then after the final norm."""
    hidden = [embeds.double()]
    for i, layer in enumerate(model.layers):
        x = hidden[-1]
        normed = rms_norm(x, layer.input_layernorm.weight, c.rms_norm_eps)
        x = x + latent_attention(layer.self_attn, c, normed, positions, lengths)
        normed = rms_norm(x, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        is_moe = i >= c.first_k_dense_replace and i % c.moe_layer_freq == 0
        x = x + (mixture_of_experts(layer.mlp, c, normed) if is_moe else swiglu_module(layer.mlp, normed))
        hidden.append(x)
    return [*hidden, rms_norm(hidden[-1], model.norm.weight, c.rms_norm_eps)]


# -- vision -------------------------------------------------------------------------------------------------------


def cubic(distance: float) -> float:
    """Keys' kernel with a = -0.75."""
    d = abs(distance)
    if d <= 1:
        return 1.25 * d**3 - 2.25 * d**2 + 1
    return -0.75 * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else 0.0


def resample(table: Tensor, height: int, width: int) -> Tensor:
    """(rows, columns, dim) to (height * width, dim): bicubic, pixel centres aligned, edges repeated."""

    def taps(size: int, out_size: int, i: int) -> list[tuple[int, float]]:
        source = (i + 0.5) * size / out_size - 0.5
        first = math.floor(source) - 1
        return [(min(max(k, 0), size - 1), cubic(source - k)) for k in range(first, first + 4)]

    table, out = table.double(), []
    for i in range(height):
        for j in range(width):
            rows, columns = taps(table.shape[0], height, i), taps(table.shape[1], width, j)
            out.append(sum(wy * wx * table[y, x] for y, wy in rows for x, wx in columns))
    return torch.stack(out)


@torch.no_grad()
def patch_embedding(module, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
    weight, bias = module.proj.weight.double(), module.proj.bias.double()
    out, dim, first = [], weight.shape[0], 0
    for t, h, w in grids:
        table = resample(module.pos_emb.weight, h, w)
        for frame in range(t):
            angles = [frame * 10000 ** (-k / (dim / 2)) for k in range(dim // 2)]
            time = [math.sin(a) for a in angles] + [math.cos(a) for a in angles] if t > 1 else [0.0] * dim
            for place in range(h * w):
                patch = pixel_values[first].double()
                pixels = torch.stack([(weight[d] * patch).sum() for d in range(dim)])
                out.append(pixels + bias + table[place] + torch.tensor(time, dtype=torch.float64))
                first += 1
    return torch.stack(out)


def vision_angles(row: int, column: int, head_dim: int) -> list[float]:
    angles = []
    for i in range(head_dim // 4):
        frequency = 10000 ** (-4 * i / head_dim)
        angles += [column * frequency, row * frequency]
    return angles


@torch.no_grad()
def vision_attention(block, c: VisionConfig, x: Tensor, grids: list[Grid]) -> Tensor:
    heads, dim = c.vt_num_attention_heads, c.vt_hidden_size // c.vt_num_attention_heads
    qkv, out, start = linear(x, block.wqkv), torch.zeros(x.shape, dtype=torch.float64), 0
    for t, h, w in grids:
        places = [(row, column) for _ in range(t) for row in range(h) for column in range(w)]
        rows = range(start, start + len(places))
        for head in range(heads):
            q, k, v = (qkv[:, part * heads * dim + head * dim :][:, :dim] for part in range(3))
            turned_q, turned_k = (
                torch.stack([turn(m[r], vision_angles(*place, dim)) for r, place in zip(rows, places, strict=True)])
                for m in (q, k)
            )
            for i, r in enumerate(rows):
                values = v[start : start + len(places)]
                out[r, head * dim : (head + 1) * dim] = attend(turned_q[i], turned_k, values, dim**-0.5)
        start += len(places)
    return linear(out, block.wo)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@torch.no_grad()
def vision_encoder(encoder, c: VisionConfig, x: Tensor, grids: list[Grid]) -> Tensor:
    for block in encoder.blocks:
        x = x + vision_attention(block, c, layer_norm(x, block.norm0, VISION_EPS), grids)
        x = x + linear(gelu_tanh(linear(layer_norm(x, block.norm1, VISION_EPS), block.mlp.fc0)), block.mlp.fc1)
    return layer_norm(x, encoder.final_layernorm, VISION_EPS)


def merge_patches(x: Tensor, grids: list[Grid], merge: tuple[int, int]) -> Tensor:
    """(num_media_tokens, merge[0] * merge[1], dim)."""
    tokens, start = [], 0
    for t, h, w in grids:
        for row in range(0, h, merge[0]):
            for column in range(0, w, merge[1]):
                vectors = []
                for y in range(row, row + merge[0]):
                    for z in range(column, column + merge[1]):
                        vectors.append(sum(x[start + f * h * w + y * w + z] for f in range(t)) / t)
                tokens.append(torch.stack(vectors))
        start += t * h * w
    return torch.stack(tokens)


@torch.no_grad()
def projector(module, c: VisionConfig, merged: Tensor) -> Tensor:
    out = []
    for vectors in merged:
        joined = layer_norm(vectors, module.pre_norm, c.projector_ln_eps).flatten()
        out.append(linear(gelu_erf(linear(joined, module.proj[0])), module.proj[2]))
    return torch.stack(out)


@torch.no_grad()
def media_features(model, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
    c, tower = model.config.vision_config, model.vision_tower
    x = patch_embedding(tower.patch_embed, pixel_values, grids)
    x = vision_encoder(tower.encoder, c, x, grids)
    return projector(model.mm_projector, c, merge_patches(x, grids, c.merge_kernel_size))


# -- whole --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits(model, input_ids: list[int], lengths: list[int], pixel_values: Tensor | None = None, grids=()) -> Tensor:
    """(num_tokens, vocab_size) float64 of whole sequences."""
    features = iter(media_features(model, pixel_values, grids)) if pixel_values is not None else iter(())
    table = model.language_model.model.embed_tokens.weight.double()
    placeholder = model.config.media_placeholder_token_id
    embeds = torch.stack([next(features) if i == placeholder else table[i] for i in input_ids])
    assert next(features, None) is None
    positions = [p for length in lengths for p in range(length)]
    hidden = decoder(model.language_model.model, model.config.text_config, embeds, positions, lengths)
    return linear(hidden[-1], model.language_model.lm_head)
