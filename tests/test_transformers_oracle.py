"""transformers' own Kimi-K2.5 as a second oracle: fresh shapes and weights every run, the same logits.

Both sum in float32 in different orders, so where two experts score all but the same they may pick differently. Such
tokens, and what follows them in their sequence if the picks did differ, are left out; few may be.
KIMI_ORACLE_SEED=N repeats a run, whose seed a failure prints.
"""

import os
import random
import re
from dataclasses import dataclass

import pytest
import torch
from random_models import make_model, make_pixels
from torch import Tensor

from kimi_k25.config import KimiK25Config
from kimi_k25.model import KimiK25ForConditionalGeneration

transformers = pytest.importorskip("transformers", minversion="5.10")
kimi_k25 = pytest.importorskip("transformers.models.kimi_k25")

SEED = int(os.environ.get("KIMI_ORACLE_SEED", random.SystemRandom().randrange(10**6)))
LOGITS_ATOL = 1e-4  # float32 logits of standard deviation 1: 2,000 shapes differ by 2.6e-5 at most,
FEATURES_ATOL = 2e-5  # and media features by 3.5e-6.
NEAR_TIE = 1e-4  # Router scores differ by less than 1e-5.
MOST_LEFT_OUT = 0.3  # Near ties are one token in 2,000; a pick that did differ takes the rest of its sequence along.
RENAMES = {  # Ours are the checkpoint's; in order, all that match.
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model.language_model",
    r"^(mm_projector|vision_tower)": r"model.\1",
    r"projector\.proj\.0": "projector.in_proj",
    r"projector\.proj\.2": "projector.out_proj",
    r"pos_emb\.weight": "pos_emb.position_embeddings",
    r"tower\.encoder": "tower",
    r"tower\.blocks": "tower.layers",
    r"(tower.*)\.norm1\.": r"\1.norm2.",
    r"(tower.*)\.norm0\.": r"\1.norm1.",
    r"(tower.*)\.fc1\.": r"\1.fc2.",
    r"(tower.*)\.fc0\.": r"\1.fc1.",
    r"(tower.*)\.wo\.": r"\1.attn.proj.",
}


def draw_config(rng: random.Random) -> dict:
    """A config.json as Moonshot writes it, of any shape that both implementations take."""
    heads, layers, groups = rng.randint(1, 5), rng.randint(2, 4), rng.choice([1, 1, 2, 4])
    experts, topk_group = groups * rng.randint(2, 6), rng.randint(1, groups)
    vision_heads, hidden_size = rng.randint(1, 4), 8 * rng.randint(3, 10)
    vision_size = vision_heads * 4 * rng.randint(2, 5)
    merge = rng.choice([(2, 2), (2, 2), (1, 2), (3, 1)])
    side, vocab_size = rng.randint(3, 9), rng.randint(50, 200)
    yarn = {
        "type": "yarn",
        "factor": rng.choice([4.0, 40.0, 64.0]),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": rng.choice([0.7, 1.0]),
        "mscale_all_dim": rng.choice([0.8, 1.0]),
        "original_max_position_embeddings": rng.choice([64, 1000, 4096]),
    }
    longest = int(yarn["factor"] * yarn["original_max_position_embeddings"])  # transformers warns of another one.
    return {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": vocab_size - 3,
        "pad_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 2,
        "dtype": "float32",
        "text_config": {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": rng.randint(10, 90),
            "moe_intermediate_size": 8 * rng.randint(1, 8),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "n_routed_experts": experts,
            "n_shared_experts": rng.randint(1, 3),
            "num_experts_per_tok": rng.randint(1, topk_group * (experts // groups)),
            "first_k_dense_replace": rng.randint(0, layers - 1),
            "n_group": groups,
            "topk_group": topk_group,
            "norm_topk_prob": rng.random() < 0.8,
            "routed_scaling_factor": rng.uniform(0.5, 3.0),
            "q_lora_rank": rng.randint(5, 40),
            "kv_lora_rank": rng.randint(5, 40),
            "qk_nope_head_dim": rng.randint(3, 20),
            "qk_rope_head_dim": 2 * rng.randint(2, 8),
            "v_head_dim": rng.randint(3, 20),
            "rms_norm_eps": rng.choice([1e-5, 1e-3]),
            "max_position_embeddings": longest,
            "rope_theta": rng.choice([1e3, 1e4, 5e4]),
            "rope_scaling": yarn if rng.random() < 0.75 else None,
        },
        "vision_config": {
            "patch_size": rng.choice([2, 6, 14]),
            "init_pos_emb_height": side,
            "init_pos_emb_width": side,
            "init_pos_emb_time": 4,
            "vt_hidden_size": vision_size,
            "vt_num_hidden_layers": rng.randint(1, 3),
            "vt_num_attention_heads": vision_heads,
            "vt_intermediate_size": rng.randint(10, 90),
            "merge_kernel_size": list(merge),
            "mm_hidden_size": vision_size,
            "text_hidden_size": hidden_size,
            "projector_ln_eps": 1e-5,
        },
    }


def their_config(raw: dict):
    """The same in transformers' spelling; it does not read Moonshot's names by itself."""
    text, vision = dict(raw["text_config"]), raw["vision_config"]
    scaling, theta = text.pop("rope_scaling") or {"type": "default"}, text.pop("rope_theta")
    rope = {**scaling, "rope_type": scaling["type"], "rope_theta": theta}
    config = kimi_k25.Kimi_K25Config(
        text_config={**text, "model_type": "deepseek_v3", "rope_parameters": rope, "num_nextn_predict_layers": 0},
        vision_config={
            "patch_size": vision["patch_size"],
            "pos_emb_height": vision["init_pos_emb_height"],
            "pos_emb_width": vision["init_pos_emb_width"],
            "pos_emb_time": vision["init_pos_emb_time"],
            "hidden_size": vision["vt_hidden_size"],
            "num_hidden_layers": vision["vt_num_hidden_layers"],
            "num_attention_heads": vision["vt_num_attention_heads"],
            "intermediate_size": vision["vt_intermediate_size"],
            "merge_kernel_size": vision["merge_kernel_size"],
        },
        projection_hidden_size=vision["mm_hidden_size"],
        projection_layer_norm_eps=vision["projector_ln_eps"],
        image_token_id=raw["media_placeholder_token_id"],
        video_token_id=text["vocab_size"],  # Ours has one id for both; this one never occurs.
        tie_word_embeddings=False,
        dtype=raw["dtype"],
        pad_token_id=raw["pad_token_id"],
        eos_token_id=raw["eos_token_id"],
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def their_state(model: KimiK25ForConditionalGeneration) -> dict[str, Tensor]:
    state, heads = {}, model.config.vision_config.vt_num_attention_heads
    for name, tensor in model.state_dict().items():
        for pattern, replacement in RENAMES.items():
            name = re.sub(pattern, replacement, name)
        if ".wqkv." not in name:
            state[name] = tensor
            continue
        for letter, part in zip("qkv", tensor.unflatten(0, (3, heads, -1)), strict=True):
            if letter != "v":  # It turns the two halves of a head, ours neighbours.
                part = torch.cat((part[:, 0::2], part[:, 1::2]), 1)
            state[name.replace("wqkv", f"attn.{letter}_proj")] = part.flatten(0, 1)
    return state


def draw_prompts(rng: random.Random, config: KimiK25Config) -> list[tuple[list[int], list[tuple[int, int, int]]]]:
    """Ids and grids: text alone, one picture, pictures and a video chunk between text, one token."""
    text = lambda n: [rng.randrange(config.media_placeholder_token_id) for _ in range(n)]  # noqa: E731
    rows, columns = config.vision_config.merge_kernel_size
    prompts = [(text(rng.randint(2, 30)), []), (text(1), [])]
    for frames in ([1], [1, rng.randint(2, 4), 1]):
        grids = [(t, rows * rng.randint(1, 4), columns * rng.randint(1, 4)) for t in frames]
        ids = text(rng.randint(0, 4))
        for _, h, w in grids:
            ids += [config.media_placeholder_token_id] * (h * w // (rows * columns)) + text(rng.randint(0, 5))
        prompts.append((ids + text(rng.randint(1, 5)), grids))
    return prompts


@torch.no_grad()
def margins(gate, router_logits: Tensor) -> Tensor:
    """By how much each token's last chosen expert, or group, beats the first that is not."""
    biased = (router_logits.sigmoid() + gate.e_score_correction_bias).unflatten(-1, (gate.num_group, -1))
    best = biased.topk(2, -1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(gate.topk_group, -1).indices, True)
    ranked = biased.masked_fill(~chosen[..., None], -torch.inf).flatten(-2).sort(-1, descending=True).values
    margin = ranked[:, gate.top_k - 1] - ranked[:, gate.top_k] if gate.top_k < ranked.shape[-1] else torch.inf
    groups = best.sort(-1, descending=True).values
    if gate.topk_group < gate.num_group:
        margin = torch.minimum(torch.as_tensor(margin), groups[:, gate.topk_group - 1] - groups[:, gate.topk_group])
    return torch.as_tensor(margin).expand(len(biased))


@dataclass
class Comparison:
    """Of all prompts, end to end: the largest error of each token's logits, which tokens count, and media features'."""

    errors: Tensor
    counts: Tensor
    feature_error: float


def record(gates, found: list) -> list:
    return [gate.register_forward_hook(lambda module, _args, out: found.append((module, *out))) for gate in gates]


@torch.no_grad()
def compare(ours: KimiK25ForConditionalGeneration, theirs, prompts, seed: int) -> Comparison:
    patch_size = ours.config.vision_config.patch_size
    pixels = [make_pixels(grids, seed + i, patch_size) if grids else None for i, (_, grids) in enumerate(prompts)]
    lengths = [len(ids) for ids, _ in prompts]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    all_pixels = torch.cat([p for p in pixels if p is not None])
    all_grids = torch.tensor([grid for _, grids in prompts for grid in grids])
    our_picks: list = []
    hooks = record([m for n, m in ours.named_modules() if n.endswith(".mlp.gate")], our_picks)
    found = ours(torch.tensor([i for ids, _ in prompts for i in ids]), None, all_pixels, all_grids, bounds)
    hooks += record([m for n, m in theirs.named_modules() if n.endswith(".mlp.gate")], their_picks := [])
    errors, counts, features = [], [], []
    for i, (ids, grids) in enumerate(prompts):
        their_picks.clear()
        media = {"pixel_values": pixels[i], "image_grid_thw": torch.tensor(grids)} if grids else {}
        out = theirs(input_ids=torch.tensor([ids]), use_cache=False, **media)
        features += out.image_outputs.pooler_output if grids else []
        errors.append((found[bounds[i] : bounds[i + 1]] - out.logits[0]).abs().amax(-1))
        near = torch.zeros(len(ids), dtype=torch.bool)
        differs = near.clone()
        for (_, _, our_ids), (gate, logits, _, their_ids) in zip(our_picks, their_picks, strict=True):
            near |= margins(gate, logits) < NEAR_TIE
            differs |= (our_ids[bounds[i] : bounds[i + 1]].sort(-1).values != their_ids.sort(-1).values).any(-1)
        first = differs.nonzero()[0].item() if differs.any() else len(ids)
        assert not differs.any() or near[first], "another expert was picked, and not for a near tie"
        counts.append(~near & (torch.arange(len(ids)) < first))
    for hook in hooks:
        hook.remove()
    feature_error = (ours.encode_media(all_pixels, all_grids) - torch.cat(features)).abs().max().item()
    return Comparison(torch.cat(errors), torch.cat(counts), feature_error)


def draw(seed: int):
    rng = random.Random(seed)
    raw = draw_config(rng)
    config = KimiK25Config.from_dict(raw)
    ours = make_model(config, seed)
    theirs = kimi_k25.Kimi_K25ForConditionalGeneration(their_config(raw)).eval()
    theirs.load_state_dict(their_state(ours))
    return ours, theirs, draw_prompts(rng, config)


def check(results: list[Comparison]) -> None:
    counts = torch.cat([result.counts for result in results])
    assert (~counts).float().mean() <= MOST_LEFT_OUT
    for result in results:
        assert result.feature_error <= FEATURES_ATOL
        assert result.errors[result.counts].max() <= LOGITS_ATOL


def test_three_shapes_give_the_logits_of_transformers():
    print(f"KIMI_ORACLE_SEED={SEED}")  # Shown if it fails.

    check([compare(*draw(SEED + i), SEED) for i in range(3)])


def test_transformers_spelling_of_a_config_reads_the_same():
    for seed in range(SEED, SEED + 20):
        raw = draw_config(random.Random(seed))

        assert KimiK25Config.from_dict(their_config(raw).to_dict()) == KimiK25Config.from_dict(raw), seed


# -- deliberate mistakes: each must be noticed --------------------------------------------------------------------


def other_eps_in_the_lora_norms(model):
    for layer in model.language_model.model.layers:
        layer.self_attn.q_a_layernorm.eps = layer.self_attn.kv_a_layernorm.eps = 1e-4


def no_correction_bias(model):
    for gate in (m for name, m in model.named_modules() if name.endswith(".mlp.gate")):
        gate.e_score_correction_bias.zero_()


def tanh_gelu_in_the_projector(model):
    model.mm_projector.proj[1] = torch.nn.GELU("tanh")


def frames_that_count_like_images(model):
    model.vision_tower.patch_embed.pos_emb.frame_sinusoids = lambda frames: torch.zeros(frames, 1, 1)


@pytest.mark.parametrize(
    "mistake",
    [other_eps_in_the_lora_norms, no_correction_bias, tanh_gelu_in_the_projector, frames_that_count_like_images],
)
def test_a_deliberate_mistake_is_noticed(mistake):
    ours, theirs, prompts = draw(0)
    check([compare(ours, theirs, prompts, 0)])

    mistake(ours)

    with pytest.raises(AssertionError):
        check([compare(ours, theirs, prompts, 0)])
